//! Whether a byte of a file lies in the page cache, without bringing it there.

use memmap2::Mmap;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;

/// A file whose place is asked for.
pub struct Cached<'a> {
    file: &'a File,
    /// Asked where it lies, never read. Without it, reads alone tell.
    map: Option<Mmap>,
    page: usize,
}

impl<'a> Cached<'a> {
    pub fn new(file: &'a File) -> Self {
        // SAFETY: its bytes are not read.
        let map = unsafe { Mmap::map(file) }.ok();
        Cached { file, map, page: rustix::param::page_size() }
    }

    /// Whether the page of the byte at `offset` is there.
    ///
    /// `mincore` reports residency, but answers "resident" for every page when we may only read the
    /// file. So a `RWF_NOWAIT` read must confirm. `mincore` goes first because that read would itself
    /// start fetching the page. A file system that cannot answer is taken to hold every page.
    pub fn holds(&self, offset: u64) -> bool {
        self.resident(offset) && self.readable(offset)
    }

    fn resident(&self, offset: u64) -> bool {
        let Some((map, offset)) = self.map.as_ref().zip(usize::try_from(offset).ok()) else { return true };
        let begin = offset - offset % self.page;
        if begin >= map.len() {
            return true;
        }
        let mut found = 0u8;
        // SAFETY: the page lies in the mapping, `found` has room for one page's answer.
        let status = unsafe { libc::mincore(map.as_ptr().add(begin).cast_mut().cast(), 1, &mut found) };
        status != 0 || found & 1 == 1
    }

    fn readable(&self, offset: u64) -> bool {
        let mut byte = [0];
        let into = &mut [IoSliceMut::new(&mut byte)];
        let read = rustix::io::preadv2(self.file.as_fd(), into, offset, ReadWriteFlags::NOWAIT);
        read != Err(Errno::AGAIN)
    }
}
