//! What one GGUF file may look like: a regression test named after each field report (PAR: parsing,
//! SEC: hostile input, TYP: types). Files are written byte by byte by `common`, none by this crate.
#![cfg(feature = "convert")]

mod common;

use common::*;
use preshard::gguf::{Gguf, Value};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Opens `bytes` as a file `model.gguf`; an error comes back as its message.
fn open(bytes: &[u8]) -> Result<Gguf, String> {
    let directory = directory();
    open_in(directory.path(), "model.gguf", bytes)
}

fn open_in(directory: &Path, name: &str, bytes: &[u8]) -> Result<Gguf, String> {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&[path]).map_err(|e| e.to_string())
}

/// Checks that the file is refused, that the message names it and every one of `words`, and that no
/// control byte of the input is in it.
#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) -> String {
    let message = open(bytes).map(|_| ()).expect_err("refused");
    said(&message, words);
    message
}

#[track_caller]
fn said(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    assert!(!message.chars().any(|c| c.is_control() && c != '\n'), "control character in {message:?}");
}

/// Three f32 tensors of four elements, `a` all 1, `b` all 2, `c` all 3.
fn three() -> Builder {
    Builder::new("llama").f32s("a", &[4], &[1.0; 4]).f32s("b", &[4], &[2.0; 4]).f32s("c", &[4], &[3.0; 4])
}

#[track_caller]
fn holds_three(gguf: &Gguf) {
    for (name, value) in [("a", 1f32), ("b", 2.0), ("c", 3.0)] {
        let tensor = gguf.tensors().iter().find(|t| t.name == name).unwrap();
        assert_eq!(gguf.data(tensor), value.to_le_bytes().repeat(4), "{name}");
    }
}

#[test]
fn par_01_versions_2_and_3_alone() {
    let v3 = open(&three().bytes()).unwrap();
    let v2 = open(&three().version(2).bytes()).unwrap();
    holds_three(&v3);
    holds_three(&v2);
    assert_eq!(v3.tensors().len(), v2.tensors().len());
    for (version, shown) in
        [(0, "version 0 "), (1, "version 1 "), (4, "version 4 "), (0x10003, "version 65539 ")]
    {
        refused(&three().version(version).bytes(), &["model.gguf", shown, "2 and 3"]);
    }
    // Version 1 with 32-bit counts and one empty string key.
    let mut v1 = b"GGUF\x01\0\0\0\0\0\0\0\x01\0\0\0".to_vec();
    v1.extend_from_slice(&[0; 4]);
    refused(&v1, &["version 1 ", "2 and 3"]);
    for length in 0..24 {
        assert!(open(&three().bytes()[..length]).is_err(), "cut at {length}");
    }
}

#[test]
fn par_02_big_endian_is_named() {
    let mut block = vec![0x3c, 0x00];
    block.extend(0..32);
    let file = Builder::new("llama").tensor("a", Q8_0, &[32], block).big_endian();
    refused(&file.bytes(), &["model.gguf", "big-endian GGUF"]);
    refused(&file.clone().version(2).bytes(), &["big-endian GGUF"]);
    refused(&file.magic(b"FUGG").bytes(), &["model.gguf", "big-endian GGUF"]);
}

#[test]
fn par_03_every_alignment_reads_the_right_bytes() {
    for alignment in [1, 2, 4, 8, 16, 32, 64, 128, 4096] {
        // The header's length takes every residue.
        for length in 0..32 {
            let gguf =
                open(&three().kv("general.name", "x".repeat(length)).alignment(alignment).bytes()).unwrap();
            holds_three(&gguf);
            assert_eq!(gguf.files()[0].data_start % u64::from(alignment), 0);
        }
    }
}

