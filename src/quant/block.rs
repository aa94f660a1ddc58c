//! Walks over blocks: reads their fields, stores decoded values, and compiles each walk for the vector
//! instructions of the CPU at hand. The decoders are plain Rust, inlined into each walk, so that every
//! version computes the same bits.
//!
//! A walk takes its decoder as a type and not as a closure: only a method can be `inline(always)`, and a
//! decoder that is called and not inlined is compiled without the walk's vector instructions.

use super::Float;
use super::float::{canonical, canonical_to_bf16, from_f16, to_bf16, to_f16};

/// How the blocks of one type, `B` bytes and `N` elements each, are read. Methods are
/// `inline(always)`.
pub(super) trait Blocks<const B: usize, const N: usize> {
    /// The elements of a block.
    fn decode(block: &[u8; B], y: &mut [f32; N]);
    /// Whether an element of the block is NaN or infinite.
    fn nonfinite(block: &[u8; B]) -> bool;
}

/// The `N` bytes at `at` of a block; each caller's offsets are those of its block's layout.
#[inline(always)]
pub(super) fn part<const N: usize>(b: &[u8], at: usize) -> &[u8; N] {
    b[at..].first_chunk().expect("a field lies inside its block")
}

/// The little-endian word at `at`.
#[inline(always)]
pub(super) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*part(b, at))
}

/// The little-endian word at `at`.
#[inline(always)]
pub(super) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(b, at))
}

/// The value of the f16 at `at`.
#[inline(always)]
pub(super) fn f16(b: &[u8], at: usize) -> f32 {
    from_f16(u16_at(b, at))
}

/// The codes in 16 bytes: the low nibbles are elements 0..16, the high ones 16..32.
#[inline(always)]
pub(super) fn nibbles(q: &[u8; 16]) -> [i8; 32] {
    let mut codes = [0; 32];
    for j in 0..16 {
        codes[j] = (q[j] & 15) as i8;
        codes[j + 16] = (q[j] >> 4) as i8;
    }
    codes
}

/// Each byte's bits, lowest first, as masks: −1 where the bit is set.
pub(super) static MASKS: [[i8; 8]; 256] = {
    let mut masks = [[0; 8]; 256];
    let mut i = 0;
    while i < 256 * 8 {
        masks[i / 8][i % 8] = -(((i / 8) >> (i % 8) & 1) as i8);
        i += 1;
    }
    masks
};

/// y = d × q.
#[inline(always)]
pub(super) fn scale<const N: usize>(d: f32, q: &[i8; N], y: &mut [f32; N]) {
    for j in 0..N {
        y[j] = d * q[j] as f32;
    }
}

/// Whether the f16 at `at` is infinite or NaN.
#[inline(always)]
pub(super) fn f16_nonfinite(b: &[u8], at: usize) -> bool {
    u16_at(b, at) & 0x7c00 == 0x7c00
}

/// The vector instructions that a walk is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vectors(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// SSE2 or NEON.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Vectors {
    /// What every CPU of the target has.
    pub(super) const PORTABLE: Vectors = Vectors(Level::Portable);

    /// The widest that this CPU has.
    pub(super) fn best() -> Vectors {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            return Vectors(Level::Avx2);
        }
        Vectors::PORTABLE
    }
}

/// Decodes blocks; NaN becomes one NaN.
pub(super) fn decode<T: Blocks<B, N>, const B: usize, const N: usize>(
    vectors: Vectors,
    blocks: &[u8],
    to: Float,
    out: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    fn avx2<T: Blocks<B, N>, const B: usize, const N: usize>(blocks: &[u8], to: Float, out: &mut [u8]) {
        walk_blocks::<T, B, N, true>(blocks, to, out);
    }
    match vectors.0 {
        Level::Portable => walk_blocks::<T, B, N, false>(blocks, to, out),
        // SAFETY: `Vectors::best` alone makes this level, after it has seen these features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::<T, B, N>(blocks, to, out) },
    }
}

