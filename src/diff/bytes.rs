//! What is known of two tensors' bytes: by the hashes of the leaves they lie in, or by reading them.

use super::{Found, Settings};
use crate::error::{Error, Result};
use crate::hash::LEAF;
use crate::hash::leaf_range;
use crate::manifest::{Shard, Tensor};
use crate::sync::{into_inner, lock};
use crate::verify;
use crate::workers;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Bytes compared at a time.
const CHUNK: usize = 1 << 20;
/// Leaves named for one tensor; more are counted.
const LISTED_LEAVES: usize = 4;

/// What is known of a tensor's bytes.
pub(super) enum Bytes {
    Equal,
    /// All that is known: they lie in leaves that hold this tensor alone and differ.
    Differ,
    /// These leaves differ and hold other tensors too.
    InLeaves(Vec<u64>),
    /// So many of all differ, the first at this byte of the tensor.
    Counted {
        first: u64,
        differ: u64,
        of: u64,
    },
    /// It lies elsewhere, or has another size.
    Unknown,
}

impl Bytes {
    /// What there is to say.
    pub(super) fn text(&self) -> Option<String> {
        match self {
            Bytes::Equal | Bytes::Unknown => None,
            Bytes::Differ => Some("bytes differ".into()),
            Bytes::Counted { first, differ, of } => {
                Some(format!("bytes: {differ} of {of} differ, the first at {first}"))
            }
            Bytes::InLeaves(leaves) => {
                let listed: Vec<_> = leaves.iter().take(LISTED_LEAVES).map(u64::to_string).collect();
                let more = if leaves.len() > LISTED_LEAVES { ", …" } else { "" };
                Some(format!("bytes may differ: changed leaf {}{more}", listed.join(", ")))
            }
        }
    }
}

/// Two places whose bytes are to be compared, and the entry that they decide.
pub(super) struct Read<'m> {
    pub(super) found: usize,
    pub(super) a: (&'m Shard, &'m Tensor),
    pub(super) b: (&'m Shard, &'m Tensor),
}

/// What the leaves' hashes say of the bytes of a tensor that both shards have.
pub(super) fn hashed(a: (&Shard, &Tensor), b: (&Shard, &Tensor)) -> Bytes {
    let ((ours, x), (theirs, y)) = (a, b);
    if (x.bytes, y.bytes) == (0, 0) {
        return Bytes::Equal;
    }
    if (x.offset, x.bytes) != (y.offset, y.bytes) {
        return Bytes::Unknown;
    }
    if ours.blake3 == theirs.blake3 && ours.bytes == theirs.bytes {
        return Bytes::Equal;
    }
    let mut changed = Vec::new();
    let mut alone = false;
    for leaf in leaves(x) {
        let range = leaf_range(leaf, ours.bytes);
        // The only leaf of a file is hashed as its root, and so is comparable with no inner leaf.
        let single = |s: &Shard| s.leaves.len() == 1;
        if range != leaf_range(leaf, theirs.bytes) || single(ours) != single(theirs) {
            return Bytes::Unknown;
        }
        if ours.leaves[leaf as usize] != theirs.leaves[leaf as usize] {
            changed.push(leaf);
            alone |= x.offset <= range.start && range.end <= x.offset + x.bytes;
        }
    }
    if changed.is_empty() {
        Bytes::Equal
    } else if alone {
        Bytes::Differ
    } else {
        Bytes::InLeaves(changed)
    }
}

/// The leaves in which a tensor of at least one byte lies.
fn leaves(tensor: &Tensor) -> std::ops::RangeInclusive<u64> {
    tensor.offset / LEAF..=(tensor.offset + tensor.bytes - 1) / LEAF
}

/// Reads and compares the bytes of `reads`; gives what they decide.
pub(super) fn compare(
    (ours, theirs): (&Path, &Path),
    found: &[Found],
    reads: &[Read],
    settings: &Settings,
) -> Result<Vec<(usize, Bytes)>> {
    let ours = Files::open(ours, reads.iter().map(|r| r.a.0))?;
    let theirs = Files::open(theirs, reads.iter().map(|r| r.b.0))?;
    let decided = Mutex::new(Vec::new());
    let threads = workers::count(settings.threads, u64::MAX);
    workers::each(threads, reads, settings.stop, |read, buffer| {
        buffer.resize(2 * CHUNK, 0);
        let (x, y) = buffer.split_at_mut(CHUNK);
        let (shard, tensor) = read.a;
        let end = tensor.offset + tensor.bytes;
        // Only the changed leaves where it is known which; the whole tensor otherwise.
        let changed = match &found[read.found].bytes {
            Bytes::InLeaves(changed) => changed.clone(),
            _ => leaves(tensor).collect(),
        };
        let (mut first, mut differ) = (None, 0);
        for leaf in changed {
            let range = leaf_range(leaf, shard.bytes);
            let (start, end) = (range.start.max(tensor.offset), range.end.min(end));
            for at in (start..end).step_by(CHUNK) {
                if settings.stop.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted("stopped before everything was compared".into()));
                }
                let n = CHUNK.min((end - at) as usize);
                let (x, y, at) = (&mut x[..n], &mut y[..n], at - tensor.offset);
                ours.read(read.a, at, x)?;
                theirs.read(read.b, at, y)?;
                for (i, _) in x.iter().zip(y).enumerate().filter(|(_, (x, y))| x != y) {
                    first.get_or_insert(at + i as u64);
                    differ += 1;
                }
            }
        }
        let bytes = first.map_or(Bytes::Equal, |first| Bytes::Counted { first, differ, of: tensor.bytes });
        lock(&decided).push((read.found, bytes));
        Ok(())
    })?;
    Ok(into_inner(decided))
}

/// The shard files of one side that are read.
struct Files<'d> {
    dir: &'d Path,
    open: BTreeMap<String, File>,
}

impl<'d> Files<'d> {
    fn open<'m>(dir: &'d Path, shards: impl Iterator<Item = &'m Shard>) -> Result<Files<'d>> {
        let shards: BTreeMap<&str, &Shard> = shards.map(|s| (s.file.as_str(), s)).collect();
        let file = |s: &Shard| Ok((s.file.clone(), verify::open(dir, &s.file, s.bytes)?));
        Ok(Files { dir, open: shards.into_values().map(file).collect::<Result<_>>()? })
    }

    /// Fills `buffer` from byte `at` of the tensor.
    fn read(&self, (shard, tensor): (&Shard, &Tensor), at: u64, buffer: &mut [u8]) -> Result<()> {
        self.open[&shard.file]
            .read_exact_at(buffer, tensor.offset + at)
            .map_err(|e| Error::io(&self.dir.join(&shard.file), "read", e))
    }
}
