//! SHD: what each rank holds.

use super::*;
use crate::common::*;
use crate::support::models::{GLM, Gqa, LLAMA, Mla, QWEN2, QWEN3, QWEN3MOE, fill, q4_k};
use crate::support::{convert, converted, get, refused};
use preshard::policy::Fit;

const QKV: &str = "model.layers.1.self_attn.qkv_proj.qweight";

/// A model whose every row differs from every other.
#[test]
fn shd_01_ranks_hold_different_rows_and_together_all() {
    for n in [2u64, 4] {
        let c = converted(&LLAMA.build(&|_| Q8_0), tp(n));
        let all: Vec<_> = (0..n).map(|r| c.rank(r)).collect();
        // Rows: each member's shares in order give the member.
        for (name, members) in [
            (QKV, vec![("attn_q", 512usize), ("attn_k", 128), ("attn_v", 128)]),
            ("model.layers.1.mlp.gate_up_proj.qweight", vec![("ffn_gate", 512), ("ffn_up", 512)]),
        ] {
            let width = 256 / 32 * 34;
            let mut at = 0;
            for (member, count) in members {
                // Two key/value heads over four ranks: each twice.
                let copies = if n == 4 && (member == "attn_k" || member == "attn_v") { 2 } else { 1 };
                let share = count / n as usize * copies;
                let held: Vec<u8> = all
                    .iter()
                    .step_by(copies)
                    .flat_map(|t| get(t, name).bytes[at * width..(at + share) * width].to_vec())
                    .collect();
                let mut whole = source(&format!("blk.1.{member}.weight"), Q8_0, &[256, count as u64]);
                match member {
                    "attn_q" => whole = unpermuted(&whole, 8, 64),
                    "attn_k" => whole = unpermuted(&whole, 2, 64),
                    _ => {}
                }
                assert!(held == whole, "{member} over {n}");
                at += share;
            }
        }
        // Columns.
        let whole = source("blk.1.ffn_down.weight", Q8_0, &[512, 256]);
        let width = 512 / 32 * 34 / n as usize;
        for (r, t) in all.iter().enumerate() {
            let held = get(t, "model.layers.1.mlp.down_proj.qweight");
            assert!(
                held.bytes == columns(&whole, 256, r * width..(r + 1) * width),
                "ffn_down, rank {r} of {n}"
            );
        }
        for (name, t) in &all[0] {
            let same = all.iter().all(|o| o[name] == *t);
            let cut = ["qkv_proj", "o_proj", "gate_up", "down_proj", "embed_tokens", "lm_head"];
            let cut = cut.iter().any(|c| name.contains(c)) && !name.ends_with("_type");
            assert_eq!(same, !cut, "{name} over {n}");
        }
    }
}

#[test]
fn shd_02_fewer_key_heads_than_ranks() {
    for (kv_heads, n) in [(2u64, 4u64), (2, 8), (1, 2), (1, 8)] {
        let dims = Gqa { kv_heads, arch: QWEN3.arch, head_norms: true, ..LLAMA };
        let c = converted(&dims.build(&|_| Q8_0), tp(n));
        let k = source("blk.1.attn_k.weight", Q8_0, &[256, kv_heads * 64]);
        let v = source("blk.1.attn_v.weight", Q8_0, &[256, kv_heads * 64]);
        let norm = decoded(F32, &source("blk.1.attn_k_norm.weight", F32, &[64]));
        let head = 64 * 272;
        for rank in 0..n {
            let stored = c.rank(rank);
            let t = get(&stored, QKV);
            let q = 512 / n as usize * 272;
            let of = (rank * kv_heads / n) as usize;
            assert!(t.bytes[q..q + head] == k[of * head..][..head], "k of rank {rank} of {n}");
            assert!(t.bytes[q + head..] == v[of * head..][..head], "v of rank {rank} of {n}");
            assert_eq!(get(&stored, "model.layers.1.self_attn.k_norm.weight").bytes, norm);
        }
    }
    let dims = Gqa { heads: 12, kv_heads: 4, head: 32, inter: 384, vocab: 192, ..LLAMA };
    let message = refused(&dims.build(&|_| Q8_0), &["--tp", "6"], &["4 key/value heads", "--tp 6"]);
    assert!(message.contains("works is 4"), "{message}");
    refused(&LLAMA.build(&|_| Q8_0), &["--tp", "3"], &["8 attention heads", "2 key/value heads", "--tp 3"]);
}

