//! `preshard convert`.

use super::options::{PlanArgs, parse_size};
use super::{Talk, print, print_json, progress, ranks, serve, signals, text};
use crate::conversion::How;
use crate::convert::CHECKPOINT_BYTES;
use crate::device;
use crate::error::Result;
use crate::policy::Mtp;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    /// Where to write; must be empty, new, or hold an unfinished conversion of the same model.
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Only these ranks (stage * tp + rank), such as 0-3; the others may follow, here or elsewhere. env:
    /// the one that SLURM_ARRAY_TASK_ID, else SLURM_PROCID, else JOB_COMPLETION_INDEX names.
    #[arg(long, value_name = "LIST", value_parser = ranks::parse)]
    ranks: Option<ranks::Ranks>,
    /// Threads; one per core when absent.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Host memory for buffers.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = parse_size)]
    memory: u64,
    /// What decodes packed weights: auto takes a GPU for the types that one decodes faster. The bytes
    /// are the same.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device::parse)]
    device: device::Choice,
    /// GPU memory for decoding.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = parse_size)]
    device_memory: u64,
    /// Bytes after which to sync and journal: what a kill may cost. For tests on small models.
    #[arg(long, value_name = "SIZE", default_value_t = CHECKPOINT_BYTES, value_parser = parse_size, hide = true)]
    checkpoint: u64,
    /// Replace an earlier conversion in the output directory.
    #[arg(long)]
    force: bool,
    /// Convert decoded tensors that hold NaN or infinity instead of refusing them.
    #[arg(long)]
    allow_nonfinite: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let made = args.plan.plan()?;
    made.notes.iter().for_each(|note| talk.note(note));
    let world = made.plan.policy.tp * made.plan.policy.pp;
    let ranks = args.ranks.map(|r| r.resolve(world, talk)).transpose()?;
    let bar = progress::bar(talk.quiet);
    let started = Instant::now();
    let outcome = made.convert(
        &args.out,
        &How {
            ranks,
            threads: args.threads,
            memory: args.memory,
            device: args.device,
            device_memory: args.device_memory,
            checkpoint: args.checkpoint,
            force: args.force,
            allow_nonfinite: args.allow_nonfinite,
            note: &|text| talk.note(text),
            progress: &|p| progress::report(&bar, p),
            stop: signals::stop(),
        },
    );
    bar.finish_and_clear();
    let outcome = outcome?;
    let seconds = started.elapsed().as_secs_f64();
    let nonfinite: u64 = outcome.manifest.shards.iter().flat_map(|s| &s.tensors).map(|t| t.nonfinite).sum();
    if nonfinite > 0 {
        talk.note(&format!("{nonfinite} blocks or elements are NaN or infinite; the manifest says where"));
    }
    let total: u64 = outcome.manifest.shards.iter().map(|s| s.bytes).sum();
    if args.json {
        return print_json(&json!({
            "out": args.out,
            "files": outcome.manifest.shards.iter().map(|s| json!({ "file": s.file, "bytes": s.bytes, "blake3": s.blake3 })).collect::<Vec<_>>(),
            "bytes": total,
            "written": outcome.written,
            "resumed": outcome.resumed,
            "seconds": seconds,
            "nonfinite": nonfinite,
            "recoded": made.plan.recoded_json(&made.gguf),
            "serve": serve::commands(&args.out, &outcome.manifest, made.plan.engine.serve.as_ref()),
        }));
    }
    if talk.quiet {
        return Ok(());
    }
    let mut out = String::new();
    for shard in &outcome.manifest.shards {
        out += &format!("{}  {}  {} tensors\n", shard.file, text::bytes(shard.bytes), shard.tensors.len());
    }
    out += &format!(
        "{} in {} files, {:.1} s, {}/s\n",
        text::bytes(total),
        outcome.manifest.shards.len(),
        seconds,
        text::bytes((outcome.written as f64 / seconds.max(1e-9)) as u64),
    );
    out += &made.plan.recoded_text(&made.gguf);
    out += &format!("check it:  preshard verify {}\n", crate::error::shown_path(&args.out));
    let mut commands =
        serve::commands(&args.out, &outcome.manifest, made.plan.engine.serve.as_ref()).into_iter();
    if let Some(command) = commands.next() {
        let label = if made.plan.policy.mtp == Mtp::Only { "add to the model's command" } else { "serve it" };
        out += &format!("{label}:  {command}\n");
    }
    for command in commands {
        out += &format!("with the MTP draft:  {command}\n");
    }
    print(&out)
}
