//! The k-quants, super-blocks of 256: q2_K, q3_K, q4_K, q5_K, q6_K
//! (`dequantize_row_*` in ggml-quants.c).

use super::block::{f16, part, scale, u32_at};

/// The 2-bit codes of a super-block: of each 32 bytes, the lowest two bits of each are 32 elements, the
/// next two bits the next 32, and so on.
#[inline(always)]
pub(super) fn two_bits(q: &[u8; 64]) -> [u8; 256] {
    let mut codes = [0; 256];
    for (codes, q) in codes.as_chunks_mut::<128>().0.iter_mut().zip(q.as_chunks::<32>().0) {
        for j in 0..32 {
            codes[j] = q[j] & 3;
            codes[j + 32] = q[j] >> 2 & 3;
            codes[j + 64] = q[j] >> 4 & 3;
            codes[j + 96] = q[j] >> 6;
        }
    }
    codes
}

/// 16 bytes of scale (low nibble) and minimum (high nibble) per 16 elements, 64 bytes of 2-bit codes,
/// d f16, dmin f16; d × scale × q − dmin × minimum.
#[inline(always)]
pub(super) fn q2_k(b: &[u8; 84], y: &mut [f32; 256]) {
    let (d, dmin) = (f16(b, 80), f16(b, 82));
    let codes = two_bits(part(b, 16));
    for (g, (y, q)) in y.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
        let (d, m) = (d * (b[g] & 15) as f32, dmin * (b[g] >> 4) as f32);
        for j in 0..16 {
            y[j] = d * q[j] as f32 - m;
        }
    }
}

/// The 16 six-bit scales of q3_K, less 32: low nibbles in bytes 0..8, upper bits in 8..12.
#[inline(always)]
pub(super) fn q3_k_scales(b: &[u8; 110]) -> [i8; 16] {
    let (low, high, top) = (u32_at(b, 96), u32_at(b, 100), u32_at(b, 104));
    let word = |nibbles: u32, k: u32| (nibbles & 0x0f0f_0f0f) | (top >> (2 * k) & 0x0303_0303) << 4;
    let words = [word(low, 0), word(high, 1), word(low >> 4, 2), word(high >> 4, 3)];
    std::array::from_fn(|i| (words[i / 4] >> (8 * (i % 4))) as u8 as i8 - 32)
}

/// 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of scales, d f16;
/// d × scale × (q − 4), where a set third bit adds the 4 back.
#[inline(always)]
pub(super) fn q3_k(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16(b, 108);
    let scales = q3_k_scales(b);
    let h: &[u8; 32] = part(b, 0);
    let mut codes = two_bits(part(b, 32)).map(|q| q as i8 - 4);
    for (g, q) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for j in 0..32 {
            q[j] += ((h[j] >> g & 1) << 2) as i8;
        }
    }
    for (g, (y, q)) in y.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
        scale(d * scales[g] as f32, q, y);
    }
}

/// The 8 six-bit scales and 8 six-bit minima of q4_K and q5_K, in 12 bytes from 4 on.
#[inline(always)]
pub(super) fn scales_and_minima(b: &[u8]) -> ([u8; 8], [u8; 8]) {
    let (scales, minima, nibbles) = (u32_at(b, 4), u32_at(b, 8), u32_at(b, 12));
    let low = |word: u32| word & 0x3f3f_3f3f;
    let high = |word: u32, nibbles: u32| (nibbles & 0x0f0f_0f0f) | (word >> 2 & 0x3030_3030);
    let bytes = |low: u32, high: u32| ((high as u64) << 32 | low as u64).to_le_bytes();
    (bytes(low(scales), high(scales, nibbles)), bytes(low(minima), high(minima, nibbles >> 4)))
}

/// d f16, dmin f16, 12 bytes of scales and minima, 128 bytes: in each 32, the low nibbles are 32
/// elements and the high nibbles the next 32; d × scale × q − dmin × minimum.
#[inline(always)]
pub(super) fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (f16(b, 0), f16(b, 2));
    let (scales, minima) = scales_and_minima(b);
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (d, m) = (d * scales[g] as f32, dmin * minima[g] as f32);
        let q: &[u8; 32] = part(b, 16 + 32 * (g / 2));
        let shift = g % 2 * 4;
        for j in 0..32 {
            y[j] = d * (q[j] >> shift & 15) as f32 - m;
        }
    }
}

/// d f16, dmin f16, scales and minima, 32 bytes of fifth bits, 128 bytes as in q4_K.
#[inline(always)]
pub(super) fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (f16(b, 0), f16(b, 2));
    let (scales, minima) = scales_and_minima(b);
    let h: &[u8; 32] = part(b, 16);
    for (g, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (d, m) = (d * scales[g] as f32, dmin * minima[g] as f32);
        let q: &[u8; 32] = part(b, 48 + 32 * (g / 2));
        let shift = g % 2 * 4;
        for j in 0..32 {
            let q = (q[j] >> shift & 15) | (h[j] >> g & 1) << 4;
            y[j] = d * q as f32 - m;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper 2 bits, 16 i8 scales, d f16; d × scale × (q − 32).
#[inline(always)]
pub(super) fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let d = f16(b, 208);
    let mut codes = two_bits(part(b, 128));
    for (n, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        // The low nibbles of 64 bytes are 64 elements, the high ones the next 64.
        let q: &[u8; 64] = part(b, 64 * n);
        for j in 0..64 {
            codes[j] = codes[j] << 4 | (q[j] & 15);
            codes[j + 64] = codes[j + 64] << 4 | q[j] >> 4;
        }
    }
    let codes = codes.map(|q| q as i8 - 32);
    for (g, (y, q)) in y.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
        scale(d * (b[192 + g] as i8) as f32, q, y);
    }
}
