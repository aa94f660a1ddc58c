//! Conversions between f64, f32, bf16 and f16, written without branches so that loops over them
//! become vector code.

/// The one NaN that decoding produces, so that every machine writes the same bytes.
pub(super) const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// `x`, or the one [`NAN`].
#[inline(always)]
pub(super) fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN } else { x }
}

/// The value of an IEEE binary16. Exact; every NaN becomes [`NAN`].
#[inline(always)]
pub(super) fn from_f16(h: u16) -> f32 {
    let h = h as u32;
    let magnitude = (h & 0x7fff) << 13;
    let normal = magnitude + (112 << 23);
    // 2^-14 + the fraction, less 2^-14: exact, and no f32 subnormal takes part.
    const TINY: u32 = 113 << 23;
    let subnormal = (f32::from_bits(magnitude + TINY) - f32::from_bits(TINY)).to_bits();
    let finite = if h & 0x7c00 == 0 { subnormal } else { normal };
    let bits = if h & 0x7c00 == 0x7c00 { magnitude + (224 << 23) } else { finite };
    canonical(f32::from_bits(bits | (h & 0x8000) << 16))
}

/// The value of a bfloat16: exact, NaN payloads included.
#[inline(always)]
pub(super) fn from_bf16(h: u16) -> f32 {
    f32::from_bits((h as u32) << 16)
}

/// The nearest f32, ties to even; every NaN becomes [`NAN`].
#[inline(always)]
pub(super) fn from_f64(x: f64) -> f32 {
    canonical(x as f32)
}

/// The nearest bfloat16, ties to even; NaN keeps its sign and upper payload and becomes quiet
/// (`ggml_compute_fp32_to_bf16` in ggml-impl.h).
#[inline(always)]
pub(super) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { bits >> 16 | 64 } else { rounded }) as u16
}

/// [`to_bf16`] of a [`canonical`] value, which needs no look for NaN.
#[inline(always)]
pub(super) fn canonical_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The nearest IEEE binary16, ties to even, infinity past 65519.99; every NaN becomes 0x7e00.
#[inline(always)]
pub(super) fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = bits >> 16 & 0x8000;
    let bits = bits & 0x7fff_ffff;
    // Adding 0.5 leaves the f16 subnormal's fraction in the lowest bits, rounded by the addition.
    const HALF: u32 = 0x3f00_0000;
    let subnormal = (f32::from_bits(bits) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    let finite = if bits < 113 << 23 { subnormal } else { normal };
    let signed = sign | if bits >= 143 << 23 { 0x7c00 } else { finite };
    (if bits > 0x7f80_0000 { 0x7e00 } else { signed }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every upper half; some of them under Miri, which is a thousand times slower.
    fn halves() -> impl Iterator<Item = u16> {
        (0..=u16::MAX).step_by(if cfg!(miri) { 251 } else { 1 })
    }

    #[test]
    fn f16_agrees_with_the_half_crate() {
        for h in halves() {
            let expected = canonical(half::f16::from_bits(h).to_f32_const());
            assert_eq!(from_f16(h).to_bits(), expected.to_bits(), "{h:#06x}");
        }
    }

    #[test]
    fn roundings_agree_with_the_half_crate() {
        // Every upper half, with lower halves on both sides of each rounding boundary.
        for upper in halves() {
            for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits((upper as u32) << 16 | lower);
                let f16 = if x.is_nan() { 0x7e00 } else { half::f16::from_f32_const(x).to_bits() };
                assert_eq!(to_f16(x), f16, "{x:e}");
                assert_eq!(to_bf16(x), half::bf16::from_f32_const(x).to_bits(), "{x:e}");
            }
        }
    }
}
