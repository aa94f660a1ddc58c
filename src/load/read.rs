//! File bytes into host memory, by the way that is fastest for where they are.

use super::Shard;
use crate::error::{Error, Result};
use memmap2::Mmap;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{Advice, madvise};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buffers, offsets and lengths of reads past the page cache are multiples of this, which suits
/// every disk in use.
pub const ALIGN: usize = 4096;

/// How file bytes reach host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Chunks in the page cache are read from it, others past it.
    #[default]
    Auto,
    /// Through the page cache, with `pread`.
    Buffered,
    /// Past the page cache; as `Buffered` where the file system cannot.
    Direct,
    /// Copied from a mapping of the page cache.
    Mapped,
    /// Copied from a mapping with stores that bypass the processor's caches.
    Streamed,
}

/// One shard's bytes.
pub struct Source<'a> {
    shard: &'a Shard,
    method: Method,
    direct: Option<File>,
    map: Option<Mmap>,
    read_direct: AtomicU64,
}

impl<'a> Source<'a> {
    pub fn new(shard: &'a Shard, method: Method) -> Result<Self> {
        let direct = match method {
            Method::Auto | Method::Direct => open_direct(shard),
            _ => None,
        };
        let map = match method {
            Method::Mapped | Method::Streamed => {
                // SAFETY: nothing here relies on the bytes staying the same; see `copy_mapped` for a
                // file that shrinks.
                Some(unsafe { Mmap::map(shard.file()) }.map_err(|e| Error::io(shard.path(), "map", e))?)
            }
            _ => None,
        };
        Ok(Source { shard, method, direct, map, read_direct: AtomicU64::new(0) })
    }

    /// Bytes read past the page cache so far.
    pub fn read_direct(&self) -> u64 {
        self.read_direct.load(Ordering::Relaxed)
    }

    /// Reads `len` bytes at `offset` into `buffer`, whose address, like `offset`, is a multiple of
    /// [`ALIGN`]; it is at least `len` rounded up to that. Past `len`, its bytes are left undefined.
    pub fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
        if let Some(map) = &self.map {
            return self.copy_mapped(map, &mut buffer[..len], offset);
        }
        if let Some(direct) = &self.direct
            && (self.method == Method::Direct || !self.cached(offset, len))
        {
            return self.read(Some(direct), &mut buffer[..len.next_multiple_of(ALIGN)], offset, len);
        }
        self.read(None, &mut buffer[..len], offset, len)
    }

    /// Reads until `len` bytes are there. What a direct read leaves over, or refuses, goes through
    /// the page cache.
    fn read(&self, mut direct: Option<&File>, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            direct = direct.filter(|_| done.is_multiple_of(ALIGN));
            match rustix::io::pread(
                direct.unwrap_or(self.shard.file()),
                &mut buffer[done..],
                offset + done as u64,
            ) {
                Ok(0) => {
                    return Err(Error::shards(
                        self.shard.path().display(),
                        format!(
                            "ends at byte {} while it is loaded, expected {}: load again when nothing writes to it",
                            offset + done as u64,
                            self.shard.entry().bytes
                        ),
                    ));
                }
                Ok(n) => {
                    if direct.is_some() {
                        self.read_direct.fetch_add(n as u64, Ordering::Relaxed);
                    }
                    done += n;
                }
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if direct.is_some() => direct = None,
                Err(e) => return Err(Error::io(self.shard.path(), "read", e)),
            }
        }
        Ok(())
    }

    fn copy_mapped(&self, map: &Mmap, buffer: &mut [u8], offset: u64) -> Result<()> {
        let source = &map[offset as usize..offset as usize + buffer.len()];
        // Faults the pages in at once, and turns a read error or a file that shrank into an error
        // here instead of a signal below.
        // SAFETY: the range lies inside the mapping; the advice changes no bytes.
        match unsafe { madvise(source.as_ptr().cast_mut().cast(), source.len(), Advice::LinuxPopulateRead) } {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(e) => return Err(Error::io(self.shard.path(), "read", e)),
        }
        match self.method {
            Method::Streamed => copy_streaming(buffer, source),
            _ => buffer.copy_from_slice(source),
        }
        Ok(())
    }

    /// Whether the ends and the middle of the range lie in the page cache. Asked by reads that may
    /// not wait; a file system that cannot answer is taken to have them.
    fn cached(&self, offset: u64, len: usize) -> bool {
        let last = len as u64 - 1;
        [0, last / 2, last].into_iter().all(|at| {
            let mut byte = [0];
            let read = rustix::io::preadv2(
                self.shard.file().as_fd(),
                &mut [IoSliceMut::new(&mut byte)],
                offset + at,
                ReadWriteFlags::NOWAIT,
            );
            read != Err(Errno::AGAIN)
        })
    }
}

fn open_direct(shard: &Shard) -> Option<File> {
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(shard.file()));
    rustix::fs::open(own, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        .ok()
        .map(File::from)
}

/// Copies with non-temporal stores where the processor has them.
fn copy_streaming(dst: &mut [u8], src: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && dst.as_ptr().addr().is_multiple_of(32) {
        // SAFETY: the feature is there; equal lengths are checked by the caller's slices below.
        unsafe { copy_streaming_avx2(dst, src) };
        return;
    }
    dst.copy_from_slice(src);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_streaming_avx2(dst: &mut [u8], src: &[u8]) {
    use std::arch::x86_64::*;
    assert_eq!(dst.len(), src.len());
    let whole = dst.len() / 128 * 128;
    // SAFETY: all accesses lie below `whole`; dst is 32-byte aligned by the caller.
    unsafe {
        let (d, s) = (dst.as_mut_ptr(), src.as_ptr());
        let mut i = 0;
        while i < whole {
            _mm_prefetch::<_MM_HINT_NTA>(s.wrapping_add(i + 1024).cast());
            _mm_prefetch::<_MM_HINT_NTA>(s.wrapping_add(i + 1088).cast());
            let a = _mm256_loadu_si256(s.add(i).cast());
            let b = _mm256_loadu_si256(s.add(i + 32).cast());
            let c = _mm256_loadu_si256(s.add(i + 64).cast());
            let e = _mm256_loadu_si256(s.add(i + 96).cast());
            _mm256_stream_si256(d.add(i).cast(), a);
            _mm256_stream_si256(d.add(i + 32).cast(), b);
            _mm256_stream_si256(d.add(i + 64).cast(), c);
            _mm256_stream_si256(d.add(i + 96).cast(), e);
            i += 128;
        }
        _mm_sfence();
    }
    dst[whole..].copy_from_slice(&src[whole..]);
}
