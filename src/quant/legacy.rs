//! The 32-element types of the first ggml: q4_0, q4_1, q5_0, q5_1, q8_0
//! (`dequantize_row_*` in ggml-quants.c).

use super::block::{MASKS, f16, nibbles, part, scale};

/// d f16, 16 bytes of nibbles; d × (q − 8).
#[inline(always)]
pub(super) fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = f16(b, 0);
    let q: &[u8; 16] = part(b, 2);
    for j in 0..16 {
        y[j] = d * ((q[j] & 15) as i8 - 8) as f32;
        y[j + 16] = d * ((q[j] >> 4) as i8 - 8) as f32;
    }
}

/// y = d × q + m.
#[inline(always)]
fn scale_and_add(d: f32, m: f32, q: &[i8; 32], y: &mut [f32; 32]) {
    for j in 0..32 {
        y[j] = d * q[j] as f32 + m;
    }
}

/// d f16, m f16, 16 bytes of nibbles; d × q + m.
#[inline(always)]
pub(super) fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    scale_and_add(f16(b, 0), f16(b, 2), &nibbles(part(b, 4)), y);
}

/// Codes of 5 bits, less `zero`: 32 fifth bits in a word, lowest first, then 16 bytes of nibbles.
#[inline(always)]
pub(super) fn five_bits(b: &[u8; 20], zero: i8) -> [i8; 32] {
    let mut codes = nibbles(part(b, 4));
    let fifth: [[i8; 8]; 4] = std::array::from_fn(|i| MASKS[b[i] as usize]);
    for (q, fifth) in codes.iter_mut().zip(fifth.as_flattened()) {
        *q = *q + (fifth & 16) - zero;
    }
    codes
}

/// d f16, 32 fifth bits, 16 bytes of nibbles; d × (q − 16).
#[inline(always)]
pub(super) fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    scale(f16(b, 0), &five_bits(part(b, 2), 16), y);
}

/// d f16, m f16, 32 fifth bits, 16 bytes of nibbles; d × q + m.
#[inline(always)]
pub(super) fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    scale_and_add(f16(b, 0), f16(b, 2), &five_bits(part(b, 4), 0), y);
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
