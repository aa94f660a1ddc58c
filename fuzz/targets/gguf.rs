//! A GGUF of any bytes, or several splits: opening it and looking at all of it must not panic, hang
//! or reach past the file, and neither must planning a conversion of it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Fit, Policy, Weights};
use preshard_fuzz::{check_message, scratch};

/// Between the files of a split set.
const SPLIT: &[u8] = b"=SPLIT==";

fuzz_target!(|data: &[u8]| {
    let mut files: Vec<&[u8]> = Vec::new();
    let mut rest = data;
    while let Some(at) = rest.windows(SPLIT.len()).position(|w| w == SPLIT) {
        files.push(&rest[..at]);
        rest = &rest[at + SPLIT.len()..];
    }
    files.push(rest);
    if files.len() > 4 {
        return;
    }
    let paths: Vec<_> = (1..=files.len())
        .map(|i| match files.len() {
            1 => scratch().join("model.gguf"),
            n => scratch().join(format!("model-{i:05}-of-{n:05}.gguf")),
        })
        .collect();
    for (path, bytes) in paths.iter().zip(&files) {
        std::fs::write(path, bytes).unwrap();
    }
    look(&paths[..1]);
    for path in &paths {
        std::fs::remove_file(path).unwrap();
    }
});

fn look(paths: &[std::path::PathBuf]) {
    let gguf = match Gguf::open(paths) {
        Ok(gguf) => gguf,
        Err(error) => return check_message(&error),
    };
    for note in gguf.notes() {
        assert!(!note.chars().any(char::is_control), "{note:?}");
    }
    for (key, value) in gguf.metadata().iter() {
        assert!(!key.is_empty());
        if let preshard::gguf::Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
            assert!(array.get(array.len()).is_none());
        }
    }
    let mut extents: Vec<_> = Vec::new();
    for t in gguf.tensors() {
        let data = gguf.data(t);
        assert_eq!(data.len() as u64, t.bytes);
        assert_eq!(t.elements() / t.ty.block * t.ty.bytes, t.bytes);
        std::hint::black_box(data.iter().fold(0u8, |a, b| a ^ b));
        if t.bytes > 0 {
            extents.push((t.file, t.offset, t.offset + t.bytes));
        }
    }
    extents.sort_unstable();
    assert!(extents.windows(2).all(|w| w[0].0 != w[1].0 || w[0].2 <= w[1].1), "extents overlap");
    for (tp, weights) in [(1, Weights::Keep), (2, Weights::Keep), (3, Weights::Bf16)] {
        let fit = Fit::Dequantise;
        let options = Policy { tp, weights, misaligned: fit, mixed: fit, ..Policy::default() };
        if let Err(error) = Plan::new(&gguf, &Tables::default(), options) {
            check_message(&error);
        }
    }
}
