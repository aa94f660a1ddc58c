//! OUT: the files themselves.

use super::*;
use crate::common::*;
use crate::support::models::{Gqa, LLAMA, QWEN3MOE, block, q4_k};
use crate::support::{Converted, converted, get, preshard, settings, snapshot, stderr};
use preshard::convert::{self, Progress};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A header of one entry for each expert's projection, cut into files that stay readable.
#[test]
fn out_02_headers_of_many_experts_stay_small() {
    let dims = Gqa {
        layers: 4,
        experts: 96,
        hidden: 32,
        inter: 32,
        heads: 1,
        kv_heads: 1,
        head: 32,
        vocab: 64,
        ..QWEN3MOE
    };
    let options =
        Policy { layout: "hf".into(), weights: Weights::Bf16, max_file_size: 500_000, ..Policy::default() };
    let c = converted(&dims.build(&|_| Q8_0), options);
    assert!(c.manifest.shards.len() > 4);
    let mut tensors = 0;
    for shard in &c.manifest.shards {
        // 2 KiB an expert, some 130 bytes of header.
        assert!(shard.data_start < 100_000, "{}: header of {} bytes", shard.file, shard.data_start);
        tensors += c.file(&shard.file).len();
    }
    assert_eq!(tensors, 3 + 4 * (9 + 96 * 3));
}

