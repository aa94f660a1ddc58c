//! `preshard plan`.

use super::options::{PlanArgs, parse_size};
use super::{Talk, html, print, print_json, text};
use crate::error::{Result, shown};
use crate::gguf::Gguf;
use crate::mapping::Part;
use crate::plan::{Fate, Plan};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,
    /// Memory of one GPU, to see whether each rank fits, such as 180G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    gpu_memory: Option<u64>,
    /// Also write the plan as one page for a browser: ranks and layers, what is decoded, every tensor.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the result as JSON, every tensor with its fate.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let made = args.plan.plan()?;
    made.notes.iter().for_each(|note| talk.note(note));
    args.html.iter().try_for_each(|file| html::write(file, &made.gguf, &made.plan, args.gpu_memory))?;
    if args.json {
        print_json(&made.to_json(args.gpu_memory))
    } else {
        print(&as_text(&made.gguf, &made.plan, args.gpu_memory, talk.verbose))
    }
}

/// What is left of a GPU's memory beside the weights; the engine needs some for its cache.
fn verdict(bytes: u64, memory: u64) -> String {
    match memory.checked_sub(bytes) {
        Some(left) => format!("fits {}, {} left for the cache", text::bytes(memory), text::bytes(left)),
        None => format!("does not fit {}: {} too many", text::bytes(memory), text::bytes(bytes - memory)),
    }
}

fn as_text(gguf: &Gguf, plan: &Plan, memory: Option<u64>, verbose: bool) -> String {
    let o = &plan.policy;
    let mut out = format!("{} as {}: {} layers", plan.architecture, plan.layout, plan.model.symbols.trunk);
    if plan.model.symbols.experts > 0 {
        out +=
            &format!(", {} experts{}", plan.model.symbols.experts, if o.ep { " placed whole" } else { "" });
    }
    out += &format!(", tensor parallel {}, pipeline stages {}\n", o.tp, o.pp);

    out += "\nGGUF tensors\n";
    let count = |part| plan.fates.iter().filter(|(_, p)| *p == part).count();
    out += &format!("  {} of the trunk, {} of the MTP block\n", count(Part::Model), count(Part::Mtp));
    // Per fate and reason: tensors, bytes, a first name.
    let mut groups: BTreeMap<(u8, String), (u64, u64, &str)> = BTreeMap::new();
    for ((fate, _), tensor) in plan.fates.iter().zip(gguf.tensors()) {
        let key = match fate {
            Fate::Packed => (0, "stay packed".to_owned()),
            Fate::Recoded(_) => (0, "written in another form, below".to_owned()),
            Fate::Float => (1, "float, copied or cast".to_owned()),
            Fate::Decoded(why) => (2, format!("decoded: {why}")),
            Fate::Dropped(why) => (3, format!("dropped: {why}")),
        };
        let sum = groups.entry(key).or_insert((0, 0, &tensor.name));
        (sum.0, sum.1) = (sum.0 + 1, sum.1 + tensor.bytes);
    }
    for ((_, what), (n, bytes, first)) in &groups {
        out += &format!(
            "  {n:>6}  {:>10}  {what} ({}{})\n",
            text::bytes(*bytes),
            shown(first),
            if *n > 1 { ", …" } else { "" }
        );
    }

    let recoded = plan.recoded_text(gguf);
    if !recoded.is_empty() {
        out += &format!("\nTypes in another form, errors measured on a sample\n{recoded}");
    }

    out += "\nRanks\n";
    for ((pp, tp), bytes) in plan.rank_bytes() {
        let rank = pp * o.tp + tp;
        let fit = memory.map(|m| format!("  {}", verdict(bytes, m))).unwrap_or_default();
        out += &format!("  rank {rank}  {:>10}{fit}\n", text::bytes(bytes));
    }
    out += "\nFiles\n";
    for shard in &plan.shards {
        out += &format!("  {}  {}  {} tensors\n", shard.name, text::bytes(shard.bytes), shard.tensors.len());
        if verbose {
            for t in &shard.tensors {
                let why = t.decoded.as_ref().map(|w| format!("  decoded: {w}")).unwrap_or_default();
                out += &format!("    {}  {}  {}{why}\n", t.name, t.dtype, text::shape(&t.shape));
            }
        }
    }
    let total: u64 = plan.shards.iter().map(|s| s.bytes).sum();
    out += &format!("  {} in all\n", text::bytes(total));
    out
}
