//! The compiled kernels: what scripts/build_kernels.py made of kernels/*.cu.
//!
//! Of each source there is a cubin for every generation of GPUs in [`GENERATIONS`], which the driver
//! takes as it is, and PTX, which it compiles: slow where nothing keeps the result, as in a fresh
//! container, but good for GPUs that came later.

use super::{Device, Module};
use crate::error::{Error, Result};

/// Compute capabilities that have a cubin, as in scripts/build_kernels.py.
const GENERATIONS: [(i32, i32); 7] = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)];

/// One source of `kernels/`, compiled. The images are zlib streams.
pub struct Image {
    /// The source's name, without its ending.
    pub name: &'static str,
    /// In the order of [`GENERATIONS`].
    pub cubins: [&'static [u8]; GENERATIONS.len()],
    /// For every GPU from 8.0 on.
    pub ptx: &'static [u8],
}

/// The [`Image`] of a source of `kernels/`, by its name.
macro_rules! image {
    ($name:literal) => {
        $crate::gpu::image::Image {
            name: $name,
            cubins: [
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_80.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_86.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_89.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_90.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_100.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_103.z")),
                include_bytes!(concat!("../../kernels/generated/", $name, ".sm_120.z")),
            ],
            ptx: include_bytes!(concat!("../../kernels/generated/", $name, ".ptx.z")),
        }
    };
}
pub(super) use image;

impl Image {
    /// Loads the kernels on a GPU. A cubin that the driver refuses (a GPU of the same generation
    /// that takes other code, as Jetsons do) is no error: then the driver compiles the PTX.
    pub fn load(&self, device: &Device) -> Result<Module> {
        if let Some(cubin) = self.cubin(device.info().compute)
            && let Ok(module) = device.module(&self.unpack(cubin)?)
        {
            return Ok(module);
        }
        let mut ptx = self.unpack(self.ptx)?;
        ptx.push(0); // the driver wants text that ends with a zero
        device.module(&ptx)
    }

    /// The cubin for a compute capability: of the same major number, the largest minor one that is
    /// not larger.
    fn cubin(&self, (major, minor): (i32, i32)) -> Option<&'static [u8]> {
        let fits = |(of, at_least): (i32, i32)| of == major && at_least <= minor;
        GENERATIONS.iter().rposition(|&generation| fits(generation)).map(|i| self.cubins[i])
    }

    /// The image as the compiler wrote it.
    pub fn unpack(&self, image: &[u8]) -> Result<Vec<u8>> {
        miniz_oxide::inflate::decompress_to_vec_zlib(image).map_err(|e| {
            Error::device("kernels", format!("{}: this build holds a damaged image: {e}", self.name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes 48..52 of an ELF header are its flags; in a cubin they name the GPU it is for. Its machine,
    /// bytes 18..20, is EM_CUDA = 190.
    #[test]
    fn every_image_is_what_its_place_says() {
        let images = [&super::super::blake3::IMAGE];
        #[cfg(feature = "convert")]
        let images = images.into_iter().chain(super::super::decode::images());
        for image in images {
            for (packed, (major, minor)) in image.cubins.iter().zip(GENERATIONS) {
                let cubin = image.unpack(packed).unwrap();
                assert_eq!(cubin[..4], *b"\x7fELF", "{}", image.name);
                assert_eq!(u16::from_le_bytes([cubin[18], cubin[19]]), 190, "{}", image.name);
                let flags = u32::from_le_bytes(cubin[48..52].try_into().unwrap());
                let number = (major * 10 + minor) as u32;
                assert!(
                    [flags & 0xff, flags >> 8 & 0xff].contains(&number),
                    "{} {number} {flags:#x}",
                    image.name
                );
            }
            let ptx = String::from_utf8(image.unpack(image.ptx).unwrap()).unwrap();
            assert!(ptx.contains(".target sm_80"), "{}", image.name);
        }
    }

    #[test]
    fn a_gpu_gets_the_nearest_cubin_of_its_generation() {
        let image = &super::super::blake3::IMAGE;
        let index = |compute| {
            image.cubin(compute).map(|c| image.cubins.iter().position(|i| i.as_ptr() == c.as_ptr()))
        };
        for (i, generation) in GENERATIONS.into_iter().enumerate() {
            assert_eq!(index(generation), Some(Some(i)), "{generation:?}");
        }
        assert_eq!(index((8, 7)), Some(Some(1)));
        assert_eq!(index((12, 1)), Some(Some(6)));
        assert_eq!(index((7, 5)), None);
        assert_eq!(index((11, 0)), None);
        assert_eq!(index((13, 0)), None);
    }
}
