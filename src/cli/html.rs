//! `preshard plan --html`: the plan as one page that needs nothing from outside.
//!
//! The page itself is `plan.html`, beside this file; here is what it shows. Its size is bounded whatever the
//! model: layers and ranks are joined past a number that a screen can show, and tensors are listed, the
//! largest first, up to [`MAX_LISTED`] bytes of text.

use crate::error::{Error, Result, shown};
use crate::gguf::Gguf;
use crate::mapping::Part;
use crate::plan::shard::{Fill, TensorPlan};
use crate::plan::{Fate, Plan};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// The page, with [`SLOT`] where the plan goes.
const PAGE: &str = include_str!("plan.html");
const SLOT: &str = "@PLAN@";
/// Columns of layers at most; more layers share columns.
const MAX_COLUMNS: u64 = 256;
/// Rows at most. When there are more ranks, neighbours that hold as many bytes of each kind share a row.
const MAX_ROWS: usize = 64;
/// Bytes of text in the list of tensors at most.
const MAX_LISTED: usize = 2 << 20;
/// Reasons listed at most.
const MAX_REASONS: usize = 200;

/// Bytes by what they are: packed, decoded, copied, replicated.
type Kinds = [u64; 4];
const PACKED: usize = 0;
const DECODED: usize = 1;
const COPIED: usize = 2;
const REPLICATED: usize = 3;

/// Writes the page to `file`. `memory` is that of one GPU, in bytes.
pub fn write(file: &Path, gguf: &Gguf, plan: &Plan, memory: Option<u64>) -> Result<()> {
    std::fs::write(file, page(gguf, plan, memory)).map_err(|e| Error::io(file, "write", e))
}

fn page(gguf: &Gguf, plan: &Plan, memory: Option<u64>) -> String {
    // Names and reasons come from untrusted files. Inside a script element only `<` could end the element;
    // the page's own code shows them as text, never as markup.
    let data = json_of(gguf, plan, memory).to_string();
    let data = data.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
    PAGE.replacen(SLOT, &data, 1)
}

fn json_of(gguf: &Gguf, plan: &Plan, memory: Option<u64>) -> Value {
    let layers = plan.model.symbols.blocks;
    let stride = layers.div_ceil(MAX_COLUMNS).max(1);
    let seen = Seen::of(gguf, plan, stride);
    let (rows, more) = seen.rows(plan);
    let columns = (0..layers.div_ceil(stride)).map(|column| {
        let (first, last) = (column * stride, ((column + 1) * stride).min(layers) - 1);
        let mtp = if last >= plan.model.symbols.trunk { " (MTP)" } else { "" };
        if first == last { format!("layer {first}{mtp}") } else { format!("layers {first} to {last}{mtp}") }
    });
    let (tensors, unlisted) = seen.tensors();
    json!({
        "title": format!("{} as {}", shown(&plan.architecture), shown(&plan.layout)),
        "tp": plan.policy.tp,
        "pp": plan.policy.pp,
        "layers": plan.model.symbols.trunk,
        "experts": plan.model.symbols.experts,
        "memory": memory,
        "columns": std::iter::once("outside the layers".to_owned()).chain(columns).collect::<Vec<_>>(),
        "rows": rows,
        "ranks_not_shown": more,
        "decoded": reasons(gguf, plan, |fate| if let Fate::Decoded(why) = fate { Some(why) } else { None }),
        "dropped": reasons(gguf, plan, |fate| if let Fate::Dropped(why) = fate { Some(why) } else { None }),
        "tensors": tensors,
        "tensors_not_shown": unlisted,
    })
}

/// GGUF tensors by reason, the largest sum first: tensors, bytes, reason, the first one's name.
fn reasons<'a>(gguf: &Gguf, plan: &'a Plan, why: impl Fn(&'a Fate) -> Option<&'a String>) -> Vec<Value> {
    let mut sums: BTreeMap<&str, (u64, u64, &str)> = BTreeMap::new();
    for ((fate, _), tensor) in plan.fates.iter().zip(gguf.tensors()) {
        if let Some(why) = why(fate) {
            let sum = sums.entry(why).or_insert((0, 0, &tensor.name));
            (sum.0, sum.1) = (sum.0 + 1, sum.1 + tensor.bytes);
        }
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, bytes, _))| std::cmp::Reverse(*bytes));
    sums.truncate(MAX_REASONS);
    sums.into_iter().map(|(why, (n, bytes, first))| json!([n, bytes, shown(why), shown(first)])).collect()
}

/// One tensor of the engine, over all ranks.
#[derive(Default)]
struct Row {
    dtype: &'static str,
    shape: Vec<u64>,
    ranks: u64,
    kinds: Kinds,
    from: BTreeSet<String>,
    types: BTreeSet<String>,
    why: Option<String>,
}

/// What is counted in one walk over the plan.
struct Seen<'a> {
    /// By pipeline stage and tensor-parallel rank, for each column.
    cells: BTreeMap<(u64, u64), Vec<Kinds>>,
    /// By name, and whether it belongs to the MTP draft, which may repeat a name of the trunk.
    tensors: HashMap<(&'a str, bool), Row>,
}