#[test]
fn shd_03_a_cut_inside_a_block() {
    // 1408 columns: 11 blocks of 32 for each of 4 ranks, 5.5 for each of 8.
    let dims = Gqa { inter: 1408, kv_heads: 8, ..LLAMA };
    let model = dims.build(&|_| Q8_0);
    let whole = source("blk.1.ffn_down.weight", Q8_0, &[1408, 256]);
    let c = converted(&model, tp(4));
    for rank in 0..4usize {
        let held = &c.rank(rank as u64)["model.layers.1.mlp.down_proj.qweight"];
        assert!(held.bytes == columns(&whole, 256, rank * 11 * 34..(rank + 1) * 11 * 34), "rank {rank}");
    }
    refused(
        &model,
        &["--tp", "8"],
        &["blk.1.ffn_down.weight", "q8_0 packs 32 columns", "176 of 1408", "--tp 4, the largest"],
    );
    let c = converted(&model, Policy { misaligned: Fit::Dequantise, ..tp(8) });
    let float = decoded(Q8_0, &whole);
    for rank in 0..8usize {
        let stored = c.rank(rank as u64);
        let held = get(&stored, "model.layers.1.mlp.down_proj.weight");
        assert!(held.bytes == columns(&float, 256, rank * 352..(rank + 1) * 352), "rank {rank}");
        get(&stored, "model.layers.1.mlp.gate_up_proj.qweight");
    }
    // Experts: 2048 columns of Q4_K are a block for each of 8 ranks, half a one for each of 16.
    let moe = Gqa { inter: 2048, heads: 16, kv_heads: 16, head: 32, experts: 2, layers: 1, ..QWEN3MOE };
    let types = |name: &str| if name.contains("_exps") { Q4_K } else { Q8_0 };
    let c = converted(&moe.build(&types), tp(8));
    let down = source("blk.0.ffn_down_exps.weight", Q4_K, &[2048, 256, 2]);
    let held = &c.rank(5)["model.layers.0.mlp.experts.routed_experts.w2_qweight"];
    assert!(held.bytes == columns(&down, 512, 5 * 144..6 * 144));
    refused(
        &moe.build(&types),
        &["--tp", "16"],
        &["blk.0.ffn_down_exps.weight", "q4_K packs 256", "128 of 2048", "--tp 8, the largest"],
    );
}

#[test]
fn shd_05_the_padded_vocabulary() {
    let dims = Gqa { vocab: 32008, layers: 1, ..LLAMA };
    let c = converted(&dims.build(&q4_k), tp(2));
    let rows: Vec<_> = c.manifest.shards.iter().map(|s| s.vocab_rows).collect();
    assert_eq!(rows, [Some([0, 16032]), Some([16032, 32008])]);
    assert_eq!((c.manifest.model.vocab, c.manifest.model.vocab_padded), (32008, 32064));
    let stored = c.rank(1);
    for (name, from, ty, width) in [
        ("model.embed_tokens.qweight", "token_embd.weight", Q4_K, 144),
        ("lm_head.qweight", "output.weight", Q6_K, 210),
    ] {
        let t = get(&stored, name);
        assert_eq!(t.shape, [16032, width as u64]);
        let whole = source(from, ty, &[256, 32008]);
        assert!(t.bytes[..15976 * width] == whole[16032 * width..], "{name}");
        let padding = &t.bytes[15976 * width..];
        assert_eq!(padding.len(), 56 * width);
        // Zero blocks decode to zero (of either sign).
        assert!(decoded(ty, padding).chunks(2).all(|x| x[0] == 0 && x[1] & 0x7f == 0), "{name}");
    }
    // 151552 is a multiple of 64, of 6 it is not.
    let dims =
        Gqa { vocab: 151552, hidden: 32, heads: 12, kv_heads: 6, head: 32, inter: 192, layers: 1, ..LLAMA };
    refused(&dims.build(&|_| Q8_0), &["--tp", "6"], &["151552 rows of the padded vocabulary", "--tp 6"]);
}

