//! Forms of packed weights that engines compute with on tensor cores: integer codes, a scale for each group of
//! columns and, in some, a zero point: `scale × (code − zero)`. Without zero points, zero is the middle of the codes.
//!
//! A ggml block becomes its part of each tensor of a form by itself: so many bytes of codes and of scales, in
//! the order of the columns. Where the type is integer codes ([`crate::quant::codes`]) that the form holds, the
//! codes are moved, and scales and zero points rounded once to the dtype of the model: nothing else is lost. Anything
//! else is rounded anew to the codes of the form, by the best of several steps, the type's own divided by whole
//! numbers among them: most of its values are then codes, and eight bits lose less than rounding to the
//! largest code would.

use crate::quant::codes::{Block, GROUPS, Integers, LARGEST};
use crate::quant::{Float, GgmlType, round};
use serde::Deserialize;

/// A form, as engines describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    /// Bits of a code, 2 to 8. Codes follow each other without gaps, lowest bits first.
    pub bits: u32,
    /// Columns that share a scale: 16, 32, 64 or 128.
    pub group: u64,
    /// Whether each group has a zero point, of the scales' dtype. Such a form holds moved codes alone.
    #[serde(default)]
    pub zero_point: bool,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let zero_points = if self.zero_point { " with zero points" } else { "" };
        write!(f, "int{} in groups of {}{zero_points}", self.bits, self.group)
    }
}

/// One of the tensors that a matrix becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// The codes: `[rows, columns × bits / 32]` words of 32 bits.
    Codes,
    /// The scales: `[rows, columns / group]`.
    Scales,
    /// The zero points, as the scales.
    ZeroPoints,
}

/// Steps that are tried for a group that is rounded anew.
const STEPS: u32 = 32;

impl Form {
    /// Whether it is one that is written here.
    pub(crate) fn is_sound(&self) -> bool {
        (2..=8).contains(&self.bits) && matches!(self.group, 16 | 32 | 64 | 128)
    }

    /// Bits of a weight, scales and zero points of 16 bits included.
    pub fn bits_per_weight(&self) -> f64 {
        f64::from(self.bits) + if self.zero_point { 32.0 } else { 16.0 } / self.group as f64
    }

    /// Whether a type's blocks can be written in it.
    pub fn takes(&self, ty: &GgmlType) -> bool {
        let fits = ty.is_quantised() && ty.block.is_multiple_of(self.group) && ty.block as usize <= LARGEST;
        fits && (!self.zero_point || self.moves(ty).is_some())
    }