impl<'a> Seen<'a> {
    fn of(gguf: &Gguf, plan: &'a Plan, stride: u64) -> Seen<'a> {
        let columns = 1 + plan.model.symbols.blocks.div_ceil(stride) as usize;
        let mut by_rank: HashMap<(&str, bool, u64, u64), &TensorPlan> = HashMap::new();
        for shard in plan.shards.iter().filter(|_| plan.policy.tp > 1) {
            for t in &shard.tensors {
                by_rank.insert((&t.name, shard.part == Part::Mtp, shard.pp, shard.tp), t);
            }
        }
        let mut seen = Seen { cells: BTreeMap::new(), tensors: HashMap::new() };
        for shard in &plan.shards {
            let cells = seen.cells.entry((shard.pp, shard.tp)).or_insert_with(|| vec![[0; 4]; columns]);
            cells[0][COPIED] += shard.header.len() as u64;
            for t in &shard.tensors {
                // Cuts go by rank number, so a rank that holds the same bytes as another has a neighbour
                // that does.
                let same = |tp: Option<u64>| {
                    let other =
                        tp.and_then(|tp| by_rank.get(&(&t.name, shard.part == Part::Mtp, shard.pp, tp)));
                    other.is_some_and(|other| other.bands == t.bands)
                };
                let replicated = same(shard.tp.checked_sub(1)) || same(shard.tp.checked_add(1));
                let kinds = kinds(gguf, t, replicated);
                let column = layer(gguf, t).map_or(0, |layer| 1 + (layer / stride) as usize);
                let row = seen.tensors.entry((&t.name, shard.part == Part::Mtp)).or_default();
                for kind in 0..4 {
                    if let Some(cell) = cells.get_mut(column) {
                        cell[kind] += kinds[kind];
                    }
                    row.kinds[kind] += kinds[kind];
                }
                row.ranks += 1;
                if row.ranks == 1 {
                    (row.dtype, row.shape) = (t.dtype, t.shape.clone());
                    row.why = t.decoded.clone();
                    row.from.extend(t.members.iter().flat_map(|m| m.from.iter().cloned()));
                    row.types.extend(t.members.iter().flat_map(|m| m.types.iter().cloned()));
                }
            }
        }
        seen
    }

    /// Rows of the picture, and how many ranks they leave out.
    fn rows(&self, plan: &Plan) -> (Vec<Value>, usize) {
        let join = self.cells.len() > MAX_ROWS;
        let mut groups: Vec<(u64, u64, &Vec<Kinds>)> = Vec::new();
        for ((pp, tp), cells) in &self.cells {
            let rank = pp * plan.policy.tp + tp;
            match groups.last_mut() {
                Some((_, last, same)) if join && *same == cells => *last = rank,
                _ => groups.push((rank, rank, cells)),
            }
        }
        let more = groups.iter().skip(MAX_ROWS).map(|(first, last, _)| (last - first + 1) as usize).sum();
        groups.truncate(MAX_ROWS);
        let row = |(first, last, cells): (u64, u64, &Vec<Kinds>)| {
            let name =
                if first == last { format!("rank {first}") } else { format!("ranks {first} to {last}") };
            json!({ "name": name, "bytes": cells.iter().flatten().sum::<u64>(), "cells": cells })
        };
        (groups.into_iter().map(row).collect(), more)
    }

    /// Tensors, the largest first, and how many are left out.
    fn tensors(&self) -> (Vec<Value>, usize) {
        let mut all: Vec<_> =
            self.tensors.iter().map(|(name, row)| (row.kinds.iter().sum::<u64>(), name, row)).collect();
        all.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
        let (mut listed, mut size) = (Vec::new(), 0);
        for (bytes, name, row) in &all {
            let some = |names: &BTreeSet<String>| {
                let more =
                    if names.len() > 4 { format!(", … ({} in all)", names.len()) } else { String::new() };
                names.iter().take(4).map(|n| shown(n)).collect::<Vec<_>>().join(", ") + &more
            };
            let why = row.why.as_deref().map(shown);
            let name = if name.1 { format!("{} (draft)", shown(name.0)) } else { shown(name.0) };
            let value = json!([
                name,
                some(&row.from),
                some(&row.types),
                row.dtype,
                row.shape,
                row.ranks,
                bytes,
                row.kinds,
                why
            ]);
            size += value.to_string().len();
            if size > MAX_LISTED {
                break;
            }
            listed.push(value);
        }
        let unlisted = all.len() - listed.len();
        (listed, unlisted)
    }
}

/// The layer that a tensor's first source belongs to.
fn layer(gguf: &Gguf, tensor: &TensorPlan) -> Option<u64> {
    let view = tensor.bands.iter().find_map(|band| match &band.fill {
        Fill::Packed(view) | Fill::Recoded(view, ..) | Fill::Float(view, _) => Some(view),
        Fill::Zero | Fill::Bytes(_) => None,
    })?;
    gguf.tensors()[view.tensor].name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

fn kinds(gguf: &Gguf, tensor: &TensorPlan, replicated: bool) -> Kinds {
    let mut kinds = [0; 4];
    for band in &tensor.bands {
        let kind = match &band.fill {
            _ if replicated => REPLICATED,
            Fill::Packed(_) | Fill::Recoded(..) => PACKED,
            Fill::Float(view, _) if gguf.tensors()[view.tensor].ty.is_quantised() => DECODED,
            Fill::Float(..) | Fill::Zero | Fill::Bytes(_) => COPIED,
        };
        kinds[kind] += band.bytes();
    }
    kinds
}
