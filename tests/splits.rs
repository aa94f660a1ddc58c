//! Which files make one model: a regression test named after each field report (SPL: splits).
#![cfg(feature = "convert")]

mod common;

use common::*;
use preshard::gguf::Gguf;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(inputs: &[PathBuf]) -> Result<Gguf, String> {
    Gguf::open(inputs).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(inputs: &[PathBuf], words: &[&str]) -> String {
    let message = open(inputs).map(|_| ()).expect_err("refused");
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    message
}

/// Six f32 tensors `t0` to `t5`, tensor n holding n.
fn model() -> Builder {
    let model = Builder::new("llama").kv("llama.block_count", 2u32);
    (0..6).fold(model, |model, n| model.f32s(format!("t{n}"), &[4], &[n as f32; 4]))
}

/// The parts of [`model`] in three splits under their usual names.
fn three(directory: &Path) -> Vec<PathBuf> {
    write_splits(directory, "m", &model().splits(&[2, 2, 2]))
}

/// Checks that all of [`model`] is there, and returns the files' names.
#[track_caller]
fn holds_model(gguf: &Gguf) -> Vec<String> {
    assert_eq!(gguf.metadata().count("llama.block_count").unwrap(), Some(2));
    assert_eq!(gguf.tensors().len(), 6);
    for (n, tensor) in gguf.tensors().iter().enumerate() {
        assert_eq!(tensor.name, format!("t{n}"));
        assert_eq!(gguf.data(tensor), (n as f32).to_le_bytes().repeat(4), "t{n}");
    }
    gguf.files().iter().map(|f| f.path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn spl_01_any_split_the_directory_or_a_list() {
    let directory = directory();
    let paths = three(directory.path());
    let names: Vec<String> = (1..=3).map(|n| split_name("m", n, 3)).collect();
    for path in paths.iter().cloned().chain([directory.path().to_owned()]) {
        assert_eq!(holds_model(&open(&[path]).unwrap()), names);
    }
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let list = order.map(|i: usize| paths[i].clone());
        assert_eq!(holds_model(&open(&list).unwrap()), names);
    }
}

#[test]
fn spl_01_two_sets_in_a_directory() {
    let directory = directory();
    write_splits(directory.path(), "m-Q4_K_M", &model().splits(&[2, 4]));
    let second = write_splits(directory.path(), "m-Q8_0", &model().splits(&[3, 3]));
    refused(&[directory.path().into()], &["2 models", "m-Q4_K_M-", "m-Q8_0-"]);
    holds_model(&open(&second[..1]).unwrap());
    let single = tempfile::tempdir().unwrap();
    write_splits(single.path(), "m-Q4_K_M", &model().splits(&[2, 4]));
    model().write(single.path().join("other.gguf"));
    refused(&[single.path().into()], &["2 models", "m-Q4_K_M-", "other.gguf"]);
}

#[test]
fn spl_01_what_else_a_directory_holds() {
    let directory = directory();
    three(directory.path());
    let one =
        |architecture, kind| Builder::new(architecture).kv("general.type", kind).f32s("a", &[1], &[1.0]);
    one("clip", "mmproj").write(directory.path().join("mmproj-F16.gguf"));
    one("llama", "adapter").write(directory.path().join("lora.gguf"));
    write_splits(directory.path(), "mmproj-BF16", &one("clip", "mmproj").splits(&[0, 0, 1]));
    Builder::new("llama")
        .f32s("blk.1.nextn.eh_proj.weight", &[1], &[1.0])
        .write(directory.path().join("mtp-m.gguf"));
    std::fs::write(directory.path().join("._m-00001-of-00003.gguf"), "resource fork").unwrap();
    std::fs::write(directory.path().join("README.md"), "hello").unwrap();
    std::fs::create_dir(directory.path().join("old.gguf")).unwrap();
    let gguf = open(&[directory.path().into()]).unwrap();
    holds_model(&gguf);
    let notes = gguf.notes().join("\n");
    for word in ["mmproj-F16.gguf", "mmproj-BF16-*", "lora.gguf", "mtp-m.gguf"] {
        assert!(notes.contains(word), "{notes}");
    }
    let empty = tempfile::tempdir().unwrap();
    refused(&[empty.path().into()], &["no .gguf file"]);
    one("clip", "mmproj").write(empty.path().join("mmproj.gguf"));
    refused(&[empty.path().into()], &["no model", "mmproj.gguf"]);
    refused(&[empty.path().into(), directory.path().into()], &["directory among several"]);
    refused(&[], &["no file given"]);
    refused(&["/dev/null".into()], &["/dev/null", "regular file"]);
    refused(&[empty.path().join("absent.gguf")], &["absent.gguf", "cannot open"]);
}

#[test]
fn spl_02_missing_empty_foreign_and_extra_splits() {
    let directory = directory();
    let paths = three(directory.path());
    let second = std::fs::read(&paths[1]).unwrap();
    let (name2, name3) = (split_name("m", 2, 3), split_name("m", 3, 3));

    std::fs::remove_file(&paths[1]).unwrap();
    for input in [paths[0].clone(), paths[2].clone(), directory.path().into()] {
        refused(&[input], &["missing", &name2]);
    }
    refused(&[paths[0].clone(), paths[2].clone()], &["not given", &name2]);
    std::fs::rename(&paths[2], directory.path().join("aside")).unwrap();
    refused(&paths[..1], &["2 of its 3", &name2, &name3]);
    std::fs::rename(directory.path().join("aside"), &paths[2]).unwrap();

    std::fs::write(&paths[1], []).unwrap();
    for input in [paths[0].clone(), paths[1].clone(), directory.path().into()] {
        refused(&[input], &["empty file", &name2]);
    }

    // Split 2 of a model in four, and of one in three with another number of tensors.
    model().splits(&[1, 1, 1, 3])[1].write(&paths[1]);
    refused(&paths[..1], &["split.count", &name2, "4, expected 3"]);
    let larger = model().f32s("t6", &[4], &[6.0; 4]);
    larger.splits(&[3, 2, 2])[1].write(&paths[1]);
    refused(&paths[..1], &["split.tensors.count", &name2, "7, expected 6"]);
    // One that says what it is.
    model().splits(&[2, 2, 2])[1].clone().kv("general.architecture", "qwen2").write(&paths[1]);
    refused(&paths[..1], &["general.architecture", &name2, &split_name("m", 1, 3)]);
    // No split at all.
    Builder::new("llama").f32s("x", &[1], &[1.0]).write(&paths[1]);
    refused(&paths[..1], &["split.no", "absent", &name2]);
    refused(&paths[1..2], &[&name2, "split.count"]);

    std::fs::write(&paths[1], second).unwrap();
    std::fs::copy(&paths[2], directory.path().join(split_name("m", 4, 3))).unwrap();
    for input in [paths[0].clone(), directory.path().into()] {
        refused(&[input], &[&split_name("m", 4, 3)]);
    }
}

#[test]
fn spl_03_numbers_counts_and_types() {
    type Set = fn(Builder, &str, i64) -> Builder;
    let types: [Set; 4] = [
        |b, key, n| b.set(key, n as u16),
        |b, key, n| b.set(key, n as u32),
        |b, key, n| b.set(key, n as i32),
        |b, key, n| b.set(key, n as u64),
    ];
    for set in types {
        let directory = directory();
        let mut splits = model().splits(&[2, 2, 2]);
        for (split, number) in splits.iter_mut().zip(0..) {
            for (key, value) in [("split.no", number), ("split.count", 3), ("split.tensors.count", 6)] {
                *split = set(split.clone(), key, value);
            }
        }
        let paths = write_splits(directory.path(), "m", &splits);
        holds_model(&open(&paths[1..2]).unwrap());
    }
    let cases: [(&str, u32, &str); 5] = [
        ("split.no", 2, "2, expected 1"),
        ("split.no", 0, "0, expected 1"),
        ("split.count", 4, "4, expected 3"),
        ("split.tensors.count", 7, "7, expected 6"),
        ("split.tensors.count", 2, "2, expected 6"),
    ];
    for (key, value, words) in cases {
        let directory = directory();
        let mut splits = model().splits(&[2, 2, 2]);
        splits[1] = splits[1].clone().set(key, value);
        let paths = write_splits(directory.path(), "m", &splits);
        refused(&paths[..1], &[key, &split_name("m", 2, 3), words]);
        refused(&paths, &[key]);
    }
    // Each of several mismatches is told.
    let directory = directory();
    let splits: Vec<Builder> =
        model().splits(&[2, 2, 2]).into_iter().map(|b| b.set("split.tensors.count", 7i32)).collect();
    let paths = write_splits(directory.path(), "m", &splits);
    let message = refused(&paths[..1], &["7, expected 6"]);
    assert_eq!(message.lines().count(), 3, "{message}");
    for key in ["split.no", "split.count", "split.tensors.count"] {
        let splits: Vec<Builder> = model().splits(&[3, 3]).into_iter().map(|b| b.unset(key)).collect();
        let paths = write_splits(directory.path(), "u", &splits);
        refused(&paths[..1], &[key]);
        let splits: Vec<Builder> = model().splits(&[3, 3]).into_iter().map(|b| b.set(key, "1")).collect();
        let paths = write_splits(directory.path(), "t", &splits);
        refused(&paths[..1], &[key, "text", "whole number"]);
    }
    // Numbers as large as they go, under a name that is none of a split.
    let last = model().splits(&[3, 3])[1].clone().set("split.no", u64::MAX);
    refused(&[last.write(directory.path().join("last.gguf"))], &["last.gguf", "of 2"]);
    let many = model().splits(&[3, 3])[1].clone().set("split.count", u64::MAX);
    refused(&[many.write(directory.path().join("many.gguf"))], &["many.gguf", "split.count"]);
    // A name that disagrees with the keys.
    let wrong = model().splits(&[2, 2, 2])[2].write(directory.path().join(split_name("w", 1, 2)));
    refused(&[wrong], &["split.count", "3, expected 2", "name"]);
}

#[test]
fn spl_03_one_file_that_was_merged() {
    // llama-gguf-split --merge leaves split.count 0.
    let directory = directory();
    for count in [0u16, 1] {
        let merged = model().kv("split.no", 0u16).kv("split.count", count).kv("split.tensors.count", 6i32);
        holds_model(&open(&[merged.write(directory.path().join("merged.gguf"))]).unwrap());
        let one = merged.write(directory.path().join(split_name("one", 1, 1)));
        holds_model(&open(&[one]).unwrap());
        let short = merged.set("split.tensors.count", 7i32).write(directory.path().join("short.gguf"));
        refused(&[short], &["split.tensors.count", "7, expected 6"]);
    }
}

/// Tools that join splits by hand keep the first file's keys; `split.tensors.count` proves the file whole.
#[test]
fn spl_03_one_file_that_was_joined_and_kept_its_split_count() {
    let joined = model().kv("split.no", 0u16).kv("split.count", 3u16).kv("split.tensors.count", 6i32);
    for name in ["joined.gguf".to_owned(), split_name("m", 1, 3), split_name("m", 1, 2)] {
        let directory = directory();
        let path = joined.write(directory.path().join(name));
        for input in [path.clone(), directory.path().to_owned()] {
            let gguf = open(&[input]).unwrap();
            holds_model(&gguf);
            let notes = gguf.notes().join("\n");
            assert!(notes.contains("split 1 of 3") && notes.contains("all 6 tensors"), "{notes}");
        }
        // Fewer tensors than the set has, or a file that counts itself as another split.
        for (key, value) in [("split.tensors.count", 7), ("split.no", 1)] {
            joined.clone().set(key, value).write(&path);
            let message = refused(std::slice::from_ref(&path), &[]);
            assert!(message.contains("missing") || message.contains("split"), "{message}");
        }
        joined.clone().unset("split.tensors.count").write(&path);
        refused(&[path], &[]);
    }
    // A set whose later files are empty is the set it says it is, from any of its files.
    let directory = directory();
    for path in write_splits(directory.path(), "m", &model().splits(&[6, 0, 0])) {
        let gguf = open(&[path]).unwrap();
        assert_eq!(holds_model(&gguf).len(), 3);
        assert!(gguf.notes().is_empty());
    }
}

#[test]
fn spl_04_first_split_holds_metadata_alone() {
    let directory = directory();
    let paths = write_splits(directory.path(), "m", &model().splits(&[0, 3, 3]));
    for path in &paths {
        let gguf = open(std::slice::from_ref(path)).unwrap();
        holds_model(&gguf);
        assert!(gguf.notes().is_empty());
    }
    // Without the padding that a file without tensors does not need.
    let bytes = std::fs::read(&paths[0]).unwrap();
    let end = bytes.iter().rposition(|&b| b != 0).unwrap() + 4;
    std::fs::write(&paths[0], &bytes[..end.min(bytes.len())]).unwrap();
    holds_model(&open(&paths[..1]).unwrap());
    // Or some of the MTP block, which makes it no draft sidecar.
    let draft =
        Builder::new("llama").f32s("blk.1.nextn.eh_proj.weight", &[1], &[1.0]).f32s("a", &[1], &[2.0]);
    let paths = write_splits(directory.path(), "d", &draft.splits(&[1, 1]));
    assert_eq!(open(&paths[..1]).unwrap().tensors().len(), 2);
    // No tensors in any: a vocabulary.
    let empty = Builder::new("llama").splits(&[0, 0]);
    let paths = write_splits(directory.path(), "v", &empty);
    refused(&paths[..1], &["vocabulary"]);
    // The architecture must be in the first.
    let splits: Vec<Builder> =
        model().splits(&[3, 3]).into_iter().map(|b| b.unset("general.architecture")).collect();
    let paths = write_splits(directory.path(), "n", &splits);
    refused(&paths[..1], &["general.architecture", &split_name("n", 1, 2)]);
}

#[test]
fn spl_07_splits_joined_with_cat() {
    let directory = directory();
    for counts in [[2, 2, 2], [0, 3, 3]] {
        let parts: Vec<Vec<u8>> = model().splits(&counts).iter().map(Builder::bytes).collect();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, parts.concat()).unwrap();
        let at = format!("second header at byte {}", parts[0].len());
        refused(&[path], &["model.gguf", "concatenated GGUF", &at]);
    }
    // Also where the last tensor's padding is absent.
    let whole = Builder::new("llama").f32s("a", &[3], &[1.0; 3]).no_final_padding();
    let length = whole.bytes().len();
    let path = whole.clone().tail(model().bytes()).write(directory.path().join("two.gguf"));
    refused(&[path], &[&format!("second header at byte {length}")]);
}

#[test]
fn spl_09_files_are_told_apart_by_their_headers() {
    let directory = directory();
    let paths = three(directory.path());
    let before = open(&paths[..1]).unwrap();
    for file in before.files() {
        let bytes = std::fs::read(&file.path).unwrap();
        assert_eq!(file.size, bytes.len() as u64);
        assert_eq!(file.header_hash, *blake3::hash(&bytes[..file.data_start as usize]).as_bytes());
    }
    model().kv("llama.rope.freq_base", 1e4f32).splits(&[2, 2, 2])[0].write(&paths[0]);
    let after = open(&paths[..1]).unwrap();
    holds_model(&after);
    assert_ne!(before.files()[0].header_hash, after.files()[0].header_hash);
    assert_eq!(before.files()[1].header_hash, after.files()[1].header_hash);
}

#[test]
fn spl_11_odd_names() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let splits = model().splits(&[3, 3]);
    let narrow = [splits[0].write(at("m-001-of-002.gguf")), splits[1].write(at("m-002-of-002.gguf"))];
    let upper = [splits[0].write(at("M-00001-of-00002.GGUF")), splits[1].write(at("M-00002-of-00002.GGUF"))];
    for path in narrow.iter().chain(&upper) {
        holds_model(&open(std::slice::from_ref(path)).unwrap());
    }
    holds_model(&open(&[model().write(at("best-of-breed.gguf"))]).unwrap());
    holds_model(&open(&[model().write(at("no-extension"))]).unwrap());
    let renamed = [splits[0].write(at("a.gguf")), splits[1].write(at("b.gguf"))];
    holds_model(&open(&renamed).unwrap());
    holds_model(&open(&[renamed[1].clone(), renamed[0].clone()]).unwrap());
    refused(&renamed[..1], &["a.gguf", "split 1 of 2", "-00001-of-00002.gguf"]);
    // Lists that are no set.
    refused(&[renamed[0].clone(), renamed[0].clone()], &["split.no", "a.gguf", "once"]);
    refused(&[renamed[0].clone(), at("best-of-breed.gguf")], &["best-of-breed.gguf", "one model at a time"]);
    // A split's name without the keys of one.
    let keyless = model().write(at("k-00001-of-00003.gguf"));
    refused(&[keyless], &["split.count", "1, expected 3", "name"]);
}

