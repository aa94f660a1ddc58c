//! Ranks that several hosts converted become the directory of one run, or are refused.
#![cfg(feature = "cli")]

mod common;
mod support;

use preshard::policy::{Policy, Weights};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use support::models::{GLM, q4_k};
use support::{How, preshard, snapshot, stderr};

/// Two pipeline stages of two ranks, and drafts.
fn options() -> Policy {
    Policy { tp: 2, pp: 2, ..Policy::default() }
}

fn model(dir: &Path) -> PathBuf {
    GLM.build(&q4_k).write(dir.join("model.gguf"))
}

fn host(source: &Path, options: Policy, ranks: &[u64], dir: PathBuf) -> PathBuf {
    let how = How { ranks: Some(ranks.to_vec()), ..How::default() };
    support::convert_how(&[source.to_owned()], options, &dir, how).unwrap();
    dir
}

fn merge(dirs: &[&Path], out: &Path) -> Result<(), String> {
    let output = preshard().arg("merge").args(dirs).arg("-o").arg(out).output().unwrap();
    match output.status.code() {
        Some(0) => Ok(()),
        Some(1) => Err(stderr(&output)),
        other => panic!("{other:?}: {}", stderr(&output)),
    }
}

#[test]
fn ranks_of_several_hosts_become_the_directory_of_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let whole = dir.path().join("whole");
    support::convert(&source, options(), &whole).unwrap();
    let whole = snapshot(&whole);
    let hosts: Vec<_> = [vec![0], vec![3, 1], vec![2]]
        .iter()
        .map(|ranks| host(&source, options(), ranks, dir.path().join(format!("{ranks:?}"))))
        .collect();
    let paths: Vec<&Path> = hosts.iter().map(PathBuf::as_path).collect();
    let before: Vec<_> = paths.iter().map(|p| snapshot(p)).collect();

    let out = dir.path().join("out");
    merge(&paths, &out).unwrap();
    assert!(snapshot(&out) == whole, "{:?}", snapshot(&out).keys());
    assert!(paths.iter().map(|p| snapshot(p)).eq(before), "the hosts' directories stay as they are");
    // Again: nothing to do. A host's directory may stand among the others, or twice.
    merge(&[&out, paths[0], paths[0], paths[2]], &out).unwrap();
    // Into the directory of one host.
    merge(&[paths[1], paths[2]], paths[0]).unwrap();
    assert!(snapshot(paths[0]) == whole);
}

#[test]
fn a_merge_that_died_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let whole = dir.path().join("whole");
    support::convert(&source, options(), &whole).unwrap();
    let a = host(&source, options(), &[0, 1], dir.path().join("a"));
    let b = host(&source, options(), &[2, 3], dir.path().join("b"));
    let out = dir.path().join("out");
    // The second directory is found damaged when the first is already in: a stop in the middle.
    let shard = b.join("mtp-rank-1-part-0.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let error = merge(&[&a, &b], &out).unwrap_err();
    assert!(
        error.contains("mtp-rank-1-part-0.safetensors") && error.contains("copy the file again"),
        "{error}"
    );
    assert!(!out.join("preshard.json").exists());
    // What stands in the working directory may be half a copy.
    std::fs::remove_file(out.join(".partial/model-pp-0-tp-0-part-0.safetensors")).unwrap();
    std::fs::write(out.join(".partial/model-pp-0-tp-0-part-0.safetensors"), b"half").unwrap();
    std::fs::write(&shard, &bytes).unwrap();
    merge(&[&a, &b], &out).unwrap();
    assert!(snapshot(&out) == snapshot(&whole));
}

