//! Decoding from host memory to host memory on a GPU, for threads that each want a leaf decoded.
//!
//! A call takes a worker from a pool: a few slots, each with a stream, pinned staging buffers and
//! device memory. The input goes through the slots in pieces, so that while one piece is decoded, the
//! next is on its way up and the one before on its way down. The calls block; many threads may make
//! them at once.

use super::decode::{Decoder, Part, has_kernel};
use super::{DeviceBuffer, PinnedBuffer, Stream};
use crate::error::Result;
use crate::quant::{Float, GgmlType};
use crate::sync;
use std::ops::Range;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Bytes of each buffer of a slot: large enough that starting a copy costs little beside it.
const PIECE: usize = 2 << 20;
/// Slots of a worker: one going up, one decoding, one going down.
const SLOTS: usize = 3;
/// Results smaller than this are decoded where they are: the CPU is done before a copy has begun.
const SMALL: usize = 128 << 10;
/// Device memory of a worker: input and output of each slot. Its pinned memory is as much.
const WORKER_BYTES: usize = SLOTS * 2 * PIECE;

/// Decodes host memory on one GPU, within a bound of device memory. Usable from any thread.
pub struct Batch {
    decoder: Decoder,
    workers: usize,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Worker>,
    made: usize,
}

type Worker = [Slot; SLOTS];

struct Slot {
    stream: Stream,
    input: PinnedBuffer,
    output: PinnedBuffer,
    device: DeviceBuffer,
    /// The bytes of the result that `output` will hold when the stream is done.
    pending: Option<Range<usize>>,
}

/// How fast one type is decoded, in bytes of result per second over all threads.
#[derive(Clone, Copy, Debug)]
pub struct Benefit {
    /// The type.
    pub ty: &'static GgmlType,
    /// By [`Batch::decode_host`].
    pub gpu: f64,
    /// By [`GgmlType::decode`] on as many threads.
    pub cpu: f64,
}

impl Benefit {
    /// Whether the GPU is worth its memory and its driver: at least a tenth faster.
    pub fn gpu_wins(&self) -> bool {
        self.gpu > 1.1 * self.cpu
    }
}

impl Batch {
    /// At most `device_bytes` of device memory (and as much pinned host memory) is taken, when first
    /// needed, but always enough for one thread: 12 MiB. Threads beyond the bound wait for one another.
    pub fn new(decoder: Decoder, device_bytes: usize) -> Batch {
        Batch {
            decoder,
            workers: (device_bytes / WORKER_BYTES).max(1),
            pool: Mutex::default(),
            returned: Condvar::new(),
        }
    }

    /// The kernels it uses.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Decodes whole blocks, as [`GgmlType::decode`]. A small `out`, and a type without a kernel, are
    /// decoded by the CPU, to the same bits.
    ///
    /// # Panics
    /// As [`GgmlType::decode`].
    pub fn decode_host(&self, ty: &GgmlType, packed: &[u8], to: Float, out: &mut [u8]) -> Result<()> {
        let bytes = ty.bytes as usize;
        let blocks = packed.len() / bytes;
        let decoded = ty.block as usize * to.size();
        assert!(packed.len().is_multiple_of(bytes), "{}: {} bytes of blocks", ty.name, packed.len());
        assert_eq!(out.len(), blocks * decoded, "{}: output of {blocks} blocks", ty.name);
        if ty.same_float() == Some(to) {
            out.copy_from_slice(packed);
            return Ok(());
        }
        if out.len() < SMALL || !has_kernel(ty) {
            ty.decode(packed, to, out);
            return Ok(());
        }
        let piece = PIECE / bytes.max(decoded);
        // While it drops, and only then is `out` free again, it waits for the streams.
        let mut lease = self.lease()?;
        for (n, start) in (0..blocks).step_by(piece).enumerate() {
            let blocks = start..blocks.min(start + piece);
            let slot = &mut lease.slots()[n % SLOTS];
            slot.finish(out)?;
            let part = Part::whole(ty, blocks.len() as u64);
            let packed = &packed[blocks.start * bytes..blocks.end * bytes];
            let result = blocks.start * decoded..blocks.end * decoded;
            slot.start(packed, result, |input, output, stream| {
                // SAFETY: `start` has queued the blocks' upload to `input` and gives room at `output`, each
                // in a buffer of the slot whose stream this is.
                unsafe { self.decoder.decode(ty, to, input, output, &part, stream) }
            })?;
        }
        lease.slots().iter_mut().try_for_each(|slot| slot.finish(out))
    }

