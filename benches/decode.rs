//! How fast one core decodes each type, against copying memory in the same run.
//!
//! ```console
//! $ cargo bench --bench decode                # every type
//! $ cargo bench --bench decode -- q4_K q6_K   # some
//! ```
//!
//! The output of one pass is 512 MiB, so that it fits no cache. Columns: GB/s of output in each dtype
//! and, in brackets, the ratio to memcpy's GB/s of output; GB/s of input for the search for NaN and
//! infinite blocks. Best of five passes.

use preshard::quant::{Float, GgmlType, TYPES};
use std::time::Instant;

const OUTPUT: usize = 512 << 20;
/// Bytes of output decoded by one call, like the 16 MiB leaf that the converter works in.
const LEAF: usize = 16 << 20;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    // Random bytes in which no f16 at an even offset is NaN or infinite: ordinary blocks are finite.
    let source: Vec<u8> = (0..OUTPUT / 8)
        .flat_map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random & 0xbfff_bfff_bfff_bfff).to_le_bytes()
        })
        .collect();
    let mut out = vec![0; OUTPUT];

    let copy = gb_per_s(OUTPUT, || out.copy_from_slice(&source));
    println!("memcpy {copy:.1} GB/s of output\n");
    println!("{:8} {:>14} {:>14} {:>14} {:>9}", "type", "F32", "BF16", "F16", "NaN scan");
    for ggml in TYPES.iter().filter(|t| t.is_quantised() || t.is_float()) {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == ggml.name) {
            continue;
        }
        print!("{:8}", ggml.name);
        for to in Float::ALL {
            let speed = decode(ggml, to, &source, &mut out);
            print!(" {:>14}", format!("{speed:.1} ({:.2})", speed / copy));
        }
        let whole = source.len() - source.len() % ggml.bytes as usize;
        let mut found = 0;
        let scan = gb_per_s(whole, || found = ggml.count_nonfinite(&source[..whole]));
        std::hint::black_box(found);
        // nvfp4 has no such values, so there is nothing to scan.
        if scan < 1000.0 { println!(" {scan:>9.1}") } else { println!(" {:>9}", "none") }
    }
}

/// GB/s of output, decoding leaf after leaf through source and output.
fn decode(ggml: &GgmlType, to: Float, source: &[u8], out: &mut [u8]) -> f64 {
    let blocks = LEAF / to.size() / ggml.block as usize;
    let (input, output) = (blocks * ggml.bytes as usize, blocks * ggml.block as usize * to.size());
    let leaves = (out.len() / output).min(source.len() / input);
    gb_per_s(leaves * output, || {
        for (source, out) in source.chunks_exact(input).zip(out.chunks_exact_mut(output)) {
            ggml.decode(source, to, out);
        }
    })
}

fn gb_per_s(bytes: usize, mut pass: impl FnMut()) -> f64 {
    let seconds = (0..5).map(|_| {
        let start = Instant::now();
        pass();
        start.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}
