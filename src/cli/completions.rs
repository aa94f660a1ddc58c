//! `preshard completions`.

use super::{Cli, print_bytes};
use crate::error::Result;
use clap::CommandFactory;
use clap_complete::Shell;

#[derive(clap::Args)]
pub struct Args {
    /// The shell that will read them.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "preshard", &mut script);
    print_bytes(&script)
}