    /// Measures how fast each of `types` is decoded to `to` on `threads` threads, by the GPU and by
    /// the CPU: about 50 ms a type, and the memory of a leaf a thread.
    pub fn benefit(&self, types: &[&'static GgmlType], to: Float, threads: usize) -> Result<Vec<Benefit>> {
        const OUTPUT: usize = 16 << 20;
        let mut buffers = vec![vec![0; OUTPUT]; threads.max(1)];
        let mut results = Vec::with_capacity(types.len());
        for &ty in types {
            let blocks = OUTPUT / (ty.block as usize * to.size());
            let packed = noise(blocks * ty.bytes as usize);
            let length = blocks * ty.block as usize * to.size();
            let gpu = speed(&mut buffers, length, |out| self.decode_host(ty, &packed, to, out))?;
            let cpu = speed(&mut buffers, length, |out| {
                ty.decode(&packed, to, out);
                Ok(())
            })?;
            results.push(Benefit { ty, gpu, cpu });
        }
        Ok(results)
    }

    fn lease(&self) -> Result<Lease<'_>> {
        let mut pool = sync::lock(&self.pool);
        loop {
            if let Some(worker) = pool.idle.pop() {
                return Ok(Lease { batch: self, worker: Some(worker) });
            }
            if pool.made < self.workers {
                pool.made += 1;
                break;
            }
            pool = sync::wait(&self.returned, pool);
        }
        drop(pool);
        let made = || -> Result<Worker> { Ok([self.slot()?, self.slot()?, self.slot()?]) };
        let worker = made().inspect_err(|_| {
            sync::lock(&self.pool).made -= 1;
            self.returned.notify_one();
        })?;
        Ok(Lease { batch: self, worker: Some(worker) })
    }

    fn slot(&self) -> Result<Slot> {
        let device = self.decoder.device();
        Ok(Slot {
            stream: device.stream()?,
            input: device.alloc_pinned(PIECE)?,
            output: device.alloc_pinned(PIECE)?,
            device: device.alloc(2 * PIECE)?,
            pending: None,
        })
    }
}

impl Slot {
    /// Queues the upload of `packed`, its decoding by `launch` (from the first device address to the
    /// second) and the download of what will be bytes `result` of the whole.
    fn start(
        &mut self,
        packed: &[u8],
        result: Range<usize>,
        launch: impl FnOnce(u64, u64, &Stream) -> Result<()>,
    ) -> Result<()> {
        self.input[..packed.len()].copy_from_slice(packed);
        let (input, output) = (self.device.ptr(), self.device.ptr() + PIECE as u64);
        let length = result.len();
        self.pending = Some(result);
        // SAFETY: nothing touches the slot's buffers before `finish` or the lease's end has waited for the
        // stream.
        unsafe {
            self.stream.copy_to_device(input, self.input.as_ptr(), packed.len())?;
            launch(input, output, &self.stream)?;
            self.stream.copy_from_device(self.output.as_mut_ptr(), output, length)
        }
    }

    /// Waits for the piece queued last and hands its result over.
    fn finish(&mut self, out: &mut [u8]) -> Result<()> {
        self.stream.synchronize()?;
        if let Some(range) = self.pending.take() {
            let length = range.len();
            out[range].copy_from_slice(&self.output[..length]);
        }
        Ok(())
    }
}

/// A worker on loan from the pool.
struct Lease<'a> {
    batch: &'a Batch,
    /// Gone only while dropping.
    worker: Option<Worker>,
}

impl Lease<'_> {
    fn slots(&mut self) -> &mut [Slot] {
        self.worker.as_mut().map_or(&mut [], |w| w)
    }
}

impl Drop for Lease<'_> {
    /// Nothing queued may outlive the call, also when it failed or panicked.
    fn drop(&mut self) {
        for slot in self.slots() {
            slot.pending = None;
            // A failure here was or will be reported by another call on this GPU.
            let _ = slot.stream.synchronize();
        }
        sync::lock(&self.batch.pool).idle.extend(self.worker.take());
        self.batch.returned.notify_one();
    }
}

/// Bytes per second of `work`, which writes `length` bytes, on one thread for each buffer.
fn speed(
    buffers: &mut [Vec<u8>],
    length: usize,
    work: impl Fn(&mut [u8]) -> Result<()> + Sync,
) -> Result<f64> {
    const TIME: Duration = Duration::from_millis(20);
    // One call each touches the memory and has the kernels loaded.
    on_each(buffers, |buffer| work(&mut buffer[..length]))?;
    let rates = on_each(buffers, |buffer| {
        let out = &mut buffer[..length];
        let start = Instant::now();
        let mut calls = 0;
        while calls == 0 || start.elapsed() < TIME {
            work(out)?;
            calls += 1;
        }
        Ok((calls * length) as f64 / start.elapsed().as_secs_f64())
    })?;
    Ok(rates.iter().sum())
}

/// `work` on every buffer at once, each on its own thread.
fn on_each<T: Send>(
    buffers: &mut [Vec<u8>],
    work: impl Fn(&mut Vec<u8>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = buffers.iter_mut().map(|buffer| scope.spawn(|| work(buffer))).collect();
        threads.into_iter().map(sync::join).collect()
    })
}

/// Bytes without a pattern, the same on every run (the splitmix64 sequence).
fn noise(bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).flat_map(|n| {
        let mut z = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31).to_le_bytes()
    });
    words.take(bytes).collect()
}
