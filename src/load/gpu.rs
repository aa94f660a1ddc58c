//! The pipeline from a shard file to a GPU.
//!
//! Reader threads fill page-locked slots, several of them one slot together; whoever completes a
//! chunk queues its copy. A copy takes a fraction of the time that one thread needs to read as much,
//! so a few slots more than the readers fill suffice. Once all chunks of a leaf are on their way, the
//! hashing thread queues that leaf's hash behind their copies on a stream of its own, so that
//! verification overlaps with loading. Host memory is bounded by the slots, whatever the file.

use super::read::{ALIGN, ShardFile};
use super::ring::Ring;
use super::{Options, Origin, Shard, Stats, compare_leaves, numa};
use crate::error::{Error, Result};
use crate::gpu::blake3::{LeafHasher, VALUE};
use crate::gpu::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use crate::hash::LEAF;
use crate::manifest;
use crate::sync;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Bytes that the readers fill at one time, all together: the fewer threads, the larger the pieces.
/// Less was slower with few threads, more with several GPUs (docs/performance.md).
const FILLING: usize = 16 << 20;
/// As [`FILLING`], for a file that is not in the page cache: a disk wants more requests at a time.
const FILLING_COLD: usize = 32 << 20;
/// Bytes whose copies are queued meanwhile, so that the link always has some.
const QUEUED: usize = 16 << 20;
/// Bytes of one read at least.
const SMALLEST_READ: usize = 64 << 10;

/// A shard in device memory: the whole file in one allocation, freed when dropped.
pub struct Loaded {
    memory: DeviceBuffer,
    entry: manifest::Shard,
    stats: Stats,
}

impl Loaded {
    /// The device address of the tensor of that name and its entry in the manifest.
    pub fn tensor(&self, name: &str) -> Option<(u64, &manifest::Tensor)> {
        self.tensors().find(|(_, t)| t.name == name)
    }

    /// All tensors with their device addresses, in file order. The addresses are good for as long
    /// as this value lives.
    pub fn tensors(&self) -> impl Iterator<Item = (u64, &manifest::Tensor)> {
        self.entry.tensors.iter().map(|t| (self.memory.ptr() + t.offset, t))
    }

