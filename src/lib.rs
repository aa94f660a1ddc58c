//! Turns a GGUF model into per-rank safetensors shards that many GPUs load in seconds.

#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "convert")]
pub mod conversion;
#[cfg(feature = "convert")]
pub mod convert;
pub mod cut;
#[cfg(feature = "convert")]
pub mod device;
#[cfg(feature = "convert")]
pub mod diff;
pub mod error;
#[cfg(feature = "convert")]
pub mod eval;
#[cfg(feature = "convert")]
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod hash;
#[cfg(feature = "convert")]
pub mod hf;
#[cfg(feature = "convert")]
pub mod journal;
pub mod load;
pub mod manifest;
#[cfg(feature = "convert")]
pub mod mapping;
#[cfg(feature = "convert")]
pub mod merge;
#[cfg(feature = "convert")]
pub mod plan;
pub mod policy;
pub mod quant;
#[cfg(feature = "convert")]
mod source_pages;
#[cfg(feature = "convert")]
mod spares;
#[cfg(feature = "convert")]
pub mod store;
mod sync;
#[cfg(feature = "convert")]
pub mod verify;
#[cfg(feature = "convert")]
mod workers;

pub use error::{Error, Result};
