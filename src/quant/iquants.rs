//! The iq types, super-blocks of 256 (iq4_nl: 32): codes are numbers of entries in fixed grids
//! (`dequantize_row_iq*` in ggml-quants.c).

use super::block::{MASKS, f16, part, scale, u16_at, u32_at};
use super::float::from_f16;
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use std::array::from_fn;

/// Masks of seven sign bits; an eighth makes the number of signs even (`ksigns_iq2xs` in
/// ggml-common.h).
static EVEN_SIGNS: [[i8; 8]; 128] = {
    let mut masks = [[0; 8]; 128];
    let mut i = 0;
    while i < 128 {
        masks[i] = MASKS[i | (i.count_ones() as usize & 1) << 7];
        i += 1;
    }
    masks
};

/// The masks of the `l`-th seven bits of `word`.
#[inline(always)]
fn even_signs(word: u32, l: usize) -> [i8; 8] {
    EVEN_SIGNS[(word >> (7 * l)) as usize & 127]
}

/// d × ±grid, with one d per `G` elements. No grid holds a zero, so negating before the product gives
/// the same bits.
#[inline(always)]
fn signed<const G: usize>(
    grid: &[[i8; 8]; 32],
    signs: &[[i8; 8]; 32],
    d: impl Fn(usize) -> f32,
    y: &mut [f32; 256],
) {
    let mut codes = [0; 256];
    for (q, (grid, signs)) in codes.iter_mut().zip(grid.as_flattened().iter().zip(signs.as_flattened())) {
        *q = (grid ^ signs) - signs;
    }
    for (g, (y, q)) in y.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<G>().0).enumerate() {
        scale(d(g), q, y);
    }
}

/// d f16; per 32 elements four grid bytes, then a word of four 7-bit signs and a 4-bit scale;
/// d × (½ + scale) × ¼ × grid.
#[inline(always)]
pub(super) fn iq2_xxs(b: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let word = |g| u32_at(b, 6 + 8 * g);
    let grid = from_fn(|l| IQ2_XXS[b[2 + 8 * (l / 4) + l % 4] as usize]);
    let signs = from_fn(|l| even_signs(word(l / 4), l % 4));
    signed::<32>(&grid, &signs, |g| d * (0.5 + (word(g) >> 28) as f32) * 0.25, y);
}

/// d f16; 32 words of a 9-bit grid number and 7 signs; 8 bytes, a 4-bit scale per 16 elements.
#[inline(always)]
pub(super) fn iq2_xs(b: &[u8; 74], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let word = |l| u16_at(b, 2 + 2 * l);
    let grid = from_fn(|l| IQ2_XS[word(l) as usize & 511]);
    let signs = from_fn(|l| EVEN_SIGNS[word(l) as usize >> 9]);
    signed::<16>(&grid, &signs, |g| d * (0.5 + nibble(b, 66, g) as f32) * 0.25, y);
}

/// The `i`-th nibble from byte `at` on, low before high.
#[inline(always)]
fn nibble(b: &[u8], at: usize, i: usize) -> u8 {
    b[at + i / 2] >> (i % 2 * 4) & 15
}

/// d f16; 32 low grid bytes; 32 sign bytes; 8 bytes of upper grid bits; 8 bytes of scales as iq2_xs.
#[inline(always)]
pub(super) fn iq2_s(b: &[u8; 82], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let grid = from_fn(|l| {
        let upper = b[66 + l / 4] as usize >> (l % 4 * 2) & 3;
        IQ2_S[b[2 + l] as usize | upper << 8]
    });
    let signs = from_fn(|l| MASKS[b[34 + l] as usize]);
    signed::<16>(&grid, &signs, |g| d * (0.5 + nibble(b, 74, g) as f32) * 0.25, y);
}

/// d f16; 64 grid bytes; per 32 elements a word of signs and scale as in iq2_xxs;
/// d × (½ + scale) × ½ × grid.
#[inline(always)]
pub(super) fn iq3_xxs(b: &[u8; 98], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let word = |g| u32_at(b, 66 + 4 * g);
    let grid = from_fn(|l| pair(IQ3_XXS[b[2 + 2 * l] as usize], IQ3_XXS[b[3 + 2 * l] as usize]));
    let signs = from_fn(|l| even_signs(word(l / 4), l % 4));
    signed::<32>(&grid, &signs, |g| d * (0.5 + (word(g) >> 28) as f32) * 0.5, y);
}