    /// How a type stands for its elements, where its codes can be moved.
    fn moves(&self, ty: &GgmlType) -> Option<&'static Integers> {
        let fits = |from: &&Integers| self.bits >= from.bits && from.group.is_multiple_of(self.group);
        ty.integers().filter(fits).filter(|from| self.zero_point || from.middle.is_some())
    }

    /// Bytes that a block of a type becomes in one of the tensors, scales of 16 bits.
    pub fn block_bytes(&self, piece: Piece, ty: &GgmlType) -> u64 {
        match piece {
            Piece::Codes => ty.block * u64::from(self.bits) / 8,
            Piece::Scales | Piece::ZeroPoints => ty.block / self.group * 2,
        }
    }

    /// Writes the part of one block in one of the tensors. `float`, of 16 bits, is the scales' dtype.
    ///
    /// # Panics
    /// When the form does not take the type, `float` has not 16 bits, or a slice has the wrong length.
    pub fn encode(&self, piece: Piece, ty: &GgmlType, block: &[u8], float: Float, out: &mut [u8]) {
        assert_eq!(out.len() as u64, self.block_bytes(piece, ty));
        let groups = self.groups(ty, block, float);
        match piece {
            Piece::Codes => pack(&groups.codes, self.bits, out),
            Piece::Scales => put(&groups.scales, out),
            Piece::ZeroPoints => put(&groups.zeros, out),
        }
    }

    /// The sum of the squares of what the elements of a block differ by from ggml's, and of ggml's elements.
    ///
    /// # Panics
    /// As [`Form::encode`].
    pub fn error(&self, ty: &GgmlType, block: &[u8], float: Float) -> (f64, f64) {
        let groups = self.groups(ty, block, float);
        let widen = |bits: u16| f64::from(round::widen(bits, float));
        let (mut wrong, mut all) = (0.0, 0.0);
        for (i, exact) in decode(ty, block)[..ty.block as usize].iter().enumerate() {
            let (g, exact) = (i / self.group as usize, f64::from(*exact));
            let zero = if self.zero_point { widen(groups.zeros[g]) } else { f64::from(self.middle()) };
            wrong += (widen(groups.scales[g]) * (f64::from(groups.codes[i]) - zero) - exact).powi(2);
            all += exact.powi(2);
        }
        (wrong, all)
    }

    /// The code of zero.
    fn middle(&self) -> u8 {
        1 << (self.bits - 1)
    }

    fn groups(&self, ty: &GgmlType, block: &[u8], float: Float) -> Groups {
        assert!(self.takes(ty) && float.size() == 2 && block.len() as u64 == ty.bytes);
        let mut read = Block::default();
        match (self.moves(ty), ty.integers()) {
            (Some(from), _) => {
                from.read(block, &mut read);
                self.moved(from, &read, float)
            }
            (None, Some(from)) => {
                from.read(block, &mut read);
                self.rounded(
                    &decode(ty, block),
                    |at| {
                        // Of two scales of the type in one group, the larger.
                        let scales = at.start / from.group as usize..at.end.div_ceil(from.group as usize);
                        read.scales[scales].iter().fold(0.0, |most, scale| scale.abs().max(most))
                    },
                    float,
                )
            }
            (None, None) => self.rounded(&decode(ty, block), |_| 0.0, float),
        }
    }

    /// Codes as they are, with scales and zero points in the dtype of the model.
    fn moved(&self, from: &Integers, read: &Block, float: Float) -> Groups {
        let mut out = Groups { codes: read.codes, ..Groups::new() };
        if let Some(middle) = from.middle.filter(|_| !self.zero_point) {
            // Both are offset binary, of unlike widths.
            let shift = self.middle() - middle;
            out.codes.iter_mut().for_each(|code| *code = code.wrapping_add(shift));
        }
        // Groups of the form in each group of the type.
        let split = (from.group / self.group) as usize;
        for g in 0..GROUPS / split {
            let (mut scale, minimum) = (read.scales[g], read.minima[g]);
            let mut zero = match from.middle {
                Some(middle) => f32::from(middle),
                None if minimum == 0.0 => 0.0,
                None => minimum / scale,
            };
            if scale.is_finite() && !round::is_finite(round::narrow(zero, float), float) {
                // The scale is nothing beside the minimum, which is then all of each element.
                (scale, zero) = (minimum, 1.0);
                let size = from.group as usize;
                out.codes[g * size..(g + 1) * size].fill(0);
            }
            out.scales[g * split..(g + 1) * split].fill(round::narrow(scale, float));
            out.zeros[g * split..(g + 1) * split].fill(round::narrow(zero, float));
        }
        out
    }

    /// Values rounded to codes; `step` is that of the type for some elements, 0 where it has none.
    fn rounded(
        &self,
        values: &[f32; LARGEST],
        step: impl Fn(std::ops::Range<usize>) -> f32,
        float: Float,
    ) -> Groups {
        let mut out = Groups { codes: [self.middle(); LARGEST], ..Groups::new() };
        let size = self.group as usize;
        let limits = Limits { most: f32::from(self.middle() - 1), least: -f32::from(self.middle()) };
        let groups = values.chunks_exact(size).zip(out.codes.chunks_exact_mut(size));
        for (g, ((values, codes), scale)) in groups.zip(&mut out.scales).enumerate() {
            // The smallest step that brings every value within the codes. A NaN, which `max` passes over, must
            // reach the scale.
            let need = |x: &f32| if *x < 0.0 { x / limits.least } else { x / limits.most };
            let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
            let finest = values.iter().map(need).fold(0.0, larger);
            if finest == 0.0 {
                continue;
            }
            let mut best = (f32::INFINITY, round::narrow(finest, float));
            // The type's step or, where that says nothing, the largest value, divided by whole numbers, as far as
            // every value stays within the codes. Half of the largest divisor and less give no finer steps.
            let own = step(g * size..(g + 1) * size);
            let own = if own > finest && own <= finest * limits.most { own } else { finest * limits.most };
            // What the division loses must not cost a divisor: a value just past the codes becomes the last.
            let last = (own / finest * 1.001) as u32;
            let first = (last / 2 + 1).max((last + 1).saturating_sub(STEPS));
            let divided = (first..=last).map(|k| round::narrow(own / k as f32, float));
            for bits in [best.1].into_iter().chain(divided) {
                let wrong = errors(values, round::widen(bits, float), limits);
                if wrong < best.0 {
                    best = (wrong, bits);
                }
            }
            *scale = best.1;
            let inverse = round::widen(best.1, float).recip();
            if inverse.is_finite() {
                for (code, x) in codes.iter_mut().zip(values) {
                    *code = (nearest(*x, inverse, limits) - limits.least) as u8;
                }
            }
        }
        out
    }
}

