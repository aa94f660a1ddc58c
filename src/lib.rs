//! Turns a GGUF model into per-rank safetensors shards that many GPUs load in seconds.
//!
//! A conversion reads a GGUF once and writes, for each rank of an engine, one safetensors file with that rank's
//! parameters under the engine's names, cut for it, packed where the engine computes with packed weights. A
//! loader then reads each file straight to its GPU and checks every byte there.
//!
//! ```text
//!  GGUF files           mapping tables, policy
//!      │                         │
//!     gguf ────────────────►   plan ─────► hf       what each tensor becomes; config.json, tokenizer.json
//!      │                         │
//!      └───► quant ───► eval ◄───┘                  the bytes of any leaf (16 MiB) of any file
//!                         │
//!                      convert                      all leaves, on all threads, in any order
//!                         │
//!           OUT/*.safetensors, preshard.json        a file for each rank; the manifest: a hash for each leaf
//!                         │
//!          ┌──────────────┼─────────────┐
//!       verify       diff, merge       load ──► gpu one file, one allocation, every leaf hashed where it is
//! ```
//!
//! [`conversion`] is the way in for a program that converts, [`load`] for one that loads. The features follow that:
//! `convert` is the converter, `cuda` the GPU side of both, `cli` the command `preshard`; with none of them the crate
//! is a loader into host memory and its few dependencies.
//!
//! # What would become of a model
//!
//! ```
//! use preshard::conversion::Source;
//! use preshard::policy::{Fit, Policy};
//!
//! let source = Source { gguf: vec!["tests/fixtures/dense/tiny-qwen3moe-Q4_K_M.gguf".into()], ..Source::default() };
//! let planned = source.plan(Policy { tp: 2, misaligned: Fit::Dequantise, ..Policy::default() })?;
//! assert_eq!(planned.class, "Qwen3MoeForCausalLM");
//! for shard in &planned.plan.shards {
//!     println!("{}: {} bytes", shard.name, shard.bytes);
//!     for tensor in &shard.tensors {
//!         println!("  {} {} {:?}", tensor.name, tensor.dtype, tensor.shape);
//!         if let Some(reason) = &tensor.decoded {
//!             println!("    decoded: {reason}");
//!         }
//!     }
//! }
//! # Ok::<(), preshard::Error>(())
//! ```
//!
//! # Convert, load, look
//!
//! ```
//! use preshard::conversion::{How, Source};
//! use preshard::load::{Directory, Options};
//! use preshard::policy::{Policy, Weights};
//!
//! # let temporary = tempfile::tempdir().unwrap();
//! # let out = temporary.path().join("out");
//! let source = Source { gguf: vec!["tests/fixtures/dense/tiny-llama-Q4_K_M.gguf".into()], ..Source::default() };
//! let policy = Policy { tp: 2, weights: Weights::Bf16, ..Policy::default() };
//! source.plan(policy)?.convert(&out, &How::default())?;
//!
//! // Every byte of the shard is compared with the manifest before this returns.
//! let rank = Directory::open(&out)?.shard(1)?.load_host(&Options::default())?;
//! let (bytes, norm) = rank.tensor("model.norm.weight").unwrap();
//! assert_eq!((norm.dtype.as_str(), bytes.len() as u64), ("BF16", 2 * norm.shape[0]));
//! # Ok::<(), preshard::Error>(())
//! ```
//!
//! # Check, compare
//!
//! ```
//! use preshard::conversion::{How, Source};
//! use preshard::diff::{Side, diff};
//! use preshard::policy::{Policy, Weights};
//! use preshard::verify;
//!
//! # let temporary = tempfile::tempdir().unwrap();
//! # let (keep, bf16) = (temporary.path().join("keep"), temporary.path().join("bf16"));
//! let source = Source { gguf: vec!["tests/fixtures/dense/tiny-llama-Q4_K_M.gguf".into()], ..Source::default() };
//! source.plan(Policy::default())?.convert(&keep, &How::default())?;
//! source.plan(Policy { weights: Weights::Bf16, ..Policy::default() })?.convert(&bf16, &How::default())?;
//!
//! verify::hashes(&keep, &verify::Settings::default())?; // as converted
//! source.verify(&keep, &verify::Settings::default())?; // as the GGUF gives it
//!
//! let found = diff(&Side::open(&keep)?, &Side::open(&bf16)?, &Default::default())?;
//! assert!(found.lines().contains(&"policy weights: keep -> bf16".to_owned()));
//! # Ok::<(), preshard::Error>(())
//! ```
//!
//! Errors say who must act ([`Error`]) and are one line each. Input from outside is never trusted: a GGUF, a mapping
//! table, a manifest or a shard that is damaged or hostile gives an error.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "convert")]
pub mod computed;
#[cfg(feature = "convert")]
pub mod conversion;
#[cfg(feature = "convert")]
pub mod convert;
#[doc(hidden)]
pub mod cut;
#[cfg(feature = "convert")]
pub mod device;
#[cfg(feature = "convert")]
pub mod diff;
pub mod error;
#[cfg(feature = "convert")]
pub mod eval;
#[cfg(feature = "convert")]
pub mod forms;
#[cfg(feature = "convert")]
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod hash;
#[cfg(feature = "convert")]
pub mod hf;
#[cfg(feature = "convert")]
pub mod indexer;
#[cfg(feature = "convert")]
mod journal;
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
mod store;
mod sync;
#[cfg(feature = "convert")]
pub mod verify;
#[cfg(feature = "convert")]
mod workers;

pub use error::{Error, Result};
