//! A model and a cut, made from the bytes: the ranks' parts together are the whole, bit for bit.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../../tests/support/models.rs"]
mod models;
#[path = "../../tests/support/union.rs"]
mod union;

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static FILE: LazyLock<tempfile::NamedTempFile> =
    LazyLock::new(|| tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file"));

fuzz_target!(|bytes: [u8; union::Case::BYTES]| {
    union::check(&union::Case::of(&bytes), FILE.path());
});
