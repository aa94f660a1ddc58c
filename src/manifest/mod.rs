//! The manifest `preshard.json`: what a converted directory holds, byte by byte.
//!
//! Written last, so that a directory without it is incomplete. It holds no times, no host names
//! and no absolute paths: the same input and options give the same bytes.

mod check;

use crate::error::{Error, Result};
use crate::policy::Policy;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The name of the manifest in a converted directory.
pub const FILE_NAME: &str = "preshard.json";
/// The schema version this crate writes and reads.
pub const SCHEMA: u32 = 1;

/// The whole manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The tool and its version, `preshard 0.1.0`.
    pub tool: String,
    /// BLAKE3 (hex) of everything that decides the output but the choice of ranks.
    pub plan: String,
    /// The GGUF files, in split order.
    pub sources: Vec<Source>,
    /// The model, as the engine is to see it.
    pub model: Model,
    /// What was asked for.
    pub policy: Policy,
    /// The shard files, by rank; ranks of other runs are absent.
    pub shards: Vec<Shard>,
    /// The other files of the directory (config.json, tokenizer.json, …) with size and hash.
    pub files: Vec<SmallFile>,
    /// GGUF tensors that reach no file, with the reason.
    pub dropped: Vec<Dropped>,
}

/// One GGUF file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// File name, no directory.
    pub file: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 (hex) of its header: everything before the tensor data.
    pub header_blake3: String,
}

/// The model and the engine layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// GGUF architecture, `glm-dsa`.
    pub architecture: String,
    /// Class the engine builds, `GlmMoeDsaForCausalLM`.
    pub class: String,
    /// Layout: the name of the engine's table, `vllm-dsa`, or `hf`.
    pub layout: String,
    /// Decoder layers of the trunk, the MTP block not counted.
    pub layers: u64,
    /// Rows of the vocabulary as stored, and after padding.
    pub vocab: u64,
    /// Rows of the vocabulary after padding, over all ranks.
    pub vocab_padded: u64,
    /// Routed experts, 0 for a dense model.
    pub experts: u64,
}

/// One shard file: all tensors of one rank (or of one rank's MTP draft).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// File name, from the rank numbers alone.
    pub file: String,
    /// `model` for the trunk, `mtp` for the draft.
    pub part: String,
    /// Pipeline stage.
    pub pp: u64,
    /// Tensor-parallel rank.
    pub tp: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Byte at which tensor data starts: 8 + the safetensors header, a multiple of 4096.
    pub data_start: u64,
    /// BLAKE3 (hex) of the file, as `b3sum` prints it.
    pub blake3: String,
    /// Chaining value (hex) of each leaf, in order; a file of one leaf has its `blake3` here.
    pub leaves: Vec<String>,
    /// Global ids of the routed experts whose rows this rank holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<u64>,
    /// First vocabulary row of this rank and the end of its real rows; the rest is padding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_rows: Option<[u64; 2]>,
    /// The tensors, in file order.
    pub tensors: Vec<Tensor>,
}

/// One tensor of a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its name in the file: the engine's parameter.
    pub name: String,
    /// safetensors dtype, `BF16`.
    pub dtype: String,
    /// Shape as stored.
    pub shape: Vec<u64>,
    /// Byte offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Logical shape (elements) of packed bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical: Option<Vec<u64>>,
    /// What it is made of, in order: GGUF tensors with their types and rows here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<Member>,
    /// Why a quantised source was decoded, when it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoded: Option<String>,
    /// The form that a quantised source was written in, on each of the tensors that it became.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recoded: Option<Recoded>,
    /// NaN and infinity in it, when there is any: packed blocks, or elements of a float tensor.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nonfinite: u64,
    /// Other names by which the engine reaches the same storage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A form of packed weights for tensor cores, and what of it a tensor holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recoded {
    /// `codes`, `scales`, `zero_points` or `shape`.
    pub holds: String,
    /// Bits of a code.
    pub bits: u32,
    /// Columns that share a scale.
    pub group: u64,
    /// Whether each group has a zero point.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zero_point: bool,
    /// Root mean square of what the weights differ by from ggml's, over that of ggml's, in millionths and rounded
    /// up; measured on a sample of at most 4096 blocks.
    pub error: u64,
}

/// One member of a fused tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// The Hugging Face tensor (`{E}` stands for every expert of a stack).
    pub hf: String,
    /// The GGUF tensors it comes from.
    pub from: Vec<String>,
    /// Their ggml types.
    pub types: Vec<String>,
    /// Rows of this tensor (of each expert's matrix in a stack): first and end.
    pub rows: [u64; 2],
    /// Bytes of one row before padding to the widest member; packed tensors only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_bytes: Option<u64>,
}

/// A file that is copied or made from metadata.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallFile {
    /// File name.
    pub file: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 (hex).
    pub blake3: String,
}

/// A GGUF tensor that was left out on purpose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropped {
    /// Its GGUF name.
    pub tensor: String,
    /// Why.
    pub reason: String,
}

impl Manifest {
    /// Reads and checks `dir/preshard.json`.
    pub fn read(dir: &Path) -> Result<Manifest> {
        let path = dir.join(FILE_NAME);
        let bytes = std::fs::read(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::shards(
                path.display(),
                "not found; the conversion is incomplete or this is no preshard directory: run preshard convert again",
            ),
            _ => Error::io(&path, "read", e),
        })?;
        Manifest::from_slice(&bytes, &path)
    }

    /// The manifest in the bytes of its file, checked; `path` is where they come from, for messages.
    pub fn from_slice(bytes: &[u8], path: &Path) -> Result<Manifest> {
        let manifest: Manifest = serde_json::from_slice(bytes)
            .map_err(|e| Error::shards(path.display(), format!("not a manifest: {e}")))?;
        match check::problem(&manifest) {
            Some(detail) => Err(Error::shards(path.display(), detail)),
            None => Ok(manifest),
        }
    }

    /// The manifest as the bytes of its file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest has string keys only");
        bytes.push(b'\n');
        bytes
    }
}
