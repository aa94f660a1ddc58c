//! A conversion that cannot be right is refused: every problem named in a line, status 1, and
//! nothing written. Wrong usage is status 2.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use std::path::Path;
use support::models::{GLM, Gqa, LLAMA, QWEN3MOE, add, q4_k};
use support::{fixture, preshard, refused, refused_in, snapshot, stderr, stdout};

#[test]
fn every_unknown_tensor_is_listed() {
    let mut model = LLAMA.build(&q4_k);
    for name in ["blk.0.attn_q.weight_foo", "blk.99.attn_q.weight", "something.else"] {
        model = add(model, name, &[256, 64], F32);
    }
    let message =
        refused(&model, &[], &["blk.0.attn_q.weight_foo", "blk.99.attn_q.weight", "something.else"]);
    assert_eq!(message.lines().count(), 3, "{message}");
    assert!(message.lines().all(|l| l.contains("unknown tensor")), "{message}");
}

#[test]
fn every_missing_tensor_is_listed_with_what_it_feeds() {
    let model = GLM
        .build(&q4_k)
        .without("blk.1.attn_q_a.weight")
        .without("blk.2.exp_probs_b.bias")
        .without("output_norm.weight");
    let message = refused(
        &model,
        &["--tp", "2"],
        &[
            "blk.1.attn_q_a.weight: missing; model.layers.1.self_attn.q_a_proj.weight",
            "blk.2.exp_probs_b.bias: missing; model.layers.2.mlp.gate.e_score_correction_bias",
            "output_norm.weight: missing; model.norm.weight",
        ],
    );
    assert_eq!(message.lines().count(), 3, "{message}");
}

/// The number after `--tp` that the message recommends.
fn largest(message: &str) -> u64 {
    let rest = message.rsplit("largest --tp that works is ").next().unwrap();
    let rest = if rest.len() == message.len() { message.rsplit("or --tp ").next().unwrap() } else { rest };
    rest.chars()
        .take_while(char::is_ascii_digit)
        .collect::<String>()
        .parse()
        .unwrap_or_else(|_| panic!("{message}"))
}

#[test]
fn a_tp_that_does_not_divide_is_refused_with_one_that_does() {
    // 8 heads, 2 of keys and values.
    let message =
        refused(&LLAMA.build(&q4_k), &["--tp", "3", "--weights", "bf16"], &["8 attention heads", "--tp 3"]);
    assert_eq!(largest(&message), 2, "{message}");
    let message =
        refused(&LLAMA.build(&q4_k), &["--tp", "16", "--weights", "bf16"], &["attention heads", "--tp 16"]);
    assert_eq!(largest(&message), 8, "{message}");
    // What is recommended works.
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
    let run = preshard()
        .args(["convert", "-q", "--tp", "8", "--weights", "bf16", "-o"])
        .arg(dir.path().join("out"))
        .arg(source)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
}

#[test]
fn a_cut_inside_a_block_is_refused_with_the_way_out() {
    // 512 columns over 4 ranks are 128, half a block.
    let message = refused(
        &LLAMA.build(&q4_k),
        &["--tp", "4"],
        &[
            "blk.0.attn_output.weight",
            "blk.1.ffn_down.weight",
            "128 of 512 columns",
            "--misaligned dequantise",
        ],
    );
    assert_eq!(largest(&message), 2, "{message}");
    assert_eq!(message.lines().count(), 4, "{message}");
}

#[test]
fn members_of_unlike_kinds_are_refused_with_the_way_out() {
    let types = |name: &str| if name.contains("attn_k.") { F16 } else { q4_k(name) };
    let message = refused(
        &LLAMA.build(&types),
        &[],
        &[
            "model.layers.0.self_attn.qkv_proj.weight",
            "model.layers.1.self_attn.qkv_proj.weight",
            "f16",
            "q4_K",
            "--mixed dequantise",
        ],
    );
    assert_eq!(message.lines().count(), 2, "{message}");
    let types = |name: &str| if name.contains("blk.1.ffn_up_exps") { Q5_K } else { q4_k(name) };
    refused(
        &QWEN3MOE.build(&types),
        &[],
        &["model.layers.1.mlp.experts.routed_experts.w13_weight", "q4_K, q5_K", "--mixed dequantise"],
    );
}

