//! How fast the GPU decodes: per type, the bandwidth of the kernels beside that of a device-to-device
//! copy in the same run, then decoding of host memory beside the CPU.
//!
//! `cargo bench --bench decode_gpu [-- TYPE...]`

use cudarc::driver::{result, sys};
use preshard::gpu::batch::Batch;
use preshard::gpu::decode::{Decoder, Part};
use preshard::gpu::{Device, DeviceBuffer, Stream};
use preshard::quant::{Float, GgmlType, TYPES};
use preshard::{Error, Result};

/// Elements of one measurement: far more than a cache holds.
const ELEMENTS: u64 = 1 << 29;
const ROUNDS: usize = 15;

fn main() {
    if let Err(e) = run() {
        println!("nothing measured: {e}");
    }
}

fn run() -> Result<()> {
    let device = Device::open(0)?;
    println!("{}, {:?}", device.info().name, device.info().compute);
    let names: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let types: Vec<&'static GgmlType> = TYPES
        .iter()
        .filter(|t| t.is_float() || t.is_quantised())
        .filter(|t| names.is_empty() || names.iter().any(|n| n == t.name))
        .collect();
    kernels(&device, &types)?;
    host(device, &types)
}

fn kernels(device: &Device, types: &[&'static GgmlType]) -> Result<()> {
    let stream = device.stream()?;
    let decoder = Decoder::new(device);
    let out = device.alloc(ELEMENTS as usize * 4)?;
    // Random bytes, but finite scales, whatever the type: bit 14 of an f16 that is clear.
    let mut source = device.alloc(ELEMENTS as usize * 8)?;
    fill_with_noise(&mut source)?;

    let copied = 1u64 << 30;
    let seconds = median(device, &stream, || copy(&stream, out.ptr(), source.ptr(), copied as usize))?;
    let peak = 2.0 * copied as f64 / seconds;
    println!("device-to-device copy: {:.0} GB/s read and written", peak / 1e9);
    println!("{:8} {:>5} {:>9} {:>10} {:>7}", "type", "to", "elem/s e9", "GB/s", "of copy");
    for ty in types {
        for to in Float::ALL {
            let blocks = ELEMENTS / ty.block;
            let part = Part::whole(ty, blocks);
            // SAFETY: `source` holds 8 bytes and `out` 4 an element, and both outlive the work.
            let seconds = median(device, &stream, || unsafe {
                decoder.decode(ty, to, source.ptr(), out.ptr(), &part, &stream)
            })?;
            let bytes = (blocks * ty.bytes + ELEMENTS * to.size() as u64) as f64;
            println!(
                "{:8} {:>5} {:>9.0} {:>10.0} {:>6.1}%",
                ty.name,
                to.name().to_lowercase(),
                ELEMENTS as f64 / seconds / 1e9,
                bytes / seconds / 1e9,
                100.0 * bytes / seconds / peak
            );
        }
    }
    Ok(())
}

fn host(device: Device, types: &[&'static GgmlType]) -> Result<()> {
    let batch = Batch::new(Decoder::new(&device), 1 << 30);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    for threads in [1, cores.div_ceil(2), cores] {
        println!("host memory to bf16, {threads} threads, GB/s of result");
        println!("{:8} {:>7} {:>7} {:>6}", "type", "GPU", "CPU", "ratio");
        for b in batch.benefit(types, Float::Bf16, threads)? {
            println!("{:8} {:>7.1} {:>7.1} {:>6.2}", b.ty.name, b.gpu / 1e9, b.cpu / 1e9, b.gpu / b.cpu);
        }
    }
    Ok(())
}

fn fill_with_noise(buffer: &mut DeviceBuffer) -> Result<()> {
    let mut state = 1u64;
    let piece: Vec<u8> = (0..8 << 20)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state & 0xbfbf_bfbf_bfbf_bfbf).to_le_bytes()
        })
        .collect();
    for at in (0..buffer.len()).step_by(piece.len()) {
        buffer.write(at, &piece[..piece.len().min(buffer.len() - at)])?;
    }
    Ok(())
}

fn copy(stream: &Stream, dst: u64, src: u64, bytes: usize) -> Result<()> {
    // SAFETY: both buffers hold `bytes` bytes and outlive the work.
    unsafe { result::memcpy_dtod_async(dst, src, bytes, stream.raw() as sys::CUstream) }
        .map_err(|e| Error::device(stream.device(), format!("cannot copy: {e}")))
}

/// Median seconds of `work` on the GPU, after two warm-up rounds.
fn median(device: &Device, stream: &Stream, work: impl Fn() -> Result<()>) -> Result<f64> {
    let mut seconds = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS + 2 {
        let (start, end) = (device.event(true)?, device.event(true)?);
        stream.record(&start)?;
        work()?;
        stream.record(&end)?;
        end.synchronize()?;
        if round >= 2 {
            seconds.push(end.seconds_since(&start)?);
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[ROUNDS / 2])
}
