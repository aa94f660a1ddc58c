//! The options that `plan` and `convert` share.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::hf;
use crate::mapping::Tables;
use crate::plan::{Fit, Keep, Options, Plan, Weights};
use clap::ValueEnum;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct PlanArgs {
    /// The GGUF: a file, any file of a split set, all of them, or the directory.
    #[arg(required = true, value_name = "GGUF")]
    pub source: Vec<PathBuf>,
    /// Tensor-parallel ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub tp: u64,
    /// Pipeline stages.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub pp: u64,
    /// Layers of each pipeline stage, as in VLLM_PP_LAYER_PARTITION; vLLM's default when absent.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    pub pp_layers: Option<Vec<u64>>,
    /// Place whole experts on the ranks (vLLM's --enable-expert-parallel) instead of cutting each.
    #[arg(long)]
    pub ep: bool,
    /// keep: packed weights stay packed where the engine computes with them; else decode everything.
    #[arg(long, value_enum, value_name = "HOW")]
    pub weights: Option<WeightsArg>,
    /// The DSA indexer of GLM-5: keep it, or drop it and serve dense attention.
    #[arg(long, value_enum, value_name = "HOW", default_value = "keep")]
    pub indexer: KeepArg,
    /// The multi-token-prediction block.
    #[arg(long, value_enum, value_name = "HOW", default_value = "keep")]
    pub mtp: KeepArg,
    /// Packed tensors whose cut falls inside a block.
    #[arg(long, value_enum, value_name = "HOW", default_value = "refuse")]
    pub misaligned: FitArg,
    /// Joined tensors of which some are packed and some are not, or experts of several types.
    #[arg(long, value_enum, value_name = "HOW", default_value = "refuse")]
    pub mixed: FitArg,
    /// Whose file layout to write: `vllm`, `hf` for an ordinary checkpoint, or another engine that a mapping
    /// table describes.
    #[arg(long, value_name = "ENGINE", default_value = "vllm")]
    pub layout: String,
    /// Largest file of `--layout hf`, with K, M, G or T (powers of 1000) or Ki, Mi, Gi, Ti.
    #[arg(long, value_name = "SIZE", default_value = "50G", value_parser = parse_size)]
    pub max_file_size: u64,
    /// A directory with the model's original config.json and tokenizer; its files win over what the
    /// GGUF tells.
    #[arg(long, value_name = "DIR")]
    pub hf_config: Option<PathBuf>,
    /// Go on when the metadata has keys of the architecture that are unknown here; they may change what
    /// the model computes.
    #[arg(long)]
    pub allow_unknown_keys: bool,
    /// A directory of mapping tables that override the built-in ones.
    #[arg(long, value_name = "DIR")]
    pub mappings: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum WeightsArg {
    Keep,
    Bf16,
    F16,
    F32,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum KeepArg {
    Keep,
    Drop,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum FitArg {
    Refuse,
    #[value(alias = "dequantize")]
    Dequantise,
}

impl PlanArgs {
    /// Opens the source and plans.
    pub fn plan(&self) -> Result<(Gguf, Plan)> {
        let gguf = Gguf::open(&self.source)?;
        let tables = Tables { dir: self.mappings.as_deref() };
        let plan = Plan::new(&gguf, &tables, self.options())?;
        Ok((gguf, plan))
    }

    /// What the small files of the directory are made from.
    pub fn request(&self, plan: &Plan) -> hf::Request {
        hf::Request {
            allow_unknown_keys: self.allow_unknown_keys,
            ..plan.directory(self.hf_config.clone(), self.mappings.clone())
        }
    }

    fn options(&self) -> Options {
        let keep = |k| match k {
            KeepArg::Keep => Keep::Keep,
            KeepArg::Drop => Keep::Drop,
        };
        let fit = |f| match f {
            FitArg::Refuse => Fit::Refuse,
            FitArg::Dequantise => Fit::Dequantise,
        };
        Options {
            tp: self.tp,
            pp: self.pp,
            stages: self.pp_layers.clone(),
            ep: self.ep,
            weights: match self.weights {
                Some(WeightsArg::Keep) | None => Weights::Keep,
                Some(WeightsArg::Bf16) => Weights::Bf16,
                Some(WeightsArg::F16) => Weights::F16,
                Some(WeightsArg::F32) => Weights::F32,
            },
            indexer: keep(self.indexer),
            mtp: keep(self.mtp),
            misaligned: fit(self.misaligned),
            mixed: fit(self.mixed),
            layout: self.layout.clone(),
            max_file_size: self.max_file_size,
        }
    }
}

/// `16Mi`, `50G`, `1000000`: bytes.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim_end_matches(['b', 'B']) {
        "" => 1,
        "K" | "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return Err(format!("unit {unit:?}; use K, M, G, T, Ki, Mi, Gi or Ti")),
    };
    let number: u64 = number.parse().map_err(|_| "expected a whole number, for example 50G".to_owned())?;
    match number.checked_mul(scale) {
        Some(0) | None => Err("out of range".into()),
        Some(bytes) => Ok(bytes),
    }
}

/// `0-3,6`: ranks, sorted, each once.
pub fn parse_ranks(text: &str) -> std::result::Result<Ranks, String> {
    let mut ranks = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<u64>().ok().filter(|n| *n < 1 << 24);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => ranks.extend(first..=last),
            _ => return Err(format!("{part:?}; expected ranks such as 0-3 or 0,2,5")),
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    Ok(Ranks(ranks))
}

/// A list of ranks.
#[derive(Clone)]
pub struct Ranks(pub Vec<u64>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ranks_are_read_as_people_write_them() {
        assert_eq!(parse_size("50G"), Ok(50_000_000_000));
        assert_eq!(parse_size("16MiB"), Ok(16 << 20));
        assert_eq!(parse_size("123"), Ok(123));
        for bad in ["", "G", "-1", "1.5G", "1X", "99999999999T", "0"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_ranks("0-3,6,2").unwrap().0, [0, 1, 2, 3, 6]);
        for bad in ["", "3-1", "a", "1-", "-1"] {
            assert!(parse_ranks(bad).is_err(), "{bad}");
        }
    }
}
