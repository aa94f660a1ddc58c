//! One and two bits with one f16 scale: q1_0, q2_0 (`dequantize_row_q1_0`, `_q2_0` in ggml-quants.c).

use super::block::{MASKS, f16, part, scale};

/// d f16, 128 bits, lowest first: a set bit is d, a clear one −d.
#[inline(always)]
pub(super) fn q1_0(b: &[u8; 18], y: &mut [f32; 128]) {
    let q: &[u8; 16] = part(b, 2);
    let masks: [[i8; 8]; 16] = std::array::from_fn(|i| MASKS[q[i] as usize]);
    let mut codes = [0; 128];
    for (q, mask) in codes.iter_mut().zip(masks.as_flattened()) {
        *q = -1 - 2 * mask;
    }
    scale(f16(b, 0), &codes, y);
}

/// d f16, 64 codes of 2 bits, lowest first; d × (q − 1).
#[inline(always)]
pub(super) fn q2_0(b: &[u8; 18], y: &mut [f32; 64]) {
    let d = f16(b, 0);
    let q: &[u8; 16] = part(b, 2);
    for (y, q) in y.as_chunks_mut::<4>().0.iter_mut().zip(q) {
        *y = std::array::from_fn(|j| d * ((q >> (2 * j) & 3) as i8 - 1) as f32);
    }
}