#[test]
fn par_04_bad_alignment_is_refused() {
    for bad in [0u32, 48, 3, 1 << 30, u32::MAX] {
        let message = refused(&three().kv("general.alignment", bad).bytes(), &["general.alignment"]);
        said(&message, &[&bad.to_string()]);
    }
    refused(&three().kv("general.alignment", 32i32).bytes(), &["general.alignment", "i32", "u32"]);
    refused(&three().kv("general.alignment", 32u64).bytes(), &["general.alignment", "u64", "u32"]);
    refused(&three().kv("general.alignment", vec![32u32]).bytes(), &["general.alignment", "array", "u32"]);
    let off = three().f32s("d", &[1], &[4.0]).at(100).bytes();
    refused(&off, &["tensor d", "offset 100", "alignment 32"]);
    // Padding after the last tensor is optional.
    let unpadded = three().f32s("d", &[1], &[4.0]).no_final_padding().bytes();
    assert_ne!(unpadded.len() % 32, 0);
    holds_three(&open(&unpadded).unwrap());
    holds_three(&open(&three().f32s("d", &[1], &[4.0]).bytes()).unwrap());
}

#[test]
fn par_05_names_and_ranks() {
    let named = |name: &[u8]| Builder::new("llama").f32s(name, &[1], &[1.0]).bytes();
    let longest = "n".repeat(63);
    assert_eq!(open(&named(longest.as_bytes())).unwrap().tensors()[0].name, longest);
    for length in [64, 200] {
        refused(&named("n".repeat(length).as_bytes()), &["nnnn", &length.to_string(), "63"]);
    }
    refused(&named(&"é".repeat(32).into_bytes()), &["64", "63"]);
    refused(&named(b""), &["tensor 0", "name is empty"]);
    refused(&named(b"\xff\xfe\x1b[31m"), &["\\xff\\xfe\\x1b", "UTF-8"]);
    // Odd but legal: kept as they are, and never printed raw.
    for odd in ["nul\0", "../up", "new\nline", "quote\""] {
        assert_eq!(open(&named(odd.as_bytes())).unwrap().tensors()[0].name, odd);
    }
    refused(&Builder::new("llama").tensor("a\x1b[2J\n", 99, &[1], []).bytes(), &["\\u{1b}", "\\u{a}"]);
    let ranked = |dims| Builder::new("llama").f32s("a", &[1], &[1.0]).dims(dims).bytes();
    for dims in [0, 5, 9, 1 << 31] {
        refused(&ranked(dims), &["tensor a", &format!("{dims} dimensions"), "1 to 4"]);
    }
    let four = Builder::new("llama").f32s("a", &[1, 2, 1, 2], &[1.0; 4]).bytes();
    assert_eq!(open(&four).unwrap().tensors()[0].ne, [1, 2, 1, 2]);
}

#[test]
fn par_06_empty_and_invalid_values() {
    refused(&three().kv("", 1u32).bytes(), &["empty metadata key", "number 1"]);
    refused(&three().kv(b"\xff\x07key", 1u32).bytes(), &["\\xff\\x07key", "UTF-8"]);
    let gguf = open(
        &three()
            .kv("tokenizer.chat_template", "")
            .kv("empty.counts", Vec::<u32>::new())
            .kv("empty.texts", Vec::<&str>::new())
            .kv("one", Kv::Text(vec![0xff, 0xfe]))
            .kv("tokens", Kv::Array(8, vec![Kv::Text(vec![0xff, 0xfe]), Kv::Text(vec![]), Kv::from("ok")]))
            .bytes(),
    )
    .unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.text("tokenizer.chat_template").unwrap(), Some(""));
    for key in ["empty.counts", "empty.texts"] {
        assert_eq!(metadata.counts(key).unwrap(), Some(vec![]), "{key}");
        assert_eq!(metadata.flags(key).unwrap(), Some(vec![]), "{key}");
        assert_eq!(metadata.texts(key).unwrap().unwrap().len(), 0, "{key}");
    }
    assert_eq!(metadata.bytes("one").unwrap(), Some(&[0xff, 0xfe][..]));
    assert!(metadata.text("one").unwrap_err().to_string().contains("UTF-8"));
    let tokens: Vec<&[u8]> = metadata.texts("tokens").unwrap().unwrap().collect();
    assert_eq!(tokens, [&[0xff, 0xfe][..], b"", b"ok"]);
    refused(&three().kv("flag", Kv::Raw(7, vec![2])).bytes(), &["flag", "bool byte 2"]);
    refused(&three().kv("flags", Kv::claimed_array(7, 2, &[1, 255])).bytes(), &["flags", "bool byte 255"]);
    refused(&three().kv("odd", Kv::Raw(13, vec![0; 8])).bytes(), &["odd", "type 13"]);
}