#[test]
fn par_08_one_tensor_in_two_splits() {
    for value in [2f32, 9.0] {
        let directory = directory();
        let splits = model().without("t5").f32s("t2", &[4], &[value; 4]).splits(&[2, 2, 2]);
        let paths = write_splits(directory.path(), "m", &splits);
        refused(&paths[..1], &["t2: ", &split_name("m", 2, 3), &split_name("m", 3, 3)]);
    }
}

#[test]
fn later_splits_repeat_the_same_or_nothing() {
    let directory = directory();
    let mut splits = model().splits(&[3, 3]);
    splits[1] = splits[1].clone().kv("llama.block_count", 2u32).kv("other.key", 1u32);
    let paths = write_splits(directory.path(), "m", &splits);
    let gguf = open(&paths[1..]).unwrap();
    holds_model(&gguf);
    assert!(gguf.metadata().get("other.key").is_none());
    assert!(gguf.notes().join("\n").contains("other.key"), "{:?}", gguf.notes());
    splits[1] = splits[1].clone().set("llama.block_count", 3u32);
    let paths = write_splits(directory.path(), "m", &splits);
    refused(&paths[1..], &["llama.block_count", &split_name("m", 1, 2), &split_name("m", 2, 2)]);
}

#[test]
fn every_file_of_a_set_is_checked() {
    let directory = directory();
    let paths = three(directory.path());
    for path in &paths[1..] {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 20]).unwrap();
    }
    let message = refused(&paths[..1], &["t3", "t5", &split_name("m", 2, 3), &split_name("m", 3, 3)]);
    assert_eq!(message.lines().count(), 2, "{message}");
    // Each file has its own alignment.
    let mut splits = model().splits(&[2, 2, 2]);
    splits[1] = splits[1].clone().alignment(64);
    let paths = write_splits(directory.path(), "a", &splits);
    holds_model(&open(&paths[..1]).unwrap());
}
