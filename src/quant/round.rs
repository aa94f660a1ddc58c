//! Roundings between f32 and the dtypes of 16 bits, as the decoders do them.

use super::Float;
use super::float::{from_bf16, from_f16, to_bf16, to_f16};

/// The bits of the nearest value of a dtype of 16 bits, ties to even.
///
/// # Panics
/// When `float` is f32.
pub fn narrow(x: f32, float: Float) -> u16 {
    match float {
        Float::Bf16 => to_bf16(x),
        Float::F16 => to_f16(x),
        Float::F32 => panic!("f32 has 32 bits"),
    }
}

/// The value of such bits. Exact.
///
/// # Panics
/// When `float` is f32.
pub fn widen(bits: u16, float: Float) -> f32 {
    match float {
        Float::Bf16 => from_bf16(bits),
        Float::F16 => from_f16(bits),
        Float::F32 => panic!("f32 has 32 bits"),
    }
}

/// Whether such bits are neither NaN nor infinite.
///
/// # Panics
/// When `float` is f32.
pub fn is_finite(bits: u16, float: Float) -> bool {
    widen(bits, float).is_finite()
}
