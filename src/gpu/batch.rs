//! Decoding from host memory to host memory on a GPU, for threads that each want a leaf decoded.
//!
//! A call takes a worker from a pool: a few slots, each with a stream, pinned staging buffers and
//! device memory. The input goes through the slots in pieces, so that while one piece is decoded, the
//! next is on its way up and the one before on its way down. The calls block; many threads may make
//! them at once.

use super::decode::{Decoder, KvB, Part};
use super::{DeviceBuffer, PinnedBuffer, Stream};
use crate::error::{Error, Result};
use crate::quant::{Float, GgmlType};
use cudarc::driver::sys;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of each buffer of a slot: large enough that starting a copy costs little beside it.
const PIECE: usize = 2 << 20;
/// Slots of a worker: one going up, one decoding, one going down.
const SLOTS: usize = 3;
/// Results smaller than this are decoded where they are: the CPU is done before a copy has begun.
const SMALL: usize = 128 << 10;
/// Device memory of a worker: input, scratch and output of each slot. Its pinned memory is less.
const WORKER_BYTES: usize = SLOTS * 3 * PIECE;

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

/// The buffers of a slot on the device.
struct Addresses {
    input: u64,
    scratch: u64,
    output: u64,
}

/// What one unit of work (a block, a row, a head) takes, in bytes.
struct Unit {
    input: usize,
    scratch: usize,
    output: usize,
}