#[test]
fn par_07_duplicate_key() {
    let key = "llama.attention.head_count_kv";
    refused(&three().kv(key, 8u32).kv(key, 2u32).bytes(), &[key, "twice"]);
    refused(&three().kv(key, 8u32).kv(key, 8u32).bytes(), &[key, "twice"]);
}

#[test]
fn par_08_duplicate_tensor() {
    let name = "blk.0.attn_k.weight";
    let twice = three().f32s(name, &[1], &[1.0]).f32s(name, &[1], &[2.0]).f32s("b", &[1], &[1.0]);
    let message = refused(&twice.bytes(), &[name, "twice", "model.gguf", "b: "]);
    assert_eq!(message.lines().count(), 2, "{message}");
}

#[test]
fn par_09_tensors_without_elements() {
    let gguf =
        open(&three().tensor("none", F32, &[0], []).tensor("flat", F32, &[0, 64], []).bytes()).unwrap();
    holds_three(&gguf);
    for (name, ne) in [("none", &[0][..]), ("flat", &[0, 64])] {
        let tensor = gguf.tensors().iter().find(|t| t.name == name).unwrap();
        assert_eq!((tensor.ne.as_slice(), tensor.bytes, tensor.elements()), (ne, 0, 0));
        assert!(gguf.data(tensor).is_empty());
    }
    // They share an offset with each other and with a tensor that has elements, and may stand where
    // padding that is absent would have ended.
    holds_three(&open(&three().tensor("none", Q4_K, &[0], []).offset(32).bytes()).unwrap());
    let end = Builder::new("llama").f32s("a", &[3], &[1.0; 3]).tensor("none", F32, &[0], []).offset(32);
    open(&end.no_final_padding().bytes()).unwrap();
    refused(&three().tensor("none", F32, &[0], []).offset(1 << 40).bytes(), &["none"]);
}

#[test]
fn par_10_what_is_no_gguf_is_named() {
    let cases: [(&[u8], &str); 11] = [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 5\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"\n  <HTML><head>", "HTML"),
        (b"", "empty file"),
        (b"tjgg\x03\0\0\0", "legacy GGML"),
        (b"lmgg\0\0\0\0", "legacy GGML"),
        (b"fmgg\x01\0\0\0", "legacy GGML"),
        (b"{\"error\":\"Unauthorized\"}", "JSON"),
        (b"\x40\0\0\0\0\0\0\0{\"__metadata__\":{}}", "safetensors"),
        (b"PK\x03\x04\0\0", "PyTorch"),
        (b"GGU", "not a GGUF"),
    ];
    for (bytes, word) in cases {
        refused(bytes, &["model.gguf", word]);
    }
    // A file cut in parts by size: the first has a sound header, the second anything.
    let directory = directory();
    let whole = three().bytes();
    let (head, rest) = whole.split_at(whole.len() - 40);
    for (name, bytes) in [
        ("model.gguf.part1of2", head),
        ("model.gguf.part2of2", rest),
        ("model.gguf-split-a", head),
        ("model.gguf.001", rest),
    ] {
        let message = open_in(directory.path(), name, bytes).map(|_| ()).unwrap_err();
        said(&message, &[name, "byte-split part", "join"]);
    }
    let message = open_in(directory.path(), "model.gguf.part", head).map(|_| ()).unwrap_err();
    said(&message, &["unfinished download"]);
    let alone = tempfile::tempdir().unwrap();
    std::fs::write(alone.path().join("model.gguf.part1of2"), head).unwrap();
    said(&Gguf::open(&[alone.path().into()]).unwrap_err().to_string(), &["part1of2", "byte-split part"]);
}

