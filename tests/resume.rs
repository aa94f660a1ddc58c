//! A run that dies is continued by the same command, and the result is that of a run that did not.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::convert::{self, Outcome, Progress};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Policy, Weights};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::models::{Gqa, LLAMA};
use support::{preshard, settings, snapshot, stderr};

/// 64 MiB as bf16: several leaves of 16 MiB in each of two ranks.
fn model(dir: &Path) -> PathBuf {
    let dims = Gqa { hidden: 1024, inter: 3072, heads: 16, kv_heads: 4, layers: 3, ..LLAMA };
    dims.build(&|_| Q4_0).write(dir.join("model.gguf"))
}

fn options() -> Policy {
    Policy { tp: 2, weights: Weights::Bf16, ..Policy::default() }
}

const ARGS: [&str; 6] = ["--tp", "2", "--weights", "bf16", "--threads", "2"];

/// Converts, and stops after `leaves` leaves when there are so many left.
fn run(source: &Path, out: &Path, options: Policy, leaves: u64) -> Result<Outcome, String> {
    let gguf = Gguf::open(&[source.to_owned()]).unwrap();
    let plan = Plan::new(&gguf, &Tables::default(), options).unwrap();
    let stop = AtomicBool::new(leaves == 0);
    let written = AtomicU64::new(0);
    let progress = |p: Progress| {
        if matches!(p, Progress::Wrote(_)) && written.fetch_add(1, Ordering::Relaxed) + 1 >= leaves {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let settings = settings(&stop, &progress);
    convert::run(&plan, &gguf, out, &settings).map_err(|e| e.to_string())
}

/// Copies a directory of files and folders.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// The result of an undisturbed run.
fn whole(source: &Path, dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let out = dir.join("whole");
    let outcome = run(source, &out, options(), u64::MAX).unwrap();
    let files = snapshot(&out);
    // The leaves' hashes fold to what b3sum prints.
    for shard in &outcome.manifest.shards {
        assert!(shard.leaves.len() > 1);
        assert_eq!(blake3::hash(&files[&shard.file]).to_hex().as_str(), shard.blake3);
    }
    files
}

#[test]
fn stopped_after_any_leaf_it_goes_on_and_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let expected = whole(&source, dir.path());
    let mut resumed_before = None;
    for leaves in 0..64 {
        let out = dir.path().join("out");
        match run(&source, &out, options(), leaves) {
            Ok(_) => panic!("{leaves}: not stopped"),
            Err(message) => assert!(message.contains("the same command goes on"), "{message}"),
        }
        assert!(!out.join("preshard.json").exists());
        // Leaves not in the journal may hold anything: here, the bytes of a dying machine.
        let journal = std::fs::read_to_string(out.join(".partial/journal")).unwrap();
        spoil(&out.join(".partial"), &journal);
        let outcome = run(&source, &out, options(), u64::MAX).unwrap();
        assert!(snapshot(&out) == expected, "stopped after {leaves} leaves");
        // Each leaf more that the first run did is one less for the second.
        assert!(resumed_before.is_none_or(|n| outcome.resumed > n) || outcome.written == 0, "{leaves}");
        resumed_before = Some(outcome.resumed);
        std::fs::remove_dir_all(&out).unwrap();
        if outcome.written == 0 {
            assert!(leaves >= 4, "the model has several leaves");
            return;
        }
    }
    panic!("never done");
}

/// Overwrites every leaf that the journal does not list.
fn spoil(partial: &Path, journal: &str) {
    use std::os::unix::fs::FileExt;
    const LEAF: u64 = 16 << 20;
    for rank in 0..2 {
        let name = format!("model-rank-{rank}-part-0.safetensors");
        let Ok(file) = std::fs::OpenOptions::new().write(true).open(partial.join(&name)) else { continue };
        let bytes = file.metadata().unwrap().len();
        for leaf in 0..bytes.div_ceil(LEAF) {
            if !journal.contains(&format!("{name} {leaf} ")) {
                let n = LEAF.min(bytes - leaf * LEAF);
                file.write_all_at(&vec![0xa5; n as usize], leaf * LEAF).unwrap();
            }
        }
    }
}

#[test]
fn a_journal_cut_anywhere_loses_leaves_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let expected = whole(&source, dir.path());
    let stopped = dir.path().join("stopped");
    run(&source, &stopped, options(), 3).map(drop).unwrap_err();
    let journal = std::fs::read(stopped.join(".partial/journal")).unwrap();
    let lines: Vec<usize> =
        journal.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1).collect();
    assert_eq!(lines.len(), 4, "a head and a line for each leaf");
    for (cut, resumed) in [
        (0, 0),
        (5, 0),
        (lines[0], 0),
        (lines[1] - 1, 0),
        (lines[1] + 40, 1),
        (lines[2], 2),
        (lines[3] - 1, 2),
        (lines[3], 3),
    ] {
        let out = dir.path().join("out");
        copy(&stopped, &out);
        std::fs::write(out.join(".partial/journal"), &journal[..cut]).unwrap();
        let text = String::from_utf8_lossy(&journal[..cut]).into_owned();
        let whole_lines = &text[..text.rfind('\n').map_or(0, |i| i + 1)];
        spoil(&out.join(".partial"), whole_lines);
        let outcome = run(&source, &out, options(), u64::MAX).unwrap();
        assert_eq!(outcome.resumed.div_ceil(16 << 20), resumed, "cut at {cut}");
        assert!(snapshot(&out) == expected, "cut at {cut}");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_run_that_died_while_renaming_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let expected = whole(&source, dir.path());
    let all = expected.keys().filter(|f| f.ends_with(".safetensors")).count();
    // Every leaf is written and journalled; then the files appear one by one.
    for moved in 0..=all {
        let out = dir.path().join("out");
        let leaves = expected.values().map(|b| b.len().div_ceil(16 << 20)).sum::<usize>() as u64 - 2;
        run(&source, &out, options(), leaves).map(drop).unwrap_err();
        // Written before the first file is renamed: it tells which files are the run's own.
        std::fs::write(out.join(".partial/preshard.json"), &expected["preshard.json"]).unwrap();
        for rank in 0..moved {
            let name = format!("model-rank-{rank}-part-0.safetensors");
            std::fs::rename(out.join(".partial").join(&name), out.join(&name)).unwrap();
        }
        let outcome = run(&source, &out, options(), u64::MAX).unwrap();
        assert_eq!(outcome.written, 0, "nothing is written twice");
        assert!(snapshot(&out) == expected, "{moved} files in place");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_run_that_died_while_tidying_up_was_successful() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let expected = whole(&source, dir.path());
    let out = dir.path().join("out");
    run(&source, &out, options(), u64::MAX).unwrap();
    // The manifest is in place, the working directory still there.
    std::fs::create_dir(out.join(".partial")).unwrap();
    std::fs::write(out.join(".partial/journal"), "what the run had left").unwrap();
    let outcome = run(&source, &out, options(), u64::MAX).unwrap();
    assert_eq!(outcome.written, 0);
    assert!(snapshot(&out) == expected, "nothing but the conversion is left");
    let again = run(&source, &out, options(), u64::MAX).map(drop).unwrap_err().to_string();
    assert!(again.contains("already holds this conversion"), "{again}");
}

#[test]
fn a_shard_that_was_deleted_meanwhile_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let expected = whole(&source, dir.path());
    let out = dir.path().join("out");
    run(&source, &out, options(), 3).map(drop).unwrap_err();
    for rank in 0..2 {
        std::fs::remove_file(out.join(format!(".partial/model-rank-{rank}-part-0.safetensors"))).unwrap();
    }
    assert_eq!(run(&source, &out, options(), u64::MAX).unwrap().resumed, 0);
    assert!(snapshot(&out) == expected);
}

