//! The `preshard` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    preshard::cli::main()
}