#[test]
fn par_11_the_wrong_kind_is_named() {
    let kind = |architecture: &str, kind: &str| {
        Builder::new(architecture).kv("general.type", kind).f32s("a", &[1], &[1.0]).bytes()
    };
    open(&kind("llama", "model")).unwrap();
    refused(&kind("clip", "mmproj"), &["mmproj", "expected a language model"]);
    refused(&Builder::new("clip").f32s("a", &[1], &[1.0]).bytes(), &["clip", "expected a language model"]);
    refused(&kind("llama", "adapter"), &["adapter", "expected a language model"]);
    refused(&kind("llama", "imatrix"), &["imatrix", "expected a language model"]);
    refused(&kind("llama", "dataset"), &["dataset", "expected a language model"]);
    refused(&kind("controlvector", "model"), &["control vector"]);
    refused(&Builder::bare().kv("general.type", "imatrix").f32s("a", &[1], &[1.0]).bytes(), &["imatrix"]);
    refused(&Builder::new("llama").kv("llama.vocab_size", 9u32).bytes(), &["vocabulary", "0 tensors"]);
    refused(&Builder::bare().f32s("a", &[1], &[1.0]).bytes(), &["general.architecture", "missing"]);
    refused(
        &Builder::bare().kv("general.architecture", 3u32).f32s("a", &[1], &[1.0]).bytes(),
        &["general.architecture", "3", "text"],
    );
    let sidecar = Builder::new("glm-dsa")
        .kv("glm-dsa.block_count", 79u32)
        .f32s("blk.78.nextn.eh_proj.weight", &[1], &[1.0])
        .f32s("blk.78.attn_norm.weight", &[1], &[1.0]);
    refused(&sidecar.bytes(), &["MTP", "blk.78"]);
}

#[test]
fn par_12_per_layer_values_as_scalar_or_array() {
    let gguf = open(
        &three()
            .kv("u32", 8u32)
            .kv("u64", 8u64)
            .kv("i64", 8i64)
            .kv("negative", -8i64)
            .kv("all", vec![8i32; 4])
            .kv("mixed", vec![0i32, 0, 8, 0])
            .kv("bytes", vec![1u8, 2, 3, 255])
            .kv("floats", vec![8f32; 4])
            .kv("below", vec![8i32, -1, 8, 8])
            .kv("float", 0.5f32)
            .kv("true", true)
            .bytes(),
    )
    .unwrap();
    let metadata = gguf.metadata();
    for key in ["u32", "u64", "i64", "all"] {
        assert_eq!(metadata.per_layer(key, 4, 4).unwrap(), Some(vec![8; 4]), "{key}");
    }
    assert_eq!(metadata.per_layer("mixed", 4, 4).unwrap(), Some(vec![0, 0, 8, 0]));
    assert_eq!(metadata.per_layer("bytes", 4, 4).unwrap(), Some(vec![1, 2, 3, 255]));
    assert_eq!(metadata.per_layer("absent", 4, 4).unwrap(), None);
    for (key, layers) in
        [("mixed", 5), ("floats", 4), ("below", 4), ("negative", 4), ("float", 4), ("u32", u64::MAX)]
    {
        let message = metadata.per_layer(key, layers, layers).unwrap_err().to_string();
        said(&message, &["model.gguf", key]);
    }
    assert_eq!(metadata.number("float").unwrap(), Some(0.5));
    assert_eq!(metadata.number("negative").unwrap(), Some(-8.0));
    assert_eq!(metadata.numbers("floats").unwrap(), Some(vec![8.0; 4]));
    assert_eq!(metadata.flag("true").unwrap(), Some(true));
    assert!(
        metadata.flag("u32").is_err() && metadata.count("true").is_err() && metadata.texts("all").is_err()
    );
    assert_eq!(metadata.get("below"), Some(&Value::Array(metadata.array("below").unwrap().unwrap().clone())));
    assert_eq!(metadata.array("below").unwrap().unwrap().get(1), Some(Value::I64(-1)));
}

