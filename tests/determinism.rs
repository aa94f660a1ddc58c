//! The same input and options give the same bytes: any number of threads, any order of the source,
//! one run or one for each rank.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::eval::{Decoder, Evaluator, Findings};
use preshard::gguf::Gguf;
use preshard::hash::LEAF;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Policy, Weights};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::models::{GLM, LLAMA, Numbers, blocks, q4_k};
use support::union::{self, Case};
use support::{How, convert_how, fixture, snapshot};

const TP2: fn() -> Policy = || Policy { tp: 2, weights: Weights::Bf16, ..Policy::default() };

/// The files of a conversion.
fn made(source: &[PathBuf], options: Policy, how: How, out: &Path) -> BTreeMap<String, Vec<u8>> {
    convert_how(source, options, out, how).unwrap_or_else(|e| panic!("{e}"));
    snapshot(out)
}

/// The same without the manifest, which names the source files.
fn shards(mut files: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    // The manifest names the source files, and the sums hold the manifest's hash.
    assert!(files.remove("preshard.json").is_some());
    assert!(files.remove("B3SUMS").is_some());
    files
}

#[test]
fn threads_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let source = [fixture("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf")];
    let one = made(&source, TP2(), How { threads: 1, ..How::default() }, &dir.path().join("1"));
    for threads in [2, 3] {
        let many =
            made(&source, TP2(), How { threads, ..How::default() }, &dir.path().join(threads.to_string()));
        assert!(one == many, "{threads} threads");
    }
    let again = made(&source, TP2(), How { threads: 1, ..How::default() }, &dir.path().join("again"));
    assert!(one == again, "a second run");
}

#[test]
fn splits_and_the_merged_file_give_the_same_shards() {
    let dir = tempfile::tempdir().unwrap();
    let model = GLM.build(&q4_k);
    let count = GLM.shapes().len();
    let whole = model.write(dir.path().join("whole.gguf"));
    let splits = write_splits(dir.path(), "cut", &model.splits(&[0, 17, count - 17]));
    for options in [TP2(), Policy { tp: 2, ep: true, ..Policy::default() }] {
        let tag = format!("{}-{}", options.ep, options.tp);
        let run = |source: &[PathBuf], name: &str| {
            shards(made(source, options.clone(), How::default(), &dir.path().join(format!("{tag}-{name}"))))
        };
        let expected = run(std::slice::from_ref(&whole), "whole");
        for (i, split) in splits.iter().enumerate() {
            assert!(expected == run(std::slice::from_ref(split), &format!("from split {i}")), "split {i}");
        }
        let mut list = splits.clone();
        list.reverse();
        assert!(expected == run(&list, "from a list"), "a list in another order");
    }
}

#[test]
fn ranks_in_several_runs_give_the_directory_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let source = [GLM.build(&q4_k).write(dir.path().join("model.gguf"))];
    let options = || Policy { tp: 2, pp: 2, ..Policy::default() };
    let whole = made(&source, options(), How::default(), &dir.path().join("whole"));
    assert_eq!(whole.keys().filter(|f| f.ends_with(".safetensors")).count(), 6, "{:?}", whole.keys());
    for order in [vec![vec![0], vec![1], vec![2], vec![3]], vec![vec![3, 1], vec![0, 2]]] {
        let out = dir.path().join(format!("{order:?}"));
        let mut last = BTreeMap::new();
        for ranks in &order {
            last = made(&source, options(), How { ranks: Some(ranks.clone()), ..How::default() }, &out);
        }
        assert!(whole == last, "{order:?}: {:?}", last.keys());
    }
    // Ranks on two hosts, each with a directory: the files are those of one run.
    for rank in 0..4 {
        let how = How { ranks: Some(vec![rank]), ..How::default() };
        let alone = made(&source, options(), how, &dir.path().join(format!("host-{rank}")));
        for (file, bytes) in alone.iter().filter(|(f, _)| f.ends_with(".safetensors")) {
            assert!(whole[file] == *bytes, "{file}");
        }
    }
}

/// What is not asked for does not reach the files: the source's path, its alignment and order.
#[test]
fn where_and_how_the_source_lies_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = LLAMA.build(&q4_k);
    let expected =
        made(&[model.write(dir.path().join("m.gguf"))], TP2(), How::default(), &dir.path().join("a"));
    let elsewhere = dir.path().join("else where é");
    std::fs::create_dir(&elsewhere).unwrap();
    let moved = made(&[model.write(elsewhere.join("m.gguf"))], TP2(), How::default(), &elsewhere.join("b"));
    assert!(expected == moved, "another directory");
    let mut shapes = LLAMA.shapes();
    shapes.reverse();
    let reversed = support::models::fill(LLAMA.metadata().alignment(4096), &shapes, &q4_k);
    let other =
        made(&[reversed.write(dir.path().join("r.gguf"))], TP2(), How::default(), &dir.path().join("c"));
    assert!(shards(expected) == shards(other), "tensors in another order, aligned otherwise");
}

