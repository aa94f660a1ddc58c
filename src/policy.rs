//! The policy of a conversion: everything that the user decides about its bytes.
//!
//! One spelling for the command line, the Python package and the manifest: what these types are called in JSON.

use serde::de::IntoDeserializer;
use serde::de::value::StrDeserializer;
use serde::{Deserialize, Serialize};

/// Parallelism, and what becomes of weights that could go either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Tensor-parallel ranks.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Whole experts per rank.
    pub ep: bool,
    /// First layer of each stage and the end: `pp + 1` numbers (see [`bounds`]). None before planning: the
    /// engine's default.
    pub stages: Vec<u64>,
    /// The engine: one of the architecture's `[engines]` (`vllm`, or `hf` for an ordinary checkpoint), or the
    /// name of an engine table.
    pub layout: String,
    /// Largest file of an ordinary checkpoint, in bytes.
    pub max_file_size: u64,
    /// How weights are stored.
    pub weights: Weights,
    /// The DSA indexer.
    pub indexer: Keep,
    /// The multi-token-prediction block.
    pub mtp: Mtp,
    /// Shared experts. An engine that knows one form alone has them apart, and the manifest then says nothing.
    #[serde(default = "separate", skip_serializing_if = "is_separate")]
    pub shared_experts: SharedExperts,
    /// Packed tensors whose cut falls inside a block.
    pub misaligned: Fit,
    /// Joined members of unlike types.
    pub mixed: Fit,
    /// What packed weights may lose in another form, in millionths (see [`MAX_ERROR`]); with [`Weights::Fast`] and
    /// [`Weights::FastF16`] alone. None before planning: the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_error: Option<u64>,
}

/// Whether a layout, or an engine table, of this name is an ordinary checkpoint: `hf`, or `hf-NAME`.
pub fn is_ordinary(layout: &str) -> bool {
    layout == "hf" || layout.starts_with("hf-")
}

/// [`Policy::max_error`] when none is given: two to three times what rounding to bf16 loses.
pub const MAX_ERROR: u64 = 5000;

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            tp: 1,
            pp: 1,
            ep: false,
            stages: Vec::new(),
            layout: "vllm".into(),
            // What transformers' save_pretrained uses.
            max_file_size: 50_000_000_000,
            weights: Weights::Keep,
            indexer: Keep::Keep,
            mtp: Mtp::Keep,
            shared_experts: SharedExperts::Auto,
            misaligned: Fit::Refuse,
            mixed: Fit::Refuse,
            max_error: None,
        }
    }
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// Packed where the engine computes with packed weights, bf16 elsewhere.
    Keep,
    /// All decoded to bf16.
    Bf16,
    /// All decoded to f16.
    F16,
    /// All decoded to f32.
    F32,
    /// Packed weights in forms that tensor cores take, bf16 elsewhere.
    Fast,
    /// The same with f16.
    #[serde(rename = "fast-f16")]
    FastF16,
}

impl Weights {
    /// Whether packed weights are written in other forms.
    pub fn recodes(self) -> bool {
        matches!(self, Weights::Fast | Weights::FastF16)
    }
}

/// What to do with tensors that a policy decides about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// They are converted.
    Keep,
    /// They are left out.
    Drop,
}

/// What to do with the multi-token-prediction block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum Mtp {
    /// It is converted, into files of its own beside the model's.
    Keep,
    /// It is left out.
    Drop,
    /// It alone is converted: a draft in a directory of its own.
    Only,
}

/// Where an expert that every token goes through is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum SharedExperts {
    /// As the engine does by itself. A plan knows which of the others that is.
    Auto,
    /// After the routed experts, as one more of them.
    Fused,
    /// In parameters of its own.
    Separate,
}

fn separate() -> SharedExperts {
    SharedExperts::Separate
}

fn is_separate(form: &SharedExperts) -> bool {
    *form == SharedExperts::Separate
}

/// What to do with tensors that cannot stay packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// Nothing is converted.
    Refuse,
    /// They are decoded.
    #[serde(alias = "dequantize")]
    #[cfg_attr(feature = "cli", value(alias = "dequantize"))]
    Dequantise,
}

/// The value that a word stands for, in the spelling of the manifest.
///
/// # Errors
///
/// The word and all that it could have been.
pub fn word<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, String> {
    let text: StrDeserializer<serde::de::value::Error> = text.into_deserializer();
    T::deserialize(text).map_err(|e| crate::error::shown(&e.to_string()))
}

/// A value in the spelling of the manifest.
pub fn spelled<T: Serialize>(value: T) -> String {
    serde_json::json!(value).as_str().unwrap_or_default().to_owned()
}

/// [`Policy::stages`] of stages with so many layers each.
pub fn bounds(layers: &[u64]) -> Vec<u64> {
    let ends = layers.iter().scan(0u64, |end, n| {
        *end = end.saturating_add(*n);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}
