//! File bytes into host memory, by the way that is fastest for where they are.
//!
//! Reads, never a mapping: a mapping was no faster on the machines measured, and a file that
//! shrinks or a disk that fails would end the process by a signal instead of an error.

use super::cached::Cached;
use super::{Origin, Shard};
use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Buffers, offsets and lengths of reads past the page cache are multiples of this, which suits
/// every disk in use.
pub const ALIGN: usize = 4096;

/// How file bytes reach host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// What lies in the page cache is read from it, the rest past it.
    #[default]
    Auto,
    /// Through the page cache, with `pread`.
    Buffered,
    /// Past the page cache; as `Buffered` where the file system cannot.
    Direct,
}

/// A shard's file, as an origin.
pub(super) struct ShardFile<'a> {
    shard: &'a Shard,
    method: Method,
    cached: Cached<'a>,
    direct: Option<File>,
    /// Whether the next range is taken to be in the page cache, as the last one was.
    warm: AtomicBool,
    read_direct: AtomicU64,
}

impl<'a> ShardFile<'a> {
    pub fn new(shard: &'a Shard, method: Method) -> Result<Self> {
        let direct = match method {
            Method::Auto | Method::Direct => open_direct(shard),
            Method::Buffered => None,
        };
        let cached = Cached::new(shard.file());
        let places = [1, 2, 3].map(|quarter| shard.entry().bytes / 4 * quarter);
        let warm = direct.is_none() || (method == Method::Auto && places.iter().all(|&at| cached.holds(at)));
        let (warm, read_direct) = (AtomicBool::new(warm), AtomicU64::new(0));
        Ok(ShardFile { shard, method, cached, direct, warm, read_direct })
    }

    /// Reads from the page cache until something is not there; gives the number of bytes. A file
    /// system that cannot do that reads all, as it likes, and says nothing of the next range.
    fn read_cached(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let len = buffer.len();
        // The check costs microseconds; skipping it on a cold file makes the kernel prefetch pages
        // that we then read again with O_DIRECT.
        if !self.warm.load(Ordering::Relaxed) && !self.cached.holds(offset + len as u64 / 2) {
            return Ok(0);
        }
        let done = loop {
            let into = &mut [IoSliceMut::new(buffer)];
            match rustix::io::preadv2(self.shard.file().as_fd(), into, offset, ReadWriteFlags::NOWAIT) {
                Ok(n) => break n,
                Err(Errno::AGAIN) => break 0,
                Err(Errno::INTR) => {}
                Err(_) => return self.read(None, buffer, offset, 0..len).map(|()| len),
            }
        };
        self.warm.store(done == len, Ordering::Relaxed);
        Ok(done)
    }

    /// Reads that part of the range at `offset`. What a direct read leaves over, or refuses, goes
    /// through the page cache.
    fn read(
        &self,
        mut direct: Option<&File>,
        buffer: &mut [u8],
        offset: u64,
        part: Range<usize>,
    ) -> Result<()> {
        let mut done = part.start;
        while done < part.end {
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
}

impl Origin for ShardFile<'_> {
    fn name(&self) -> String {
        self.shard.path().display().to_string()
    }

    fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
        let Some(direct) = &self.direct else {
            return self.read(None, &mut buffer[..len], offset, 0..len);
        };
        let done = match self.method {
            Method::Auto => self.read_cached(&mut buffer[..len], offset)?,
            _ => 0,
        };
        self.read(Some(direct), &mut buffer[..len.next_multiple_of(ALIGN)], offset, done..len)
    }

    fn leaves(&self) -> Option<&[[u8; 32]]> {
        Some(self.shard.leaves())
    }

    /// Before the first read: whether the file lies outside the page cache, as far as three places tell.
    fn is_slow(&self) -> bool {
        !self.warm.load(Ordering::Relaxed)
    }

    fn read_direct(&self) -> u64 {
        self.read_direct.load(Ordering::Relaxed)
    }

    fn finish(&self) -> Result<()> {
        self.shard.check_unchanged()
    }
}

fn open_direct(shard: &Shard) -> Option<File> {
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(shard.file()));
    rustix::fs::open(own, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        .ok()
        .map(File::from)
}
