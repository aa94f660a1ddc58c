//! File bytes into host memory, by the way that is fastest for where they are.
//!
//! Reads, never a mapping: a mapping was no faster on the machines measured, and a file that
//! shrinks or a disk that fails would end the process by a signal instead of an error.

use super::Shard;
use super::cached::Cached;
use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
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
}

/// One shard's bytes.
pub struct Source<'a> {
    shard: &'a Shard,
    method: Method,
    cached: Cached<'a>,
    direct: Option<File>,
    read_direct: AtomicU64,
}

impl<'a> Source<'a> {
    pub fn new(shard: &'a Shard, method: Method) -> Result<Self> {
        let direct = match method {
            Method::Auto | Method::Direct => open_direct(shard),
            Method::Buffered => None,
        };
        let cached = Cached::new(shard.file());
        Ok(Source { shard, method, cached, direct, read_direct: AtomicU64::new(0) })
    }

    /// Bytes read past the page cache so far.
    pub fn read_direct(&self) -> u64 {
        self.read_direct.load(Ordering::Relaxed)
    }

    /// Whether most of the file will be read past the page cache, as far as three places tell.
    #[cfg(feature = "cuda")]
    pub fn is_cold(&self) -> bool {
        let bytes = self.shard.entry().bytes as usize;
        self.direct.is_some() && (self.method == Method::Direct || !self.cached(0, bytes))
    }

    /// Reads `len` bytes at `offset` into `buffer`, whose address, like `offset`, is a multiple of
    /// [`ALIGN`]; it is at least `len` rounded up to that. Past `len`, its bytes are left undefined.
    pub fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
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
                    let ends = self.shard.file().metadata().map_or(offset + done as u64, |m| m.len());
                    return Err(Error::shards(
                        self.shard.path().display(),
                        format!(
                            "ends at byte {ends} while it is loaded, expected {}: load again when nothing writes to it",
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

    /// Whether the ends and the middle of the range lie in the page cache.
    fn cached(&self, offset: u64, len: usize) -> bool {
        let last = len as u64 - 1;
        [0, last / 2, last].into_iter().all(|at| self.cached.holds(offset + at))
    }
}

fn open_direct(shard: &Shard) -> Option<File> {
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(shard.file()));
    rustix::fs::open(own, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        .ok()
        .map(File::from)
}
