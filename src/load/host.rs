//! A shard into host memory, verified by threads.

use super::read::{ALIGN, ShardFile};
use super::{Options, Origin, Shard, Stats, compare_leaves, numa};
use crate::error::{Error, Result};
use crate::hash;
use crate::hash::LEAF;
use crate::manifest;
use crate::sync;
use memmap2::MmapMut;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A shard in host memory: the whole file at a page boundary.
pub struct LoadedHost {
    memory: MmapMut,
    entry: manifest::Shard,
    stats: Stats,
}

impl LoadedHost {
    /// The bytes of the tensor of that name and its entry in the manifest.
    pub fn tensor(&self, name: &str) -> Option<(&[u8], &manifest::Tensor)> {
        self.tensors().find(|(_, t)| t.name == name)
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = (&[u8], &manifest::Tensor)> {
        self.entry.tensors.iter().map(|t| (&self.memory[t.offset as usize..(t.offset + t.bytes) as usize], t))
    }

    /// The memory, the caller's to write: byte `i` of the file is byte `i` here. Past the file's end
    /// its bytes are undefined.
    pub fn memory(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// What the load did.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

impl Shard {
    /// Reads the shard into host memory and, unless turned off, verifies every leaf.
    ///
    /// # Errors
    /// A read that fails or falls short, a file that changes meanwhile, a damaged leaf (with the
    /// tensors it holds): then nothing is handed out.
    pub fn load_host(&self, options: &Options) -> Result<LoadedHost> {
        let origin = ShardFile::new(self, options.method)?;
        load_host(&origin, self.entry(), options)
    }
}

/// Takes the file that `entry` describes from `origin` into host memory and, unless turned off or there is nothing to
/// compare with, verifies every leaf.
///
/// # Errors
/// As [`Shard::load_host`].
pub fn load_host(origin: &dyn Origin, entry: &manifest::Shard, options: &Options) -> Result<LoadedHost> {
    options.check()?;
    let start = Instant::now();
    let bytes = usize::try_from(entry.bytes)
        .map_err(|_| Error::shards(origin.name(), "does not fit this machine's address space"))?;
    let mut memory = MmapMut::map_anon(bytes.next_multiple_of(ALIGN))
        .map_err(|e| Error::io(Path::new(&origin.name()), "get the memory for", e))?;
    let _ = memory.advise(memmap2::Advice::HugePage); // only faster
    let expected = origin.leaves().filter(|_| options.verify);
    let threads = options.threads_for(numa::cores(None).len());
    let mut found = vec![[0; 32]; hash::leaves(entry.bytes) as usize];
    let failed = AtomicBool::new(false);
    let work = Mutex::new(memory.chunks_mut(LEAF as usize).zip(&mut found).enumerate());
    let run = || -> Result<()> {
        while !failed.load(Ordering::Relaxed) {
            let Some((index, (buffer, value))) = sync::lock(&work).next() else { break };
            let offset = index as u64 * LEAF;
            let len = LEAF.min(entry.bytes - offset) as usize;
            for at in (0..len).step_by(options.chunk) {
                options.check_stop()?;
                origin.fill(&mut buffer[at..], offset + at as u64, options.chunk.min(len - at))?;
            }
            if expected.is_some() {
                *value = hash::leaf(&buffer[..len], index as u64, entry.bytes);
            }
        }
        Ok(())
    };
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let run = || run().inspect_err(|_| failed.store(true, Ordering::Relaxed));
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(sync::join).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    origin.finish()?;
    if let Some(expected) = expected {
        compare_leaves(&origin.name(), entry, expected, &found)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let stats = Stats {
        bytes: entry.bytes,
        seconds,
        first_byte: seconds,
        last_byte: seconds,
        memory: 0.0,
        locking: 0.0,
        kernels: 0.0,
        threads,
        pinned: 0,
        direct: origin.read_direct(),
        verified: expected.is_some(),
    };
    Ok(LoadedHost { memory, entry: entry.clone(), stats })
}
