//! What may go wrong while converting, and what must hold then: nothing stale is trusted, nothing whole
//! is lost, and every damage is seen. scripts/check_faults.py tries the same at length, with kills,
//! failing system calls and full disks.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::convert::{self, Outcome, Progress, Settings};
use preshard::eval::{Decoder, Evaluator};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Policy, Weights};
use preshard::verify;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::models::{Gqa, LLAMA};
use support::{fixture, preshard, settings, snapshot, stderr};

/// 64 MiB as bf16: several leaves of 16 MiB in each of two ranks.
fn model(dir: &Path) -> PathBuf {
    let dims = Gqa { hidden: 1024, inter: 3072, heads: 16, kv_heads: 4, layers: 3, ..LLAMA };
    dims.build(&|_| Q4_0).write(dir.join("model.gguf"))
}

fn options() -> Policy {
    Policy { tp: 2, weights: Weights::Bf16, ..Policy::default() }
}

/// Converts; after `leaves` leaves `then` is called once and the run asked to stop.
fn run_then(
    source: &Path,
    out: &Path,
    force: bool,
    leaves: u64,
    then: &(dyn Fn() + Sync),
    stop_then: bool,
) -> Result<Outcome, String> {
    let gguf = Gguf::open(&[source.to_owned()]).map_err(|e| e.to_string())?;
    let plan = Plan::new(&gguf, &Tables::default(), options()).map_err(|e| e.to_string())?;
    let stop = AtomicBool::new(stop_then && leaves == 0);
    let written = AtomicU64::new(0);
    let progress = |p: Progress| {
        if matches!(p, Progress::Wrote(_)) && written.fetch_add(1, Ordering::Relaxed) + 1 == leaves {
            then();
            stop.store(stop_then, Ordering::Relaxed);
        }
    };
    let settings = Settings { force, ..settings(&stop, &progress) };
    convert::run(&plan, &gguf, out, &settings).map_err(|e| e.to_string())
}

fn stopped(source: &Path, out: &Path, leaves: u64) {
    let message = run_then(source, out, false, leaves, &|| (), true).map(drop).unwrap_err();
    assert!(message.contains("the same command goes on"), "{message}");
}

fn run(source: &Path, out: &Path) -> Result<Outcome, String> {
    run_then(source, out, false, u64::MAX, &|| (), false)
}

fn check(dir: &Path) -> Result<(), String> {
    let settings = verify::Settings { threads: 1, progress: &|_| (), stop: &AtomicBool::new(false) };
    verify::hashes(dir, &settings).map(drop).map_err(|e| e.to_string())
}

#[test]
fn leaves_of_a_file_that_went_missing_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    run(&source, &dir.path().join("whole")).unwrap();
    let out = dir.path().join("out");
    stopped(&source, &out, 3);
    let shard = out.join(".partial/model-rank-0-part-0.safetensors");
    std::fs::remove_file(&shard).unwrap();
    // This run makes the file anew, full of zeros, and dies before it writes a leaf of it.
    stopped(&source, &out, 0);
    assert!(shard.exists());
    run(&source, &out).unwrap();
    assert!(snapshot(&out) == snapshot(&dir.path().join("whole")));
    // So is a file that was cut.
    let out = dir.path().join("cut");
    stopped(&source, &out, 3);
    let shard = out.join(".partial/model-rank-0-part-0.safetensors");
    std::fs::File::options().write(true).open(&shard).unwrap().set_len(100).unwrap();
    run(&source, &out).unwrap();
    assert!(snapshot(&out) == snapshot(&dir.path().join("whole")));
}

#[test]
fn a_source_that_was_changed_is_not_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let out = dir.path().join("out");
    stopped(&source, &out, 2);
    let change = || {
        let file = std::fs::File::options().write(true).open(&source).unwrap();
        let end = file.metadata().unwrap().len();
        file.write_all_at(b"other weights", end - 1000).unwrap();
    };
    change();
    let message = run(&source, &out).map(drop).unwrap_err();
    assert!(message.contains("changed since"), "{message}");
    // While a run is on, it is seen at the end, and no leaf of the mixture is left to go on from.
    let out = dir.path().join("during");
    let message = run_then(&source, &out, false, 2, &change, false).map(drop).unwrap_err();
    assert!(message.contains("modified since it was opened"), "{message}");
    assert!(!out.exists());
}

