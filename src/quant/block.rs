//! Walks over blocks: reads their fields, stores decoded values, and compiles each walk for the vector
//! instructions of the CPU at hand. The decoders are plain Rust, inlined into each walk, so that every
//! version computes the same bits.

use super::Float;
use super::float::{canonical, from_f16, to_bf16, to_f16};

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
    /// What every CPU of the target has: SSE2 or NEON.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Vectors {
    /// What every CPU of the target has.
    pub(super) const PORTABLE: Vectors = Vectors(Level::Portable);

    /// The widest that this CPU has.
    pub(super) fn best() -> Vectors {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            return Vectors(Level::Avx2);
        }
        Vectors::PORTABLE
    }
}

/// Defines `$name`, which runs the walk `$walk` compiled for the given vectors.
macro_rules! compiled_for_each_level {
    ($(#[$doc:meta])* $name:ident = $walk:ident <$(const $n:ident),*> ($f:ident : $bound:ty $(, $arg:ident : $type:ty)*) $(-> $result:ty)?) => {
        $(#[$doc])*
        pub(super) fn $name<$(const $n: usize),*>($f: $bound, vectors: Vectors $(, $arg: $type)*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2<$(const $n: usize),*>($f: $bound $(, $arg: $type)*) $(-> $result)? {
                $walk($f $(, $arg)*)
            }
            match vectors.0 {
                Level::Portable => $walk($f $(, $arg)*),
                // SAFETY: `Vectors::best` alone makes this level, after it has seen that the CPU has AVX2.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($f $(, $arg)*) },
            }
        }
    };
}

compiled_for_each_level! {
    /// Decodes blocks of `B` bytes and `N` elements with `block`; NaN becomes one NaN.
    decode = walk_blocks<const B, const N>(block: impl Fn(&[u8; B], &mut [f32; N]), blocks: &[u8], to: Float, out: &mut [u8])
}

compiled_for_each_level! {
    /// Casts elements of `B` bytes, each read by `read`.
    cast = walk_elements<const B>(read: impl Fn([u8; B]) -> f32, elements: &[u8], to: Float, out: &mut [u8])
}

compiled_for_each_level! {
    /// The number of blocks of `B` bytes for which `nonfinite` holds.
    count = walk_counting<const B>(nonfinite: impl Fn(&[u8; B]) -> bool, blocks: &[u8]) -> u64
}

#[inline(always)]
fn walk_blocks<const B: usize, const N: usize>(
    block: impl Fn(&[u8; B], &mut [f32; N]),
    blocks: &[u8],
    to: Float,
    out: &mut [u8],
) {
    let blocks = blocks.as_chunks::<B>().0;
    let mut y = [0.0; N];
    match to {
        Float::F32 => {
            for (b, out) in blocks.iter().zip(out.chunks_exact_mut(4 * N)) {
                block(b, &mut y);
                store(&y, out, |y| canonical(y).to_le_bytes());
            }
        }
        Float::Bf16 => {
            for (b, out) in blocks.iter().zip(out.chunks_exact_mut(2 * N)) {
                block(b, &mut y);
                store(&y, out, |y| to_bf16(canonical(y)).to_le_bytes());
            }
        }
        Float::F16 => {
            for (b, out) in blocks.iter().zip(out.chunks_exact_mut(2 * N)) {
                block(b, &mut y);
                store(&y, out, |y| to_f16(y).to_le_bytes());
            }
        }
    }
}

#[inline(always)]
fn store<const N: usize, const S: usize>(y: &[f32; N], out: &mut [u8], round: impl Fn(f32) -> [u8; S]) {
    for (y, out) in y.iter().zip(out.as_chunks_mut::<S>().0) {
        *out = round(*y);
    }
}

#[inline(always)]
fn walk_elements<const B: usize>(read: impl Fn([u8; B]) -> f32, elements: &[u8], to: Float, out: &mut [u8]) {
    let elements = elements.as_chunks::<B>().0.iter();
    match to {
        Float::F32 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<4>().0) {
                *out = read(*x).to_le_bytes();
            }
        }
        Float::Bf16 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<2>().0) {
                *out = to_bf16(read(*x)).to_le_bytes();
            }
        }
        Float::F16 => {
            for (x, out) in elements.zip(out.as_chunks_mut::<2>().0) {
                *out = to_f16(read(*x)).to_le_bytes();
            }
        }
    }
}

#[inline(always)]
fn walk_counting<const B: usize>(nonfinite: impl Fn(&[u8; B]) -> bool, blocks: &[u8]) -> u64 {
    blocks.as_chunks::<B>().0.iter().map(|b| nonfinite(b) as u64).sum()
}
