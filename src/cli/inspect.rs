use super::Talk;
use crate::error::Result;
#[derive(clap::Args)]
pub struct Args {}
pub fn run(_: Args, _: Talk) -> Result<()> {
    Ok(())
}
