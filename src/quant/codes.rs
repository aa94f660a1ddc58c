//! The integer codes and scales of the types that are no more than that: `scale × (code − middle)`, or
//! `scale × code − minimum`, for groups of elements. Another format of integer codes then takes the codes as
//! they are, and only its scales are rounded.
//!
//! The levels of iq4 and mxfp4 are integers of a few more bits than their numbers in the table. Of the other
//! types, whose codes are numbers of entries in grids, nothing is known here.

use super::GgmlType;
use super::block::{f16, nibbles, part};
use super::iquants::{iq4_xs_scale, levels};
use super::kquants::{q3_k_scales, scales_and_minima, two_bits};
use super::legacy::five_bits;
use super::microscale::{e2m1_doubled, e8m0_half};

/// Elements of the largest block.
pub const LARGEST: usize = 256;
/// Groups of the largest block, at 16 elements each.
pub const GROUPS: usize = LARGEST / 16;

/// How the codes of a type stand for its elements.
#[derive(Debug)]
pub struct Integers {
    /// Bits of a code.
    pub bits: u32,
    /// Elements that share a scale.
    pub group: u64,
    /// The code of 0; `None` where each group has a minimum instead.
    pub middle: Option<u8>,
    id: u32,
    read: fn(&[u8], &mut Block),
}

/// The codes and scales of one block.
pub struct Block {
    /// Codes, each of [`Integers::bits`] bits; those past the block's elements mean nothing.
    pub codes: [u8; LARGEST],
    /// A scale for each group.
    pub scales: [f32; GROUPS],
    /// What is taken from each group's `scale × code`, where the type has no `middle`.
    pub minima: [f32; GROUPS],
}

impl Default for Block {
    fn default() -> Self {
        Block { codes: [0; LARGEST], scales: [0.0; GROUPS], minima: [0.0; GROUPS] }
    }
}

macro_rules! row {
    ($id:literal, $bits:literal bits, group $group:literal, $middle:expr, $read:expr) => {
        Integers { bits: $bits, group: $group, middle: $middle, id: $id, read: $read }
    };
}

/// The types that are integer codes, by id.
#[rustfmt::skip]
static INTEGERS: [Integers; 13] = [
    row!(2, 4 bits, group 32, Some(8), |b, out| {
        out.scales[0] = f16(b, 0);
        offset(&nibbles(part(b, 2)), 0, &mut out.codes);
    }),
    row!(3, 4 bits, group 32, None, |b, out| {
        (out.scales[0], out.minima[0]) = (f16(b, 0), -f16(b, 2));
        offset(&nibbles(part(b, 4)), 0, &mut out.codes);
    }),
    row!(6, 5 bits, group 32, Some(16), |b, out| {
        out.scales[0] = f16(b, 0);
        offset(&five_bits(part(b, 2), 0), 0, &mut out.codes);
    }),
    row!(7, 5 bits, group 32, None, |b, out| {
        (out.scales[0], out.minima[0]) = (f16(b, 0), -f16(b, 2));
        offset(&five_bits(part(b, 4), 0), 0, &mut out.codes);
    }),
    row!(8, 8 bits, group 32, Some(128), |b, out| {
        out.scales[0] = f16(b, 0);
        offset(&part::<32>(b, 2).map(|q| q as i8), 128, &mut out.codes);
    }),
    row!(10, 2 bits, group 16, None, |b, out| {
        let (d, dmin) = (f16(b, 80), f16(b, 82));
        out.codes = two_bits(part(b, 16));
        for (g, nibbles) in part::<16>(b, 0).iter().enumerate() {
            (out.scales[g], out.minima[g]) = (d * (nibbles & 15) as f32, dmin * (nibbles >> 4) as f32);
        }
    }),
    row!(11, 3 bits, group 16, Some(4), |b, out| {
        let d = f16(b, 108);
        out.codes = two_bits(part(b, 32));
        high_bits(part(b, 0), 2, &mut out.codes);
        for (scale, s) in out.scales.iter_mut().zip(q3_k_scales(part(b, 0))) {
            *scale = d * s as f32;
        }
    }),
    row!(12, 4 bits, group 32, None, |b, out| {
        k_scales(b, out);
        k_nibbles(part(b, 16), &mut out.codes);
    }),
    row!(13, 5 bits, group 32, None, |b, out| {
        k_scales(b, out);
        k_nibbles(part(b, 48), &mut out.codes);
        high_bits(part(b, 16), 4, &mut out.codes);
    }),
    row!(14, 6 bits, group 16, Some(32), |b, out| {
        let d = f16(b, 208);
        out.codes = two_bits(part(b, 128));
        for (n, codes) in out.codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            // The low nibbles of 64 bytes are 64 elements, the high ones the next 64.
            let q: &[u8; 64] = part(b, 64 * n);
            for j in 0..64 {
                codes[j] = codes[j] << 4 | (q[j] & 15);
                codes[j + 64] = codes[j + 64] << 4 | q[j] >> 4;
            }
        }
        for (g, scale) in out.scales.iter_mut().enumerate() {
            *scale = d * (b[192 + g] as i8) as f32;
        }
    }),
    row!(20, 8 bits, group 32, Some(128), |b, out| {
        out.scales[0] = f16(b, 0);
        offset(&levels(part(b, 2)), 128, &mut out.codes);
    }),
    row!(23, 8 bits, group 32, Some(128), |b, out| {
        for (g, codes) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            out.scales[g] = iq4_xs_scale(part(b, 0), g);
            offset(&levels(part(b, 8 + 16 * g)), 128, codes);
        }
    }),
    row!(39, 5 bits, group 32, Some(16), |b, out| {
        out.scales[0] = e8m0_half(b[0]);
        offset(&nibbles(part(b, 1)).map(e2m1_doubled), 16, &mut out.codes);
    }),
];

