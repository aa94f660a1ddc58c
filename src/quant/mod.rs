//! The ggml types: one table row and one decoder each, bit for bit as ggml decodes them.
//!
//! A new type is one row of [`TYPES`] and one function from a block's bytes to its elements in f32, in
//! the file of its family. The rules that hold for all types:
//!
//! - A decoder computes in f32 with ggml's own formula. All its products are exact, so each element is
//!   rounded at most once before it is rounded to the wanted dtype (to nearest, ties to even).
//! - A NaN that decoding produces (from a NaN or infinite scale) is always the same quiet NaN:
//!   0x7fc00000 in f32, 0x7fc0 in bf16, 0x7e00 in f16.
//! - A float tensor that keeps its dtype is copied: NaN payloads and subnormals stay. When the dtype
//!   changes, f32 to bf16 and bf16 to f32 keep a NaN's sign and upper payload and every other cast makes
//!   the quiet NaN above. f64 goes through f32, as in PyTorch.

mod block;
pub mod codes;
mod float;
mod grids;
mod iquants;
mod kquants;
mod legacy;
mod lowbit;
mod microscale;
pub mod round;
mod ternary;

use block::{Blocks, Vectors, f16_nonfinite};

/// A dtype that weights are decoded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Float {
    /// All of them.
    pub const ALL: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::Bf16 | Float::F16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Float::F32 => "F32",
            Float::Bf16 => "BF16",
            Float::F16 => "F16",
        }
    }
}

/// One ggml tensor type: how its blocks are laid out and decoded.
#[derive(Debug)]
pub struct GgmlType {
    /// The id that GGUF files carry (`enum ggml_type`).
    pub id: u32,
    /// ggml's own name, for example `q4_K`.
    pub name: &'static str,
    /// Elements of one block.
    pub block: u64,
    /// Bytes of one block.
    pub bytes: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// `same` is the output dtype for which decoding is a copy.
    Float {
        same: Option<Float>,
        code: Code,
    },
    Integer,
    Quantised(Code),
    /// Made and used up inside a matrix product.
    Activation,
}

/// The code of a type, compiled for each set of vector instructions.
#[derive(Debug)]
struct Code {
    /// Decodes whole blocks.
    decode: fn(Vectors, &[u8], Float, &mut [u8]),
    /// Counts blocks that hold a NaN or an infinity.
    nonfinite: fn(Vectors, &[u8]) -> u64,
}

/// A row of a float type: its element's bytes, the output dtype that is a copy, how to read an element
/// and whether it is NaN or infinite.
macro_rules! float {
    ($id:literal $name:literal $bytes:literal $same:expr, |$b:ident| $read:expr, $nonfinite:expr) => {{
        struct Row;
        impl Blocks<$bytes, 1> for Row {
            #[inline(always)]
            fn decode($b: &[u8; $bytes], y: &mut [f32; 1]) {
                *y = [$read];
            }
            #[inline(always)]
            fn nonfinite($b: &[u8; $bytes]) -> bool {
                $nonfinite
            }
        }
        let code = Code { decode: block::cast::<Row, $bytes>, nonfinite: block::count::<Row, $bytes, 1> };
        GgmlType { id: $id, name: $name, block: 1, bytes: $bytes, kind: Kind::Float { same: $same, code } }
    }};
}

/// A row of a quantised type: block elements and bytes, decoder, and how to tell that a block holds a
/// NaN or an infinity: the offsets of f16 scales, each of which takes part in every element, or code.
macro_rules! quantised {
    ($id:literal $name:literal $block:literal $bytes:literal $decode:path, scales $($at:literal)+) => {
        quantised!($id $name $block $bytes $decode, |b| false $(| f16_nonfinite(b, $at))+)
    };
    ($id:literal $name:literal $block:literal $bytes:literal $decode:path, |$b:ident| $nonfinite:expr) => {{
        struct Row;
        impl Blocks<$bytes, $block> for Row {
            #[inline(always)]
            fn decode(b: &[u8; $bytes], y: &mut [f32; $block]) {
                $decode(b, y);
            }
            #[inline(always)]
            fn nonfinite($b: &[u8; $bytes]) -> bool {
                $nonfinite
            }
        }
        let code = Code {
            decode: block::decode::<Row, $bytes, $block>,
            nonfinite: block::count::<Row, $bytes, $block>,
        };
        GgmlType { id: $id, name: $name, block: $block, bytes: $bytes, kind: Kind::Quantised(code) }
    }};
}

/// A row of a type that is never decoded.
macro_rules! sizes {
    ($id:literal $name:literal $block:literal $bytes:literal $kind:expr) => {
        GgmlType { id: $id, name: $name, block: $block, bytes: $bytes, kind: $kind }
    };
}

