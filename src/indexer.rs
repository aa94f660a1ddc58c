//! Which layers run an indexer of their own (DeepSeek sparse attention): the plan and config.json must agree.

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};
use crate::mapping::Group;

/// Which of the first `trunk` layers run their own indexer; the others reuse the choice of the last
/// that does (GLM-5.2). From the metadata where it says so, else by the table's schedule; a `group` that
/// names neither is in every layer. `mtp`: layers after the trunk.
/// The tensors do not tell: some files carry a copy of the indexer in every layer, and one may be missing.
pub fn layers(gguf: &Gguf, group: &Group, trunk: u64, mtp: u64) -> Result<Vec<bool>> {
    if trunk > 1 << 16 {
        return Err(Error::source("block_count", format!("{trunk} layers: not a model")));
    }
    if let Some(key) = &group.owners
        && let Some(array) = gguf.metadata().array(key)?
    {
        let types: Vec<bool> = array
            .iter()
            .map(|v| matches!(v, Value::Bool(true) | Value::U64(1..) | Value::I64(1..)))
            .collect();
        // Older converters counted the draft layers in.
        if ![trunk, trunk.saturating_add(mtp)].contains(&(types.len() as u64)) {
            return Err(Error::source(
                key,
                format!(
                    "{} entries, expected one for each of {trunk} layers, or {} with the MTP block: convert to GGUF again",
                    types.len(),
                    trunk.saturating_add(mtp)
                ),
            ));
        }
        return Ok(types[..trunk as usize].to_vec());
    }
    if let Some(schedule) = &group.schedule
        && gguf.metadata().count(&schedule.key)?.unwrap_or(0) >= schedule.least
    {
        return Ok((0..trunk).map(|layer| follows(layer, schedule.every, schedule.after)).collect());
    }
    Ok(vec![true; trunk as usize])
}

/// Whether `layer` runs its indexer under a schedule, as vLLM and transformers compute it.
pub fn follows(layer: u64, freq: u64, offset: u64) -> bool {
    (layer + 1).saturating_sub(offset).is_multiple_of(freq)
}