#[test]
fn a_source_that_changes_during_the_run_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&|_| Q4_0).write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let gguf = Gguf::open(std::slice::from_ref(&source)).unwrap();
    let plan = Plan::new(&gguf, &Tables::default(), options()).unwrap();
    let stop = AtomicBool::new(false);
    let progress = |p: Progress| {
        if matches!(p, Progress::Start { .. }) {
            use std::io::Write;
            let mut file = std::fs::OpenOptions::new().append(true).open(&source).unwrap();
            file.write_all(b"more").unwrap();
        }
    };
    let settings = settings(&stop, &progress);
    let message = convert::run(&plan, &gguf, &out, &settings).map(drop).unwrap_err().to_string();
    assert!(message.contains("model.gguf: it had"), "{message}");
    assert!(!out.join("preshard.json").exists());
}

#[test]
fn an_unfinished_conversion_is_taken_up_by_its_own_plan_alone() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let out = dir.path().join("out");
    run(&source, &out, options(), 2).map(drop).unwrap_err();
    let before = snapshot(&out);
    let other = Policy { tp: 4, ..options() };
    let message = run(&source, &out, other.clone(), u64::MAX).map(drop).unwrap_err();
    assert!(message.contains("unfinished conversion with other options"), "{message}");
    assert!(snapshot(&out) == before, "a refusal changes nothing");
    // Another source of the same shape is another plan.
    let changed = LLAMA.build(&|_| Q4_0).write(dir.path().join("other.gguf"));
    let message = run(&changed, &out, options(), u64::MAX).map(drop).unwrap_err();
    assert!(message.contains("another source"), "{message}");
    assert!(snapshot(&out) == before);
    // --force discards it.
    let status = preshard()
        .args(["convert", "--force", "-q", "--tp", "4", "--weights", "bf16", "-o"])
        .args([&out, &source])
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", stderr(&status));
    let fresh = dir.path().join("fresh");
    run(&source, &fresh, other, u64::MAX).unwrap();
    let shards = |dir: &Path| {
        let mut files = snapshot(dir);
        files.retain(|name, _| name.ends_with(".safetensors"));
        files
    };
    assert!(shards(&out) == shards(&fresh));
}