/// Every type of ggml (llama.cpp 0.5.0-dev, ggml 0.25), by id. Ids, names and sizes are those of
/// `ggml_get_type_traits`.
#[rustfmt::skip]
pub static TYPES: [GgmlType; 35] = [
    float!(0 "f32" 4 Some(Float::F32), |b| f32::from_le_bytes(*b),
        u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000),
    float!(1 "f16" 2 Some(Float::F16), |b| float::from_f16(u16::from_le_bytes(*b)),
        u16::from_le_bytes(*b) & 0x7c00 == 0x7c00),
    quantised!(2 "q4_0" 32 18 legacy::q4_0, scales 0),
    quantised!(3 "q4_1" 32 20 legacy::q4_1, scales 0 2),
    quantised!(6 "q5_0" 32 22 legacy::q5_0, scales 0),
    quantised!(7 "q5_1" 32 24 legacy::q5_1, scales 0 2),
    quantised!(8 "q8_0" 32 34 legacy::q8_0, scales 0),
    sizes!(9 "q8_1" 32 36 Kind::Activation),
    quantised!(10 "q2_K" 256 84 kquants::q2_k, scales 80 82),
    quantised!(11 "q3_K" 256 110 kquants::q3_k, scales 108),
    quantised!(12 "q4_K" 256 144 kquants::q4_k, scales 0 2),
    quantised!(13 "q5_K" 256 176 kquants::q5_k, scales 0 2),
    quantised!(14 "q6_K" 256 210 kquants::q6_k, scales 208),
    sizes!(15 "q8_K" 256 292 Kind::Activation),
    quantised!(16 "iq2_xxs" 256 66 iquants::iq2_xxs, scales 0),
    quantised!(17 "iq2_xs" 256 74 iquants::iq2_xs, scales 0),
    quantised!(18 "iq3_xxs" 256 98 iquants::iq3_xxs, scales 0),
    quantised!(19 "iq1_s" 256 50 iquants::iq1_s, scales 0),
    quantised!(20 "iq4_nl" 32 18 iquants::iq4_nl, scales 0),
    quantised!(21 "iq3_s" 256 110 iquants::iq3_s, scales 0),
    quantised!(22 "iq2_s" 256 82 iquants::iq2_s, scales 0),
    quantised!(23 "iq4_xs" 256 136 iquants::iq4_xs, scales 0),
    sizes!(24 "i8" 1 1 Kind::Integer),
    sizes!(25 "i16" 1 2 Kind::Integer),
    sizes!(26 "i32" 1 4 Kind::Integer),
    sizes!(27 "i64" 1 8 Kind::Integer),
    float!(28 "f64" 8 None, |b| float::from_f64(f64::from_le_bytes(*b)),
        u64::from_le_bytes(*b) & (0x7ff << 52) == 0x7ff << 52),
    quantised!(29 "iq1_m" 256 56 iquants::iq1_m, |b| iquants::iq1_m_nonfinite(b)),
    float!(30 "bf16" 2 Some(Float::Bf16), |b| float::from_bf16(u16::from_le_bytes(*b)),
        u16::from_le_bytes(*b) & 0x7f80 == 0x7f80),
    quantised!(34 "tq1_0" 256 54 ternary::tq1_0, scales 52),
    quantised!(35 "tq2_0" 256 66 ternary::tq2_0, scales 64),
    quantised!(39 "mxfp4" 32 17 microscale::mxfp4, |b| microscale::mxfp4_overflows(b)),
    // No code of nvfp4 is NaN or infinite.
    quantised!(40 "nvfp4" 64 36 microscale::nvfp4, |_b| false),
    quantised!(41 "q1_0" 128 18 lowbit::q1_0, scales 0),
    quantised!(42 "q2_0" 64 18 lowbit::q2_0, scales 0),
];

/// The type with this id, if ggml has it.
pub fn by_id(id: u32) -> Option<&'static GgmlType> {
    TYPES.iter().find(|t| t.id == id)
}

/// Why [`by_id`] knows no such type, as the end of a sentence.
pub fn why_unknown(id: u32) -> String {
    match id {
        4 => "type 4 (q4_2) was removed by ggml; older Ollama wrote MXFP4 under this id: \
              get the model as a current GGUF"
            .into(),
        5 => "type 5 (q4_3) was removed by ggml: get the model as a current GGUF".into(),
        31..=33 => format!(
            "type {id} (q4_0 repacked for one CPU) was removed by ggml: get the q4_0 file of this model"
        ),
        36..=38 => format!(
            "type {id} (iq4_nl repacked for one CPU) was removed by ggml: get the iq4_nl file of this model"
        ),
        97..=399 => format!(
            "type {id} is an ik_llama.cpp type, which llama.cpp does not have: \
             get a GGUF made for llama.cpp"
        ),
        _ => format!("type {id} is unknown to ggml 0.25: a damaged file, or a newer format"),
    }
}

impl GgmlType {
    /// Whether elements are packed in blocks with scales, as weights in files are.
    pub fn is_quantised(&self) -> bool {
        matches!(self.kind, Kind::Quantised(_))
    }

    /// Whether elements are f64, f32, f16 or bf16.
    pub fn is_float(&self) -> bool {
        matches!(self.kind, Kind::Float { .. })
    }