/// Casts elements of `B` bytes.
pub(super) fn cast<T: Blocks<B, 1>, const B: usize>(
    vectors: Vectors,
    elements: &[u8],
    to: Float,
    out: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2<T: Blocks<B, 1>, const B: usize>(elements: &[u8], to: Float, out: &mut [u8]) {
        walk_elements::<T, B>(elements, to, out);
    }
    match vectors.0 {
        Level::Portable => walk_elements::<T, B>(elements, to, out),
        // SAFETY: `Vectors::best` alone makes this level, after it has seen AVX2.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::<T, B>(elements, to, out) },
    }
}

/// The number of blocks that hold a NaN or an infinity.
pub(super) fn count<T: Blocks<B, N>, const B: usize, const N: usize>(vectors: Vectors, blocks: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2<T: Blocks<B, N>, const B: usize, const N: usize>(blocks: &[u8]) -> u64 {
        walk_counting::<T, B, N>(blocks)
    }
    match vectors.0 {
        Level::Portable => walk_counting::<T, B, N>(blocks),
        // SAFETY: `Vectors::best` alone makes this level, after it has seen AVX2.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::<T, B, N>(blocks) },
    }
}

/// `F16C`: whether the walk is compiled for a CPU with these instructions.
#[inline(always)]
fn walk_blocks<T: Blocks<B, N>, const B: usize, const N: usize, const F16C: bool>(
    blocks: &[u8],
    to: Float,
    out: &mut [u8],
) {
    let blocks = blocks.as_chunks::<B>().0.iter();
    let mut y = [0.0; N];
    let decode = |b, y: &mut [f32; N]| {
        T::decode(b, y);
        // After this, rounding need not look for NaN.
        if T::nonfinite(b) {
            *y = y.map(canonical);
        }
    };
    match to {
        Float::F32 => {
            for (b, out) in blocks.zip(out.chunks_exact_mut(4 * N)) {
                decode(b, &mut y);
                for (y, out) in y.iter().zip(out.as_chunks_mut::<4>().0) {
                    *out = y.to_le_bytes();
                }
            }
        }
        Float::Bf16 => {
            for (b, out) in blocks.zip(out.chunks_exact_mut(2 * N)) {
                decode(b, &mut y);
                for (y, out) in y.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = canonical_to_bf16(*y).to_le_bytes();
                }
            }
        }
        Float::F16 => {
            for (b, out) in blocks.zip(out.chunks_exact_mut(2 * N)) {
                decode(b, &mut y);
                #[cfg(target_arch = "x86_64")]
                if F16C {
                    for (y, out) in y.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<16>().0) {
                        // SAFETY: `F16C` says that the CPU has the instruction.
                        unsafe { f16c(y, out) };
                    }
                    continue;
                }
                for (y, out) in y.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = to_f16(*y).to_le_bytes();
                }
            }
        }
    }
}

/// [`to_f16`] of 8 elements; the canonical NaN becomes 0x7e00 here too.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx,f16c")]
fn f16c(y: &[f32; 8], out: &mut [u8; 16]) {
    use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_cvtps_ph, _mm256_loadu_ps};
    // SAFETY: both are as long as the vectors, and neither instruction asks for alignment.
    unsafe {
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(y.as_ptr()));
        _mm_storeu_si128(out.as_mut_ptr().cast(), halves);
    }
}

#[inline(always)]
fn walk_elements<T: Blocks<B, 1>, const B: usize>(elements: &[u8], to: Float, out: &mut [u8]) {
    let elements = elements.as_chunks::<B>().0.iter();
    let read = |element| {
        let mut y = [0.0];
        T::decode(element, &mut y);
        y[0]
    };
    match to {
        Float::F32 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<4>().0) {
                *out = read(x).to_le_bytes();
            }
        }
        Float::Bf16 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<2>().0) {
                *out = to_bf16(read(x)).to_le_bytes();
            }
        }
        Float::F16 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<2>().0) {
                *out = to_f16(read(x)).to_le_bytes();
            }
        }
    }
}

#[inline(always)]
fn walk_counting<T: Blocks<B, N>, const B: usize, const N: usize>(blocks: &[u8]) -> u64 {
    blocks.as_chunks::<B>().0.iter().map(|b| T::nonfinite(b) as u64).sum()
}
