//! `via = "rows"`: runs of stored rows put in another order, swapped in blocks, or taken in turns from several
//! GGUF tensors; and columns swapped in blocks. Rows move packed.

use super::params::Member;
use super::symbols::Symbols;
use super::tensors::{Model, Swap, View, matrix_shape};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::mapping::{Run, TensorRule};
use std::ops::Range;

/// Runs past which a table is taken for a mistake: each becomes a part of the plan.
const MAX_RUNS: u64 = 1 << 20;

/// The views of a rule's Hugging Face tensor, and its shape.
///
/// # Errors
///
/// When the symbols are no numbers, or runs, groups and blocks do not fit the tensors.
pub(super) fn rows(
    gguf: &Gguf,
    symbols: &Symbols,
    rule: &TensorRule,
    sources: &[usize],
    layer: Option<u64>,
) -> Result<(Vec<View>, Vec<u64>)> {
    let at = layer.unwrap_or(0);
    let wrong = |what: String| Error::source(&gguf.tensors()[sources[0]].name, what);
    let number = |text: &str, rows: u64| {
        let value = symbols.evaluate(text, at, Some(rows));
        value.ok_or_else(|| wrong(format!("{text:?} of its mapping rule is no whole number for this model")))
    };
    let whole = [Run::default()];
    let runs = if rule.rows.is_empty() { &whole[..] } else { &rule.rows[..] };
    let groups = rule.groups.as_deref().map_or(Ok(1), |g| number(g, 0))?;
    let first = matrix_shape(&gguf.tensors()[sources[0]])?;
    let cols = first.get(1).copied().unwrap_or(1);
    let columns = match &rule.columns[..] {
        [] => None,
        texts => Some(swap(texts, cols, |text| number(text, cols)).map_err(wrong)?),
    };
    // For each run its views, of which every group takes an equal share.
    let mut parts: Vec<Vec<View>> = Vec::new();
    let mut held = vec![0; sources.len()];
    let mut count = 0u64;
    for run in runs {
        let of = sources.get(run.of).copied().unwrap_or(sources[0]);
        let tensor = &gguf.tensors()[of];
        let shape = matrix_shape(tensor)?;
        if shape.get(1).copied().unwrap_or(1) != cols || shape.len() != first.len() {
            return Err(wrong(format!(
                "shape {first:?} beside {} {shape:?}: they have no common rows",
                tensor.name
            )));
        }
        let (start, end) = match run.take.as_deref() {
            None => (0, shape[0]),
            Some(take) => {
                let (a, b) = take.split_once("..").unwrap_or((take, ""));
                let end = if b.trim().is_empty() { Ok(shape[0]) } else { number(b, shape[0]) };
                (if a.trim().is_empty() { 0 } else { number(a, shape[0])? }, end?)
            }
        };
        if start > end || end > shape[0] {
            return Err(Error::source(
                &tensor.name,
                format!(
                    "{} rows, expected at least {end}, of which its mapping takes those from {start}",
                    shape[0]
                ),
            ));
        }
        held[run.of.min(sources.len() - 1)] += end - start;
        let pieces = match &run.swap[..] {
            [] => std::iter::once(start..end).collect(),
            texts => {
                let swap = swap(texts, end - start, |text| number(text, shape[0]))
                    .map_err(|what| Error::source(&tensor.name, what))?;
                swap.pieces(start)?
            }
        };
        let share = (end - start).checked_div(groups).filter(|share| share * groups == end - start);
        let Some(share) = share.filter(|share| groups == 1 || share.is_multiple_of(piece_len(&pieces)))
        else {
            return Err(Error::source(
                &tensor.name,
                format!("{} rows of it cannot be divided over {groups} groups", end - start),
            ));
        };
        // Cut so that no piece lies in two groups.
        let mut views = Vec::new();
        for piece in pieces {
            let step = if groups == 1 { piece.end - piece.start } else { share.min(piece.end - piece.start) };
            let mut row = piece.start;
            while row < piece.end {
                let rows = row..(row + step).min(piece.end);
                row = rows.end;
                views.push(View { columns, ..View::of(of, 0, rows, 0..cols) });
                count += 1;
                if count > MAX_RUNS {
                    return Err(Error::source(
                        &tensor.name,
                        format!("its mapping cuts it in more than {MAX_RUNS} runs"),
                    ));
                }
            }
        }
        parts.push(views);
    }
    for (source, taken) in sources.iter().zip(held) {
        let tensor = &gguf.tensors()[*source];
        let rows = matrix_shape(tensor)?[0];
        if taken != rows {
            return Err(Error::source(
                &tensor.name,
                format!("{rows} rows, of which its mapping takes {taken}"),
            ));
        }
    }
    let mut views = Vec::new();
    for group in 0..groups as usize {
        for part in &parts {
            let share = part.len() / groups as usize;
            views.extend_from_slice(&part[group * share..(group + 1) * share]);
        }
    }
    let total = views.iter().map(|v| v.rows.end - v.rows.start).sum();
    let shape = if first.len() == 1 { vec![total] } else { vec![total, cols] };
    Ok((views, shape))
}

