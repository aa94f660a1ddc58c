//! Checks the tensors of all files: types, shapes, sizes, extents, overlaps, duplicate names.

use super::file::{Opened, bytes, end};
use super::{Tensor, identify};
use crate::error::{Error, Result, shown, shown_path};
use crate::quant::{self, GgmlType};
use std::collections::{BTreeMap, HashMap};

/// Problems of one kind that are listed one by one; of more, only the number is told.
const LISTED: usize = 50;

/// Checks every tensor and says where its bytes lie. All problems of one kind are told at once.
pub(super) fn tensors(files: &[Opened], notes: &mut Vec<String>) -> Result<Vec<Tensor>> {
    names(files)?;
    let types = types(files)?;
    let tensors = sizes(files, &types)?;
    extents(files, &tensors)?;
    overlaps(files, &tensors)?;
    tails(files, notes);
    Ok(tensors)
}

/// Collects problems of one kind.
#[derive(Default)]
struct Problems {
    listed: Vec<Error>,
    more: usize,
}

impl Problems {
    fn push(&mut self, error: Error) {
        if self.listed.len() < LISTED { self.listed.push(error) } else { self.more += 1 }
    }
    fn finish(mut self) -> Result<()> {
        if self.more > 0 {
            self.listed.push(Error::source("and more", format!("{} more problems like these", self.more)));
        }
        Error::all(self.listed)
    }
}

fn names(files: &[Opened]) -> Result<()> {
    let mut seen = HashMap::new();
    let mut problems = Problems::default();
    for file in files {
        for entry in &file.header.entries {
            let Some(first) = seen.insert(entry.name.as_str(), file) else { continue };
            let place = if std::ptr::eq(first, file) {
                format!("twice in {}", shown_path(&file.path))
            } else {
                format!("in {} and in {}", shown_path(&first.path), shown_path(&file.path))
            };
            problems.push(Error::source(
                &entry.name,
                format!("the tensor is there {place}, expected once: get a sound file"),
            ));
        }
    }
    problems.finish()
}

/// The type of every tensor, file after file; each bad id is told once.
fn types(files: &[Opened]) -> Result<Vec<&'static GgmlType>> {
    let mut types = Vec::new();
    let mut bad: BTreeMap<u32, (&Opened, &str, usize)> = BTreeMap::new();
    for file in files {
        for entry in &file.header.entries {
            match quant::by_id(entry.type_id) {
                Some(ty) => types.push(ty),
                None => bad.entry(entry.type_id).or_insert((file, &entry.name, 0)).2 += 1,
            }
        }
    }
    let mut problems = Problems::default();
    for (id, (file, name, times)) in bad {
        let more = if times > 1 { format!(" (and {} more)", times - 1) } else { String::new() };
        problems.push(Error::source_file(
            &file.path,
            format!("tensor {}{more}: {}", shown(name), quant::why_unknown(id)),
        ));
    }
    problems.finish()?;
    Ok(types)
}

fn sizes(files: &[Opened], types: &[&'static GgmlType]) -> Result<Vec<Tensor>> {
    let mut problems = Problems::default();
    let mut tensors = Vec::with_capacity(types.len());
    let mut types = types.iter();
    for (index, file) in files.iter().enumerate() {
        for (entry, &ty) in file.header.entries.iter().zip(&mut types) {
            let subject = |detail: String| {
                Error::source_file(&file.path, format!("tensor {}: {detail}", shown(&entry.name)))
            };
            let (alignment, ne) = (file.header.alignment, &entry.ne);
            if entry.offset % alignment != 0 {
                problems.push(subject(format!(
                    "its offset {} is no multiple of the alignment {alignment}: the file is damaged",
                    entry.offset
                )));
                continue;
            }
            if ne[0] % ty.block != 0 {
                problems.push(subject(format!(
                    "rows of {} elements, and type {} needs a multiple of its block of {}: \
                     the file is damaged or of an unknown variant",
                    ne[0], ty.name, ty.block
                )));
                continue;
            }
            let Some(bytes) = bytes(ty, ne) else {
                problems.push(subject(format!(
                    "its size overflows (type {}, shape {ne:?}) in a file of {} bytes: the file is damaged",
                    ty.name, file.size
                )));
                continue;
            };
            let Some(offset) = file.header.data_start.checked_add(entry.offset) else {
                problems.push(subject(format!(
                    "its offset {} lies past the end of the file of {} bytes",
                    entry.offset, file.size
                )));
                continue;
            };
            tensors.push(Tensor { name: entry.name.clone(), ty, ne: ne.clone(), file: index, offset, bytes });
        }
    }
    problems.finish()?;
    Ok(tensors)
}

/// One problem per file: the data ends before some tensor does.
fn extents(files: &[Opened], tensors: &[Tensor]) -> Result<()> {
    let end = |t: &Tensor| u128::from(t.offset) + u128::from(t.bytes);
    // Of each file, the tensor that ends last of those past the file's end, and how many there are.
    let mut past: Vec<Option<(&Tensor, usize)>> = vec![None; files.len()];
    for tensor in tensors {
        let file = &files[tensor.file];
        // A tensor without elements may stand where absent padding would have ended.
        let slack = if tensor.bytes == 0 { file.header.alignment } else { 0 };
        if end(tensor) > u128::from(file.size) + u128::from(slack) {
            let (worst, count) = past[tensor.file].unwrap_or((tensor, 0));
            let worst = if end(tensor) > end(worst) { tensor } else { worst };
            past[tensor.file] = Some((worst, count + 1));
        }
    }
    let mut problems = Problems::default();
    for (file, past) in files.iter().zip(past) {
        let Some((worst, count)) = past else { continue };
        let more = if count > 1 { format!(" (and {} more)", count - 1) } else { String::new() };
        problems.push(Error::source_file(
            &file.path,
            identify::partial(&file.path).unwrap_or_else(|| {
                format!(
                    "tensor {}{more}: its {} bytes at byte {} need a file of {} bytes, it has {}: \
                     the file is cut off or damaged, get it again",
                    shown(&worst.name),
                    worst.bytes,
                    worst.offset,
                    end(worst),
                    file.size
                )
            }),
        ));
    }
    problems.finish()
}

fn overlaps(files: &[Opened], tensors: &[Tensor]) -> Result<()> {
    let mut problems = Problems::default();
    let mut order: Vec<&Tensor> = tensors.iter().filter(|t| t.bytes > 0).collect();
    order.sort_by_key(|t| (t.file, t.offset));
    let mut last: Option<&Tensor> = None;
    for tensor in order {
        match last {
            Some(before) if before.file == tensor.file && before.offset + before.bytes > tensor.offset => {
                problems.push(Error::source_file(
                    &files[tensor.file].path,
                    format!(
                        "tensors {} (bytes {} to {}) and {} (bytes {} to {}) overlap: the file is damaged",
                        shown(&before.name),
                        before.offset,
                        before.offset + before.bytes,
                        shown(&tensor.name),
                        tensor.offset,
                        tensor.offset + tensor.bytes
                    ),
                ));
                if tensor.offset + tensor.bytes > before.offset + before.bytes {
                    last = Some(tensor);
                }
            }
            _ => last = Some(tensor),
        }
    }
    problems.finish()
}

/// Remarks on bytes after the last tensor's padding.
fn tails(files: &[Opened], notes: &mut Vec<String>) {
    for file in files {
        if let Some((_, padded)) = end(&file.header)
            && file.size > padded
        {
            notes.push(format!(
                "{}: {} bytes after the last tensor are ignored",
                shown_path(&file.path),
                file.size - padded
            ));
        }
    }
}
