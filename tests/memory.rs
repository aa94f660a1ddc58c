//! The reader allocates by what it has read, never by what a file claims.
#![cfg(feature = "convert")]

mod common;

use common::*;
use preshard::gguf::Gguf;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counting what each thread holds.
struct Counting;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Cells without destructors can be reached as long as the thread allocates.
    let now = NOW.get() + bytes;
    NOW.set(now);
    PEAK.set(PEAK.get().max(now));
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Opens the file, and says how many bytes were held at most beyond those before.
fn peak(bytes: &[u8]) -> (bool, usize) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let before = NOW.get();
    PEAK.set(before);
    let sound = Gguf::open(&[path]).is_ok();
    (sound, (PEAK.get() - before) as usize)
}

fn small() -> Builder {
    Builder::new("llama").f32s("a", &[1], &[1.0])
}

#[test]
fn sec_01_sec_02_claims_cost_nothing() {
    let claims = [
        small().claim_pairs(u64::MAX),
        small().claim_tensors(1 << 32),
        small().kv("k", Kv::claimed_text(1 << 40, b"")),
        small().kv("k", Kv::claimed_array(0, 1 << 62, b"")),
        small().kv("k", Kv::claimed_array(8, 1 << 33, b"")),
        // What the file is long enough for, but does not hold: zeros are no keys and no tensors.
        Builder::new("llama").claim_pairs(1 << 16).tail(vec![0; 1 << 20]),
        Builder::new("llama").claim_tensors(1 << 14).tail(vec![0; 1 << 20]),
        small().kv("k", Kv::claimed_array(8, 1 << 16, &u64::MAX.to_le_bytes())).tail(vec![0; 1 << 20]),
        small().kv("k", Kv::claimed_array(12, 1 << 20, b"")).tail(vec![0; 1 << 20]),
    ];
    for (index, claim) in claims.iter().enumerate() {
        let (sound, peak) = peak(&claim.bytes());
        assert!(!sound && peak < 64 << 10, "claim {index}: sound {sound}, {peak} bytes held");
    }
}

#[test]
fn sec_02_a_real_vocabulary_stays_small() {
    let tokens: Vec<String> = (0..262_144).map(|i| format!("token{i}")).collect();
    let merges: Vec<String> = (0..300_000).map(|i| format!("tok en{i}")).collect();
    let file = small()
        .kv("tokenizer.ggml.tokens", tokens.clone())
        .kv("tokenizer.ggml.scores", vec![0f32; 262_144])
        .kv("tokenizer.ggml.token_type", vec![1i32; 262_144])
        .kv("tokenizer.ggml.merges", merges);
    let bytes = file.bytes();
    let (sound, peak) = peak(&bytes);
    assert!(sound);
    // An array grows by doubling; otherwise the metadata costs its bytes in the file.
    assert!(peak < 2 * bytes.len(), "{peak} bytes held for a file of {}", bytes.len());

    let directory = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&[file.write(directory.path().join("m.gguf"))]).unwrap();
    let read = gguf.metadata().texts("tokenizer.ggml.tokens").unwrap().unwrap();
    assert!(read.eq(tokens.iter().map(String::as_bytes)));
    assert_eq!(gguf.metadata().counts("tokenizer.ggml.token_type").unwrap().unwrap().len(), 262_144);
}

#[test]
fn many_small_entries_cost_in_proportion() {
    let file = (0..20_000).fold(small(), |file, i| file.kv(format!("k{i}"), 1u8));
    let file = (0..20_000).fold(file, |file, i| file.tensor(format!("t{i}"), F32, &[0], []));
    let bytes = file.bytes();
    let (sound, peak) = peak(&bytes);
    assert!(sound);
    assert!(peak < 10 * bytes.len(), "{peak} bytes held for a file of {}", bytes.len());
}