    /// Whether elements are signed integers of 8 to 64 bits.
    pub fn is_integer(&self) -> bool {
        matches!(self.kind, Kind::Integer)
    }

    /// Whether this is a type of intermediate results (q8_1, q8_K), which files never hold.
    pub fn is_activation(&self) -> bool {
        matches!(self.kind, Kind::Activation)
    }

    /// The dtype to which decoding is a plain copy, for f32, f16 and bf16.
    pub fn same_float(&self) -> Option<Float> {
        match self.kind {
            Kind::Float { same, .. } => same,
            _ => None,
        }
    }

    /// Bytes of a row of `cols` elements; `None` when they are no whole number of blocks or the
    /// product is too large.
    pub fn row_bytes(&self, cols: u64) -> Option<u64> {
        cols.is_multiple_of(self.block).then_some(cols / self.block)?.checked_mul(self.bytes)
    }

    /// Decodes whole blocks to `to`, little-endian, on one thread. Neither slice need be aligned.
    ///
    /// # Panics
    ///
    /// When the type is an integer or activation type, `blocks` is no whole number of blocks, or `out`
    /// is not exactly the elements times [`Float::size`].
    pub fn decode(&self, blocks: &[u8], to: Float, out: &mut [u8]) {
        self.decode_for(Vectors::best(), blocks, to, out);
    }

    /// [`GgmlType::decode`] with the vector instructions that every CPU of the target has: the same
    /// bits, slower. For tests and benchmarks.
    #[doc(hidden)]
    pub fn decode_portable(&self, blocks: &[u8], to: Float, out: &mut [u8]) {
        self.decode_for(Vectors::PORTABLE, blocks, to, out);
    }

    fn decode_for(&self, vectors: Vectors, blocks: &[u8], to: Float, out: &mut [u8]) {
        let elements = self.whole_blocks(blocks) * self.block as usize;
        assert_eq!(out.len(), elements * to.size(), "{}: output of {elements} elements", self.name);
        match &self.kind {
            Kind::Float { same, .. } if *same == Some(to) => out.copy_from_slice(blocks),
            Kind::Float { code, .. } | Kind::Quantised(code) => (code.decode)(vectors, blocks, to, out),
            Kind::Integer | Kind::Activation => panic!("{} has no decoder", self.name),
        }
    }

    /// The number of blocks of which some element decodes to a NaN or an infinity in f32; for float
    /// types, of elements that are one. Looks at scales only, so it runs at the speed of memory. Integers
    /// have none. A finite value too large for f16 is not counted.
    ///
    /// # Panics
    ///
    /// When `blocks` is no whole number of blocks.
    pub fn count_nonfinite(&self, blocks: &[u8]) -> u64 {
        self.whole_blocks(blocks);
        match &self.kind {
            Kind::Float { code, .. } | Kind::Quantised(code) => (code.nonfinite)(Vectors::best(), blocks),
            Kind::Integer | Kind::Activation => 0,
        }
    }

    /// The first block that [`GgmlType::count_nonfinite`] would count.
    ///
    /// # Panics
    ///
    /// When `blocks` is no whole number of blocks.
    pub fn first_nonfinite(&self, blocks: &[u8]) -> Option<u64> {
        self.whole_blocks(blocks);
        let size = self.bytes as usize;
        let piece = (1 << 16) / size;
        let (at, piece) = blocks
            .chunks(piece * size)
            .enumerate()
            .find(|(_, p)| self.count_nonfinite(p) > 0)
            .map(|(i, p)| (i * piece, p))?;
        let within = piece.chunks_exact(size).position(|b| self.count_nonfinite(b) > 0)?;
        Some((at + within) as u64)
    }

    fn whole_blocks(&self, blocks: &[u8]) -> usize {
        let size = self.bytes as usize;
        assert!(blocks.len().is_multiple_of(size), "{}: {} bytes of blocks", self.name, blocks.len());
        blocks.len() / size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_rise_and_names_differ() {
        assert!(TYPES.windows(2).all(|w| w[0].id < w[1].id && w[0].name != w[1].name));
        assert_eq!(by_id(12).map(|t| t.name), Some("q4_K"));
        assert!(by_id(4).is_none() && by_id(43).is_none() && by_id(u32::MAX).is_none());
    }

    #[test]
    fn a_row_is_whole_blocks_and_fits() {
        let q4_k = by_id(12).unwrap();
        assert_eq!(q4_k.row_bytes(512), Some(288));
        assert_eq!(q4_k.row_bytes(0), Some(0));
        assert_eq!(q4_k.row_bytes(128), None);
        assert_eq!(by_id(28).unwrap().row_bytes(1 << 61), None);
    }

    #[test]
    fn every_unknown_type_says_whose_it_is() {
        assert!(why_unknown(4).contains("Ollama"));
        assert!(why_unknown(33).contains("removed by ggml"));
        assert!(why_unknown(139).contains("ik_llama.cpp"));
        assert!(why_unknown(1000).contains("unknown"));
    }
}
