//! The 32-element types of the first ggml: q4_0, q4_1, q5_0, q5_1, q8_0
//! (`dequantize_row_*` in ggml-quants.c).

use super::block::{f16, part};

/// d f16, 16 bytes: the low nibbles are elements 0..16, the high ones 16..32; d × (q − 8).
#[inline(always)]
pub(super) fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = f16(b, 0);
    let q: &[u8; 16] = part(b, 2);
    for j in 0..16 {
        y[j] = d * ((q[j] & 15) as i8 - 8) as f32;
        y[j + 16] = d * ((q[j] >> 4) as i8 - 8) as f32;
    }
}

/// d f16, m f16, nibbles as in q4_0; d × q + m.
#[inline(always)]
pub(super) fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (f16(b, 0), f16(b, 2));
    let q: &[u8; 16] = part(b, 4);
    for j in 0..16 {
        y[j] = d * (q[j] & 15) as f32 + m;
        y[j + 16] = d * (q[j] >> 4) as f32 + m;
    }
}

/// The fifth bit of each of 32 codes, in place: bit j of `at` belongs to element j.
#[inline(always)]
fn fifth_bits(at: &[u8; 4]) -> [u8; 32] {
    let bits = u32::from_le_bytes(*at);
    std::array::from_fn(|j| (bits >> j & 1) as u8 * 16)
}

/// d f16, 32 fifth bits, nibbles as in q4_0; d × (q − 16).
#[inline(always)]
pub(super) fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    let d = f16(b, 0);
    let h = fifth_bits(part(b, 2));
    let q: &[u8; 16] = part(b, 6);
    for j in 0..16 {
        y[j] = d * ((q[j] & 15 | h[j]) as i8 - 16) as f32;
        y[j + 16] = d * ((q[j] >> 4 | h[j + 16]) as i8 - 16) as f32;
    }
}

/// d f16, m f16, 32 fifth bits, nibbles as in q4_0; d × q + m.
#[inline(always)]
pub(super) fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (f16(b, 0), f16(b, 2));
    let h = fifth_bits(part(b, 4));
    let q: &[u8; 16] = part(b, 8);
    for j in 0..16 {
        y[j] = d * (q[j] & 15 | h[j]) as f32 + m;
        y[j + 16] = d * (q[j] >> 4 | h[j + 16]) as f32 + m;
    }
}

/// d f16, 32 i8; d × q.
#[inline(always)]
pub(super) fn q8_0(b: &[u8; 34], y: &mut [f32; 32]) {
    let d = f16(b, 0);
    let q: &[u8; 32] = part(b, 2);
    for j in 0..32 {
        y[j] = d * (q[j] as i8) as f32;
    }
}
