//! The same input and options give the same bytes: any number of threads, any order of the source,
//! one run or one for each rank.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::plan::{Options, Weights};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::models::{GLM, LLAMA, q4_k};
use support::{How, convert_how, fixture, snapshot};

const TP2: fn() -> Options = || Options { tp: 2, weights: Weights::Bf16, ..Options::default() };

/// The files of a conversion.
fn made(source: &[PathBuf], options: Options, how: How, out: &Path) -> BTreeMap<String, Vec<u8>> {
    convert_how(source, options, out, how).unwrap_or_else(|e| panic!("{e}"));
    snapshot(out)
}

/// The same without the manifest, which names the source files.
fn shards(mut files: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    assert!(files.remove("preshard.json").is_some());
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
    for options in [TP2(), Options { tp: 2, ep: true, ..Options::default() }] {
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
    let options = || Options { tp: 2, pp: 2, ..Options::default() };
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
