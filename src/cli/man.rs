//! `preshard man`.

use super::{Cli, print_bytes};
use crate::error::{Error, Result};
use clap::CommandFactory;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Write a page for each command into this directory, such as ~/.local/share/man/man1, instead of
    /// printing the one that names them all.
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    // `preshard help` is no page of its own.
    let command = Cli::command().disable_help_subcommand(true);
    if let Some(dir) = &args.dir {
        return std::fs::create_dir_all(dir)
            .and_then(|()| clap_mangen::generate_to(command, dir))
            .map_err(|e| Error::io(dir, "write pages into", e));
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|e| Error::io(Path::new("standard output"), "write", e))?;
    print_bytes(&page)
}
