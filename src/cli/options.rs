//! The options that `plan` and `convert` share.

use crate::conversion::{Planned, Source};
use crate::error::Result;
use crate::policy::{Fit, Keep, Mtp, Policy, SharedExperts, Weights, bounds};
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
    /// Place whole experts on the ranks (vLLM's --enable-expert-parallel, SGLang's --ep-size) instead of cutting each.
    #[arg(long)]
    pub ep: bool,
    /// keep: packed weights stay packed where the engine computes with them; fast, with --layout hf or
    /// hf-humming: their codes in forms that tensor cores take; else decode everything.
    #[arg(long, value_enum, value_name = "HOW", default_value = "keep", hide_possible_values = true)]
    pub weights: Weights,
    /// With --weights fast: the most, in percent, that a tensor may lose in another form (root mean square of the
    /// difference over that of ggml's values); what every form exceeds is decoded. 0.5 when absent.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub max_error: Option<u64>,
    /// The DSA indexer of GLM-5: keep it, or drop it and serve dense attention.
    #[arg(long, value_enum, value_name = "HOW", default_value = "keep")]
    pub indexer: Keep,
    /// The multi-token-prediction block: beside the model, left out, or alone, in a directory of its own.
    #[arg(long, value_enum, value_name = "HOW", default_value = "keep", hide_possible_values = true)]
    pub mtp: Mtp,
    /// Shared experts: as one more of the routed ones, or apart; auto is what SGLang does by itself on CUDA.
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto", hide_possible_values = true)]
    pub shared_experts: SharedExperts,
    /// Packed tensors whose cut falls inside a block.
    #[arg(long, value_enum, value_name = "HOW", default_value = "refuse")]
    pub misaligned: Fit,
    /// Joined tensors of which some are packed and some are not, or experts of several types.
    #[arg(long, value_enum, value_name = "HOW", default_value = "refuse")]
    pub mixed: Fit,
    /// Whose file layout to write: `vllm`, `sglang`, `hf` for an ordinary checkpoint, or another engine that a mapping
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

impl PlanArgs {
    /// Opens the source and plans.
    pub fn plan(self) -> Result<Planned> {
        let policy = Policy {
            tp: self.tp,
            pp: self.pp,
            ep: self.ep,
            stages: self.pp_layers.as_deref().map(bounds).unwrap_or_default(),
            layout: self.layout,
            max_file_size: self.max_file_size,
            weights: self.weights,
            indexer: self.indexer,
            mtp: self.mtp,
            shared_experts: self.shared_experts,
            misaligned: self.misaligned,
            mixed: self.mixed,
            max_error: self.max_error,
        };
        let source = Source {
            gguf: self.source,
            hf_config: self.hf_config,
            mappings: self.mappings,
            allow_unknown_keys: self.allow_unknown_keys,
        };
        source.plan(policy)
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

/// `0.5`: a percentage, in millionths.
pub fn parse_percent(text: &str) -> std::result::Result<u64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok((percent * 1e4).round() as u64),
        _ => Err("expected a percentage from 0 to 100, for example 0.5".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse_size("50G"), Ok(50_000_000_000));
        assert_eq!(parse_size("16MiB"), Ok(16 << 20));
        assert_eq!(parse_size("123"), Ok(123));
        for bad in ["", "G", "-1", "1.5G", "1X", "99999999999T", "0"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_percent("0.5"), Ok(5000));
        assert_eq!(parse_percent("8%"), Ok(80000));
        for bad in ["", "-1", "101", "NaN", "x"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }
}