/// Two's complement to offset binary.
fn offset(q: &[i8], middle: u8, codes: &mut [u8]) {
    for (code, q) in codes.iter_mut().zip(q) {
        *code = (*q as u8).wrapping_add(middle);
    }
}

/// Bit `g` of 32 bytes is a higher bit of the elements of the `g`th 32.
fn high_bits(h: &[u8; 32], shift: u32, codes: &mut [u8; LARGEST]) {
    for (g, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for j in 0..32 {
            codes[j] |= (h[j] >> g & 1) << shift;
        }
    }
}

/// Of each 32 bytes, the low nibbles are 32 elements and the high nibbles the next 32.
fn k_nibbles(q: &[u8; 128], codes: &mut [u8; LARGEST]) {
    for (codes, q) in codes.as_chunks_mut::<64>().0.iter_mut().zip(q.as_chunks::<32>().0) {
        for j in 0..32 {
            (codes[j], codes[j + 32]) = (q[j] & 15, q[j] >> 4);
        }
    }
}

/// The scales and minima of q4_K and q5_K.
fn k_scales(b: &[u8], out: &mut Block) {
    let (d, dmin) = (f16(b, 0), f16(b, 2));
    let (scales, minima) = scales_and_minima(b);
    for g in 0..8 {
        (out.scales[g], out.minima[g]) = (d * scales[g] as f32, dmin * minima[g] as f32);
    }
}

impl GgmlType {
    /// How the codes of this type stand for its elements, where it is one of integer codes.
    pub fn integers(&self) -> Option<&'static Integers> {
        INTEGERS.iter().find(|i| i.id == self.id)
    }
}

impl Integers {
    /// Reads one block: every element is `scale × code − minimum`, or `scale × (code − middle)`. All
    /// products here are exact in f32, as in the decoders.
    ///
    /// # Panics
    /// When `block` is shorter than a block of the type.
    pub fn read(&self, block: &[u8], out: &mut Block) {
        (self.read)(block, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{Float, TYPES};

    /// The codes and scales give what the decoder gives, whatever the bytes of a block: the decoders are
    /// held against ggml.
    #[test]
    fn codes_and_scales_decode_as_the_decoders_do() {
        let mut state = 1u64;
        let mut seen = 0;
        for (ty, integers) in TYPES.iter().filter_map(|t| Some((t, t.integers()?))) {
            seen += 1;
            for _ in 0..if cfg!(miri) { 2 } else { 500 } {
                let block: Vec<u8> = (0..ty.bytes)
                    .map(|_| {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        (state >> 56) as u8
                    })
                    .collect();
                if ty.count_nonfinite(&block) > 0 {
                    continue;
                }
                let mut expected = vec![0; ty.block as usize * 4];
                ty.decode(&block, Float::F32, &mut expected);
                let mut read = Block::default();
                integers.read(&block, &mut read);
                for (i, expected) in expected.as_chunks::<4>().0.iter().enumerate() {
                    let g = i / integers.group as usize;
                    let code = read.codes[i];
                    assert!(u32::from(code) < 1 << integers.bits, "{}: code {code}", ty.name);
                    let value = match integers.middle {
                        Some(middle) => read.scales[g] * (code as f32 - middle as f32),
                        None => read.scales[g] * code as f32 - read.minima[g],
                    };
                    assert_eq!(value, f32::from_le_bytes(*expected), "{} element {i}", ty.name);
                }
            }
        }
        assert_eq!(seen, INTEGERS.len());
    }
}