/// Where results go: copied by the GPU to pinned memory, or through the slot's own pinned buffer.
enum Target<'a> {
    Pinned(*mut u8),
    Staged(&'a mut [u8]),
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
    /// At most `device_bytes` of device memory (and less pinned host memory) is taken, when first
    /// needed, but always enough for one thread: 18 MiB. Threads beyond the bound wait for one another.
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

    /// Decodes whole blocks, as [`GgmlType::decode`]. When `out` lies in pinned memory
    /// ([`super::Device::alloc_pinned`]) the GPU writes to it directly. A small `out` is decoded by the
    /// CPU, to the same bits.
    ///
    /// # Panics
    /// As [`GgmlType::decode`].
    pub fn decode_host(&self, ty: &GgmlType, packed: &[u8], to: Float, out: &mut [u8]) -> Result<()> {
        let (block, bytes) = (ty.block as usize, ty.bytes as usize);
        let blocks = packed.len() / bytes;
        assert!(packed.len().is_multiple_of(bytes), "{}: {} bytes of blocks", ty.name, packed.len());
        assert_eq!(out.len(), blocks * block * to.size(), "{}: output of {blocks} blocks", ty.name);
        if ty.same_float() == Some(to) {
            out.copy_from_slice(packed);
            return Ok(());
        }
        if out.len() < SMALL {
            ty.decode(packed, to, out);
            return Ok(());
        }
        let unit = Unit { input: bytes, scratch: 0, output: block * to.size() };
        self.run(
            blocks,
            &unit,
            |piece, input| {
                input[..piece.len() * bytes].copy_from_slice(&packed[piece.start * bytes..piece.end * bytes])
            },
            |piece, at, stream| {
                let part = Part::whole(ty, piece.len() as u64);
                // SAFETY: `run` has queued the blocks' upload to `at.input` and gives the room at
                // `at.output`, each in a buffer of the slot whose stream this is.
                unsafe { self.decoder.decode(ty, to, at.input, at.output, &part, stream) }
            },
            out,
        )
    }

    /// Decodes a range of columns of rows of blocks: row r of `packed` starts at byte `r *
    /// part.row_bytes`, row r of `out` at element `r * part.count` (`part.stride` is not used).
    ///
    /// # Panics
    /// When `part` does not lie inside its rows, these inside `packed`, or `out` has another length.
    pub fn decode_columns(
        &self,
        ty: &GgmlType,
        packed: &[u8],
        part: &Part,
        to: Float,
        out: &mut [u8],
    ) -> Result<()> {
        let part = Part { stride: part.count, ..*part };
        let (rows, count) = (part.rows as usize, part.count as usize);
        assert!(part.fits(ty), "{}: {part:?}", ty.name);
        assert_eq!(packed.len() as u64, part.rows * part.row_bytes, "{}: {part:?}", ty.name);
        assert_eq!(out.len(), rows * count * to.size(), "{}: {part:?}", ty.name);
        if out.is_empty() {
            return Ok(());
        }
        // Only the blocks that hold wanted elements go up, row after row.
        let from = (part.first / ty.block * ty.bytes) as usize;
        let bytes = (part.blocks(ty) * ty.bytes) as usize;
        let unit = Unit { input: bytes, scratch: 0, output: count * to.size() };
        self.run(
            rows,
            &unit,
            |piece, input| {
                for (row, input) in piece.zip(input.chunks_exact_mut(bytes)) {
                    input.copy_from_slice(&packed[row * part.row_bytes as usize + from..][..bytes]);
                }
            },
            |piece, at, stream| {
                let part = Part {
                    rows: piece.len() as u64,
                    row_bytes: bytes as u64,
                    first: part.first % ty.block,
                    ..part
                };
                // SAFETY: as in `decode_host`.
                unsafe { self.decoder.decode(ty, to, at.input, at.output, &part, stream) }
            },
            out,
        )
    }

    /// Assembles `kv_b_proj` from packed k_b and v_b, as [`Decoder::kv_b`].
    ///
    /// # Panics
    /// When a length or a row of blocks does not agree with `shape`.
    pub fn kv_b(
        &self,
        (k_ty, k): (&GgmlType, &[u8]),
        (v_ty, v): (&GgmlType, &[u8]),
        shape: KvB,
        to: Float,
        out: &mut [u8],
    ) -> Result<()> {
        assert!(shape.nope.is_multiple_of(k_ty.block) && shape.kl.is_multiple_of(v_ty.block), "{shape:?}");
        let k_head = (shape.kl * (shape.nope / k_ty.block) * k_ty.bytes) as usize;
        let v_head = (shape.v * (shape.kl / v_ty.block) * v_ty.bytes) as usize;
        let (heads, size) = (shape.heads as usize, to.size());
        let unit = Unit {
            // v_b starts at the 16 bytes after the last k_b.
            input: k_head + v_head + 16,
            scratch: (shape.kl * shape.nope) as usize * size,
            output: ((shape.nope + shape.v) * shape.kl) as usize * size,
        };
        assert_eq!(
            (k.len(), v.len(), out.len()),
            (heads * k_head, heads * v_head, heads * unit.output),
            "{shape:?}"
        );
        let v_at = |heads: usize| (heads * k_head).next_multiple_of(16);
        self.run(
            heads,
            &unit,
            |piece, input| {
                input[..piece.len() * k_head].copy_from_slice(&k[piece.start * k_head..piece.end * k_head]);
                input[v_at(piece.len())..][..piece.len() * v_head]
                    .copy_from_slice(&v[piece.start * v_head..piece.end * v_head]);
            },
            |piece, at, stream| {
                let shape = KvB { heads: piece.len() as u64, ..shape };
                let v_input = at.input + v_at(piece.len()) as u64;
                // SAFETY: as in `decode_host`; `unit` gives each buffer the room it needs.
                unsafe {
                    let (k, v) = ((k_ty, at.input), (v_ty, v_input));
                    self.decoder.kv_b(k, v, shape, to, at.scratch, at.output, stream)
                }
            },
            out,
        )
    }

    /// Measures how fast each of `types` is decoded to `to` on `threads` threads, by the GPU and by
    /// the CPU, with results in pinned memory or not: about 50 ms a type, and the memory of a leaf a
    /// thread.
    pub fn benefit(
        &self,
        types: &[&'static GgmlType],
        to: Float,
        threads: usize,
        pinned: bool,
    ) -> Result<Vec<Benefit>> {
        const OUTPUT: usize = 16 << 20;
        let device = self.decoder.device();
        let mut buffers = (0..threads.max(1))
            .map(|_| match pinned {
                true => device.alloc_pinned(OUTPUT).map(Buffer::Pinned),
                false => Ok(Buffer::Plain(vec![0; OUTPUT])),
            })
            .collect::<Result<Vec<_>>>()?;
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

    /// Sends `units` units through the slots of a worker, in pieces of as many as fit.
    fn run(
        &self,
        units: usize,
        unit: &Unit,
        fill: impl Fn(Range<usize>, &mut [u8]),
        launch: impl Fn(Range<usize>, &Addresses, &Stream) -> Result<()>,
        out: &mut [u8],
    ) -> Result<()> {
        let widest = unit.input.max(unit.scratch).max(unit.output);
        if widest > PIECE {
            return Err(Error::device(
                self.decoder.device(),
                format!(
                    "one row or head takes {widest} bytes, at most {PIECE} go through at once: use the CPU"
                ),
            ));
        }
        let piece = PIECE / widest;
        let mut target = match is_pinned(self, out)? {
            true => Target::Pinned(out.as_mut_ptr()),
            false => Target::Staged(out),
        };
        // Dropped before `out` is free again, and before then it waits for the streams.
        let mut lease = self.lease()?;
        for (n, start) in (0..units).step_by(piece).enumerate() {
            let units = start..units.min(start + piece);
            let slot = &mut lease.slots()[n % SLOTS];
            slot.finish(&mut target)?;
            fill(units.clone(), &mut slot.input);
            slot.start(units, unit, &launch, &target)?;
        }
        lease.slots().iter_mut().try_for_each(|slot| slot.finish(&mut target))
    }

    fn lease(&self) -> Result<Lease<'_>> {
        let mut pool = self.pool();
        loop {
            if let Some(worker) = pool.idle.pop() {
                return Ok(Lease { batch: self, worker: Some(worker) });
            }
            if pool.made < self.workers {
                pool.made += 1;
                break;
            }
            pool = self.returned.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
        drop(pool);
        let made = || -> Result<Worker> { Ok([self.slot()?, self.slot()?, self.slot()?]) };
        let worker = made().inspect_err(|_| {
            self.pool().made -= 1;
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
            device: device.alloc(3 * PIECE)?,
            pending: None,
        })
    }

    /// The pool is whole at every moment, so a panic elsewhere harms nothing.
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Queues one piece, whose input lies in `self.input`.
    fn start(
        &mut self,
        units: Range<usize>,
        unit: &Unit,
        launch: impl Fn(Range<usize>, &Addresses, &Stream) -> Result<()>,
        target: &Target,
    ) -> Result<()> {
        let at = Addresses {
            input: self.device.ptr(),
            scratch: self.device.ptr() + PIECE as u64,
            output: self.device.ptr() + 2 * PIECE as u64,
        };
        let (input, output) = (units.len() * unit.input, units.len() * unit.output);
        let place = units.start * unit.output;
        let to = match target {
            // SAFETY: `place` lies inside the result, which the pointer starts.
            Target::Pinned(out) => unsafe { out.add(place) },
            Target::Staged(_) => {
                self.pending = Some(place..place + output);
                self.output.as_mut_ptr()
            }
        };
        // SAFETY: nothing touches the slot's buffers, and the caller of `run` nothing of the result,
        // before `finish` or the lease's end has waited for the stream.
        unsafe {
            self.stream.copy_to_device(at.input, self.input.as_ptr(), input)?;
            launch(units, &at, &self.stream)?;
            self.stream.copy_from_device(to, at.output, output)
        }
    }

    /// Waits for the piece queued last and hands its result over.
    fn finish(&mut self, target: &mut Target) -> Result<()> {
        self.stream.synchronize()?;
        if let (Some(range), Target::Staged(out)) = (self.pending.take(), target) {
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
        self.batch.pool().idle.extend(self.worker.take());
        self.batch.returned.notify_one();
    }
}

/// Whether the driver knows all of `memory` as page-locked.
fn is_pinned(batch: &Batch, memory: &[u8]) -> Result<bool> {
    batch.decoder.device().bind()?;
    Ok([memory.first(), memory.last()].iter().all(|byte| {
        byte.is_some_and(|byte| {
            let mut kind = 0u32;
            let mut attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
            let mut data = std::ptr::from_mut(&mut kind).cast();
            // SAFETY: asks one attribute of an address, whatever it is, and writes one int through a valid
            // pointer. For memory that the driver does not know it succeeds and writes 0.
            let result = unsafe {
                sys::cuPointerGetAttributes(1, &mut attribute, &mut data, std::ptr::from_ref(byte) as u64)
            };
            result.result().is_ok() && kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32
        })
    }))
}

enum Buffer {
    Pinned(PinnedBuffer),
    Plain(Vec<u8>),
}

impl Buffer {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Buffer::Pinned(b) => b,
            Buffer::Plain(b) => b,
        }
    }
}

/// Bytes per second of `work`, which writes `length` bytes, on one thread for each buffer.
fn speed(
    buffers: &mut [Buffer],
    length: usize,
    work: impl Fn(&mut [u8]) -> Result<()> + Sync,
) -> Result<f64> {
    const TIME: Duration = Duration::from_millis(20);
    // One call each touches the memory and has the kernels compiled.
    on_each(buffers, |buffer| work(&mut buffer.bytes()[..length]))?;
    let rates = on_each(buffers, |buffer| {
        let out = &mut buffer.bytes()[..length];
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
    buffers: &mut [Buffer],
    work: impl Fn(&mut Buffer) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = buffers.iter_mut().map(|buffer| scope.spawn(|| work(buffer))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
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