#[test]
fn sec_01_claimed_counts() {
    for count in [1u64 << 32, 1 << 63, u64::MAX] {
        let size = three().bytes().len().to_string();
        refused(&three().claim_pairs(count).bytes(), &["metadata_kv_count", &count.to_string(), &size]);
        refused(&three().claim_tensors(count).bytes(), &["tensor_count", &count.to_string(), &size]);
    }
    refused(&three().claim_tensors(9).bytes(), &["tensor_count is 9", "more than fit"]);
    refused(&three().claim_pairs(90).bytes(), &["metadata_kv_count is 90", "more than fit"]);
    // One more than there are, with zeros after it.
    let one_more = Builder::new("llama").claim_pairs(2).tail([0; 64]).bytes();
    refused(&one_more, &["metadata key", "2 metadata keys", &one_more.len().to_string()]);
    refused(&three().claim_tensors(4).tail([0; 64]).bytes(), &["4 tensors"]);
}

#[test]
fn sec_02_claimed_lengths() {
    for length in [1u64 << 63, 1 << 62, 1 << 40] {
        for element in 0..=12 {
            let bytes = three().kv("k", Kv::claimed_array(element, length, &[])).bytes();
            let message = refused(&bytes, &["metadata key k"]);
            if element != 9 {
                said(&message, &[&length.to_string(), "left"]);
            }
        }
    }
    for length in [u64::MAX, 1 << 63, 100_000] {
        refused(
            &three().kv("k", Kv::claimed_text(length, b"x")).bytes(),
            &["key k", &length.to_string(), "left"],
        );
        let in_array = Kv::claimed_array(8, 1, &length.to_le_bytes());
        refused(&three().kv("k", in_array).bytes(), &["key k", "entry 0", &length.to_string(), "left"]);
    }
    // The length of a key itself.
    let sound = three().bytes();
    for length in [u64::MAX, 1 << 20, sound.len() as u64] {
        let mut bytes = sound.clone();
        bytes[24..32].copy_from_slice(&length.to_le_bytes());
        refused(&bytes, &["metadata key 0", &length.to_string()]);
    }
    open(&three().kv("k".repeat(65535), 1u32).bytes()).unwrap();
    refused(&three().kv("k".repeat(65536), 1u32).bytes(), &["metadata key 1", "65536", "65535"]);
    // Arrays of arrays, 3000 deep.
    let mut nested = Vec::new();
    for _ in 0..3000 {
        nested.extend_from_slice(&9u32.to_le_bytes());
        nested.extend_from_slice(&1u64.to_le_bytes());
    }
    refused(&three().kv("k", Kv::Raw(9, nested)).bytes(), &["key k", "array of arrays"]);
    refused(&three().kv("k", Kv::claimed_array(99, 1, &[0; 8])).bytes(), &["key k", "99"]);
}

#[test]
fn sec_04_sizes_that_wrap() {
    let huge = 0x7fff_ffff_ffff_ffc0;
    let two = Builder::new("llama").tensor("a", I8, &[huge], []).tensor("b", I8, &[huge], []);
    refused(&two.bytes(), &["tensor a", &huge.to_string(), "file"]);
    let wrapping = Builder::new("llama").tensor("a", F32, &[(1 << 62) - 1], []).f32s("b", &[1], &[1.0]);
    refused(&wrapping.bytes(), &["tensor a", "overflow", "file"]);
    for ne in [&[1 << 32, 1 << 32][..], &[1 << 62, 4], &[u64::MAX], &[u64::MAX, 0], &[1 << 63]] {
        refused(&Builder::new("llama").tensor("a", F32, ne, []).bytes(), &["tensor a", "overflow"]);
    }
    // Blocks wrap where elements do not.
    let blocks = Builder::new("llama").tensor("a", F64, &[1 << 61], []);
    refused(&blocks.bytes(), &["tensor a", "overflow"]);
}