/// Two grid entries of four elements.
#[inline(always)]
fn pair(a: [i8; 4], b: [i8; 4]) -> [i8; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

/// d f16; 64 low grid bytes; 8 bytes of ninth grid bits; 32 sign bytes; 4 bytes, a 4-bit scale per
/// 32 elements; d × (1 + 2 × scale) × grid.
#[inline(always)]
pub(super) fn iq3_s(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let entry = |i| IQ3_S[b[2 + i] as usize | (b[66 + i / 8] as usize >> (i % 8) & 1) << 8];
    let grid = from_fn(|l| pair(entry(2 * l), entry(2 * l + 1)));
    let signs = from_fn(|l| MASKS[b[74 + l] as usize]);
    signed::<32>(&grid, &signs, |g| d * (1 + 2 * nibble(b, 106, g)) as f32, y);
}

/// d × (grid ± ⅛), minus where `below`, with one d per `G` elements: ⅛ × d × (8 × grid ± 1), since all
/// of these products are exact.
#[inline(always)]
fn shifted<const G: usize>(
    grid: &[[i8; 8]; 32],
    below: impl Fn(usize) -> bool,
    d: impl Fn(usize) -> f32,
    y: &mut [f32; 256],
) {
    let shifts: [[i8; 8]; 32] = from_fn(|l| [if below(l) { -1 } else { 1 }; 8]);
    let mut codes = [0; 256];
    for (q, (grid, shift)) in codes.iter_mut().zip(grid.as_flattened().iter().zip(shifts.as_flattened())) {
        *q = 8 * grid + shift;
    }
    for (g, (y, q)) in y.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<G>().0).enumerate() {
        scale(d(g) * 0.125, q, y);
    }
}

/// d f16; 32 low grid bytes; per 32 elements a word of four 3-bit upper grid bits, a 3-bit scale and
/// the sign of the shift; d × (2 × scale + 1) × (grid ± ⅛).
#[inline(always)]
pub(super) fn iq1_s(b: &[u8; 50], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let word = |g| u16_at(b, 34 + 2 * g);
    let grid = from_fn(|l| IQ1[b[2 + l] as usize | (word(l / 4) as usize >> (l % 4 * 3) & 7) << 8]);
    let below = |l| word(l / 4) & 0x8000 != 0;
    shifted::<32>(&grid, below, |g| d * (2 * (word(g) >> 12 & 7) + 1) as f32, y);
}

/// The f16 scale of iq1_m: the top four bits of each of the last four words, first word lowest.
#[inline(always)]
fn iq1_m_scale(b: &[u8; 56]) -> u16 {
    (0..4).fold(0, |d, k| d | u16_at(b, 48 + 2 * k) >> 12 << (4 * k))
}

/// Whether the scale of an iq1_m block is infinite or NaN.
#[inline(always)]
pub(super) fn iq1_m_nonfinite(b: &[u8; 56]) -> bool {
    iq1_m_scale(b) & 0x7c00 == 0x7c00
}

/// 32 low grid bytes; 16 bytes, a nibble per 8 elements: 3 upper grid bits and the sign of the shift;
/// 4 words of four 3-bit scales, one per 16 elements, and a quarter of the f16 scale.
#[inline(always)]
pub(super) fn iq1_m(b: &[u8; 56], y: &mut [f32; 256]) {
    let d = from_f16(iq1_m_scale(b));
    let grid = from_fn(|l| IQ1[b[l] as usize | (nibble(b, 32, l) as usize & 7) << 8]);
    let below = |l| nibble(b, 32, l) & 8 != 0;
    let scale = |g| u16_at(b, 48 + g / 4 * 2) >> (g % 4 * 3) & 7;
    shifted::<16>(&grid, below, |g| d * (2 * scale(g) + 1) as f32, y);
}

/// The 16 levels of iq4_nl and iq4_xs (`kvalues_iq4nl` in ggml-common.h).
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The levels of the low and the high nibble of each byte: one look-up for two elements.
static IQ4_PAIRS: [[i8; 2]; 256] = {
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [IQ4[byte & 15], IQ4[byte >> 4]];
        byte += 1;
    }
    pairs
};

/// The levels of 32 nibbles, in the order of [`nibbles`](super::block::nibbles).
#[inline(always)]
pub(super) fn levels(q: &[u8; 16]) -> [i8; 32] {
    let mut codes = [0; 32];
    for j in 0..16 {
        [codes[j], codes[j + 16]] = IQ4_PAIRS[q[j] as usize];
    }
    codes
}

/// d f16, 16 bytes of nibbles.
#[inline(always)]
pub(super) fn iq4_nl(b: &[u8; 18], y: &mut [f32; 32]) {
    scale(f16(b, 0), &levels(part(b, 2)), y);
}

/// d f16; per 32 elements a 6-bit scale, its upper bits in a word, its low nibbles in 4 bytes; 128
/// bytes of nibbles; d × (scale − 32) × level.
#[inline(always)]
pub(super) fn iq4_xs(b: &[u8; 136], y: &mut [f32; 256]) {
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        scale(iq4_xs_scale(b, g), &levels(part(b, 8 + 16 * g)), y);
    }
}

/// The scale of the `g`th 32 elements of iq4_xs.
#[inline(always)]
pub(super) fn iq4_xs_scale(b: &[u8; 136], g: usize) -> f32 {
    let six_bits = nibble(b, 4, g) | ((u16_at(b, 2) >> (2 * g) & 3) as u8) << 4;
    f16(b, 0) * (six_bits as i8 - 32) as f32
}
