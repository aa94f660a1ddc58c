//! BLAKE3 leaf chaining values of a file that lies in device memory (`kernels/blake3.cu`).

use super::image::{Image, image};
use super::{Arg, Device, DeviceBuffer, Kernel, Stream};
use crate::error::Result;
use crate::hash::LEAF;

/// A module of its own, so that a load does not wait for the decoders.
pub(super) static IMAGE: Image = image!("blake3");
/// Chunks (1024 bytes) that one block of threads hashes, and such groups in a leaf.
const GROUP: u32 = 128;
const GROUPS_PER_LEAF: u32 = (LEAF / 1024) as u32 / GROUP;
/// Leaves of one launch at most.
const BATCH: u64 = 64;
/// Bytes of a chaining value.
pub const VALUE: usize = 32;

/// Hashes leaves on one GPU. Its calls must be queued on one stream, because they share scratch memory.
pub struct LeafHasher {
    groups: Kernel,
    leaves: Kernel,
    scratch: DeviceBuffer,
}

impl LeafHasher {
    /// Loads the kernels and takes 256 KiB of device memory.
    pub fn new(device: &Device) -> Result<LeafHasher> {
        let module = IMAGE.load(device)?;
        Ok(LeafHasher {
            groups: module.kernel("blake3_groups")?,
            leaves: module.kernel("blake3_leaves")?,
            scratch: device.alloc(BATCH as usize * GROUPS_PER_LEAF as usize * VALUE)?,
        })
    }

    /// Queues the hashing of leaves `first..first + count` of the file of `bytes` bytes at the device
    /// address `file`; 32 bytes for each go to `out`, the device address of leaf `first`'s value.
    ///
    /// # Safety
    /// `file` (16-byte aligned) must be device memory that holds those leaves whole once the stream
    /// gets here, unchanged until it has passed; `out` (4-byte aligned) must be device memory for
    /// `count` values; all calls go to one stream.
    pub unsafe fn queue(
        &self,
        stream: &Stream,
        file: u64,
        bytes: u64,
        first: u64,
        count: u64,
        out: u64,
    ) -> Result<()> {
        let mut done = 0;
        while done < count {
            let n = BATCH.min(count - done);
            let leaf = first + done;
            // SAFETY: the kernels read the file inside `bytes` and the scratch memory, and write the
            // scratch memory and `n` values at `out`; the caller keeps both alive.
            unsafe {
                self.groups.launch(
                    stream,
                    n as u32 * GROUPS_PER_LEAF,
                    GROUP,
                    0,
                    &[Arg::U64(file), Arg::U64(bytes), Arg::U64(leaf), Arg::U64(self.scratch.ptr())],
                )?;
                self.leaves.launch(
                    stream,
                    n as u32,
                    GROUPS_PER_LEAF / 2,
                    0,
                    &[
                        Arg::U64(self.scratch.ptr()),
                        Arg::U64(bytes),
                        Arg::U64(leaf),
                        Arg::U64(out + done * VALUE as u64),
                    ],
                )?;
            }
            done += n;
        }
        Ok(())
    }
}
