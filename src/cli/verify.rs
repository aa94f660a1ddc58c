//! `preshard verify`.

use super::{Talk, print, print_json, progress, signals, text};
use crate::conversion::Source;
use crate::diff;
use crate::error::{Error, Result, shown_path};
use crate::verify::{self, Settings};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// The converted directory.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Recompute every byte from this GGUF (as given to convert) instead of checking hashes.
    #[arg(long, value_name = "GGUF", num_args = 1..)]
    source: Vec<PathBuf>,
    /// The mapping tables it was converted with, when not the built-in ones.
    #[arg(long, value_name = "DIR")]
    mappings: Option<PathBuf>,
    /// The directory given to convert with --hf-config, if one was.
    #[arg(long, value_name = "DIR", requires = "source")]
    hf_config: Option<PathBuf>,
    /// Fail unless tensors and files are those of this conversion: its preshard.json (which names the
    /// tensors that changed), its B3SUMS or its directory.
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,
    /// Threads; one per core when absent.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let bar = progress::bar(talk.quiet);
    let started = Instant::now();
    let settings =
        Settings { threads: args.threads, progress: &|p| progress::report(&bar, p), stop: signals::stop() };
    let result = if args.source.is_empty() {
        verify::hashes(&args.dir, &settings)
    } else {
        let source = Source {
            gguf: args.source.clone(),
            hf_config: args.hf_config,
            mappings: args.mappings,
            ..Source::default()
        };
        source.verify(&args.dir, &settings)
    };
    bar.finish_and_clear();
    let result = result.and_then(|outcome| {
        let Some(expected) = &args.expect else { return Ok(outcome) };
        let settings = diff::Settings { threads: args.threads, stop: signals::stop() };
        for note in diff::expected(&args.dir, expected, &settings)? {
            talk.note(&note);
        }
        Ok(outcome)
    });
    let against = if args.source.is_empty() { "hashes" } else { "source" };
    if args.json {
        let problems: Vec<String> = match &result {
            Ok(_) => vec![],
            Err(Error::Many(errors)) => errors.iter().map(ToString::to_string).collect(),
            Err(error) => vec![error.to_string()],
        };
        let seconds = started.elapsed().as_secs_f64();
        let (files, bytes) = result.as_ref().map_or((0, 0), |o| (o.files, o.bytes));
        print_json(
            &json!({ "ok": result.is_ok(), "against": against, "files": files, "bytes": bytes, "seconds": seconds, "problems": problems }),
        )?;
        return result.map(drop);
    }
    let outcome = result?;
    if talk.quiet {
        return Ok(());
    }
    let seconds = started.elapsed().as_secs_f64();
    print(&format!(
        "{} files, {}: every byte is as {}{}; {:.1} s, {}/s\n",
        outcome.files,
        text::bytes(outcome.bytes),
        if args.source.is_empty() { "converted" } else { "the GGUF gives it" },
        args.expect.map_or(String::new(), |file| format!(", and as {} expects", shown_path(&file))),
        seconds,
        text::bytes((outcome.bytes as f64 / seconds.max(1e-9)) as u64)
    ))
}
