//! A manifest of any bytes, with and without the directory it speaks of: read, checked, verified and
//! opened by the loader, and recomputed from a source.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::conversion::Source;
use preshard::load::Directory;
use preshard::manifest::{FILE_NAME, Manifest};
use preshard::verify::{self, Settings};
use preshard_fuzz::{check_message, model, scratch};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fuzz_target!(|data: &[u8]| {
    let manifest = match Manifest::from_slice(data, Path::new(FILE_NAME)) {
        Ok(manifest) => manifest,
        Err(error) => return check_message(&error),
    };
    let again =
        Manifest::from_slice(&manifest.to_bytes(), Path::new(FILE_NAME)).expect("reads its own bytes");
    assert_eq!(again, manifest);

    let dir = scratch().join("converted");
    let source = scratch().join("source.gguf");
    if !source.exists() {
        model::fixed().gguf.write(&source);
    }
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join(FILE_NAME), data).unwrap();
    // Files of the sizes it claims, when they are small, so that what lies behind is reached.
    let sizes = manifest
        .shards
        .iter()
        .map(|s| (&s.file, s.bytes))
        .chain(manifest.files.iter().map(|f| (&f.file, f.bytes)));
    let mut made = Vec::new();
    for (file, bytes) in sizes.take(4).filter(|(f, b)| *b < 1 << 20 && f.len() < 100 && *f != FILE_NAME) {
        std::fs::write(dir.join(file), vec![0; bytes as usize]).unwrap();
        made.push(file);
    }
    let stop = AtomicBool::new(false);
    let settings = Settings { threads: 1, progress: &|_| (), stop: &stop };
    if let Err(error) = verify::hashes(&dir, &settings) {
        check_message(&error);
    }
    let source = Source { gguf: vec![source], ..Source::default() };
    if let Err(error) = source.verify(&dir, &settings) {
        check_message(&error);
    }
    if let Err(error) = Directory::open(&dir).and_then(|d| d.all().map(drop)) {
        check_message(&error);
    }
    for file in made {
        let _ = std::fs::remove_file(dir.join(file));
    }
});
