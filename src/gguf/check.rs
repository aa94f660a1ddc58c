//! Checks the tensors of all files: types, shapes, sizes, extents, overlaps, duplicate names.

use super::splits::Opened;
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
    tails(files, &tensors, notes)?;
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

/// Bytes of a tensor; `None` when they or its elements pass what ggml can count (i64).
fn bytes(ty: &GgmlType, ne: &[u64]) -> Option<u64> {
    let limit = |n: u64| (n <= i64::MAX as u64).then_some(n);
    for &n in ne {
        limit(n)?;
    }
    if ne.contains(&0) {
        return Some(0);
    }
    ne.iter().try_fold(1u64, |product, &n| limit(product.checked_mul(n)?))?;
    ne[1..].iter().try_fold(ty.row_bytes(ne[0])?, |product, &n| limit(product.checked_mul(n)?))
}

/// One problem per file: the data ends before some tensor does.
fn extents(files: &[Opened], tensors: &[Tensor]) -> Result<()> {
    let mut problems = Problems::default();
    for (index, file) in files.iter().enumerate() {
        let past = |t: &&Tensor| {
            // A tensor without elements may stand where the padding would have ended.
            let size = if t.bytes == 0 { file.size.saturating_add(file.header.alignment) } else { file.size };
            t.file == index && t.offset.checked_add(t.bytes).is_none_or(|end| end > size)
        };
        let Some(worst) = tensors.iter().filter(past).max_by_key(|t| t.offset as u128 + u128::from(t.bytes))
        else {
            continue;
        };
        let cut = tensors.iter().filter(past).count();
        let more = if cut > 1 { format!(" (and {} more)", cut - 1) } else { String::new() };
        problems.push(Error::source_file(
            &file.path,
            identify::partial(&file.path).unwrap_or_else(|| {
                format!(
                    "tensor {}{more}: its {} bytes at byte {} need a file of {} bytes, it has {}: \
                     the file is cut off or damaged, get it again",
                    shown(&worst.name),
                    worst.bytes,
                    worst.offset,
                    u128::from(worst.offset) + u128::from(worst.bytes),
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

/// What follows the last tensor: padding, bytes of no use, or a second GGUF that `cat` put there.
fn tails(files: &[Opened], tensors: &[Tensor], notes: &mut Vec<String>) -> Result<()> {
    let mut problems = Problems::default();
    for (index, file) in files.iter().enumerate() {
        let header = &file.header;
        let end = tensors
            .iter()
            .filter(|t| t.file == index && t.bytes > 0)
            .map(|t| t.offset + t.bytes)
            .max()
            .unwrap_or(header.data_start);
        let padded = end.next_multiple_of(header.alignment);
        let second = [end, padded].into_iter().find(|&at| {
            usize::try_from(at).ok().and_then(|at| file.map.get(at..)).is_some_and(|t| t.starts_with(b"GGUF"))
        });
        if let Some(at) = second {
            problems.push(Error::source_file(
                &file.path,
                format!(
                    "concatenated GGUF: second header at byte {at}; splits cannot be joined with cat: \
                     use the split files themselves, or join them with llama-gguf-split --merge"
                ),
            ));
        } else if file.size > padded {
            notes.push(format!(
                "{}: {} bytes after the last tensor are ignored",
                shown_path(&file.path),
                file.size - padded
            ));
        }
    }
    problems.finish()
}
