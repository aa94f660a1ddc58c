//! Decoding of ggml blocks in device memory (`kernels/decode_*.cu`): the same bits as
//! [`GgmlType::decode`] on the CPU.
//!
//! The kernels of a family are loaded when a type of it is first decoded. [`Decoder`]
//! works on device memory; [`super::batch`] takes and gives host memory.

use super::image::{Image, image};
use super::{Arg, Device, Kernel, Module, Stream};
use crate::error::{Error, Result};
use crate::quant::{Float, GgmlType};
use crate::sync;
use std::collections::HashMap;
use std::sync::Mutex;

/// A source of kernels, compiled, and the types it decodes.
struct Family {
    image: Image,
    types: &'static [&'static str],
}

macro_rules! family {
    ($name:literal $($ty:literal)*) => {
        Family { image: image!($name), types: &[$($ty),*] }
    };
}

/// The families of src/quant; the integers have no decoder.
static FAMILIES: [Family; 7] = [
    family!("decode_float" "f32" "f16" "bf16" "f64"),
    family!("decode_legacy" "q4_0" "q4_1" "q5_0" "q5_1" "q8_0"),
    family!("decode_kquants" "q2_K" "q3_K" "q4_K" "q5_K" "q6_K"),
    family!("decode_iquants" "iq1_s" "iq1_m" "iq2_xxs" "iq2_xs" "iq2_s" "iq3_xxs" "iq3_s" "iq4_nl" "iq4_xs"),
    family!("decode_ternary" "tq1_0" "tq2_0"),
    family!("decode_microscale" "mxfp4" "nvfp4"),
    family!("decode_lowbit" "q1_0" "q2_0"),
];

/// Warps of one thread block, as WARPS in kernels/decode.cuh.
const WARPS: u32 = 8;
/// Elements of one step of a warp, as STEP in kernels/decode.cuh.
const STEP: u64 = 256;

/// The same range of elements of each of several rows of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Number of rows.
    pub rows: u64,
    /// From one row of blocks to the next, in bytes: a multiple of the block's.
    pub row_bytes: u64,
    /// First wanted element of each row; it may lie inside a block.
    pub first: u64,
    /// Wanted elements of each row.
    pub count: u64,
    /// From one row of the result to the next, in elements.
    pub stride: u64,
}

impl Part {
    /// Everything in `blocks` blocks that follow each other.
    pub fn whole(ty: &GgmlType, blocks: u64) -> Part {
        let count = blocks * ty.block;
        Part { rows: 1, row_bytes: blocks * ty.bytes, first: 0, count, stride: count }
    }

    /// Blocks of a row that hold wanted elements.
    pub(super) fn blocks(&self, ty: &GgmlType) -> u64 {
        (self.first % ty.block + self.count).div_ceil(ty.block)
    }

    /// Whether it lies inside its rows, which are whole blocks.
    pub(super) fn fits(&self, ty: &GgmlType) -> bool {
        self.row_bytes.is_multiple_of(ty.bytes)
            && self
                .first
                .checked_add(self.count)
                .is_some_and(|end| end <= self.row_bytes / ty.bytes * ty.block)
            && (self.rows <= 1 || self.stride >= self.count)
    }
}

/// The decoding kernels of one GPU. Usable from any thread.
pub struct Decoder {
    device: Device,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    kernels: HashMap<String, Kernel>,
}

impl Decoder {
    /// Loads nothing yet.
    pub fn new(device: &Device) -> Decoder {
        Decoder { device: device.clone(), loaded: Mutex::default() }
    }

    /// The GPU it works on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where the address of a block of `ty` in device memory must be a multiple of: the largest power
    /// of two, at most 16, that divides its bytes (`block_align` in kernels/decode.cuh).
    pub fn alignment(ty: &GgmlType) -> u64 {
        1 << ty.bytes.trailing_zeros().min(4)
    }

    /// Queues decoding of `part` of the rows of `ty` at the device address `src` to `to` at `dst`.
    ///
    /// The fastest writes need `dst` and rows of the result at multiples of 16 bytes (of 32 for f32) and
    /// `part.first` at a multiple of 8; anything else gives the same result.
    ///
    /// # Errors
    /// When `ty` has no kernel ([`has_kernel`]) or the driver refuses.
    ///
    /// # Panics
    /// When `part` does not lie inside its rows, or an address
    /// is not aligned: `src` as [`Decoder::alignment`] says, `dst` to an element.
    ///
    /// # Safety
    /// `src` must be device memory of this GPU that holds the rows once the stream gets here, unchanged
    /// until it has passed; `dst` must be writable device memory for the result, apart from `src`.
    pub unsafe fn decode(
        &self,
        ty: &GgmlType,
        to: Float,
        src: u64,
        dst: u64,
        part: &Part,
        stream: &Stream,
    ) -> Result<()> {
        assert!(part.fits(ty), "{}: {part:?}", ty.name);
        assert!(
            src.is_multiple_of(Self::alignment(ty)) && dst.is_multiple_of(to.size() as u64),
            "{}",
            ty.name
        );
        if part.rows == 0 || part.count == 0 {
            return Ok(());
        }
        let mut part = *part;
        let row = part.row_bytes / ty.bytes * ty.block;
        if part.count == row && part.stride == row {
            let blocks = part.rows * (part.row_bytes / ty.bytes);
            part = Part::whole(ty, blocks);
        }
        let (blocks, skip) = (part.blocks(ty), part.first % ty.block);
        let tiles = blocks.div_ceil(steps(ty) * STEP / ty.block);
        let total = part.rows.checked_mul(tiles).and_then(|n| u32::try_from(n).ok()).ok_or_else(|| {
            Error::device(
                &self.device,
                format!("{} rows of {} elements are too many for one launch", part.rows, part.count),
            )
        })?;
        let size = to.size() as u64;
        let vector = dst.is_multiple_of(16)
            && skip.is_multiple_of(8)
            && (part.rows == 1 || (part.stride * size).is_multiple_of(16));
        let args = [
            Arg::U64(src + part.first / ty.block * ty.bytes),
            Arg::U64(dst),
            Arg::U64(part.row_bytes),
            Arg::U64(blocks),
            Arg::U64(skip),
            Arg::U64(part.count),
            Arg::U64(part.stride),
            Arg::U32(tiles as u32),
            Arg::U32(total),
            Arg::U32(vector.into()),
        ];
        let family = family(ty).ok_or_else(|| {
            Error::device(&self.device, format!("no kernel decodes {}: use the CPU", ty.name))
        })?;
        let kernel = self.kernel(family, &format!("decode_{}_{}", ty.name, to.name().to_lowercase()))?;
        // SAFETY: the arguments are those of DECODE_ENTRY; the caller vouches for the memory, and `fits`
        // keeps the kernel inside it.
        unsafe { kernel.launch(stream, total.div_ceil(WARPS), WARPS * 32, 0, &args) }
    }

