//! The loader: one rank's file to its GPU (or to host memory), every byte verified.
//!
//! A shard file is one contiguous blob. It is copied whole, header included, into one allocation,
//! and the tensors are views into it: tensor `t` starts at `base + t.offset`, where `offset` is
//! its byte offset in the file. The header is padded so that the data starts at a multiple of
//! 4096, and every tensor keeps the alignment that the converter gave it (the largest power of two
//! that divides its size, up to the allocation's own).
//!
//! What was copied is hashed where it arrived: on the GPU by a kernel, on the CPU by threads. A
//! leaf (16 MiB) whose BLAKE3 chaining value is not the manifest's fails the load, and nothing is
//! handed out. All copies and hashes are done, and the device synchronised, before a load returns:
//! the memory may be used on any stream at once.

pub(crate) mod cached;
mod directory;
#[cfg(feature = "cuda")]
mod gpu;
#[doc(hidden)]
pub mod header;
mod host;
mod numa;
mod origin;
mod read;
#[cfg(feature = "cuda")]
mod ring;

pub use directory::{Directory, Shard};
#[cfg(feature = "cuda")]
pub use gpu::{Loaded, load_all, load_from};
pub use host::{LoadedHost, load_host};
pub use origin::Origin;
pub use read::{ALIGN, Method};

use crate::error::{Error, Result};
use crate::hash::LEAF;
use crate::hash::to_hex;
use crate::manifest;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How to load. The default is right unless measured otherwise.
#[derive(Clone, Debug)]
pub struct Options {
    /// Reader threads per shard; `None` chooses by the cores at hand.
    pub threads: Option<usize>,
    /// Bytes of one copy to the GPU, or of one read into host memory: a power of two from 64 KiB to
    /// 16 MiB.
    pub chunk: usize,
    /// How file bytes reach host memory.
    pub method: Method,
    /// Compare every leaf's hash with the manifest.
    pub verify: bool,
    /// Set by another thread to give the load up, with [`Error::Interrupted`].
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for Options {
    fn default() -> Self {
        Options { threads: None, chunk: 8 << 20, method: Method::Auto, verify: true, stop: None }
    }
}

impl Options {
    /// More threads than this gained nothing on any machine measured.
    const MAX_DEFAULT_THREADS: usize = 16;

    fn check(&self) -> Result<()> {
        if !self.chunk.is_power_of_two() || self.chunk < 64 << 10 || self.chunk as u64 > LEAF {
            return Err(Error::request(
                "chunk",
                format!("{} bytes, expected a power of two from 65536 to {LEAF}", self.chunk),
            ));
        }
        match self.threads {
            Some(n) if n == 0 || n > 256 => Err(Error::request("threads", format!("{n}, expected 1 to 256"))),
            _ => Ok(()),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    fn check_stop(&self) -> Result<()> {
        if self.stopped() {
            return Err(Error::Interrupted("the load was stopped; nothing was loaded".into()));
        }
        Ok(())
    }

    /// Reader threads of a load that has `cores` cores for them.
    fn threads_for(&self, cores: usize) -> usize {
        self.threads.unwrap_or(cores.clamp(2, Self::MAX_DEFAULT_THREADS))
    }
}

/// What a load did and how long it took.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Stats {
    /// Bytes of the file.
    pub bytes: u64,
    /// Seconds from the call to its return, allocations and verification included.
    pub seconds: f64,
    /// Seconds until the file's first chunk was in its place.
    pub first_byte: f64,
    /// Seconds until its last byte was.
    pub last_byte: f64,
    /// Seconds in which the driver allocated the device memory.
    pub memory: f64,
    /// Seconds in which readers waited for page-locked memory, the longest of them. Others read
    /// meanwhile. The next load to the same device finds that memory locked.
    pub locking: f64,
    /// Seconds in which the hash kernels were loaded, while the readers read.
    pub kernels: f64,
    /// Reader threads.
    pub threads: usize,
    /// Bytes of page-locked host memory used, 0 for a load into host memory.
    pub pinned: u64,
    /// Bytes read past the page cache.
    pub direct: u64,
    /// Whether every leaf was compared with the manifest.
    pub verified: bool,
}

/// The error for the leaves of a file whose hash is not the one expected: `found` holds all hashes.
fn compare_leaves(
    name: &str,
    entry: &manifest::Shard,
    expected: &[[u8; 32]],
    found: &[[u8; 32]],
) -> Result<()> {
    const SHOWN: usize = 4;
    let bad: Vec<usize> =
        (0..found.len().max(expected.len())).filter(|&i| found.get(i) != expected.get(i)).collect();
    let Some(&first) = bad.first() else { return Ok(()) };
    let tensors: Vec<&manifest::Tensor> = entry
        .tensors
        .iter()
        .filter(|t| {
            bad.iter().any(|&l| t.offset < (l as u64 + 1) * LEAF && t.offset + t.bytes > l as u64 * LEAF)
        })
        .collect();
    let names: Vec<String> = tensors.iter().take(SHOWN).map(|t| crate::error::shown(&t.name)).collect();
    let more = match tensors.len() {
        n if n > SHOWN => format!(" and {} more", n - SHOWN),
        _ => String::new(),
    };
    let header = if first == 0 { "the header, " } else { "" };
    Err(Error::shards(
        name,
        format!(
            "{} of {} leaves damaged, the first is leaf {first} (bytes {}..{}): BLAKE3 {}, expected {}; \
             damaged: {header}{}{more}: copy the file again, or convert again",
            bad.len(),
            found.len(),
            first as u64 * LEAF,
            ((first as u64 + 1) * LEAF).min(entry.bytes),
            found.get(first).map_or_else(|| "of nothing".into(), to_hex),
            expected.get(first).map_or_else(|| "of nothing".into(), to_hex),
            names.join(", ")
        ),
    ))
}
