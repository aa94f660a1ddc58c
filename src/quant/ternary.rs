//! Ternary weights: tq1_0, tq2_0 (`dequantize_row_tq1_0`, `_tq2_0` in ggml-quants.c).

use super::block::{f16, part};

/// `N` base-3 numbers read as fractions of 256: digit `n` of each, for `n` below `DIGITS`, is one
/// run of `N` elements; d × (digit − 1).
#[inline(always)]
fn trits<const N: usize>(d: f32, q: &[u8; N], y: &mut [f32]) {
    for (y, power) in y.as_chunks_mut::<N>().0.iter_mut().zip([1u8, 3, 9, 27, 81]) {
        for j in 0..N {
            let q = q[j].wrapping_mul(power) as u16;
            y[j] = d * (((q * 3) >> 8) as i16 - 1) as f32;
        }
    }
}

/// 32 + 16 bytes of five digits, 4 bytes of four digits, d f16.
#[inline(always)]
pub(super) fn tq1_0(b: &[u8; 54], y: &mut [f32; 256]) {
    let d = f16(b, 52);
    trits::<32>(d, part(b, 0), &mut y[..160]);
    trits::<16>(d, part(b, 32), &mut y[160..240]);
    trits::<4>(d, part(b, 48), &mut y[240..]);
}

/// 64 bytes of four 2-bit codes, d f16: code k of 32 bytes is one run of 32 elements; d × (q − 1).
#[inline(always)]
pub(super) fn tq2_0(b: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16(b, 64);
    for n in 0..2 {
        let q: &[u8; 32] = part(b, 32 * n);
        for k in 0..4 {
            let y = &mut y[128 * n + 32 * k..][..32];
            for j in 0..32 {
                y[j] = d * ((q[j] >> (2 * k) & 3) as i8 - 1) as f32;
            }
        }
    }
}
