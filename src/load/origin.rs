//! Where a load's bytes come from.

use crate::error::Result;

/// The bytes of one rank's file, from wherever they come: a file here, ranges over a network, or a GGUF that is
/// converted on the way.
///
/// A load asks for every byte once, from several threads and in any order.
pub trait Origin: Sync {
    /// What messages call it.
    fn name(&self) -> String;

    /// Writes `len` bytes from `offset` on into `buffer`.
    ///
    /// Offsets and buffers are multiples of [`ALIGN`](super::ALIGN), as is the length but at the file's end; the
    /// buffer has at least `len` bytes rounded up to that, and what lies past `len` is left undefined.
    ///
    /// # Errors
    ///
    /// When the bytes cannot be had. The load then ends, and hands out nothing.
    fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()>;

    /// The leaves' chaining values that the bytes must have; `None` where the origin makes the bytes, so that nothing
    /// is there to compare them with.
    fn leaves(&self) -> Option<&[[u8; 32]]>;

    /// Whether bytes come slowly, so that more threads should wait for them at a time.
    fn is_slow(&self) -> bool {
        false
    }

    /// Bytes read past the page cache so far.
    fn read_direct(&self) -> u64 {
        0
    }

    /// Called once every byte was asked for.
    ///
    /// # Errors
    ///
    /// When what was read changed meanwhile.
    fn finish(&self) -> Result<()>;
}
