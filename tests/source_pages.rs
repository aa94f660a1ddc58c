//! A conversion, and a verification against the source, leaves the page cache as it found it.
#![cfg(feature = "convert")]

mod common;
mod support;

use common::F32;
use preshard::conversion::Source;
use preshard::policy::{Policy, Weights};
use preshard::verify;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use support::models::{Gqa, LLAMA};

/// How many of the file's pages lie in the page cache.
fn cached(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    // SAFETY: its bytes are not read.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut pages = vec![0u8; map.len().div_ceil(rustix::param::page_size())];
    // SAFETY: `pages` has a byte for each page of the mapping.
    let status = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
    assert_eq!(status, 0);
    pages.iter().filter(|p| **p & 1 == 1).count()
}

#[test]
fn a_source_is_let_go_of_behind_the_run_unless_it_was_cached_before() {
    // On a disk: what lies in tmpfs cannot be evicted.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // 123 MB: eight leaves of source.
    let model = Gqa { vocab: 60_000, ..LLAMA };
    let source = model.build(&|_| F32).write(dir.path().join("model.gguf"));
    let file = File::open(&source).unwrap();
    file.sync_all().unwrap();
    let all = cached(&source);
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    if cached(&source) > all / 10 {
        eprintln!("skipped: this file system does not evict pages when asked");
        return;
    }
    let options = Policy { weights: Weights::Bf16, ..Policy::default() };
    support::convert(&source, options.clone(), &dir.path().join("cold")).unwrap();
    let left = cached(&source);
    // The header was read before the run began, with what the kernel read ahead of it.
    assert!(left < all / 4, "{left} of {all} pages are left in the page cache");

    // Against its source, a directory is verified in the source's order, with the same care.
    let stop = AtomicBool::new(false);
    let settings = verify::Settings { threads: 2, progress: &|_| {}, stop: &stop };
    let from = Source { gguf: vec![source.clone()], ..Source::default() };
    from.verify(&dir.path().join("cold"), &settings).unwrap();
    let left = cached(&source);
    assert!(left < all / 4, "{left} of {all} pages are left in the page cache by verify");

    std::fs::read(&source).unwrap();
    support::convert(&source, options, &dir.path().join("warm")).unwrap();
    let left = cached(&source);
    assert!(left > all * 9 / 10, "{left} of {all} pages are left, and all were there before");
}
