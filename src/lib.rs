//! Turns a GGUF model into per-rank safetensors shards that many GPUs load in seconds.

pub mod error;
#[cfg(feature = "convert")]
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod manifest;
pub mod quant;

pub use error::{Error, Result};