#[test]
fn sec_05_extents_past_the_file() {
    let block = [7u8; 34];
    let sound = three().tensor("q", Q8_0, &[32, 2], [block, block].concat()).no_final_padding().bytes();
    holds_three(&open(&sound).unwrap());
    let data = open(&sound).unwrap().files()[0].data_start as usize;
    for have in [sound.len() - 1, sound.len() - 34, data] {
        let message = refused(&sound[..have], &["tensor q", "cut off"]);
        said(&message, &[&format!("need a file of {} bytes", sound.len()), &format!("it has {have}")]);
    }
    for offset in [1u64 << 63, u64::MAX - 31, 128, 1 << 40] {
        refused(&three().f32s("d", &[4], &[1.0; 4]).offset(offset).bytes(), &["tensor d"]);
    }
    // Every cut of the file is refused, whatever it hits.
    let sound = three().kv("list", vec!["a", "bc"]).kv("flag", true).no_final_padding().bytes();
    for have in 0..sound.len() {
        assert!(open(&sound[..have]).is_err(), "cut at {have}");
    }
}

#[test]
fn sec_06_overlaps_holes_order_and_tails() {
    let q = |name: &str| three().f32s(name, &[16], &[9.0; 16]);
    refused(&q("d").offset(0).bytes(), &["tensors", "a (", "d (", "overlap"]);
    refused(&q("d").offset(64).bytes(), &["c (", "d (", "overlap"]);
    // A long tensor over two short ones: both pairs are told.
    let long = Builder::new("llama")
        .f32s("long", &[64], &[1.0; 64])
        .f32s("in1", &[4], &[2.0; 4])
        .offset(32)
        .f32s("in2", &[4], &[2.0; 4])
        .offset(96);
    let message = refused(&long.bytes(), &["in1", "in2"]);
    assert_eq!(message.lines().count(), 2, "{message}");
    // A hole of 1 MB, and data in another order than the table.
    let hole = three().f32s("d", &[4], &[4.0; 4]).at(1 << 20);
    let gguf = open(&hole.bytes()).unwrap();
    holds_three(&gguf);
    assert_eq!(gguf.data(&gguf.tensors()[3]), 4f32.to_le_bytes().repeat(4));
    let order = Builder::new("llama")
        .f32s("c", &[4], &[3.0; 4])
        .at(64)
        .f32s("a", &[4], &[1.0; 4])
        .at(0)
        .f32s("b", &[4], &[2.0; 4])
        .at(32);
    let gguf = open(&order.bytes()).unwrap();
    holds_three(&gguf);
    assert_eq!(gguf.tensors()[0].name, "c");
    assert!(gguf.notes().is_empty());
    // 4 KB after the last tensor: a note.
    let tail = open(&three().tail([1; 4096]).bytes()).unwrap();
    holds_three(&tail);
    said(&tail.notes().join("\n"), &["model.gguf", "4096 bytes", "ignored"]);
    assert_eq!(tail.notes().len(), 1);
    // A tensor without elements hides no tail.
    let hidden = three().tensor("none", F32, &[0], []).offset(96 + 4096);
    assert_eq!(open(&hidden.clone().tail([1; 4096]).bytes()).unwrap().notes().len(), 1);
    refused(&hidden.tail([b"GGUF".as_slice(), &[0; 4092]].concat()).bytes(), &["second header"]);
}