    fn kernel(&self, family: &'static Family, name: &str) -> Result<Kernel> {
        let mut loaded = sync::lock(&self.loaded);
        if let Some(kernel) = loaded.kernels.get(name) {
            return Ok(kernel.clone());
        }
        let module = match loaded.modules.get(family.image.name) {
            Some(module) => module.clone(),
            None => family.image.load(&self.device)?,
        };
        loaded.modules.insert(family.image.name, module.clone());
        let kernel = module.kernel(name)?;
        loaded.kernels.insert(name.to_owned(), kernel.clone());
        Ok(kernel)
    }
}

/// Steps of a tile, which is what one warp decodes, as STEPS in kernels/decode.cuh.
fn steps(ty: &GgmlType) -> u64 {
    match STEP * ty.bytes / ty.block {
        0..=288 => 8,
        289..=1024 => 4,
        _ => 2,
    }
}

/// The kernels that decode `ty`; none for integers, and for a type whose kernel is not yet written.
fn family(ty: &GgmlType) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.types.contains(&ty.name))
}

/// Whether there is a kernel that decodes `ty`. Without one, the CPU does.
pub fn has_kernel(ty: &GgmlType) -> bool {
    family(ty).is_some()
}

/// All compiled decoders.
#[cfg(test)]
pub(super) fn images() -> impl Iterator<Item = &'static Image> {
    FAMILIES.iter().map(|f| &f.image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::TYPES;

    #[test]
    fn every_decodable_type_has_its_three_kernels() {
        for ty in TYPES.iter().filter(|t| t.is_float() || t.is_quantised()) {
            let image = &family(ty).expect(ty.name).image;
            let ptx = String::from_utf8(image.unpack(image.ptx).unwrap()).unwrap();
            for to in Float::ALL {
                let name = format!("decode_{}_{}", ty.name, to.name().to_lowercase());
                assert!(ptx.contains(&format!(".entry {name}(")), "{name}");
                for packed in image.cubins {
                    let cubin = image.unpack(packed).unwrap();
                    let section = format!(".text.{name}\0").into_bytes();
                    assert!(cubin.windows(section.len()).any(|w| w == section), "{name}");
                }
            }
        }
    }

    #[test]
    fn a_type_without_a_kernel_is_known_as_such() {
        for ty in &TYPES {
            assert_eq!(has_kernel(ty), ty.is_float() || ty.is_quantised(), "{}", ty.name);
        }
    }

    #[test]
    fn the_kernels_use_the_grids_of_the_decoders() {
        let numbers = |text: &str, end: &str| {
            let table = text.split(end).next().unwrap_or_default();
            table.split("0x").skip(1).map(|n| n[..4].to_owned()).collect::<Vec<_>>()
        };
        let header = include_str!("../../kernels/grids.cuh");
        let source = include_str!("../quant/grids.rs");
        for name in ["IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"] {
            let at = source.split(&format!("const {name}_PACKED: ")).nth(1).expect(name);
            let here = header.split(&format!("short {name}[")).nth(1).expect(name);
            let (there, here) = (numbers(at, "];"), numbers(here, "};"));
            assert!(there.len() >= 256 && there == here, "{name}: run scripts/emit_grids.py");
        }
    }

    #[test]
    fn a_part_must_lie_inside_its_rows() {
        let q4_k = crate::quant::by_id(12).unwrap();
        let part = Part { rows: 2, row_bytes: 288, first: 100, count: 300, stride: 300 };
        assert!(part.fits(q4_k));
        assert_eq!(part.blocks(q4_k), 2);
        assert!(!Part { count: 413, stride: 413, ..part }.fits(q4_k));
        assert!(!Part { stride: 299, ..part }.fits(q4_k));
        assert!(!Part { row_bytes: 290, ..part }.fits(q4_k));
        assert!(!Part { first: u64::MAX, ..part }.fits(q4_k));
        assert_eq!(Part { first: 250, count: 6, ..part }.blocks(q4_k), 1);
        assert_eq!(Part { first: 250, count: 7, ..part }.blocks(q4_k), 2);
    }
}
