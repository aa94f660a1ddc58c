//! `--layout sglang`: what is written is what SGLang's own loader makes of the ordinary checkpoint.
//!
//! The expected names, dtypes, shapes and hashes are those of the state of SGLang 0.5.23's ranks after it loaded
//! `--layout hf` of the same model with its default loader (`scripts/interop_sglang.sh`).
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::policy::{Keep, Mtp, Policy, SharedExperts, Weights};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::models::{DEEPSEEK, Gqa, LLAMA, Mla, QWEN3};
use support::{convert, converted, fixture, preshard, read, stderr, stdout};

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

fn dsv3() -> PathBuf {
    fixture("dsv3/tiny-dsv3-Q4_K_M.gguf")
}

fn glm5() -> PathBuf {
    fixture("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf")
}

/// V3's class with queries at once, as V2-Lite has them.
const LITE: Mla = Mla { layers: 2, moe_inter: 256, nope: 128, rope: 64, q_lora: 0, experts: 8, ..DEEPSEEK };

#[test]
fn deepseek_is_cut_as_sglang_cuts_it() {
    as_sglang_holds_it(&dsv3(), bf16(2), "dsv3");
    as_sglang_holds_it(&dsv3(), Policy { ep: true, ..bf16(2) }, "dsv3-ep");
    as_sglang_holds_it(&dsv3(), Policy { shared_experts: SharedExperts::Fused, ..bf16(2) }, "dsv3-fused");
    let dir = tempfile::tempdir().unwrap();
    let source = LITE.build(&|_| BF16).write(dir.path().join("lite.gguf"));
    as_sglang_holds_it(&source, bf16(2), "lite");
}

#[test]
fn glm_5_is_cut_as_sglang_cuts_it_with_either_form_of_its_indexer_and_without() {
    let mtp = Mtp::Drop;
    as_sglang_holds_it(&glm5(), bf16(2), "glm5");
    as_sglang_holds_it(&glm5(), Policy { ep: true, mtp, ..bf16(2) }, "glm5-ep");
    let fused = Policy { shared_experts: SharedExperts::Fused, mtp, ..bf16(2) };
    as_sglang_holds_it(&glm5(), fused, "glm5-fused");
    let separate = Policy { layout: "sglang-dsa-separate".into(), mtp, ..bf16(2) };
    as_sglang_holds_it(&glm5(), separate, "glm5-is");
    as_sglang_holds_it(&glm5(), Policy { indexer: Keep::Drop, ..bf16(2) }, "glm5-nx");
}

/// The draft has no embedding and head of its own in an ordinary checkpoint of this model: SGLang leaves that memory as
/// it is until it takes the model's. In the files they are the model's.
#[track_caller]
fn draft_as_sglang_holds_it(policy: Policy, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (alone, beside, model) =
        (dir.path().join("draft"), dir.path().join("both"), dir.path().join("model"));
    convert(&glm5(), Policy { mtp: Mtp::Only, ..policy.clone() }, &alone).unwrap();
    convert(&glm5(), policy.clone(), &beside).unwrap();
    convert(&glm5(), Policy { mtp: Mtp::Drop, ..policy }, &model).unwrap();
    for (rank, mut expected) in expected(name).into_iter().enumerate() {
        let file = format!("model-rank-{rank}-part-0.safetensors");
        let trunk = state(&model.join(&file));
        for shared in ["model.embed_tokens.weight", "lm_head.weight"] {
            expected.insert(shared.into(), trunk[shared].clone());
        }
        assert_eq!(state(&alone.join(&file)), expected, "{name}, rank {rank}");
        // The same bytes as beside the model, which does not change for it.
        assert_eq!(state(&beside.join(format!("mtp-rank-{rank}-part-0.safetensors"))), expected);
        assert_eq!(state(&beside.join(&file)), trunk);
    }
}

