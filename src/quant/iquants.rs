//! The iq types, super-blocks of 256 (iq4_nl: 32): codes are numbers of entries in fixed grids
//! (`dequantize_row_iq*` in ggml-quants.c).

use super::block::{f16, part, u16_at, u32_at};
use super::float::from_f16;
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

/// Seven sign bits as eight: the eighth makes their number even (`ksigns_iq2xs` in ggml-common.h).
#[inline(always)]
fn even_signs(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// d × grid, where a set bit of `signs` negates its element.
#[inline(always)]
fn signed<const N: usize>(d: f32, grid: &[i8; N], signs: u8, y: &mut [f32]) {
    for j in 0..N {
        let value = d * grid[j] as f32;
        y[j] = if signs >> j & 1 != 0 { -value } else { value };
    }
}

/// d f16; per 32 elements four grid bytes, then a word of four 7-bit signs and a 4-bit scale;
/// d × (½ + scale) × ¼ × grid.
#[inline(always)]
pub(super) fn iq2_xxs(b: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let grid: &[u8; 4] = part(b, 2 + 8 * g);
        let word = u32_at(b, 6 + 8 * g);
        let d = d * (0.5 + (word >> 28) as f32) * 0.25;
        for l in 0..4 {
            signed(d, &IQ2_XXS[grid[l] as usize], even_signs(word >> (7 * l)), &mut y[8 * l..][..8]);
        }
    }
}

/// d f16; 32 words of a 9-bit grid number and 7 signs; 8 bytes, a 4-bit scale per 16 elements.
#[inline(always)]
pub(super) fn iq2_xs(b: &[u8; 74], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(b, 2 + 2 * l);
        let scale = b[66 + l / 4] >> (l / 2 % 2 * 4) & 15;
        let d = d * (0.5 + scale as f32) * 0.25;
        signed(d, &IQ2_XS[word as usize & 511], even_signs(word as u32 >> 9), y);
    }
}

/// d f16; 32 low grid bytes; 32 sign bytes; 8 bytes of upper grid bits; 8 bytes of scales as iq2_xs.
#[inline(always)]
pub(super) fn iq2_s(b: &[u8; 82], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let upper = b[66 + l / 4] as usize >> (l % 4 * 2) & 3;
        let scale = b[74 + l / 4] >> (l / 2 % 2 * 4) & 15;
        let d = d * (0.5 + scale as f32) * 0.25;
        signed(d, &IQ2_S[b[2 + l] as usize | upper << 8], b[34 + l], y);
    }
}

/// d f16; 64 grid bytes; per 32 elements a word of signs and scale as in iq2_xxs;
/// d × (½ + scale) × ½ × grid.
#[inline(always)]
pub(super) fn iq3_xxs(b: &[u8; 98], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let grid: &[u8; 8] = part(b, 2 + 8 * g);
        let word = u32_at(b, 66 + 4 * g);
        let d = d * (0.5 + (word >> 28) as f32) * 0.5;
        for l in 0..4 {
            let signs = even_signs(word >> (7 * l));
            signed(d, &IQ3_XXS[grid[2 * l] as usize], signs, &mut y[8 * l..][..4]);
            signed(d, &IQ3_XXS[grid[2 * l + 1] as usize], signs >> 4, &mut y[8 * l + 4..][..4]);
        }
    }
}

/// d f16; 64 low grid bytes; 8 bytes of ninth grid bits; 32 sign bytes; 4 bytes, a 4-bit scale per
/// 32 elements; d × (1 + 2 × scale) × grid.
#[inline(always)]
pub(super) fn iq3_s(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let upper = b[66 + l / 4] as usize >> (l % 4 * 2);
        let scale = b[106 + l / 8] >> (l / 4 % 2 * 4) & 15;
        let d = d * (1 + 2 * scale) as f32;
        signed(d, &IQ3_S[b[2 + 2 * l] as usize | (upper & 1) << 8], b[74 + l], &mut y[..4]);
        signed(d, &IQ3_S[b[3 + 2 * l] as usize | (upper & 2) << 7], b[74 + l] >> 4, &mut y[4..]);
    }
}

/// d × (grid ± ⅛), minus when `below`.
#[inline(always)]
fn shifted(d: f32, grid: &[i8; 8], below: bool, y: &mut [f32; 8]) {
    let delta = if below { -0.125 } else { 0.125 };
    for j in 0..8 {
        y[j] = d * (grid[j] as f32 + delta);
    }
}

/// d f16; 32 low grid bytes; per 32 elements a word of four 3-bit upper grid bits, a 3-bit scale and
/// the sign of the shift; d × (2 × scale + 1) × (grid ± ⅛).
#[inline(always)]
pub(super) fn iq1_s(b: &[u8; 50], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(b, 34 + l / 4 * 2);
        let d = d * (2 * (word >> 12 & 7) + 1) as f32;
        let upper = word as usize >> (l % 4 * 3) & 7;
        shifted(d, &IQ1[b[2 + l] as usize | upper << 8], word & 0x8000 != 0, y);
    }
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
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = u16_at(b, 48 + l / 8 * 2) >> (l / 2 % 4 * 3) & 7;
        let d = d * (2 * scale + 1) as f32;
        let nibble = b[32 + l / 2] >> (l % 2 * 4);
        shifted(d, &IQ1[b[l] as usize | (nibble as usize & 7) << 8], nibble & 8 != 0, y);
    }
}

/// The 16 levels of iq4_nl and iq4_xs (`kvalues_iq4nl` in ggml-common.h).
static IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// d × level of 32 nibbles: the low nibbles are elements 0..16, the high ones 16..32.
#[inline(always)]
fn levels(d: f32, q: &[u8; 16], y: &mut [f32; 32]) {
    for j in 0..16 {
        y[j] = d * IQ4[q[j] as usize & 15] as f32;
        y[j + 16] = d * IQ4[q[j] as usize >> 4] as f32;
    }
}

/// d f16, 16 bytes of nibbles.
#[inline(always)]
pub(super) fn iq4_nl(b: &[u8; 18], y: &mut [f32; 32]) {
    levels(f16(b, 0), part(b, 2), y);
}

/// d f16; per 32 elements a 6-bit scale, its upper bits in a word, its low nibbles in 4 bytes; 128
/// bytes of nibbles; d × (scale − 32) × level.
#[inline(always)]
pub(super) fn iq4_xs(b: &[u8; 136], y: &mut [f32; 256]) {
    let d = f16(b, 0);
    let upper = u16_at(b, 2);
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = b[4 + g / 2] >> (g % 2 * 4) & 15 | ((upper >> (2 * g) & 3) as u8) << 4;
        levels(d * (scale as i8 - 32) as f32, part(b, 8 + 16 * g), y);
    }
}