/// A file is cut in leaves of 16 MiB wherever that falls: in a row, a block, a transposed head, the
/// padding of a row. The header is made longer step by step, which moves every tensor past the cut.
#[test]
fn a_leaf_may_begin_anywhere() {
    let types = |name: &str| match name {
        n if n.contains("attn_kv_a_mqa") => Q8_0,
        n if n.contains("attn_v.") => Q5_0,
        _ => q4_k(name),
    };
    // One damaged scale in each: it is counted once, in the leaf where its block begins.
    let damaged = |model: Builder, name: &str, ne: &[u64]| {
        let mut data = blocks(name, Q4_K, ne.iter().product());
        data[144 * 100..144 * 100 + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
        model.without(name).tensor(name, Q4_K, ne, data)
    };
    let llama = damaged(LLAMA.build(&types), "blk.0.attn_q.weight", &[256, 512]);
    let glm = damaged(GLM.build(&types), "blk.1.attn_q_a.weight", &[256, 256]);
    let dir = tempfile::tempdir().unwrap();
    let mut numbers = Numbers::of("leaves");
    for (model, weights) in [
        (&llama, Weights::Keep),
        (&glm, Weights::Keep),
        (&llama, Weights::Bf16),
        (&glm, Weights::F32),
        (&llama, Weights::Fast),
        (&glm, Weights::FastF16),
    ] {
        let gguf = Gguf::open(&[model.write(dir.path().join("m.gguf"))]).unwrap();
        let options = match weights {
            Weights::Fast | Weights::FastF16 => Policy { layout: "hf".into(), weights, ..Policy::default() },
            _ => Policy { tp: 2, weights, ..Policy::default() },
        };
        let mut plan = Plan::new(&gguf, &Tables::default(), options).unwrap();
        let mut shard = plan.shards.remove(0);
        let evaluator = Evaluator { plan: &plan, gguf: &gguf, decoder: &Decoder::CPU, allow_nonfinite: true };
        let (header, bytes) = (shard.header.len(), shard.bytes as usize);
        assert!(bytes < LEAF as usize, "one leaf as it is: {bytes} bytes");
        let mut whole = Vec::new();
        let found = evaluator.leaf(&shard, 0, &mut whole).unwrap();
        let count = |found: &[Findings]| found.iter().flat_map(|f| &f.nonfinite).map(|n| n.1).sum::<u64>();
        assert!(count(std::slice::from_ref(&found)) > 0);
        let offsets: Vec<u64> = shard.tensors.iter().map(|t| t.offset).collect();
        // The cut lies so many bytes into the data: anywhere, and inside what may be the damaged block.
        // Elements are never cut: tensors are aligned.
        let mut cuts: Vec<usize> =
            (0..40).map(|_| (numbers.next() as usize % (bytes - header) / 4 * 4).max(4)).collect();
        let bad = whole[header..].chunks_exact(2).enumerate().filter(|(_, b)| *b == [0x00, 0x7e]);
        cuts.extend(bad.map(|(i, _)| i * 2 / 4 * 4 + 64).take(20).filter(|at| *at < bytes - header));
        if weights.recodes() {
            // Of the damaged blocks' cuts too; each costs two encodings of the whole, slow without optimisation.
            let damaged = cuts.split_off(40);
            cuts.truncate(8);
            cuts.extend(damaged.into_iter().take(4));
        }
        for at in cuts {
            let shift = LEAF as usize - header - at;
            shard.header = vec![0; header + shift];
            shard.bytes = (bytes + shift) as u64;
            for (tensor, offset) in shard.tensors.iter_mut().zip(&offsets) {
                tensor.offset = offset + shift as u64;
            }
            // Buffers are used again: what the leaf before left must not shine through.
            let (mut first, mut second) = (vec![0xa5; LEAF as usize], vec![0xa5; LEAF as usize]);
            let both = [evaluator.leaf(&shard, 0, &mut first), evaluator.leaf(&shard, 1, &mut second)];
            let both = both.map(Result::unwrap);
            assert!(first[LEAF as usize - at..] == whole[header..header + at], "before a cut at {at}");
            assert!(second == whole[header + at..], "after a cut at {at}");
            assert_eq!(count(&both), count(std::slice::from_ref(&found)), "NaN counted, cut at {at}");
        }
    }
}

/// Any model and any cut: what the ranks hold together is the whole. fuzz/targets/plan_eval.rs tries many
/// more.
#[test]
fn the_ranks_together_hold_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut numbers = Numbers::of("union");
    let (mut planned, mut cut) = (0, 0);
    for _ in 0..300 {
        let case = Case::of(&std::array::from_fn(|_| numbers.next() as u8));
        if let Some(n) = union::check(&case, &dir.path().join("m.gguf")) {
            planned += 1;
            cut += n;
        }
    }
    assert!(planned > 50 && cut > 1000, "{planned} plans, {cut} members cut");
}