#[test]
fn a_conversion_that_is_replaced_stays_whole_until_the_new_one_is() {
    let dir = tempfile::tempdir().unwrap();
    let old = LLAMA.build(&|_| Q8_0).write(dir.path().join("old.gguf"));
    let out = dir.path().join("out");
    let four = Policy { tp: 4, ..options() };
    support::convert(&old, four, &out).unwrap();
    let before = snapshot(&out);
    let mut files_before = before.clone();
    files_before.retain(|name, _| !name.starts_with(".partial"));
    let source = model(dir.path());
    for leaves in [0, 1, 3] {
        let message = run_then(&source, &out, true, leaves, &|| (), true).map(drop).unwrap_err();
        assert!(message.contains("the same command goes on"), "{message}");
        let mut now = snapshot(&out);
        now.retain(|name, _| !name.starts_with(".partial"));
        assert!(now == files_before, "after {leaves} leaves");
        check(&out).unwrap();
    }
    let outcome = run_then(&source, &out, true, u64::MAX, &|| (), false).unwrap();
    assert!(outcome.resumed > 0, "the leaves of the stopped runs count");
    run(&source, &dir.path().join("whole")).unwrap();
    assert!(snapshot(&out) == snapshot(&dir.path().join("whole")), "nothing of the four ranks is left");
}

#[test]
fn nan_is_refused_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let sound = model(dir.path());
    let mut bytes = std::fs::read(&sound).unwrap();
    let gguf = Gguf::open(std::slice::from_ref(&sound)).unwrap();
    let t = gguf.tensors().iter().find(|t| t.name == "blk.1.ffn_up.weight").unwrap();
    let scale = t.offset as usize + 7 * 18;
    bytes[scale..scale + 2].copy_from_slice(&[0x00, 0x7e]);
    let source = dir.path().join("nan.gguf");
    std::fs::write(&source, bytes).unwrap();

    let out = dir.path().join("out");
    let message = run(&source, &out).map(drop).unwrap_err();
    assert!(message.starts_with("blk.1.ffn_up.weight: q4_0 block 7 decodes to NaN"), "{message}");
    assert!(!out.exists());
    std::fs::create_dir(&out).unwrap();
    run(&source, &out).map(drop).unwrap_err();
    assert!(out.exists() && snapshot(&out).is_empty(), "a directory that was there stays");
    run(&sound, &out).unwrap();
    let before = snapshot(&out);
    run_then(&source, &out, true, u64::MAX, &|| (), false).map(drop).unwrap_err();
    assert!(snapshot(&out) == before, "a refused --force loses nothing");

    let out = dir.path().join("allowed");
    let how = support::How { allow_nonfinite: true, ..Default::default() };
    let outcome = support::convert_how(&[source], options(), &out, how).unwrap();
    let counts: Vec<_> = outcome
        .manifest
        .shards
        .iter()
        .flat_map(|s| &s.tensors)
        .filter(|t| t.nonfinite > 0)
        .map(|t| (t.name.as_str(), t.nonfinite))
        .collect();
    assert_eq!(counts, [("model.layers.1.mlp.gate_up_proj.weight", 32)], "the elements of one block");
}

#[test]
fn every_flipped_bit_is_found_and_its_file_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let source = fixture("dense/tiny-llama-Q4_K_M.gguf");
    let done = preshard()
        .args(["convert", "-q", "--tp", "2", "--misaligned", "dequantise"])
        .arg(source)
        .arg("-o")
        .arg(&out)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    check(&out).unwrap();
    let files: Vec<_> = snapshot(&out).into_iter().collect();
    assert!(files.iter().any(|(name, _)| name == "config.json"));
    let mut numbers = support::models::Numbers::of("bits");
    for i in 0..15 * files.len() {
        let (name, bytes) = &files[i % files.len()];
        let (at, bit) = (numbers.next() as usize % bytes.len(), numbers.next() % 8);
        let mut changed = bytes.clone();
        changed[at] ^= 1 << bit;
        std::fs::write(out.join(name), changed).unwrap();
        let message = check(&out).expect_err(&format!("bit {bit} of byte {at} of {name}"));
        assert!(message.contains(name.as_str()), "{name}: {message}");
        if name.ends_with(".safetensors") {
            assert!(message.contains("leaf 0 "), "{message}");
        }
        std::fs::write(out.join(name), bytes).unwrap();
    }
    check(&out).unwrap();
}