#[test]
fn shd_06_the_order_of_the_file_is_not_the_order_of_members() {
    let expected = converted(&LLAMA.build(&q4_k), tp(2));
    let mut shapes = LLAMA.shapes();
    shapes.sort_by_key(|(name, _)| {
        let place = ["ffn_up", "ffn_down", "ffn_gate", "attn_v", "attn_k.", "attn_output", "attn_q"];
        (place.iter().position(|p| name.contains(p)).unwrap_or(9), std::cmp::Reverse(name.clone()))
    });
    let model = fill(LLAMA.metadata(), &shapes, &q4_k);
    let c = converted(&model, tp(2));
    assert!((0..2).all(|r| c.rank(r) == expected.rank(r)));
    // Up in the first split, gate in the last.
    let dir = tempfile::tempdir().unwrap();
    let n = shapes.len();
    let splits = write_splits(dir.path(), "m", &model.splits(&[2, n - 8, 6]));
    let out = dir.path().join("out");
    convert(&splits[0], tp(2), &out).unwrap();
    for r in 0..2 {
        let shard = crate::support::read(&out.join(format!("model-rank-{r}-part-0.safetensors")));
        assert!(shard == expected.rank(r));
    }
}

#[test]
fn shd_07_members_in_three_splits_with_fewer_key_heads_than_ranks() {
    let dims = Gqa { layers: 1, ..LLAMA };
    let mut shapes = dims.shapes();
    shapes.sort_by_key(|(name, _)| match name.as_str() {
        "blk.0.attn_q.weight" => 0,
        "blk.0.attn_k.weight" => 2,
        "blk.0.attn_v.weight" => 4,
        n if n.starts_with("blk.0.ffn") => 3,
        _ => 1,
    });
    let model = fill(dims.metadata(), &shapes, &|_| Q8_0);
    let at = |name: &str| shapes.iter().position(|(n, _)| n == name).unwrap();
    let (k, v) = (at("blk.0.attn_k.weight"), at("blk.0.attn_v.weight"));
    let dir = tempfile::tempdir().unwrap();
    let splits = write_splits(dir.path(), "m", &model.splits(&[k, v - k, shapes.len() - v]));
    let out = dir.path().join("out");
    convert(&splits[2], tp(4), &out).unwrap();
    let expected = converted(&dims.build(&|_| Q8_0), tp(4));
    for r in 0..4 {
        let shard = crate::support::read(&out.join(format!("model-rank-{r}-part-0.safetensors")));
        assert!(shard == expected.rank(r), "rank {r}");
    }
}

#[test]
fn shd_08_whole_experts_on_ranks() {
    // 8 experts over 3 ranks: 3, 3, 2. Their inner size needs no cut.
    let dims = Gqa { heads: 6, kv_heads: 3, inter: 256, experts: 8, vocab: 192, layers: 1, ..QWEN3MOE };
    let types = |name: &str| if name.contains("attn_output") { Q8_0 } else { q4_k(name) };
    let model = dims.build(&types);
    let c = converted(&model, Policy { ep: true, ..tp(3) });
    let ids: Vec<_> = c.manifest.shards.iter().map(|s| s.experts.clone()).collect();
    assert_eq!(ids, [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7]]);
    let [gate, up] =
        ["gate", "up"].map(|x| source(&format!("blk.0.ffn_{x}_exps.weight"), Q4_K, &[256, 256, 8]));
    let down = source("blk.0.ffn_down_exps.weight", Q6_K, &[256, 256, 8]);
    let router = decoded(F32, &source("blk.0.ffn_gate_inp.weight", F32, &[256, 8]));
    for (rank, ids) in ids.iter().enumerate() {
        let stored = c.rank(rank as u64);
        let prefix = "model.layers.0.mlp.experts";
        let expected: Vec<u8> = ids
            .iter()
            .flat_map(|e| [&gate, &up].map(|x| rows(x, 8)[*e as usize].to_vec()).concat())
            .collect();
        assert!(
            get(&stored, &format!("{prefix}.routed_experts.w13_qweight")).bytes == expected,
            "rank {rank}"
        );
        let expected: Vec<u8> = ids.iter().flat_map(|e| rows(&down, 8)[*e as usize].to_vec()).collect();
        assert!(
            get(&stored, &format!("{prefix}.routed_experts.w2_qweight")).bytes == expected,
            "rank {rank}"
        );
        assert_eq!(get(&stored, &format!("{prefix}.gate.weight")).bytes, router, "the router knows all");
    }
    let wide = Gqa { heads: 16, kv_heads: 16, head: 32, ..dims };
    refused(&wide.build(&types), &["--tp", "16", "--ep", "--weights", "bf16"], &["8 experts over 16 ranks"]);
    // DeepSeek's correction bias is whole on every rank; its shared expert is still cut.
    let c = converted(&GLM.build(&q4_k), Policy { ep: true, ..tp(2) });
    let bias = source("blk.1.exp_probs_b.bias", F32, &[4]);
    for rank in 0..2 {
        let stored = c.rank(rank);
        let prefix = "model.layers.1.mlp.experts";
        assert_eq!(get(&stored, &format!("{prefix}.gate.e_score_correction_bias")).bytes, bias);
        assert_eq!(
            get(&stored, &format!("{prefix}._shared_experts._layer.gate_up_proj.qweight")).shape,
            [512, 144]
        );
    }
}

