//! The `preshard` command.
fn main() {}
