//! One file: opened, mapped, parsed, and where its data ends.

use super::header::{self, Header};
use super::identify;
use crate::error::{Error, Result, shown_path};
use crate::quant::{self, GgmlType};
use memmap2::Mmap;
use std::fs::{File, Metadata as Stat};
use std::path::{Path, PathBuf};

/// One opened, mapped and parsed file.
pub(super) struct Opened {
    pub path: PathBuf,
    pub file: File,
    pub map: Mmap,
    pub size: u64,
    /// As it was when the file was opened.
    pub stat: Stat,
    pub header: Header,
}

/// Opens, maps and parses a file.
///
/// # Errors
///
/// When it is no sound GGUF, or several one after the other.
pub(super) fn open(path: &Path) -> Result<Opened> {
    let stat = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
    if stat.is_dir() {
        return Err(Error::request(shown_path(path), "a directory among several inputs: give it alone"));
    }
    if !stat.is_file() {
        return Err(Error::source_file(path, "not a regular file: the reader maps it, so give a file"));
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let stat = file.metadata().map_err(|e| Error::io(path, "examine", e))?;
    if stat.len() == 0 {
        return Err(Error::source_file(path, identify::not_gguf(&[]).unwrap_or_default()));
    }
    // SAFETY: the mapping is read-only and private to this process, but another process can change
    // the file. Changed bytes give wrong values, never a wild read: every length is read once and
    // checked before use, and `Gguf::unchanged` tells. A file that shrinks raises SIGBUS on access;
    // the converter installs a handler that says so.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map", e))?;
    let part = || identify::partial(path);
    if let Some(found) = identify::not_gguf(&map) {
        return Err(Error::source_file(path, part().unwrap_or(found)));
    }
    let header =
        header::parse(path, &map).map_err(|problem| Error::source_file(path, part().unwrap_or(problem)))?;
    if let Some(at) = second_header(&header, &map) {
        return Err(Error::source_file(
            path,
            format!(
                "concatenated GGUF: second header at byte {at}; splits cannot be joined with cat: \
                 use the split files themselves, or join them with llama-gguf-split --merge"
            ),
        ));
    }
    Ok(Opened { path: path.to_owned(), file, size: map.len() as u64, map, stat, header })
}

/// Bytes of a tensor; `None` when they or its elements pass what ggml can count (i64).
pub(super) fn bytes(ty: &GgmlType, ne: &[u64]) -> Option<u64> {
    let limit = |n: u64| (n <= i64::MAX as u64).then_some(n);
    for &n in ne {
        limit(n)?;
    }
    if ne.contains(&0) {
        return Some(0);
    }
    ne.iter().try_fold(1u64, |product, &n| limit(product.checked_mul(n)?))?;
    ne[1..].iter().try_fold(limit(ty.row_bytes(ne[0])?)?, |product, &n| limit(product.checked_mul(n)?))
}

/// Where the data of a file ends, and where its padding does; `None` when its tensors are not sound.
pub(super) fn end(header: &Header) -> Option<(u64, u64)> {
    let mut end = header.data_start;
    for entry in &header.entries {
        let size = bytes(quant::by_id(entry.type_id)?, &entry.ne)?;
        if size > 0 {
            end = end.max(header.data_start.checked_add(entry.offset)?.checked_add(size)?);
        }
    }
    Some((end, end.checked_next_multiple_of(header.alignment)?))
}

/// Where a second GGUF follows the last tensor, as `cat` leaves it.
fn second_header(header: &Header, file: &[u8]) -> Option<u64> {
    let (end, padded) = end(header)?;
    [end, padded].into_iter().find(|&at| {
        usize::try_from(at).ok().and_then(|at| file.get(at..)).is_some_and(|rest| rest.starts_with(b"GGUF"))
    })
}