#[test]
fn shd_09_layers_on_stages() {
    // DeepSeek-V3's 61 layers and its MTP block, each as small as can be.
    let dims = Mla {
        arch: "deepseek2",
        layers: 61,
        hidden: 32,
        inter: 32,
        moe_inter: 32,
        heads: 1,
        nope: 32,
        rope: 32,
        v: 32,
        q_lora: 32,
        kv_lora: 32,
        experts: 1,
        vocab: 64,
        index_heads: 0,
        ..GLM
    };
    let model = dims.build(&|_| Q8_0);
    let layers = |options: Policy| -> (Vec<u64>, Vec<std::collections::BTreeSet<u64>>) {
        let pp = options.pp;
        let c = converted(&model, options);
        let on_stage = |p: u64| {
            let name = match pp {
                1 => "model-rank-0-part-0.safetensors".to_owned(),
                _ => format!("model-pp-{p}-tp-0-part-0.safetensors"),
            };
            let stored = c.file(&name);
            let first = stored.contains_key("model.embed_tokens.qweight");
            let last = stored.contains_key("lm_head.qweight") && stored.contains_key("model.norm.weight");
            assert_eq!((first, last), (p == 0, p + 1 == pp), "stage {p}");
            let numbers = stored
                .keys()
                .filter_map(|n| n.strip_prefix("model.layers.")?.split('.').next()?.parse().ok());
            numbers.collect()
        };
        let mtp: Vec<_> = c.manifest.shards.iter().filter(|s| s.part == "mtp").map(|s| s.pp).collect();
        assert_eq!(mtp, [pp - 1]);
        (c.manifest.policy.stages.clone(), (0..pp).map(on_stage).collect())
    };
    let check = |(stages, held): (Vec<u64>, Vec<std::collections::BTreeSet<u64>>), expected: &[u64]| {
        assert_eq!(stages, expected);
        for (range, held) in expected.windows(2).zip(held) {
            assert_eq!(held, (range[0]..range[1]).collect());
        }
    };
    let pp = |pp: u64, stages: &[u64]| Policy { pp, stages: stages.to_vec(), ..tp(1) };
    check(layers(pp(1, &[])), &[0, 61]);
    check(layers(pp(3, &[])), &[0, 20, 41, 61]);
    check(layers(pp(3, &[0, 22, 42, 61])), &[0, 22, 42, 61]);
    for (stages, args) in [("22,20,20", "3"), ("22,39", "3"), ("61,0,0", "3")] {
        refused(&model, &["--pp", args, "--pp-layers", stages], &[stages, "61 layers"]);
    }
    refused(&model, &["--pp", "62"], &["62 stages for 61 layers"]);
    // Tied: the first stage embeds with what the last computes logits with.
    let c = converted(&QWEN2.build(&q4_k), Policy { pp: 2, ..tp(1) });
    let (first, last) =
        (c.file("model-pp-0-tp-0-part-0.safetensors"), c.file("model-pp-1-tp-0-part-0.safetensors"));
    assert_eq!(get(&first, "model.embed_tokens.qweight"), get(&last, "lm_head.qweight"));
}
