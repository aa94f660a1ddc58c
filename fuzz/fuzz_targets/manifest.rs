//! Any text as a manifest: read, and what was read is written and read the same; its directory opened.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::load::Directory;
use preshard::manifest::{FILE_NAME, Manifest};
use std::sync::LazyLock;

static DIR: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a directory"));

fuzz_target!(|text: &[u8]| {
    let dir = DIR.path();
    let write = |bytes: &[u8]| std::fs::write(dir.join(FILE_NAME), bytes).expect("a written manifest");
    write(text);
    let Ok(manifest) = Manifest::read(dir) else { return };
    for file in manifest.shards.iter().map(|s| &s.file).chain(manifest.files.iter().map(|f| &f.file)) {
        assert_eq!(std::path::Path::new(file).components().count(), 1, "{file:?} leaves the directory");
        assert!(!file.is_empty() && file != ".." && file != ".");
    }
    write(&manifest.to_bytes());
    assert_eq!(Manifest::read(dir).expect("what was written"), manifest);
    if let Ok(directory) = Directory::open(dir) {
        // No shard exists; nothing may be handed out.
        assert!(manifest.shards.is_empty() || directory.all().is_err());
    }
});