#[test]
fn a_second_run_is_kept_out_while_the_first_lasts() {
    let dir = tempfile::tempdir().unwrap();
    let source = LLAMA.build(&|_| Q4_0).write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let gguf = Gguf::open(std::slice::from_ref(&source)).unwrap();
    let plan = Plan::new(&gguf, &Tables::default(), options()).unwrap();
    let tried = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let progress = |p: Progress| {
        if matches!(p, Progress::Start { .. }) {
            for force in [&[][..], &["--force"]] {
                let second = preshard()
                    .arg("convert")
                    .args([&source, Path::new("-o"), &out])
                    .args(ARGS)
                    .args(force)
                    .output()
                    .unwrap();
                assert_eq!(second.status.code(), Some(1));
                assert!(
                    stderr(&second).contains("another preshard convert is writing here"),
                    "{}",
                    stderr(&second)
                );
                tried.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let settings = settings(&stop, &progress);
    convert::run(&plan, &gguf, &out, &settings).unwrap();
    assert_eq!(tried.into_inner(), 2);
    assert!(out.join("preshard.json").exists());
}

/// The program itself, killed at later and later moments, in one directory.
#[test]
fn killed_at_any_moment_the_same_command_finishes() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let command = |out: &Path| {
        let mut c = preshard();
        c.arg("convert").arg("-q").arg(&source).arg("-o").arg(out).args(ARGS).args(["--device", "cpu"]);
        c
    };
    let fresh = dir.path().join("fresh");
    let output = command(&fresh).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = snapshot(&fresh);

    let out = dir.path().join("out");
    let mut kills = 0;
    for step in 0.. {
        let child = command(&out).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(step * 25));
        // SIGTERM now and then: it stops between leaves and keeps what is done.
        let signal =
            if step % 3 == 2 { rustix::process::Signal::TERM } else { rustix::process::Signal::KILL };
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        let _ = rustix::process::kill_process(pid, signal);
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            break;
        }
        kills += 1;
        if out.join("preshard.json").exists() {
            // Killed after the manifest had appeared: complete, but for tidying up.
            std::fs::remove_dir_all(out.join(".partial")).unwrap();
            break;
        }
        if output.status.signal().is_none() {
            assert_eq!(output.status.code(), Some(1));
            assert!(stderr(&output).contains("the same command goes on"), "{}", stderr(&output));
        }
        assert!(kills < 400, "never finishes");
    }
    assert!(kills > 0, "no run was interrupted");
    assert!(snapshot(&out) == expected, "after {kills} kills");
}