/// The disk fills up in the middle: no manifest, and the same command goes on once there is room.
#[test]
fn out_03_a_disk_that_fills_up() {
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"])
        .arg(&mount)
        .output();
    if !mounted.is_ok_and(|m| m.status.success()) {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let result = std::panic::catch_unwind(|| fills_up(dir.path(), &mount));
    std::process::Command::new("umount").arg(&mount).status().unwrap();
    result.unwrap();
}

fn fills_up(dir: &Path, mount: &Path) {
    let source = LLAMA.build(&q4_k).write(dir.join("model.gguf"));
    let gguf = Gguf::open(&[source]).unwrap();
    let plan = || Plan::new(&gguf, &Tables::default(), Policy { weights: Weights::F32, ..tp(2) }).unwrap();
    let run = |out: &Path, filler: Option<&Path>| {
        let stop = AtomicBool::new(false);
        let progress = |p: Progress| {
            // Room enough when it was asked for, gone when the writing begins.
            if let (Progress::Start { .. }, Some(filler)) = (p, filler) {
                std::fs::write(filler, vec![0; 8 << 20]).unwrap();
            }
        };
        let settings = settings(&stop, &progress);
        convert::run(&plan(), &gguf, out, &settings).map_err(|e| e.to_string())
    };
    let (out, filler) = (mount.join("out"), mount.join("filler"));
    let message = run(&out, Some(&filler)).map(drop).unwrap_err();
    assert!(message.contains("cannot write") && message.contains("No space left"), "{message}");
    assert!(!out.join("preshard.json").exists());
    std::fs::remove_file(filler).unwrap();
    run(&out, None).unwrap();
    let whole = dir.join("whole");
    run(&whole, None).unwrap();
    assert!(snapshot(&out) == snapshot(&whole));
}

/// A later, smaller conversion must not leave an old rank's file where a loader finds it.
#[test]
fn out_03_no_stale_parts() {
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
    let original = std::fs::read(&source).unwrap();
    let out = dir.path().join("out");
    let convert = |args: &[&str]| {
        preshard().args(["convert", "-q", "-o"]).args([&out, &source]).args(args).output().unwrap()
    };
    let four = ["--tp", "4", "--misaligned", "dequantise"];
    assert!(convert(&four).status.success());
    // As it is, it stays; replaced, it is replaced whole.
    let before = snapshot(&out);
    assert_eq!(convert(&["--tp", "2"]).status.code(), Some(1));
    assert!(snapshot(&out) == before);
    assert!(convert(&["--tp", "2", "--force"]).status.success());
    let fresh = dir.path().join("fresh");
    assert!(
        preshard()
            .args(["convert", "-q", "--tp", "2", "-o"])
            .args([&fresh, &source])
            .output()
            .unwrap()
            .status
            .success()
    );
    assert!(snapshot(&out) == snapshot(&fresh));
    assert!(std::fs::read(&source).unwrap() == original, "the input is never modified");
}

fn verify(c: &Converted) -> (Option<i32>, String) {
    let run = preshard().args(["verify", "-q"]).arg(c.out()).output().unwrap();
    (run.status.code(), stderr(&run))
}

#[test]
fn out_04_tampering_is_found() {
    let c = converted(&LLAMA.build(&q4_k), tp(2));
    assert_eq!(verify(&c).0, Some(0), "{}", verify(&c).1);
    let path = |rank: u64| c.out().join(format!("model-rank-{rank}-part-0.safetensors"));
    let sound = [0, 1].map(|r| std::fs::read(path(r)).unwrap());
    assert_eq!(sound[0].len(), sound[1].len(), "equal sizes, so that a swap is not seen by size");
    let start = c.manifest.shards[0].data_start as usize;
    let check = |what: &str, files: [Option<Vec<u8>>; 2], named: &[&str]| {
        for (rank, bytes) in files.into_iter().enumerate() {
            match bytes {
                Some(bytes) => std::fs::write(path(rank as u64), bytes).unwrap(),
                None => std::fs::remove_file(path(rank as u64)).unwrap(),
            }
        }
        let (code, message) = verify(&c);
        assert_eq!(code, Some(1), "{what}");
        assert!(named.iter().all(|n| message.contains(n)), "{what}: {message}");
        for (rank, bytes) in sound.iter().enumerate() {
            std::fs::write(path(rank as u64), bytes).unwrap();
        }
    };
    let keep = |i: usize| Some(sound[i].clone());
    let rank_1 = "model-rank-1-part-0.safetensors";
    for at in [0, 9, start, start + 1000, sound[1].len() - 1] {
        let mut bytes = sound[1].clone();
        bytes[at] ^= 0x10;
        check(&format!("a bit of byte {at}"), [keep(0), Some(bytes)], &[rank_1]);
    }
    check("swapped", [keep(1), keep(0)], &["model-rank-0-part-0.safetensors", rank_1]);
    check("truncated", [keep(0), Some(sound[1][..sound[1].len() - 1].to_vec())], &[rank_1]);
    check("extended", [keep(0), Some([&sound[1][..], &[0]].concat())], &[rank_1]);
    check("missing", [keep(0), None], &[rank_1]);
    // A number of the manifest.
    let manifest = c.out().join("preshard.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let hash = &c.manifest.shards[1].blake3;
    for (from, to) in [
        (hash.as_str(), "0".repeat(64)),
        ("\"schema\": 1", "\"schema\": 2".into()),
        (&format!("\"bytes\": {}", sound[1].len()), format!("\"bytes\": {}", sound[1].len() + 1)),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&manifest, text.replace(from, &to)).unwrap();
        let (code, message) = verify(&c);
        assert_eq!(code, Some(1), "{from}");
        assert!(!message.is_empty());
    }
    std::fs::remove_file(&manifest).unwrap();
    assert!(verify(&c).1.contains("incomplete"), "{}", verify(&c).1);
}

#[test]
fn out_05_shapes_and_types_of_packed_tensors() {
    for ty in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS] {
        let (elements, bytes, _) = block(ty);
        let width = |cols: u64| cols / elements * bytes as u64;
        let types = move |name: &str| if name.contains("ffn_gate_inp") { F32 } else { ty };
        let stored = converted(&LLAMA.build(&types), tp(2));
        let t = stored.rank(1);
        for (name, rows, cols, members) in [
            ("model.layers.0.self_attn.o_proj", 256, 256, 1),
            ("model.layers.0.self_attn.qkv_proj", 256 + 64 + 64, 256, 3),
            ("model.layers.0.mlp.gate_up_proj", 512, 256, 2),
            ("lm_head", 160, 256, 1),
        ] {
            let weight = get(&t, &format!("{name}.qweight"));
            assert_eq!(
                (weight.dtype.as_str(), weight.shape.as_slice()),
                ("U8", &[rows, width(cols)][..]),
                "{name}, type {ty}"
            );
            let types = get(&t, &format!("{name}.qweight_type"));
            assert_eq!((types.dtype.as_str(), types.shape.as_slice()), ("U8", &[members][..]));
            assert_eq!(types.bytes, vec![ty as u8; members as usize]);
            assert_eq!(stored.entry(&format!("{name}.qweight")).logical.as_deref(), Some(&[rows, cols][..]));
        }
        let stored = converted(&QWEN3MOE.build(&types), tp(2));
        let t = stored.rank(0);
        for (name, rows, cols) in [("w13", 512, 256), ("w2", 256, 256)] {
            let name = format!("model.layers.1.mlp.experts.routed_experts.{name}_qweight");
            assert_eq!(get(&t, &name).shape, [4, rows, width(cols)], "{name}, type {ty}");
            assert_eq!(stored.entry(&name).logical.as_deref(), Some(&[4, rows, cols][..]));
            assert_eq!(get(&t, &format!("{name}_type")).bytes, [ty as u8]);
        }
    }
}
