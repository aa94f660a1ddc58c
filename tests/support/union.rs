//! The ranks' parts of a model together are the whole, bit for bit: a check for any model and cut.

use super::models::{DEEPSEEK, GLM, Gqa, LLAMA, MIXTRAL, Mla, QWEN2, QWEN3, QWEN3MOE};
use crate::common;
use preshard::eval::{Decoder, Evaluator};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Fit, Policy, Weights};
use std::collections::BTreeMap;
use std::path::Path;

/// A model and a cut.
#[derive(Debug)]
pub struct Case {
    arch: u8,
    heads: u8,
    kv_heads: u8,
    head: u8,
    hidden: u8,
    inter: u8,
    experts: u8,
    vocab: u8,
    lora: u8,
    rope: u8,
    legacy: bool,
    direct_queries: bool,
    tp: u8,
    ep: bool,
    weights: u8,
    dequantise: bool,
    types: [u8; 16],
}

impl Case {
    /// Bytes that decide a case.
    pub const BYTES: usize = 34;

    /// The case that these bytes spell.
    pub fn of(bytes: &[u8; Case::BYTES]) -> Case {
        let b = |i: usize| bytes[i];
        Case {
            arch: b(0),
            heads: b(1),
            kv_heads: b(2),
            head: b(3),
            hidden: b(4),
            inter: b(5),
            experts: b(6),
            vocab: b(7),
            lora: b(8),
            rope: b(9),
            legacy: b(10) & 1 == 1,
            direct_queries: b(11) & 1 == 1,
            tp: b(12),
            ep: b(13) & 1 == 1,
            weights: b(14),
            // Nearly every cut of a small model falls inside some block.
            dequantise: b(15) & 7 != 0,
            types: std::array::from_fn(|i| b(16 + i)),
        }
    }
}

const TYPES: [u32; 12] = [
    common::Q8_0,
    common::Q4_0,
    common::Q5_1,
    common::BF16,
    common::F32,
    common::F16,
    common::IQ4_NL,
    common::MXFP4,
    common::Q8_0,
    common::Q4_1,
    common::Q5_0,
    common::Q8_0,
];

fn upto(n: u8, limit: u64) -> u64 {
    u64::from(n) % limit + 1
}

impl Case {
    fn model(&self) -> common::Builder {
        let types = |name: &str| {
            let sum: usize = name.bytes().map(usize::from).sum();
            TYPES[usize::from(self.types[sum % 16]) % TYPES.len()]
        };
        let vocab = u64::from(self.vocab) + 1;
        let gqa = [LLAMA, QWEN2, QWEN3, QWEN3MOE, MIXTRAL];
        match self.arch % 7 {
            i @ 0..=4 => {
                let of = gqa[usize::from(i)].clone();
                let kv_heads = upto(self.kv_heads, 4);
                Gqa {
                    layers: 1,
                    hidden: 32 * upto(self.hidden, 3),
                    inter: 32 * upto(self.inter, 8),
                    heads: kv_heads * upto(self.heads, 4),
                    kv_heads,
                    head: 32 * upto(self.head, 2),
                    vocab,
                    experts: if of.experts > 0 { upto(self.experts, 6) } else { 0 },
                    ..of
                }
                .build(&types)
            }
            i => {
                let of = if i == 5 { GLM } else { DEEPSEEK };
                Mla {
                    layers: 2,
                    hidden: 32 * upto(self.hidden, 3),
                    inter: 32 * upto(self.inter, 8),
                    moe_inter: 32 * upto(self.inter / 8, 8),
                    heads: upto(self.heads, 8),
                    nope: 32 * upto(self.head, 3),
                    rope: 32 * upto(self.rope, 2),
                    v: 32 * upto(self.head / 4, 3),
                    q_lora: if self.direct_queries && i == 6 { 0 } else { 32 * upto(self.lora, 3) },
                    kv_lora: 32 * upto(self.lora / 4, 3),
                    experts: upto(self.experts, 6),
                    vocab,
                    index_dim: 32,
                    legacy: self.legacy && i == 6,
                    ..of
                }
                .build(&types)
            }
        }
    }
}

/// A tensor as rows: experts, rows of each, the members' rows, and the bytes.
struct Held {
    dtype: String,
    experts: usize,
    /// First row, end and bytes of a row, for each member.
    members: Vec<(usize, usize)>,
    rows: usize,
    bytes: Vec<u8>,
}

/// Every rank's tensors.
fn ranks(gguf: &Gguf, options: Policy) -> Option<(Plan, Vec<BTreeMap<String, Held>>)> {
    let tp = options.tp as usize;
    let plan = match Plan::new(gguf, &Tables::default(), options) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    let evaluator = Evaluator { plan: &plan, gguf, decoder: &Decoder::CPU, allow_nonfinite: true };
    let mut all: Vec<BTreeMap<String, Held>> = (0..tp).map(|_| BTreeMap::new()).collect();
    for shard in &plan.shards {
        let mut file = Vec::new();
        evaluator.leaf(shard, 0, &mut file).expect("a leaf");
        assert_eq!(file.len() as u64, shard.bytes);
        for t in &shard.tensors {
            let shape: Vec<usize> = t.shape.iter().map(|n| *n as usize).collect();
            let (experts, rows) = match shape[..] {
                [experts, rows, _] => (experts, rows),
                [rows, _] | [rows] => (1, rows),
                _ => (1, 1),
            };
            let members = match t.members.is_empty() {
                true => vec![(0, rows)],
                false => t.members.iter().map(|m| (m.rows[0] as usize, m.rows[1] as usize)).collect(),
            };
            let bytes = file[t.offset as usize..(t.offset + t.bytes) as usize].to_vec();
            let held = Held { dtype: t.dtype.to_owned(), experts, members, rows, bytes };
            let part = shard.name.split('-').next().unwrap_or_default();
            assert!(all[shard.tp as usize].insert(format!("{part} {}", t.name), held).is_none());
        }
    }
    Some((plan, all))
}