/// Three expressions as the blocks of `n` rows or columns.
fn swap(texts: &[String], n: u64, number: impl Fn(&str) -> Result<u64>) -> std::result::Result<Swap, String> {
    let values: Vec<u64> = texts.iter().filter_map(|text| number(text).ok()).collect();
    match values[..] {
        [outer, inner, size]
            if size > 0 && outer.checked_mul(inner).and_then(|p| p.checked_mul(size)) == Some(n) =>
        {
            Ok(Swap { outer, inner, size })
        }
        _ => Err(format!("{n} rows or columns, expected {} ({values:?})", texts.join(" x "))),
    }
}

/// All pieces are as long as the first.
fn piece_len(pieces: &[Range<u64>]) -> u64 {
    pieces.first().map_or(1, |p| if pieces.len() == 1 { 1 } else { p.end - p.start })
}

impl Swap {
    /// The stored runs in logical order, from row `start` on.
    fn pieces(&self, start: u64) -> Result<Vec<Range<u64>>> {
        if self.outer * self.inner > MAX_RUNS {
            return Err(Error::mapping("swap", format!("{} x {} runs", self.outer, self.inner)));
        }
        let blocks = (0..self.outer * self.inner).map(|block| {
            let first = start + self.stored(block * self.size);
            first..first + self.size
        });
        Ok(blocks.collect())
    }
}

/// A member's Hugging Face tensor, and which of its rows: `name[first..end]`.
pub(super) fn segment(name: &str) -> (&str, Option<&str>) {
    match name.strip_suffix(']').and_then(|rest| rest.split_once('[')) {
        Some((name, rows)) => (name, Some(rows)),
        None => (name, None),
    }
}

/// The rows that `text` (`first..end`) takes of a Hugging Face tensor of `rows` rows; all of them when absent.
///
/// # Errors
///
/// When it is no range of them in this model.
pub(super) fn taken(
    symbols: &Symbols,
    layer: Option<u64>,
    name: &str,
    text: Option<&str>,
    rows: u64,
) -> Result<Range<u64>> {
    let Some(text) = text else { return Ok(0..rows) };
    let number = |t: &str, absent| match t.trim() {
        "" => Some(absent),
        t => symbols.evaluate(t, layer.unwrap_or(0), Some(rows)),
    };
    let ends = text.split_once("..");
    match ends.and_then(|(a, b)| Some(number(a, 0)?..number(b, rows)?)) {
        Some(taken) if taken.start < taken.end && taken.end <= rows => Ok(taken),
        _ => Err(Error::mapping(
            name,
            format!("rows [{text}] of it, which has {rows}: the engine mapping does not fit this model"),
        )),
    }
}

/// What is wrong where rows of a tensor would be lost, as no member takes them.
pub(super) fn lost(model: &Model, members: &[Member]) -> Option<String> {
    members.iter().find_map(|m| {
        let tensor = &model.tensors[m.tensors[0]];
        let taken: u64 = members.iter().filter(|o| o.tensors[0] == m.tensors[0]).map(|o| o.rows).sum();
        (taken != tensor.rows()).then(|| {
            let rows = tensor.rows();
            format!("it takes {taken} rows of {}, which has {rows}: the engine mapping is wrong", tensor.name)
        })
    })
}