#[test]
fn a_limit_on_file_sizes_is_an_error_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let out = dir.path().join("out");
    // `ulimit -f` counts blocks of 512 or 1024 bytes.
    let done = Command::new("sh")
        .args(["-c", "ulimit -f 4000; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_preshard"), "convert", "-q"])
        .args(["--tp", "2", "--weights", "bf16", "-o"])
        .args([&out, &source])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert_eq!(stderr(&done).lines().count(), 1, "{}", stderr(&done));
    assert!(stderr(&done).contains("File too large"), "{}", stderr(&done));
    assert!(!out.join("preshard.json").exists());
    // The same command, without the limit, goes on.
    let done = preshard()
        .args(["convert", "-q", "--tp", "2", "--weights", "bf16", "-o"])
        .args([&out, &source])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    check(&out).unwrap();
}

#[test]
fn a_closed_standard_error_is_no_panic() {
    let mut child = preshard().args(["inspect", "/nowhere.gguf"]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn control_characters_of_an_input_are_not_printed() {
    let dir = tempfile::tempdir().unwrap();
    let nasty = "x\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m";
    let file = LLAMA
        .build(&|_| Q8_0)
        .f32s(nasty, &[4], &[0.0; 4])
        .kv(nasty, nasty)
        .write(dir.path().join("model.gguf"));
    std::fs::create_dir_all(dir.path().join("m/arch")).unwrap();
    std::fs::File::create(dir.path().join("m/arch/llama.toml"))
        .unwrap()
        .write_all(
            format!("architecture = \"llama\"\n\"{nasty}\" = 1\n").replace('\u{1b}', "\\u001b").as_bytes(),
        )
        .unwrap();
    let mappings = dir.path().join("m");
    let file = file.to_str().unwrap();
    for args in [
        &["inspect", "-v", file][..],
        &["plan", "-v", file],
        &["convert", file, "-o", "/nowhere/out"],
        &["plan", file, "--mappings", mappings.to_str().unwrap()],
    ] {
        let done = preshard().args(args).output().unwrap();
        let text = [String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr)].concat();
        assert!(!text.is_empty());
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{args:?}: {text:?}");
    }
}

#[test]
fn a_manifest_of_impossible_numbers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&|_| Q8_0).write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    run(&source, &out).unwrap();
    let text = std::fs::read_to_string(out.join("preshard.json")).unwrap();
    for (from, to) in [
        ("\"tp\": 2", "\"tp\": 0"),
        ("\"pp\": 1", "\"pp\": 0"),
        ("\"tp\": 2", "\"tp\": 18446744073709551615"),
    ] {
        assert!(text.contains(from));
        std::fs::write(out.join("preshard.json"), text.replacen(from, to, 1)).unwrap();
        let done = preshard().arg("verify").args([&out, Path::new("--source"), &source]).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{to}: {}", stderr(&done));
    }
}

/// Rows of the narrower members of a joined tensor are padded; a piece may begin in the padding of the
/// very last row. Leaves of real models begin anywhere.
#[test]
fn pieces_that_begin_in_padding_are_as_good_as_any() {
    let dir = tempfile::tempdir().unwrap();
    let types = |name: &str| if name.contains("attn_v.") { Q4_0 } else { Q8_0 };
    let source = LLAMA.build(&types).write(dir.path().join("model.gguf"));
    let gguf = Gguf::open(&[source]).unwrap();
    let plan = Plan::new(&gguf, &Tables::default(), Policy { tp: 2, ..Policy::default() }).unwrap();
    let evaluator = Evaluator { plan: &plan, gguf: &gguf, decoder: &Decoder::CPU, allow_nonfinite: false };
    for shard in &plan.shards {
        let mut whole = Vec::new();
        evaluator.bytes(shard, 0..shard.bytes, &mut whole).unwrap();
        let (mut pieces, mut piece, mut at) = (Vec::new(), Vec::new(), 0);
        while at < shard.bytes {
            let end = (at + 68).min(shard.bytes);
            evaluator.bytes(shard, at..end, &mut piece).unwrap();
            pieces.extend_from_slice(&piece);
            at = end;
        }
        assert!(pieces == whole, "{}", shard.name);
    }
}