#[test]
fn experts_stages_and_ranks_that_do_not_fit() {
    let moe = QWEN3MOE.build(&q4_k);
    let wide = Gqa { kv_heads: 8, ..QWEN3MOE }.build(&q4_k);
    refused(&wide, &["--tp", "8", "--ep", "--weights", "bf16"], &["4 experts over 8 ranks"]);
    refused(&moe, &["--pp", "3"], &["3 stages for 2 layers"]);
    refused(&moe, &["--pp", "2", "--pp-layers", "1,2"], &["1,2 does not cut 2 layers into 2 stages"]);
    refused(&moe, &["--tp", "2", "--ranks", "1-2"], &["--ranks", "rank 2 of 2"]);
    refused(&moe, &["--layout", "hf", "--tp", "2"], &["--layout hf", "--tp"]);
}

#[test]
fn what_the_header_promises_and_the_file_does_not_hold() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = LLAMA.build(&q4_k).no_final_padding().bytes();
    let source = dir.path().join("model.gguf");
    // One byte, a block, and everything but the header.
    for cut in [1, 144, bytes.len() - 3000] {
        std::fs::write(&source, &bytes[..bytes.len() - cut]).unwrap();
        refused_in(dir.path(), &source, &[], &["model.gguf"]);
    }
    let splits =
        write_splits(dir.path(), "set", &LLAMA.build(&q4_k).splits(&[7, 7, LLAMA.shapes().len() - 14]));
    std::fs::remove_file(&splits[1]).unwrap();
    refused_in(dir.path(), &splits[0], &[], &["set-00002-of-00003.gguf"]);
    let message = refused_in(dir.path(), &dir.path().join("absent.gguf"), &[], &["absent.gguf"]);
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn an_architecture_without_a_mapping_is_named() {
    let model =
        Builder::new("mamba").kv("mamba.block_count", 1u32).f32s("token_embd.weight", &[4, 4], &[0.0; 16]);
    refused(&model, &[], &["mamba", "no mapping for this architecture", "glm-dsa", "--mappings"]);
}

#[test]
fn an_output_directory_that_is_not_empty_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    refused_in(dir.path(), &source, &[], &["out", "not empty", "notes.txt"]);
    refused_in(dir.path(), &source, &["--force"], &["out", "not empty", "notes.txt"]);
    std::fs::remove_file(out.join("notes.txt")).unwrap();
    // The directory of the source itself.
    let run = preshard().arg("convert").arg(&source).arg("-o").arg(dir.path()).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert!(stderr(&run).contains("not empty"), "{}", stderr(&run));
    // An output that is a file.
    std::fs::remove_dir(&out).unwrap();
    std::fs::write(&out, "a file").unwrap();
    refused_in(dir.path(), &source, &[], &["out"]);
    std::fs::remove_file(&out).unwrap();

    // A finished conversion is not overwritten, unless told to.
    let convert = |args: &[&str]| {
        preshard().args(["convert", "-q", "-o"]).arg(&out).arg(&source).args(args).output().unwrap()
    };
    assert!(convert(&["--tp", "2"]).status.success());
    refused_in(dir.path(), &source, &["--tp", "2"], &["already holds this conversion", "--force"]);
    refused_in(dir.path(), &source, &["--tp", "1"], &["with other options", "--force"]);
    let before = snapshot(&out);
    assert!(convert(&["--tp", "1", "--force"]).status.success());
    let after = snapshot(&out);
    assert!(
        before.contains_key("model-rank-1-part-0.safetensors")
            && !after.contains_key("model-rank-1-part-0.safetensors"),
        "a stale part is gone"
    );
    // Beside it, a foreign file still stops a forced run.
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    refused_in(dir.path(), &source, &["--force"], &["notes.txt"]);
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    if rustix::process::geteuid().is_root() {
        // Root writes anywhere; a path through a file is refused to root as well.
        let dir = tempfile::tempdir().unwrap();
        let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
        let before = snapshot(dir.path());
        let run = preshard().arg("convert").arg(&source).arg("-o").arg(source.join("out")).output().unwrap();
        assert_eq!(run.status.code(), Some(1));
        assert!(stderr(&run).contains("model.gguf/out"), "{}", stderr(&run));
        assert!(before == snapshot(dir.path()));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
    let mut permissions = std::fs::metadata(dir.path()).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(dir.path(), permissions).unwrap();
    refused_in(dir.path(), &source, &[], &["out", "ermission"]);
}

