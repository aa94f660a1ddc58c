//! Turns a GGUF model into per-rank safetensors shards that many GPUs load in seconds.

#[cfg(feature = "convert")]
pub mod cut;
pub mod error;
#[cfg(feature = "convert")]
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod hash;
pub mod load;
pub mod manifest;
#[cfg(feature = "convert")]
pub mod mapping;
#[cfg(feature = "convert")]
pub mod plan;
pub mod quant;

pub use error::{Error, Result};