/// A block in the terms of a form.
struct Groups {
    codes: [u8; LARGEST],
    /// As bits of the scales' dtype, for each group of the form.
    scales: [u16; GROUPS],
    zeros: [u16; GROUPS],
}

impl Groups {
    fn new() -> Groups {
        Groups { codes: [0; LARGEST], scales: [0; GROUPS], zeros: [0; GROUPS] }
    }
}

/// The largest and the least code, less the middle.
#[derive(Clone, Copy)]
struct Limits {
    most: f32,
    least: f32,
}

/// The whole number nearest to `x × inverse`, within the limits.
#[inline(always)]
fn nearest(x: f32, inverse: f32, limits: Limits) -> f32 {
    // To this the ones place is the last of an f32, so that adding it rounds, ties to even.
    const ONES: f32 = 12_582_912.0;
    let clamped = (x * inverse).max(limits.least).min(limits.most);
    clamped + ONES - ONES
}

/// The sum of the squares of what is lost by a step, summed in an order that does not depend on the CPU.
fn errors(values: &[f32], step: f32, limits: Limits) -> f32 {
    let inverse = step.recip();
    let mut sums = [0.0f32; 8];
    for values in values.as_chunks::<8>().0 {
        for (sum, x) in sums.iter_mut().zip(values) {
            let lost = nearest(*x, inverse, limits) * step - x;
            *sum += lost * lost;
        }
    }
    sums.iter().sum()
}

/// ggml's elements of a block; zeros past them.
fn decode(ty: &GgmlType, block: &[u8]) -> [f32; LARGEST] {
    let mut bytes = [0; LARGEST * 4];
    ty.decode(block, Float::F32, &mut bytes[..ty.block as usize * 4]);
    let mut values = [0.0; LARGEST];
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
    values
}

/// A stream of codes of so many bits, lowest bits first.
fn pack(codes: &[u8; LARGEST], bits: u32, out: &mut [u8]) {
    let bits = bits as usize;
    // Eight codes fill as many bytes as a code has bits.
    for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.chunks_exact_mut(bits)) {
        let word = codes.iter().rev().fold(0u64, |word, code| word << bits | u64::from(*code));
        out.copy_from_slice(&word.to_le_bytes()[..bits]);
    }
}

fn put(values: &[u16; GROUPS], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        *out = value.to_le_bytes();
    }
}
