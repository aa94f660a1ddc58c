//! MAP, VAL and SEC-07: names, completeness, hostile sizes in the metadata, and the values that
//! llama.cpp's converter changes.

use super::*;
use crate::common::*;
use crate::support::models::{GLM, Gqa, LLAMA, MIXTRAL, QWEN2, QWEN3MOE, add, fill, q4_k};
use crate::support::{convert, converted, fixture, get, preshard, refused, refused_in, stderr};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::{Fate, Plan};
use std::path::Path;

/// Plans a model; an error comes back as its message.
fn planned(model: &Builder, tables: &Tables, options: Policy) -> Result<Plan, String> {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&[model.write(dir.path().join("model.gguf"))]).unwrap();
    Plan::new(&gguf, tables, options).map_err(|e| e.to_string())
}

#[test]
fn map_01_every_missing_tensor_stops_the_run() {
    let whole = GLM.build(&q4_k);
    let optional = ["output.weight"];
    for (name, _) in GLM.shapes() {
        if optional.contains(&name.as_str()) || name.starts_with("blk.1.") {
            continue;
        }
        let message = match planned(&whole.clone().without(&name), &Tables::default(), tp(2)) {
            Ok(_) => panic!("converted without {name}"),
            Err(message) => message,
        };
        assert!(message.starts_with(&format!("{name}: missing; model.")), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    // All at once: a whole layer.
    let mut model = whole;
    let layer: Vec<_> = GLM.shapes().into_iter().filter(|(n, _)| n.starts_with("blk.1.")).collect();
    for (name, _) in layer.iter().skip(1) {
        model = model.without(name);
    }
    let message = planned(&model, &Tables::default(), tp(2)).map(drop).unwrap_err();
    for (name, _) in layer.iter().skip(1).filter(|(n, _)| !n.contains("indexer")) {
        assert!(message.contains(&format!("{name}: missing")), "{name}: {message}");
    }
}

#[test]
fn map_02_known_leftovers_are_dropped_by_name() {
    let mut model = LLAMA.build(&q4_k);
    let names = [
        "rope_freqs.weight",
        "blk.0.attn_rot_embd.weight",
        "blk.1.attn_rot_embd",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
    ];
    for name in names {
        model = add(model, name, &[32], F32);
    }
    let c = converted(&model, tp(2));
    for name in names {
        assert!(c.dropped(name).unwrap().contains("computed by the engine"), "{name}");
    }
    assert_eq!(c.manifest.dropped.len(), names.len());
    assert_eq!(c.rank(0), converted(&LLAMA.build(&q4_k), tp(2)).rank(0));
    // A layer beyond the last is not covered by the rule for layers.
    refused(
        &add(LLAMA.build(&q4_k), "blk.2.attn_rot_embd", &[32], F32),
        &[],
        &["blk.2.attn_rot_embd: unknown tensor"],
    );
}

#[test]
fn map_03_no_output_weight_means_tied() {
    let tied = Gqa { tied: true, ..LLAMA };
    let types = |name: &str| if name == "token_embd.weight" { Q6_K } else { q4_k(name) };
    let c = converted(&tied.build(&types), tp(2));
    let data = source("token_embd.weight", Q6_K, &[256, 300]);
    for rank in 0..2u64 {
        let stored = c.rank(rank);
        assert!(!stored.contains_key("model.embed_tokens.qweight"), "one storage, under the smaller name");
        let head = get(&stored, "lm_head.qweight");
        // 300 rows padded to 320; 160 each.
        let real = &data[rank as usize * 160 * 210..data.len().min((rank as usize + 1) * 160 * 210)];
        assert!(head.bytes[..real.len()] == *real && head.bytes[real.len()..].iter().all(|b| *b == 0));
        assert_eq!(head.shape, [160, 210]);
    }
    // Two stages: the first has the embedding, the last the head, of the same rows.
    let c = converted(&tied.build(&types), Policy { pp: 2, ..tp(2) });
    for t in 0..2 {
        let first = c.file(&format!("model-pp-0-tp-{t}-part-0.safetensors"));
        let last = c.file(&format!("model-pp-1-tp-{t}-part-0.safetensors"));
        assert_eq!(get(&first, "model.embed_tokens.qweight"), get(&last, "lm_head.qweight"));
        assert!(!first.contains_key("lm_head.qweight") && !last.contains_key("model.embed_tokens.qweight"));
    }
}

/// What config.json says of tying, against what the file holds.
#[test]
fn map_03_a_config_that_disagrees() {
    let dir = tempfile::tempdir().unwrap();
    let config = |tied: bool| {
        let text = std::fs::read_to_string(fixture("hf/tiny-llama/config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (key, value) in [
            ("hidden_size", 256),
            ("intermediate_size", 512),
            ("num_hidden_layers", 2),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 2),
            ("head_dim", 64),
            ("vocab_size", 300),
        ] {
            config[key] = value.into();
        }
        config["tie_word_embeddings"] = tied.into();
        let path = dir.path().join(format!("config-{tied}"));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("config.json"), config.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (tied, untied) = (config(true), config(false));
    let with_head = LLAMA.build(&q4_k);
    let same = add(Gqa { tied: true, ..LLAMA }.build(&q4_k), "unused", &[1], F32).without("unused").tensor(
        "output.weight",
        Q4_K,
        &[256, 300],
        source("token_embd.weight", Q4_K, &[256, 300]),
    );
    let without = Gqa { tied: true, ..LLAMA }.build(&q4_k);
    // (b) none, but the config says untied.
    refused(&without, &["--hf-config", &untied], &["output.weight"]);
    // (a), (c), (d), the last with both and different while the config says tied, and the ordinary case.
    for (model, config, conflict) in [
        (&without, &tied, false),
        (&same, &tied, true),
        (&with_head, &tied, true),
        (&with_head, &untied, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let source = model.write(dir.path().join("model.gguf"));
        let out = dir.path().join("out");
        let run =
            preshard().args(["convert", "--hf-config", config, "-o"]).args([&out, &source]).output().unwrap();
        assert!(run.status.success(), "{}", stderr(&run));
        let named = stderr(&run).contains("tie_word_embeddings changed from true to false");
        assert_eq!(named, conflict, "{}", stderr(&run));
        let written: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        let shard = crate::support::read(&out.join("model-rank-0-part-0.safetensors"));
        // What the engine will look for is in the file.
        let looks_for = written["tie_word_embeddings"] == false;
        assert_eq!(shard.contains_key("model.embed_tokens.qweight"), looks_for, "{written}");
    }
}

#[test]
fn map_05_the_engine_decides_what_stays_float() {
    let name = "blk.1.ffn_gate_inp.weight";
    for ty in [Q8_0, Q4_K, F16, BF16, F32] {
        let types = move |n: &str| if n.contains("ffn_gate_inp") { ty } else { q4_k(n) };
        let c = converted(&QWEN3MOE.build(&types), tp(2));
        let stored = c.rank(1);
        let gate = get(&stored, "model.layers.1.mlp.experts.gate.weight");
        assert_eq!((gate.dtype.as_str(), gate.shape.as_slice()), ("BF16", &[4, 256][..]));
        assert_eq!(gate.bytes, decoded(ty, &source(name, ty, &[256, 4])), "type {ty}");
        assert!(!stored.keys().any(|n| n.contains("gate.qweight")));
    }
    // The same embedding under an engine whose table says that it is never quantised.
    let tables = tempfile::tempdir().unwrap();
    let built_in = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings/engine/vllm-dense.toml"),
    )
    .unwrap();
    let changed =
        built_in.replacen("unless_tied = true", "unless_tied = true\nfloat = \"no quantisation config\"", 1);
    assert_ne!(built_in, changed);
    std::fs::create_dir(tables.path().join("engine")).unwrap();
    std::fs::write(tables.path().join("engine/vllm-dense.toml"), changed).unwrap();
    let model = LLAMA.build(&q4_k);
    let names = |tables: &Tables| -> Vec<String> {
        let plan = planned(&model, tables, tp(2)).unwrap();
        let all = plan.shards[1].tensors.iter().map(|t| t.name.clone());
        all.filter(|n| n.contains("embed_tokens")).collect()
    };
    assert_eq!(names(&Tables::default()), ["model.embed_tokens.qweight", "model.embed_tokens.qweight_type"]);
    assert_eq!(names(&Tables { dir: Some(tables.path()) }), ["model.embed_tokens.weight"]);
    let plan = planned(&model, &Tables { dir: Some(tables.path()) }, tp(2)).unwrap();
    assert_eq!(plan.fates[0].0, Fate::Decoded("no quantisation config".into()));
}

/// The same Mixtral three ways: stacked, one tensor per expert, gate and up fused.
#[test]
fn map_06_every_layout_of_experts_gives_the_same_shards() {
    let (h, i) = (256usize, 512usize);
    let part = |e: u64, x: &str| source(&format!("{x} of expert {e}"), Q4_K, &[(h * i) as u64]);
    let base: Vec<_> = MIXTRAL.shapes().into_iter().filter(|(n, _)| !n.contains("_exps")).collect();
    let base = || fill(MIXTRAL.metadata(), &base, &q4_k);
    let stack = |x: &str| (0..4).flat_map(|e| part(e, x)).collect::<Vec<u8>>();
    let (mut stacked, mut single, mut fused) = (base(), base(), base());
    for l in 0..2 {
        let name = |x: &str| format!("blk.{l}.ffn_{x}");
        let (wide, tall) = ([h as u64, i as u64, 4], [i as u64, h as u64, 4]);
        stacked = stacked
            .tensor(name("gate_exps.weight"), Q4_K, &wide, stack("gate"))
            .tensor(name("up_exps.weight"), Q4_K, &wide, stack("up"))
            .tensor(name("down_exps.weight"), Q4_K, &tall, stack("down"));
        for e in 0..4 {
            single = single
                .tensor(name(&format!("gate.{e}.weight")), Q4_K, &wide[..2], part(e, "gate"))
                .tensor(name(&format!("up.{e}.weight")), Q4_K, &wide[..2], part(e, "up"))
                .tensor(name(&format!("down.{e}.weight")), Q4_K, &tall[..2], part(e, "down"));
        }
        let both = (0..4).flat_map(|e| [part(e, "gate"), part(e, "up")].concat()).collect::<Vec<u8>>();
        fused = fused.tensor(name("gate_up_exps.weight"), Q4_K, &[h as u64, 2 * i as u64, 4], both).tensor(
            name("down_exps.weight"),
            Q4_K,
            &tall,
            stack("down"),
        );
    }
    for options in [tp(2), Policy { ep: true, ..tp(2) }, bf16(4)] {
        let expected = converted(&stacked, options.clone());
        for (what, model) in [("one each", &single), ("fused", &fused)] {
            let c = converted(model, options.clone());
            for rank in 0..options.tp {
                assert!(c.rank(rank) == expected.rank(rank), "{what}, rank {rank} of {options:?}");
            }
        }
    }
    // Against the source itself: rank 1 of 2 holds the second half of gate, then of up, of each expert.
    let stored = converted(&single, tp(2)).rank(1);
    let w13 = get(&stored, "model.layers.1.block_sparse_moe.experts.routed_experts.w13_qweight");
    let expected: Vec<u8> = (0..4)
        .flat_map(|e| [part(e, "gate"), part(e, "up")].map(|p| p[p.len() / 2..].to_vec()).concat())
        .collect();
    assert_eq!(w13.shape, [4, 512, 144]);
    assert!(w13.bytes == expected);
    let message =
        refused(&single.clone().without("blk.1.ffn_up.3.weight"), &[], &["blk.1.ffn_up.3.weight: missing"]);
    assert_eq!(message.lines().count(), 1, "{message}");
    // A stack of another size than the metadata says.
    let five = stacked.set("llama.expert_count", 5u32);
    refused(&five, &[], &["blk.0.ffn_gate_exps.weight", "expected 5 experts", "llama.expert_count"]);
}

#[test]
fn map_08_fused_attn_qkv_is_refused_by_name() {
    let model = LLAMA.build(&q4_k);
    let mut model = ["q", "k", "v"].iter().fold(model, |m, x| m.without(&format!("blk.0.attn_{x}.weight")));
    model = add(model, "blk.0.attn_qkv.weight", &[256, 512 + 128 + 128], Q4_K);
    refused(
        &model,
        &["--tp", "2"],
        &["blk.0.attn_qkv.weight: unknown tensor", "blk.0.attn_k.weight: missing"],
    );
}

#[test]
fn map_09_vision_tensors_are_refused_by_name() {
    let mut model = LLAMA.build(&q4_k).kv("llama.vision.block_count", 1u32);
    for name in ["v.blk.0.attn_q.weight", "v.patch_embd.weight", "mm.0.weight"] {
        model = add(model, name, &[32, 32], F16);
    }
    let message = refused(&model, &[], &["v.blk.0.attn_q.weight", "v.patch_embd.weight", "mm.0.weight"]);
    assert_eq!(message.lines().count(), 3, "{message}");
}

#[test]
fn val_01_rows_of_llama_heads_are_put_back_in_order() {
    let dims = Gqa { head: 8, hidden: 64, inter: 64, biases: true, ..LLAMA };
    let c = converted(&dims.build(&|_| Q8_0), tp(2));
    for (t, heads) in [("q", 8usize), ("k", 2)] {
        let data = source(&format!("blk.1.attn_{t}.weight"), Q8_0, &[64, heads as u64 * 8]);
        let bias = source(&format!("blk.1.attn_{t}.bias"), F32, &[heads as u64 * 8]);
        let (data, bias) = (unpermuted(&data, heads, 8), decoded(F32, &unpermuted(&bias, heads, 8)));
        for rank in 0..2 {
            let stored = c.rank(rank as u64);
            let at = if t == "q" { 0 } else { 32 };
            let n = heads * 8 / 2;
            let weight = get(&stored, "model.layers.1.self_attn.qkv_proj.qweight");
            assert_eq!(weight.shape, [32 + 8 + 8, 68]);
            assert!(
                weight.bytes[at * 68..(at + n) * 68] == data[rank * n * 68..(rank + 1) * n * 68],
                "{t}, rank {rank}"
            );
            let stored = get(&stored, "model.layers.1.self_attn.qkv_proj.bias");
            assert!(
                stored.bytes[at * 2..(at + n) * 2] == bias[rank * n * 2..(rank + 1) * n * 2],
                "{t} bias, rank {rank}"
            );
        }
    }
    // Qwen2 is stored as it is.
    let c = converted(&Gqa { arch: QWEN2.arch, ..dims }.build(&|_| Q8_0), tp(1));
    let stored = c.rank(0);
    let weight = get(&stored, "model.layers.1.self_attn.qkv_proj.qweight");
    let rest: Vec<u8> = ["q", "k", "v"]
        .iter()
        .flat_map(|t| source(&format!("blk.1.attn_{t}.weight"), Q8_0, &[64, if *t == "q" { 64 } else { 16 }]))
        .collect();
    assert!(weight.bytes == rest);
    // Heads that the rows do not hold.
    let model = LLAMA.build(&q4_k).set("llama.attention.head_count_kv", 3u32);
    refused(&model, &[], &["blk.0.attn_k.weight", "3"]);
}

#[test]
fn val_02_norms_of_these_architectures_are_not_shifted() {
    let model = LLAMA.build(&q4_k).without("blk.0.attn_norm.weight").f32s(
        "blk.0.attn_norm.weight",
        &[256],
        &[1.5; 256],
    );
    let stored = converted(&model, tp(1)).rank(0);
    assert_eq!(get(&stored, "model.layers.0.input_layernorm.weight").bytes, [0xc0, 0x3f].repeat(256));
    // Those of Gemma are, and have no mapping: refused by name.
    let dir = tempfile::tempdir().unwrap();
    for arch in ["gemma2", "gemma3"] {
        let model = Gqa { arch, ..LLAMA }.build(&q4_k).write(dir.path().join("model.gguf"));
        refused_in(dir.path(), &model, &[], &[arch, "no mapping for this architecture"]);
        assert!(convert(&model, tp(1), &dir.path().join("out")).is_err());
    }
}

#[test]
fn sec_07_sizes_in_the_metadata_are_held_against_the_tensors() {
    let llama = LLAMA.build(&q4_k);
    let glm = GLM.build(&q4_k);
    let moe = MIXTRAL.build(&q4_k);
    let arrays = |element: u32, bytes: &[u8]| Kv::claimed_array(element, 2, bytes);
    let cases: Vec<(&str, Builder, &[&str])> = vec![
        ("layers", llama.clone().set("llama.block_count", i32::MAX as u32), &["block_count", "2147483647"]),
        ("layers", llama.clone().set("llama.block_count", u64::MAX), &["block_count"]),
        ("no layer", llama.clone().set("llama.block_count", 0u32), &["block_count is 0"]),
        ("no head", llama.clone().set("llama.attention.head_count", 0u32), &["head_count", "0"]),
        ("no key head", llama.clone().set("llama.attention.head_count_kv", 0u32), &["head_count_kv", "0"]),
        ("heads", llama.clone().set("llama.attention.head_count", u32::MAX), &["head_count"]),
        ("no expert", moe.clone().set("llama.expert_count", 0u32), &["exps"]),
        ("experts", moe.set("llama.expert_count", u32::MAX), &["4294967295"]),
        ("bytes", llama.clone().set("llama.attention.head_count_kv", arrays(0, &[2, 2])), &[]),
        ("floats", llama.set("llama.attention.head_count_kv", arrays(6, &[0; 8])), &["head_count_kv"]),
        (
            "draft",
            glm.clone().set("glm-dsa.nextn_predict_layers", u32::MAX),
            &["block_count", "4294967295 MTP blocks"],
        ),
    ];
    for (what, model, words) in cases {
        let started = std::time::Instant::now();
        let planned = planned(&model, &Tables::default(), tp(2));
        assert!(started.elapsed().as_secs() < 5, "{what}");
        match planned {
            // An array of bytes says as much as one of words.
            Ok(_) => assert!(words.is_empty(), "{what}: planned"),
            Err(message) => {
                assert!(!words.is_empty() && words.iter().all(|w| message.contains(w)), "{what}: {message}");
                assert!(message.len() < 4000 && message.lines().count() < 20, "{what}: {message}");
            }
        }
    }
    // What only config.json depends on is held against the tensors too.
    for (key, value, tensor) in [
        (
            "glm-dsa.attention.kv_lora_rank",
            0u32,
            "blk.0.attn_kv_a_mqa.weight: shape [256, 288], but config.json",
        ),
        ("glm-dsa.attention.key_length_mla", u32::MAX, "blk.0.attn_q_b.weight: shape"),
        ("glm-dsa.attention.value_length_mla", 1, "blk.0.attn_v_b.weight: shape"),
        ("glm-dsa.attention.indexer.head_count", 0, "blk.0.indexer.proj.weight: shape"),
        ("glm-dsa.embedding_length", 255, "token_embd.weight: shape"),
        ("glm-dsa.expert_feed_forward_length", 7, "blk.1.ffn_gate_exps.weight: shape"),
    ] {
        let wrong = glm.clone().set(key, value);
        refused(&wrong, &[], &[tensor, "the metadata is wrong"]);
        let dir = tempfile::tempdir().unwrap();
        let run = preshard().arg("plan").arg(wrong.write(dir.path().join("model.gguf"))).output().unwrap();
        assert!(run.status.code() == Some(1) && stderr(&run).contains(tensor), "{}", stderr(&run));
    }
}