/// tmpfs is another file system than the build's, as a rule: no links, so bytes are copied and looked at.
#[test]
fn a_copy_to_another_file_system_is_checked_leaf_by_leaf() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = |dir: &tempfile::TempDir| dir.path().metadata().unwrap().dev();
    if device(&memory) == device(&dir) {
        eprintln!("skipped: this build lies in tmpfs itself");
        return;
    }
    let source = model(dir.path());
    let options = Policy { tp: 2, weights: Weights::Bf16, ..Policy::default() };
    let whole = dir.path().join("whole");
    support::convert(&source, options.clone(), &whole).unwrap();
    let a = host(&source, options.clone(), &[0], dir.path().join("a"));
    let b = host(&source, options, &[1], dir.path().join("b"));
    merge(&[&a, &b], &memory.path().join("good")).unwrap();
    assert!(snapshot(&memory.path().join("good")) == snapshot(&whole));

    let shard = b.join("model-rank-1-part-0.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, &bytes).unwrap();
    let error = merge(&[&a, &b], &memory.path().join("bad")).unwrap_err();
    assert!(error.contains("model-rank-1-part-0.safetensors") && error.contains("leaf 0"), "{error}");
    assert!(!memory.path().join("bad/preshard.json").exists());
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let out = dir.path().join("out");
    let a = host(&source, options(), &[0, 1], dir.path().join("a"));
    let b = host(&source, options(), &[3], dir.path().join("b"));
    let refused = |dirs: &[&Path], words: &[&str]| {
        let error = merge(dirs, &out).unwrap_err();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
        assert!(!out.exists(), "nothing is written");
    };
    refused(&[&a, &b], &["1 of 4 ranks", "--ranks 2"]);
    refused(&[&b], &["3 of 4 ranks", "--ranks 0,1,2"]);
    let other = Policy { weights: Weights::Bf16, ..options() };
    let c = host(&source, other, &[2, 3], dir.path().join("c"));
    refused(&[&a, &c], &["preshard.json", "not of the same plan", "options", "convert all ranks"]);
    refused(&[&a, &dir.path().join("nowhere")], &["nowhere"]);

    // The same plan by its header, and other data: a rank that two hosts have, differently.
    let mut bytes = std::fs::read(&source).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let changed = dir.path().join("changed/model.gguf");
    std::fs::create_dir(changed.parent().unwrap()).unwrap();
    std::fs::write(&changed, bytes).unwrap();
    let d = host(&changed, options(), &[0, 1, 2, 3], dir.path().join("d"));
    refused(&[&a, &b, &d], &["differs from the one in", "convert this rank again"]);

    let usage = preshard().arg("merge").output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

/// Each scheduler's own variable names the rank; the command says which it was.
#[test]
fn the_rank_that_a_scheduler_names_is_converted() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let run = |set: &[(&str, &str)], args: &[&str], out: &Path| {
        let mut command = preshard();
        for name in ["SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX"] {
            command.env_remove(name);
        }
        command.envs(set.iter().copied()).arg("convert").arg(&source).args(["--tp", "2", "--pp", "2"]);
        command.args(args).arg("-o").arg(out).output().unwrap()
    };
    let whole = dir.path().join("whole");
    assert!(run(&[], &[], &whole).status.success());
    let (array, process, index) = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX");
    let mut hosts = Vec::new();
    for (rank, set, read) in [
        (0, &[(array, "0"), (process, "0")][..], array),
        (3, &[(array, "3"), (process, "0")], array),
        (1, &[(process, "1")], process),
        (2, &[(index, "2")], index),
    ] {
        let out = dir.path().join(rank.to_string());
        let done = run(set, &["--ranks", "env"], &out);
        assert!(done.status.success(), "{}", stderr(&done));
        let told = format!("note: rank {rank} of 4, read from {read}\n");
        assert!(stderr(&done).contains(&told), "{}", stderr(&done));
        hosts.push(out);
    }
    let paths: Vec<&Path> = hosts.iter().map(PathBuf::as_path).collect();
    let out = dir.path().join("out");
    merge(&paths, &out).unwrap();
    assert!(snapshot(&out) == snapshot(&whole));

    let nowhere = dir.path().join("nowhere");
    for (set, words) in
        [(&[][..], "none of SLURM_ARRAY_TASK_ID"), (&[(index, "4")], "JOB_COMPLETION_INDEX is 4")]
    {
        let refused = run(set, &["--ranks", "env"], &nowhere);
        assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
        assert!(stderr(&refused).contains(words), "{}", stderr(&refused));
        assert!(!nowhere.exists());
    }
    // The loader takes the same word.
    let mut load = preshard();
    load.env(process, "1").env_remove(array).args(["load", "--device", "cpu", "--ranks", "env"]).arg(&out);
    let loaded = load.output().unwrap();
    assert!(loaded.status.success() && stderr(&loaded).contains("rank 1 of 4, read from SLURM_PROCID"));
    assert!(support::stdout(&loaded).contains("model-pp-0-tp-1-part-0.safetensors -> host memory"));
}
