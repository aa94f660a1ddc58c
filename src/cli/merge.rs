//! `preshard merge`.

use super::{Talk, print, text};
use crate::error::Result;
use crate::merge;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The directories that `preshard convert --ranks` wrote, on this host or others.
    #[arg(value_name = "DIR", num_args = 1.., required = true)]
    dirs: Vec<PathBuf>,
    /// The directory of all ranks; it may be one of those given.
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let manifest = merge::merge(&args.dirs, &args.out)?;
    if talk.quiet {
        return Ok(());
    }
    let bytes = manifest.shards.iter().map(|s| s.bytes).sum();
    print(&format!("{} files, {}: all ranks are there\n", manifest.shards.len(), text::bytes(bytes)))
}
