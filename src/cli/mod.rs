//! The command line: arguments, one file per command, progress, exit codes.
//!
//! Results go to standard output, everything else to standard error. Exit status 0: success; 1:
//! refused or failed; 2: wrong usage.

mod completions;
mod convert;
mod diff;
mod html;
mod inspect;
mod load;
mod man;
mod merge;
mod options;
mod plan;
mod progress;
mod ranks;
mod serve;
mod signals;
mod text;
mod verify;

use crate::error::{Error, Result};
use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

const EXIT_STATUS: &str =
    "Exit status: 0 success, 1 refused or failed (diff: the two differ), 2 wrong usage.";

/// Turn a GGUF model into per-rank safetensors shards that many GPUs load in seconds.
#[derive(Parser)]
#[command(version, propagate_version = true, max_term_width = 100, after_help = EXIT_STATUS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print only errors.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print more: every tensor, every note.
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Show what a GGUF holds.
    Inspect(inspect::Args),
    /// Show what each tensor becomes, bytes per rank and what is dropped; write nothing.
    Plan(plan::Args),
    /// Convert a GGUF into one safetensors file per rank.
    Convert(convert::Args),
    /// Check a converted directory against its hashes, or against the GGUF it was made from.
    Verify(verify::Args),
    /// Show which tensors differ between two conversions, and why; status 1 when any does.
    Diff(diff::Args),
    /// Join the ranks that several hosts converted into one directory.
    Merge(merge::Args),
    /// Load shards to the GPUs as an engine would, verify them there and show the speed.
    Load(load::Args),
    /// Print completions for a shell.
    Completions(completions::Args),
    /// Print the manual page, or write one for each command.
    Man(man::Args),
}

/// How much to print.
#[derive(Clone, Copy)]
struct Talk {
    quiet: bool,
    verbose: bool,
    /// When `main` began.
    started: Instant,
}

impl Talk {
    /// A remark on standard error.
    fn note(self, text: &str) {
        if !self.quiet {
            tell("note", text);
        }
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let started = Instant::now();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results; a closed pipe is no reason to fail.
            let code = if error.use_stderr() { 2 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    signals::install();
    let talk = Talk { quiet: cli.quiet, verbose: cli.verbose, started };
    let result = match cli.command {
        Command::Inspect(args) => inspect::run(args, talk),
        Command::Plan(args) => plan::run(args, talk),
        Command::Convert(args) => convert::run(args, talk),
        Command::Verify(args) => verify::run(args, talk),
        Command::Diff(args) => match diff::run(args, talk) {
            Ok(false) => return ExitCode::FAILURE,
            result => result.map(drop),
        },
        Command::Merge(args) => merge::run(args, talk),
        Command::Load(args) => load::run(args, talk),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            for line in error.to_string().lines() {
                tell("error", line);
            }
            ExitCode::FAILURE
        }
    }
}

/// A line on standard error, printable whatever is in it. A reader that went away is no reason to fail.
fn tell(kind: &str, text: &str) {
    let _ = writeln!(std::io::stderr(), "{kind}: {}", crate::error::line(text));
}

/// Prints a result to standard output; a reader that went away ends the program quietly.
fn print(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Prints a result that another crate made.
fn print_bytes(bytes: &[u8]) -> Result<()> {
    match std::io::stdout().lock().write_all(bytes) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|e| Error::io(std::path::Path::new("standard output"), "write", e)),
    }
}

/// Prints a JSON result.
fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}
