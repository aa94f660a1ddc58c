//! FP4 codes (E2M1) with a small scale per group: mxfp4, nvfp4
//! (`dequantize_row_mxfp4`, `_nvfp4` in ggml-quants.c, scales in ggml-impl.h).

use super::block::{nibbles, part, scale};

/// Twice the E2M1 value of each code (`kvalues_mxfp4`): 0 1 2 3 4 6 8 12 and their negatives, where
/// code 8, minus zero, is plain zero.
#[inline(always)]
pub(super) fn e2m1_doubled(code: i8) -> i8 {
    let m = code & 7;
    let value = m + (m >= 5) as i8 + (m >= 6) as i8 + 3 * (m >= 7) as i8;
    if code & 8 != 0 { -value } else { value }
}

/// Half of the E8M0 scale 2^(e − 127), to go with the doubled codes.
#[inline(always)]
pub(super) fn e8m0_half(e: u8) -> f32 {
    // 2^-128 and 2^-127 are f32 subnormals.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 })
}

/// Half of the unsigned E4M3 scale; 0x7f counts as zero and the top bit is not looked at otherwise.
#[inline(always)]
fn ue4m3_half(x: u8) -> f32 {
    let (exponent, fraction) = ((x >> 3 & 15) as u32, (x & 7) as u32);
    let normal = f32::from_bits((exponent + 119) << 23 | fraction << 20);
    let subnormal = fraction as f32 * (1.0 / 1024.0);
    let value = if exponent == 0 { subnormal } else { normal };
    if x == 0x7f { 0.0 } else { value }
}

/// Scale E8M0, 16 bytes of nibbles.
#[inline(always)]
pub(super) fn mxfp4(b: &[u8; 17], y: &mut [f32; 32]) {
    let mut codes = nibbles(part(b, 1));
    for q in &mut codes {
        *q = e2m1_doubled(*q);
    }
    scale(e8m0_half(b[0]), &codes, y);
}

/// Whether a block of mxfp4 holds a value past f32: half scales of 2^125 and more times codes up to 12.
#[inline(always)]
pub(super) fn mxfp4_overflows(b: &[u8; 17]) -> bool {
    b[0] >= 253 && overflows(b)
}

#[cold]
fn overflows(b: &[u8; 17]) -> bool {
    let mut y = [0.0; 32];
    mxfp4(b, &mut y);
    y.iter().any(|y| !y.is_finite())
}

/// 4 scales UE4M3, then for each 8 bytes: the low nibbles are elements 0..8, the high ones 8..16.
#[inline(always)]
pub(super) fn nvfp4(b: &[u8; 36], y: &mut [f32; 64]) {
    let mut codes = [0; 64];
    for (q, codes) in part::<32>(b, 4).as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
        for j in 0..8 {
            codes[j] = (q[j] & 15) as i8;
            codes[j + 8] = (q[j] >> 4) as i8;
        }
    }
    for q in &mut codes {
        *q = e2m1_doubled(*q);
    }
    for (s, (y, q)) in y.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
        scale(ue4m3_half(b[s]), q, y);
    }
}