/// A source of holes: 420 GB that decode to 5 TB.
#[test]
fn too_little_room_is_seen_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let free = rustix::fs::statvfs(dir.path()).unwrap();
    let rows: u64 = 5_000_000_000;
    if free.f_bavail * free.f_frsize > rows * 1024 {
        eprintln!("skipped: more than 5 TB are free");
        return;
    }
    // The big tensor stands last in the file, so that the hole is at the end.
    let small = LLAMA.build(&q4_k).without("token_embd.weight").set("llama.vocab_size", rows);
    let at = small.bytes().len() as u64;
    let model = small.tensor("token_embd.weight", Q2_K, &[256, rows], vec![]);
    let source = model.write(dir.path().join("model.gguf"));
    let file = std::fs::OpenOptions::new().write(true).open(&source).unwrap();
    if file.set_len(at + rows * 84 + 4096).is_err() {
        eprintln!("skipped: the file system has no room for a sparse file of 420 GB");
        return;
    }
    let out = dir.path().join("out");
    let run = preshard().args(["convert", "--weights", "f32", "-o"]).arg(&out).arg(&source).output().unwrap();
    assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
    assert!(stderr(&run).contains("bytes to write"), "{}", stderr(&run));
    assert!(stderr(&run).contains("free on its file system"), "{}", stderr(&run));
    assert!(!out.exists());
}

/// Runs out of room in the middle: a file system of 4 MiB, where one can be made.
#[test]
fn a_full_disk_leaves_no_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
        .arg(&mount)
        .output();
    if !mounted.is_ok_and(|m| m.status.success()) {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let source = LLAMA.build(&q4_k).write(dir.path().join("model.gguf"));
    let run =
        preshard().args(["convert", "--weights", "f32", "-o"]).arg(mount.join("out")).arg(&source).output();
    let left = snapshot(&mount);
    std::process::Command::new("umount").arg(&mount).status().unwrap();
    let run = run.unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert!(stderr(&run).contains("free on its file system"), "{}", stderr(&run));
    assert!(left.is_empty(), "{:?}", left.keys());
}

#[test]
fn wrong_usage_is_status_2_and_success_0() {
    let source = fixture("dense/tiny-llama-Q4_K_M.gguf");
    let source = source.to_str().unwrap();
    for args in [
        &["convert"][..],
        &["convert", source],
        &["convert", source, "-o", "/nowhere", "--tp", "0"],
        &["convert", source, "-o", "/nowhere", "--tp", "two"],
        &["convert", source, "-o", "/nowhere", "--weights", "int3"],
        &["convert", source, "-o", "/nowhere", "--ranks", "3-1"],
        &["convert", source, "-o", "/nowhere", "--no-such-option"],
        &["no-such-command"],
        &[],
    ] {
        let run = preshard().args(args).output().unwrap();
        assert_eq!(run.status.code(), Some(2), "{args:?}");
        assert!(stdout(&run).is_empty() && !stderr(&run).is_empty(), "{args:?}");
        assert!(!Path::new("/nowhere").exists());
    }
    assert_eq!(preshard().args(["plan", source]).output().unwrap().status.code(), Some(0));
    assert_eq!(preshard().args(["plan", source, "--tp", "3"]).output().unwrap().status.code(), Some(1));
}
