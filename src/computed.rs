//! A rank's file as the GGUF gives it, for the loader: decoded and cut on the way, and nothing is written.

use crate::error::Result;
use crate::eval::{Decoder, Evaluator};
use crate::gguf::Gguf;
use crate::load::Origin;
use crate::manifest;
use crate::plan::Plan;
use crate::plan::shard::ShardPlan;

/// The bytes of one file of a plan.
pub struct Computed<'a> {
    evaluator: Evaluator<'a>,
    shard: &'a ShardPlan,
    entry: manifest::Shard,
}

impl<'a> Computed<'a> {
    /// The file `shard` of `plan`.
    pub fn new(
        gguf: &'a Gguf,
        plan: &'a Plan,
        shard: &'a ShardPlan,
        decoder: &'a Decoder<'a>,
    ) -> Computed<'a> {
        let evaluator = Evaluator { plan, gguf, decoder, allow_nonfinite: false };
        Computed { evaluator, shard, entry: shard.entry() }
    }

    /// What the file holds, for the loader; without hashes.
    pub fn entry(&self) -> &manifest::Shard {
        &self.entry
    }
}

impl Origin for Computed<'_> {
    fn name(&self) -> String {
        self.shard.name.clone()
    }

    fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
        let mut bytes = Vec::with_capacity(len);
        self.evaluator.bytes(self.shard, offset..offset + len as u64, &mut bytes)?;
        buffer[..len].copy_from_slice(&bytes);
        Ok(())
    }

    /// None: these bytes are what a conversion would hash.
    fn leaves(&self) -> Option<&[[u8; 32]]> {
        None
    }

    /// Decoding wants every core.
    fn is_slow(&self) -> bool {
        true
    }

    fn finish(&self) -> Result<()> {
        self.evaluator.gguf.unchanged()
    }
}