#[test]
fn the_draft_is_cut_as_sglang_cuts_it_alone_or_beside_the_model() {
    let fused = Policy { shared_experts: SharedExperts::Fused, ..bf16(2) };
    draft_as_sglang_holds_it(fused, "glm5-mtp-fused");
    draft_as_sglang_holds_it(Policy { layout: "sglang-dsa-separate".into(), ..bf16(2) }, "glm5-mtp");
    draft_as_sglang_holds_it(Policy { indexer: Keep::Drop, ..bf16(2) }, "glm5-nx-mtp");
}

/// 256 experts with one shared expert: DeepSeek-V3 and GLM-5. With any other number, or with experts placed whole, SGLang
/// has the shared experts apart.
#[test]
fn shared_experts_are_fused_where_sglang_fuses_them_by_itself() {
    let small = Mla { hidden: 64, moe_inter: 32, q_lora: 64, kv_lora: 64, nope: 32, v: 32, ..DEEPSEEK };
    for (experts, ep, layout, fused) in [
        (256, false, "sglang", true),
        (256, true, "sglang", false),
        (128, false, "sglang", false),
        (256, false, "vllm", false),
    ] {
        let model = Mla { experts, layers: 2, ..small.clone() }.build(&|_| BF16);
        let c = converted(&model, Policy { ep, layout: layout.into(), ..bf16(2) });
        let form = if fused { SharedExperts::Fused } else { SharedExperts::Separate };
        assert_eq!(c.manifest.policy.shared_experts, form, "{experts} {ep} {layout}");
        let names: Vec<_> = c.manifest.shards[0].tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names.iter().any(|n| n.contains("shared_experts")), !fused);
        // The manifest of an engine with one form says nothing.
        let text = std::fs::read_to_string(c.out().join("preshard.json")).unwrap();
        assert_eq!(text.contains("\"shared_experts\""), fused);
        if fused {
            let stack = c.entry("model.layers.1.mlp.experts.w2_weight");
            assert_eq!(stack.shape, [257, 64, 16]);
            assert_eq!(stack.members[0].from, ["blk.1.ffn_down_exps.weight", "blk.1.ffn_down_shexp.weight"]);
        }
    }
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
    let fused = |policy| Policy { shared_experts: SharedExperts::Fused, ..policy };
    for (source, policy, words) in [
        (
            dsv3(),
            fused(Policy { ep: true, ..bf16(2) }),
            "--shared-experts fused: SGLang 0.5.23 does not fuse",
        ),
        (dense("qwen3moe"), fused(bf16(2)), "--shared-experts fused: SGLang 0.5.23 holds"),
        (
            dsv3(),
            Policy { layout: "vllm".into(), ..fused(bf16(2)) },
            "--shared-experts fused: vLLM 0.32 holds",
        ),
        (dsv3(), Policy { mtp: Mtp::Only, ..bf16(2) }, "--mtp only: the model has no"),
        (
            glm5(),
            Policy { mtp: Mtp::Only, layout: "hf".into(), ..bf16(1) },
            "--mtp only: an ordinary checkpoint",
        ),
    ] {
        let error = convert(&source, policy, &dir.path().join("out")).err().unwrap();
        assert!(error.starts_with(words) && error.lines().count() == 1, "{error}");
    }
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
        "serve it:  python3 -m sglang.launch_server --model-path {} --load-format sharded_state --moe-runner-backend triton --tp-size 2 --ep-size 2\n",
        out.display()
    );
    assert!(stdout(&output).contains(&serve), "{}", stdout(&output));
    let verify = preshard().arg("verify").arg(&out).output().unwrap();
    assert!(verify.status.success(), "{}", stderr(&verify));
}

#[test]
fn a_draft_alone_says_how_the_model_takes_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("draft");
    let mut command = preshard();
    command.arg("convert").arg(glm5()).args(["--layout", "sglang", "--mtp", "only", "-o"]);
    let output = command.arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let add = format!(
        "add to the model's command:  --speculative-algorithm EAGLE --speculative-draft-model-path {}\n",
        out.display()
    );
    assert!(stdout(&output).contains(&add), "{}", stdout(&output));
    for args in [vec![], vec!["--source".into(), glm5()]] {
        let verify = preshard().arg("verify").arg(&out).args(args).output().unwrap();
        assert!(verify.status.success(), "{}", stderr(&verify));
    }
}