impl Held {
    /// Member `m` of expert `e`, row by row.
    fn lines(&self, e: usize, m: usize) -> Vec<&[u8]> {
        let width = self.bytes.len() / (self.experts * self.rows).max(1);
        let (from, to) = self.members[m];
        (from..to).map(|r| &self.bytes[(e * self.rows + r) * width..][..width]).collect()
    }
}

fn architecture(gguf: &Gguf) -> &str {
    gguf.metadata().text("general.architecture").expect("a text").unwrap_or_default()
}

/// Checks a case with `file` for its GGUF; returns how many members were found cut over the ranks, and
/// none when the model or the cut is refused.
pub fn check(case: &Case, file: &Path) -> Option<usize> {
    std::fs::write(file, case.model().bytes()).expect("a written file");
    let gguf = Gguf::open(&[file.to_owned()]).expect("a sound model");
    let fit = if case.dequantise { Fit::Dequantise } else { Fit::Refuse };
    let weights = [Weights::Keep, Weights::Bf16, Weights::F32, Weights::F16][usize::from(case.weights % 4)];
    let options =
        |tp: u64, ep: bool| Policy { tp, ep, weights, misaligned: fit, mixed: fit, ..Policy::default() };
    // Mostly a number that divides the heads; any other is nearly always refused.
    let heads =
        gguf.metadata().count(&format!("{}.attention.head_count", architecture(&gguf))).expect("a number");
    let fitting: Vec<u64> = [1, 2, 4, 8].into_iter().filter(|n| heads.is_some_and(|h| h % n == 0)).collect();
    let tp = match case.tp < 32 {
        true => upto(case.tp, 8),
        false => fitting[usize::from(case.tp) % fitting.len()],
    };
    let (_, whole) = ranks(&gguf, options(1, false))?;
    let (plan, parts) = ranks(&gguf, options(tp, case.ep))?;
    let mut cut = 0;
    let tp = tp as usize;
    for (name, whole) in &whole[0] {
        // A policy may decode in one plan what stays packed in the other.
        let Some(parts) = parts.iter().map(|p| p.get(name)).collect::<Option<Vec<_>>>() else { continue };
        let vocabulary =
            name.contains("embed_tokens") || name.contains("lm_head") || name.contains("shared_head.head");
        for (m, member) in whole.members.iter().enumerate() {
            for e in 0..whole.experts {
                // Whole experts: the rank that holds this one, and its place there.
                let (held, e_there): (Vec<&Held>, usize) =
                    match case.ep && whole.experts > 1 || parts[0].experts != whole.experts {
                        true => {
                            let mut first = 0;
                            let rank = parts.iter().position(|p| {
                                first += p.experts;
                                e < first
                            });
                            let rank = rank.expect("a rank holds each expert");
                            (vec![parts[rank]], e - (first - parts[rank].experts))
                        }
                        false => (parts.clone(), e),
                    };
                let expected = whole.lines(e, m);
                let lines: Vec<Vec<&[u8]>> = held.iter().map(|h| h.lines(e_there, m)).collect();
                assert!(held.iter().all(|h| h.dtype == whole.dtype), "{name}");
                let rows: usize = lines.iter().map(Vec::len).sum();
                let count = member.1 - member.0;
                if lines.iter().all(|l| *l == expected) {
                    continue;
                }
                cut += 1;
                if vocabulary {
                    // Padded to the same multiple, and cut there: real rows first, then zeros.
                    let joined: Vec<&[u8]> = lines.concat();
                    let real = plan.vocab[0] as usize;
                    assert_eq!(joined[..real], expected[..real], "{name}");
                    assert!(joined[real..].iter().all(|r| r.iter().all(|b| *b == 0)), "{name}");
                } else if rows == count * held.len() {
                    // Columns.
                    for (r, row) in expected.iter().enumerate() {
                        let joined: Vec<u8> = lines.iter().flat_map(|l| l[r].to_vec()).collect();
                        // A packed row may be padded to its widest member.
                        assert!(row.starts_with(&joined) || joined == **row, "{name}: row {r}");
                    }
                } else {
                    // Rows; key and value heads may be held by several ranks in a row.
                    let copies = rows / count;
                    assert_eq!((rows % count, tp % copies), (0, 0), "{name}: {rows} rows of {count}");
                    let joined: Vec<&[u8]> = lines.iter().step_by(copies).flatten().copied().collect();
                    assert_eq!(joined, expected, "{name}");
                    assert!(
                        lines.chunks(copies).all(|c| c.iter().all(|l| *l == c[0])),
                        "{name}: copies differ"
                    );
                }
            }
        }
    }
    Some(cut)
}
