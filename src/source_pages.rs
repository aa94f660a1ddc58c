//! The source's pages around a run: read ahead of it, let go of behind it.
//!
//! A source of hundreds of gigabytes is read once, from its first byte to its last. Left alone, the
//! kernel reads it in small pieces as it is touched, keeps every page mapped (a container's limit
//! counts them) and evicts what other programs need to make room for pages that nobody reads again.

use crate::gguf::{Gguf, SourceFile};
use crate::load::cached::Cached;
use crate::sync::lock;
use rustix::fs::{Advice, fadvise};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Mutex;

/// A place in the source: index of a file and byte offset.
pub type Place = (usize, u64);

/// How far ahead of the workers the source is read: two stretches of eight ranks' leaves.
const READ_AHEAD: u64 = 256 << 20;

/// What is let go of at once. One page of each stretch stands for all when the run begins and asks
/// what was in the page cache already: 25,000 questions for 400 GB, a tenth of a second.
const STRETCH: u64 = 16 << 20;

/// The pages of a model's files while a run reads them.
pub struct SourcePages<'a> {
    gguf: &'a Gguf,
    /// By file and stretch: it was in the page cache before the run, so it stays there.
    kept: Vec<Vec<bool>>,
    /// How far the source has been asked for ahead of its use.
    ahead: Mutex<Place>,
    behind: Mutex<Behind>,
}

/// What workers are at, and what is let go of.
#[derive(Default)]
struct Behind {
    /// How many workers read from each place on.
    reading: BTreeMap<Place, usize>,
    /// Everything before is let go of; a multiple of [`STRETCH`].
    released: Place,
}

impl<'a> SourcePages<'a> {
    /// Looks at what the page cache holds.
    pub fn new(gguf: &'a Gguf) -> Self {
        let stretches = |file: &SourceFile| {
            let cached = Cached::new(file.file());
            (0..file.size.div_ceil(STRETCH)).map(|s| cached.holds(s * STRETCH)).collect()
        };
        let kept = gguf.files().iter().map(stretches).collect();
        SourcePages { gguf, kept, ahead: Mutex::default(), behind: Mutex::default() }
    }

    /// A worker begins to read at `place` or behind it. Workers begin in the order of their places.
    pub fn begin(&self, place: Place) {
        *lock(&self.behind).reading.entry(place).or_default() += 1;
        self.read_ahead(place);
    }

    /// The worker that began at `place` is done.
    pub fn end(&self, place: Place) {
        let mut behind = lock(&self.behind);
        if let Some(workers) = behind.reading.get_mut(&place) {
            *workers -= 1;
            if *workers == 0 {
                behind.reading.remove(&place);
            }
        }
        // Nobody will begin before the first place that is still read, or before this one. Where a leaf
        // holds the end of one tensor and the begin of another, it may read what lies before its place:
        // that is fetched again, and stays until the end.
        let (file, offset) = behind.reading.keys().next().copied().unwrap_or(place);
        let until = (file, offset - offset % STRETCH);
        if until > behind.released {
            let from = std::mem::replace(&mut behind.released, until);
            drop(behind);
            self.release(from, until);
        }
    }

    /// The run is over: nothing is read any more, also of what was fetched again.
    pub fn finish(self) {
        self.release((0, 0), (self.gguf.files().len(), 0));
    }

    /// Asks the kernel for the source some way ahead of its use, so that the disk reads while the
    /// workers compute. Mapped pages read on demand come in small pieces.
    fn read_ahead(&self, (file, offset): Place) {
        // One worker at a time is enough; the others have better things to do.
        let Ok(mut ahead) = self.ahead.try_lock() else { return };
        let wanted = (file, offset + READ_AHEAD);
        if *ahead >= wanted {
            return;
        }
        let from = if ahead.0 == file { ahead.1.max(offset) } else { offset };
        *ahead = wanted;
        // Advice only: what fails here is read when it is touched.
        let _ =
            fadvise(self.gguf.files()[file].file(), from, NonZeroU64::new(wanted.1 - from), Advice::WillNeed);
    }

    /// Takes the pages between two places out of the process, and out of the page cache where the run
    /// brought them there. Advice only: a page that stays costs memory, nothing else.
    fn release(&self, from: Place, until: Place) {
        for (index, file) in self.gguf.files().iter().enumerate().take(until.0 + 1).skip(from.0) {
            let begin = if index == from.0 { from.1 } else { 0 };
            let end = if index == until.0 { until.1 } else { file.size };
            file.unmap(begin..end);
            for begin in (begin..end).step_by(STRETCH as usize) {
                let kept = self.kept[index].get((begin / STRETCH) as usize).copied().unwrap_or(true);
                let length = NonZeroU64::new(STRETCH.min(end - begin));
                if !kept {
                    let _ = fadvise(file.file(), begin, length, Advice::DontNeed);
                }
            }
        }
    }
}