#[test]
fn typ_01_unknown_types_are_listed_once_each() {
    let bad = [5, 31, 33, 36, 38, 97, 139, 156, 43, u32::MAX];
    let mut file = three();
    for (i, id) in bad.into_iter().enumerate() {
        file = file.tensor(format!("t{i}"), id, &[32], []).tensor(format!("again{i}"), id, &[32], []);
    }
    let message = refused(&file.bytes(), &["removed", "ik_llama.cpp", "unknown", "t0 (and 1 more)"]);
    assert_eq!(message.lines().count(), bad.len(), "{message}");
    for id in bad {
        assert_eq!(message.matches(&format!("type {id} ")).count(), 1, "{id}: {message}");
    }
    // q2_0: 64 elements in 18 bytes.
    let q2 = open(&Builder::new("llama").tensor("a", Q2_0, &[64, 2], [1; 36]).bytes()).unwrap();
    assert_eq!((q2.tensors()[0].bytes, q2.tensors()[0].ty.name), (36, "q2_0"));
    refused(
        &Builder::new("llama").tensor("a", Q2_0, &[64, 2], [1; 35]).no_final_padding().bytes(),
        &["tensor a"],
    );
}

#[test]
fn typ_02_ollama_mxfp4_under_id_4() {
    let experts =
        |id| Builder::new("gpt-oss").tensor("blk.0.ffn_down_exps.weight", id, &[32, 2], [1; 34]).bytes();
    assert_eq!(open(&experts(MXFP4)).unwrap().tensors()[0].bytes, 34);
    refused(&experts(4), &["blk.0.ffn_down_exps.weight", "type 4", "Ollama", "MXFP4"]);
}

#[test]
fn typ_03_rows_are_whole_blocks() {
    let cases: [(u32, &[u64], &str, u32); 4] = [
        (Q4_K, &[128, 4], "q4_K", 256),
        (Q8_0, &[16, 4], "q8_0", 32),
        (NVFP4, &[32, 2], "nvfp4", 64),
        (Q1_0, &[64, 2], "q1_0", 128),
    ];
    let mut all = three();
    for (i, (ty, ne, name, block)) in cases.into_iter().enumerate() {
        let bytes = Builder::new("llama").tensor("bad", ty, ne, [0; 1024]).bytes();
        refused(&bytes, &["tensor bad", name, &ne[0].to_string(), &block.to_string()]);
        all = all.tensor(format!("t{i}"), ty, ne, [0; 1024]);
    }
    let message = refused(&all.bytes(), &["t0", "t1", "t2", "t3"]);
    assert_eq!(message.lines().count(), 4, "{message}");
}

#[test]
fn random_damage_is_refused_or_harmless() {
    let sound = three()
        .kv("flag", true)
        .kv("list", vec!["a", "bc"])
        .kv("numbers", vec![1i16, -2])
        .tensor("q", Q8_0, &[32, 2], [7; 68])
        .bytes();
    let directory = directory();
    let mut state = 1u64;
    let mut random = |below: usize| {
        // Knuth's MMIX generator; its high bits are good.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut opened = 0;
    for _ in 0..4000 {
        let mut bytes = sound.clone();
        for _ in 0..1 + random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random(5)],
                1 => bytes[at] ^= 1 << random(8),
                2 => bytes.truncate(at + 1),
                _ => drop(bytes.splice(at..at, [0xff; 8])),
            }
        }
        // A new file each time: some file systems sync one that is truncated and written again.
        let _ = std::fs::remove_file(directory.path().join("model.gguf"));
        if let Ok(gguf) = open_in(directory.path(), "model.gguf", &bytes) {
            opened += 1;
            let read: usize = gguf.tensors().iter().map(|t| gguf.data(t).len()).sum();
            assert!(read <= bytes.len());
        }
    }
    // Damage to names, values and data leaves a file sound; the rest does not.
    assert!((400..3600).contains(&opened), "{opened}");
}

#[test]
fn a_changed_file_is_noticed() {
    let directory = directory();
    let gguf = open_in(directory.path(), "model.gguf", &three().bytes()).unwrap();
    gguf.unchanged().unwrap();
    let path: PathBuf = directory.path().join("model.gguf");
    let file = std::fs::File::options().append(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    said(&gguf.unchanged().unwrap_err().to_string(), &["model.gguf", "modified"]);
    let size = file.metadata().unwrap().len();
    file.set_len(size + 1).unwrap();
    said(
        &gguf.unchanged().unwrap_err().to_string(),
        &["model.gguf", &size.to_string(), &(size + 1).to_string()],
    );
}