    /// The memory: byte `i` of the file is byte `i` here.
    pub fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// What the load did.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Reads the device memory back and compares it with the file of `shard`, byte by byte.
    pub fn compare_with(&self, shard: &Shard) -> Result<()> {
        let mut ours = vec![0; LEAF as usize];
        let mut theirs = vec![0; LEAF as usize];
        for begin in (0..self.memory.len()).step_by(LEAF as usize) {
            let len = (self.memory.len() - begin).min(LEAF as usize);
            self.memory.read(begin, &mut ours[..len])?;
            shard
                .file()
                .read_exact_at(&mut theirs[..len], begin as u64)
                .map_err(|e| Error::io(shard.path(), "read", e))?;
            if let Some(at) = (0..len).find(|&i| ours[i] != theirs[i]) {
                return Err(Error::shards(
                    shard.path().display(),
                    format!(
                        "byte {} is {:#04x} in the file and {:#04x} on {}: the memory or the file is damaged",
                        begin + at,
                        theirs[at],
                        ours[at],
                        self.memory.device()
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl Shard {
    /// Loads the shard to `device` and, unless turned off, verifies every leaf there.
    ///
    /// # Errors
    /// Not enough device memory, a read that fails or falls short, a file that changes meanwhile,
    /// a damaged leaf (with the tensors it holds): then nothing is handed out.
    pub fn load(&self, device: &Device, options: &Options) -> Result<Loaded> {
        let mut loaded = load_all(&[(self, device)], options)?;
        loaded.pop().ok_or_else(|| Error::device(device, "nothing was loaded"))
    }

    /// As [`Shard::load`], into device memory that the caller owns.
    ///
    /// # Safety
    /// `base`, a multiple of 16, must be memory of `device` for the file's bytes, used by nothing
    /// until the call returns. After an error its contents are undefined.
    pub unsafe fn load_into(&self, device: &Device, base: u64, options: &Options) -> Result<Stats> {
        options.check()?;
        if !base.is_multiple_of(16) {
            return Err(Error::request("device memory", format!("{base:#x} is no multiple of 16")));
        }
        let cores = numa::cores(device.info().numa_node);
        let stop = AtomicBool::new(false);
        let origin = ShardFile::new(self, options.method)?;
        let (origin, entry): (&dyn Origin, _) = (&origin, self.entry());
        let load = Load { origin, entry, device, base, options, share: cores.len(), cores, stop: &stop };
        load.run(Instant::now())?.ok_or_else(|| Error::device(device, "the load was stopped"))
    }
}

/// Loads each shard to its device, all at once. The first failure stops all of them.
pub fn load_all(loads: &[(&Shard, &Device)], options: &Options) -> Result<Vec<Loaded>> {
    let files =
        loads.iter().map(|(shard, _)| ShardFile::new(shard, options.method)).collect::<Result<Vec<_>>>()?;
    let loads: Vec<(&dyn Origin, &manifest::Shard, &Device)> =
        files.iter().zip(loads).map(|(file, (shard, device))| (file as _, shard.entry(), *device)).collect();
    load_from(&loads, options)
}

/// Takes the file that each entry describes from its origin to its device, all at once; leaves are verified there
/// unless that is turned off or there is nothing to compare with. The first failure stops all of them.
///
/// # Errors
/// As [`Shard::load`].
pub fn load_from(
    loads: &[(&dyn Origin, &manifest::Shard, &Device)],
    options: &Options,
) -> Result<Vec<Loaded>> {
    options.check()?;
    let stop = AtomicBool::new(false);
    let results: Vec<Result<Option<Loaded>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = loads
            .iter()
            .map(|&(origin, entry, device)| {
                let node = device.info().numa_node;
                let neighbours = loads.iter().filter(|(_, _, d)| d.info().numa_node == node).count();
                let stop = &stop;
                scope.spawn(move || {
                    let load = || -> Result<Option<Loaded>> {
                        let start = Instant::now();
                        let bytes = usize::try_from(entry.bytes)
                            .map_err(|_| Error::shards(origin.name(), "too large for this machine"))?;
                        let memory = device.alloc(bytes)?;
                        let allocated = start.elapsed();
                        let cores = numa::cores(node);
                        let share = cores.len() / neighbours;
                        let base = memory.ptr();
                        let load = Load { origin, entry, device, base, options, share, cores, stop };
                        let stats = load.run(start)?;
                        let stats = stats.map(|s| Stats { memory: allocated.as_secs_f64(), ..s });
                        Ok(stats.map(|stats| Loaded { memory, entry: entry.clone(), stats }))
                    };
                    load().inspect_err(|_| stop.store(true, Ordering::Relaxed))
                })
            })
            .collect();
        threads.into_iter().map(sync::join).collect()
    });
    let (done, failed): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    Error::all(failed.into_iter().filter_map(Result::err).collect())?;
    Ok(done.into_iter().filter_map(Result::ok).flatten().collect())
}

/// One shard on its way to one device.
struct Load<'a> {
    origin: &'a dyn Origin,
    /// What its bytes are.
    entry: &'a manifest::Shard,
    device: &'a Device,
    /// Device address of the file's first byte.
    base: u64,
    options: &'a Options,
    /// The cores its threads may run on.
    cores: Vec<usize>,
    /// How many of them are its own; other loads have the rest.
    share: usize,
    /// Set by whoever fails; everyone looks before the next chunk.
    stop: &'a AtomicBool,
}

/// What the readers and the hashing thread share.
struct Progress {
    ring: Ring,
    slots: Vec<Slot>,
    /// Chunks of each leaf whose copies are not queued.
    uncopied: Vec<AtomicU32>,
    /// The slot that each chunk was copied from.
    slot_of: Vec<AtomicU32>,
    /// When chunk 0 was in its place.
    first: Mutex<Option<Instant>>,
    /// All copies are queued on this one: with a stream per reader, the GPU's copy engine spent
    /// microseconds between copies, a tenth of the whole.
    stream: Stream,
}

/// Page-locked memory for one chunk.
struct Slot {
    memory: OnceLock<PinnedBuffer>,
    /// Signals the slot's latest copy. Waiting on it for an earlier copy is safe: copies on one
    /// stream finish in order.
    copied: Event,
}

/// What one reader has to tell.
struct Read {
    /// How long it waited for page-locked memory.
    locking: Duration,
    /// When its last copy was done.
    end: Instant,
}

/// What the hashing thread found.
struct Hashed {
    /// The chaining value of each leaf.
    values: Vec<[u8; VALUE]>,
    /// How long loading the kernels took.
    kernels: Duration,
}

impl Drop for Progress {
    /// Slots are freed when no copy reads them; a failed copy was reported by its reader.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

/// Whatever way a reader ends, those that wait for a slot look whether to go on.
struct Leaving<'a> {
    ring: &'a Ring,
    stop: &'a AtomicBool,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.ring.wake();
    }
}

impl Load<'_> {
    /// Runs the load; `None` when another load's failure stopped it.
    fn run(&self, start: Instant) -> Result<Option<Stats>> {
        let bytes = self.entry.bytes;
        let chunk = self.options.chunk;
        let expected = self.origin.leaves().filter(|_| self.options.verify);
        // Readers that copy keep a core busy each, and one on every core was a tenth slower than on
        // three quarters of them; readers that wait for a disk do not.
        let (filling, cores) =
            if self.origin.is_slow() { (FILLING_COLD, self.share) } else { (FILLING, self.share * 3 / 4) };
        let threads = self.options.threads_for(cores);
        let piece = chunk.min(1 << (filling / threads).max(SMALLEST_READ).ilog2());
        let pieces = bytes.div_ceil(piece as u64);
        let chunks = bytes.div_ceil(chunk as u64);
        let most = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let threads = threads.min(most(pieces)).max(1);
        let slots = (threads * piece + QUEUED).div_ceil(chunk).min(most(chunks));
        let per_leaf = (LEAF / chunk as u64) as u32;
        let progress = Progress {
            ring: Ring::new(bytes, chunk, piece, slots),
            slots: (0..slots)
                .map(|_| Ok(Slot { memory: OnceLock::new(), copied: self.device.event(false)? }))
                .collect::<Result<_>>()?,
            uncopied: (0..bytes.div_ceil(LEAF))
                .map(|l| AtomicU32::new(per_leaf.min((chunks - l * u64::from(per_leaf)) as u32)))
                .collect(),
            slot_of: (0..chunks).map(|_| AtomicU32::new(0)).collect(),
            first: Mutex::new(None),
            stream: self.device.stream()?,
        };
        let fail = |_: &Error| self.stop.store(true, Ordering::Relaxed);
        let (send, leaves_sent) = mpsc::channel();
        let (read, hashed) = std::thread::scope(|scope| {
            let progress = &progress;
            let hashing =
                expected.map(|_| scope.spawn(move || self.hash(progress, leaves_sent).inspect_err(fail)));
            let readers: Vec<_> = (0..threads)
                .map(|i| {
                    let send = send.clone();
                    scope.spawn(move || {
                        let _leaving = Leaving { ring: &progress.ring, stop: self.stop };
                        self.read(i, threads, progress, &send).inspect_err(fail)
                    })
                })
                .collect();
            drop(send);
            let read: Vec<Result<Read>> = readers.into_iter().map(sync::join).collect();
            (read, hashing.map(sync::join))
        });
        let reads = read.into_iter().collect::<Result<Vec<Read>>>()?;
        let hashed = hashed.transpose()?;
        let first = *sync::lock(&progress.first);
        self.keep(progress)?;
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.origin.finish()?;
        if let (Some(expected), Some(hashed)) = (expected, &hashed) {
            compare_leaves(&self.origin.name(), self.entry, expected, &hashed.values)?;
        }
        let since = |t: Option<Instant>| t.map_or(0.0, |t| (t - start).as_secs_f64());
        Ok(Some(Stats {
            bytes,
            seconds: start.elapsed().as_secs_f64(),
            first_byte: since(first),
            last_byte: since(reads.iter().map(|r| r.end).max()),
            memory: 0.0,
            locking: reads.iter().map(|r| r.locking).max().unwrap_or_default().as_secs_f64(),
            kernels: hashed.map_or(0.0, |h| h.kernels.as_secs_f64()),
            threads,
            pinned: (slots * chunk) as u64,
            direct: self.origin.read_direct(),
            verified: expected.is_some(),
        }))
    }

    /// Leaves the slots' memory with the device, for its next load.
    fn keep(&self, mut progress: Progress) -> Result<()> {
        progress.stream.synchronize()?;
        for slot in &mut progress.slots {
            if let Some(memory) = slot.memory.take() {
                self.device.give_pinned(memory);
            }
        }
        Ok(())
    }

    /// One reader.
    fn read(
        &self,
        index: usize,
        threads: usize,
        progress: &Progress,
        leaves: &mpsc::Sender<u64>,
    ) -> Result<Read> {
        numa::bind(&self.cores);
        let start = Instant::now();
        let (ring, stream) = (&progress.ring, &progress.stream);
        for slot in (index..progress.slots.len()).step_by(threads) {
            let memory = self.device.take_pinned(self.options.chunk)?;
            let _ = progress.slots[slot].memory.set(memory); // nobody else sets this one
            ring.add(slot);
        }
        let locking = start.elapsed();
        while let Some(piece) = ring.claim(self.stop) {
            self.options.check_stop()?;
            let Slot { memory, copied } = &progress.slots[piece.slot];
            let memory = memory.get().ok_or_else(|| Error::device(self.device, "a slot without memory"))?;
            copied.synchronize()?;
            let offset = piece.chunk * self.options.chunk as u64;
            // SAFETY: the piece lies in the slot, nobody else was handed it, and no copy reads it.
            let place = unsafe { memory.part(piece.begin, piece.len.next_multiple_of(ALIGN)) };
            self.origin.fill(place, offset + piece.begin as u64, piece.len)?;
            if !ring.filled(piece) {
                continue;
            }
            let len = ring.len(piece.chunk);
            // SAFETY: the slot is not touched again before its event; `base` is device memory for
            // the whole file.
            unsafe { stream.copy_to_device(self.base + offset, memory.as_ptr(), len)? };
            stream.record(copied)?;
            ring.add(piece.slot);
            progress.slot_of[piece.chunk as usize].store(piece.slot as u32, Ordering::Release);
            if piece.chunk == 0 {
                copied.synchronize()?;
                *sync::lock(&progress.first) = Some(Instant::now());
            }
            let leaf = offset / LEAF;
            if progress.uncopied[leaf as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
                let _ = leaves.send(leaf); // nobody listens when verification is off or has failed
            }
        }
        stream.synchronize()?;
        Ok(Read { locking, end: Instant::now() })
    }

    /// Hashes leaves as they arrive.
    fn hash(&self, progress: &Progress, leaves: mpsc::Receiver<u64>) -> Result<Hashed> {
        let bytes = self.entry.bytes;
        let chunks = progress.slot_of.len() as u64;
        let per_leaf = LEAF / self.options.chunk as u64;
        let stream = self.device.stream()?;
        let start = Instant::now();
        let hasher = LeafHasher::new(self.device)?;
        let kernels = start.elapsed();
        let values = self.device.alloc(progress.uncopied.len() * VALUE)?;
        for leaf in leaves {
            let first = leaf * per_leaf;
            for chunk in first..(first + per_leaf).min(chunks) {
                let slot = progress.slot_of[chunk as usize].load(Ordering::Acquire);
                stream.wait(&progress.slots[slot as usize].copied)?;
            }
            // SAFETY: the leaf's copies come before on this stream; `values` has a place for each
            // leaf and lives until the stream is idle.
            unsafe { hasher.queue(&stream, self.base, bytes, leaf, 1, values.ptr() + leaf * VALUE as u64)? };
        }
        stream.synchronize()?;
        let mut found = vec![[0; VALUE]; progress.uncopied.len()];
        values.read(0, found.as_flattened_mut())?;
        Ok(Hashed { values: found, kernels })
    }
}
