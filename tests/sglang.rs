//! `--layout sglang`: what is written is what SGLang's own loader makes of the ordinary checkpoint.
//!
//! The expected names, dtypes, shapes and hashes are those of the state of SGLang 0.5.23's ranks after it loaded
//! `--layout hf` of the same model with its default loader (`scripts/interop_sglang.sh`).
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::policy::{Policy, Weights};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::models::{Gqa, LLAMA, QWEN3};
use support::{convert, fixture, preshard, read, stderr, stdout};

/// A rank's tensors: dtype, shape and the first half of a hash, by name.
type State = BTreeMap<String, (String, Vec<u64>, String)>;

/// What SGLang's ranks held.
fn expected(name: &str) -> Vec<State> {
    let text = std::fs::read_to_string(fixture(&format!("sglang/{name}.txt"))).unwrap();
    let mut ranks: Vec<State> = Vec::new();
    for line in text.lines() {
        let [rank, name, dtype, shape, hash] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let rank: usize = rank.parse().unwrap();
        ranks.resize_with(ranks.len().max(rank + 1), State::new);
        let shape = serde_json::from_str(shape).unwrap();
        ranks[rank].insert(name.to_owned(), (dtype.to_owned(), shape, hash.to_owned()));
    }
    assert!(!ranks.is_empty());
    ranks
}

/// What a file holds, in the same terms.
fn state(file: &Path) -> State {
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex()[..32].to_owned();
    read(file).into_iter().map(|(name, t)| (name, (t.dtype, t.shape, hash(&t.bytes)))).collect()
}

fn bf16(tp: u64) -> Policy {
    Policy { tp, layout: "sglang".into(), weights: Weights::Bf16, ..Policy::default() }
}

#[track_caller]
fn as_sglang_holds_it(source: &Path, policy: Policy, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    convert(source, policy, dir.path()).unwrap();
    for (rank, expected) in expected(name).into_iter().enumerate() {
        let found = state(&dir.path().join(format!("model-rank-{rank}-part-0.safetensors")));
        assert_eq!(found, expected, "{name}, rank {rank}");
    }
}

fn dense(name: &str) -> PathBuf {
    fixture(&format!("dense/tiny-{name}-Q4_K_M.gguf"))
}

#[test]
fn dense_models_are_cut_as_sglang_cuts_them() {
    as_sglang_holds_it(&dense("llama"), bf16(2), "llama");
    as_sglang_holds_it(&dense("qwen2"), bf16(2), "qwen2");
    let dir = tempfile::tempdir().unwrap();
    let source = QWEN3.build(&|_| BF16).write(dir.path().join("qwen3.gguf"));
    as_sglang_holds_it(&source, bf16(2), "qwen3");
    // One key/value head, which both ranks hold.
    let source = Gqa { kv_heads: 1, ..LLAMA }.build(&|_| BF16).write(dir.path().join("kv1.gguf"));
    as_sglang_holds_it(&source, bf16(2), "llama-kv1");
}

#[test]
fn experts_are_cut_or_placed_as_sglang_does() {
    as_sglang_holds_it(&dense("qwen3moe"), bf16(2), "qwen3moe");
    as_sglang_holds_it(&dense("qwen3moe"), Policy { ep: true, ..bf16(2) }, "qwen3moe-ep");
}

/// 300 rows are padded to 320, which three ranks cannot share: SGLang then pads to a multiple of 3 * 64.
#[test]
fn a_vocabulary_is_padded_until_the_ranks_can_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let model = Gqa { hidden: 192, heads: 3, kv_heads: 3, inter: 384, tied: true, ..LLAMA };
    let source = model.build(&|_| BF16).write(dir.path().join("model.gguf"));
    as_sglang_holds_it(&source, bf16(3), "llama-tp3");
    let vllm = Policy { layout: "vllm".into(), ..bf16(3) };
    assert!(convert(&source, vllm, &dir.path().join("out")).err().unwrap().contains("320 rows"));
}

#[test]
fn what_sglang_cannot_take_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let stages = Policy { pp: 2, ..bf16(1) };
    let error = convert(&dense("llama"), stages, dir.path()).err().unwrap();
    assert!(error.starts_with("--pp: SGLang") && error.contains("leave out --pp"), "{error}");
    let source = Gqa { arch: "qwen3moe", experts: 3, head_norms: true, ..LLAMA }.build(&|_| BF16);
    let source = source.write(dir.path().join("odd.gguf"));
    let error = convert(&source, Policy { ep: true, ..bf16(2) }, &dir.path().join("out")).err().unwrap();
    assert!(error.starts_with("--ep: 3 experts over 2 ranks, but SGLang"), "{error}");
}

#[test]
fn the_command_that_serves_it_is_sglangs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = preshard();
    command.arg("convert").arg(dense("qwen3moe")).args(["--layout", "sglang", "--tp", "2", "--ep", "-o"]);
    let output = command.arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let serve = format!(
        "serve it:  python3 -m sglang.launch_server --model-path {} --load-format sharded_state --tp-size 2 --ep-size 2\n",
        out.display()
    );
    assert!(stdout(&output).contains(&serve), "{}", stdout(&output));
    let verify = preshard().arg("verify").arg(&out).output().unwrap();
    assert!(verify.status.success(), "{}", stderr(&verify));
}
