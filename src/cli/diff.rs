//! `preshard diff`.

use super::{Talk, print, print_json, signals};
use crate::diff::{self, Settings, Side};
use crate::error::{Result, line};
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A converted directory or its manifest, preshard.json.
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The one to compare with. Of two directories, bytes are compared where hashes leave it open which
    /// tensor changed.
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Threads; one per core when absent.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Whether the two are equal.
pub fn run(args: Args, talk: Talk) -> Result<bool> {
    let settings = Settings { threads: args.threads, stop: signals::stop() };
    let diff = diff::diff(&Side::open(&args.a)?, &Side::open(&args.b)?, &settings)?;
    if args.json {
        let mut value = serde_json::to_value(&diff).expect("a diff has string keys only");
        value["equal"] = json!(diff.equal());
        print_json(&value)?;
    } else if !talk.quiet {
        let text: String = diff.lines().iter().map(|l| line(l) + "\n").collect();
        print(&format!("{text}{}\n", line(&diff.summary())))?;
    }
    Ok(diff.equal())
}
