//! What the metadata says reaches config.json and the tokenizer, or is refused: nothing that changes what a model
//! computes passes in silence. Each case is a public report; the right values are those of llama.cpp's loader,
//! transformers and vLLM.

use crate::common::{Builder, F32, Kv};
use crate::support::models::{DEEPSEEK, GLM, Gqa, LLAMA, MIXTRAL, Mla, QWEN2, QWEN3, QWEN3MOE, add, q4_k};
use crate::support::{converted, get, preshard, refused, stderr};
use crate::{bf16, tp};
use preshard::gguf::Gguf;
use preshard::hf::{self, Request};
use serde_json::{Value, json};

/// The small files of a model: config.json, generation_config.json, tokenizer.json, tokenizer_config.json.
#[track_caller]
fn file(model: &Builder, name: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&[model.write(dir.path().join("model.gguf"))]).unwrap();
    let files = hf::checked_files(&gguf, &Request::of(&gguf).unwrap()).unwrap_or_else(|e| panic!("{e}"));
    let (_, bytes) = files.files.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}"));
    serde_json::from_slice(bytes).unwrap()
}

fn config(model: &Builder) -> Value {
    file(model, "config.json")
}

/// A byte-level vocabulary whose last tokens are these, with their types.
fn with_tokens(model: Builder, pre: &str, tokens: &[(&str, i32)]) -> Builder {
    let mut texts: Vec<String> = (0..200).map(|i| format!("t{i}")).collect();
    texts.extend(tokens.iter().map(|(text, _)| (*text).to_owned()));
    let types: Vec<i32> = (0..200).map(|_| 1).chain(tokens.iter().map(|(_, ty)| *ty)).collect();
    model
        .kv("tokenizer.ggml.model", "gpt2")
        .kv("tokenizer.ggml.pre", pre)
        .kv("tokenizer.ggml.tokens", texts)
        .kv("tokenizer.ggml.token_type", types)
        .kv("tokenizer.ggml.merges", vec!["t 1".to_owned()])
        .kv("tokenizer.ggml.eos_token_id", 200u32)
}

fn gqa() -> [(Gqa, Builder); 5] {
    [LLAMA, QWEN2, QWEN3, QWEN3MOE, MIXTRAL].map(|m| (m.clone(), m.build(&q4_k)))
}

fn mla() -> [(Mla, Builder); 2] {
    [DEEPSEEK, GLM].map(|m| (m.clone(), m.build(&q4_k)))
}

/// Every architecture, with its prefix.
fn all() -> Vec<(&'static str, Builder)> {
    let dense = gqa().into_iter().map(|(m, b)| (m.arch, b));
    dense.chain(mla().into_iter().map(|(m, b)| (m.arch, b))).collect()
}

/// llama.cpp PR 15051 (Kimi-K2), 4000, 9609: turns end with a token that is not the end of text.
#[test]
fn a_reply_ends_with_every_token_that_llama_cpp_ends_it_with() {
    let kimi = [("[EOS]", 3), ("[BOS]", 3), ("<|im_end|>", 3), ("<|im_user|>", 3)];
    let model = with_tokens(DEEPSEEK.build(&q4_k), "kimi-k2", &kimi);
    assert_eq!(config(&model)["eos_token_id"], json!([200, 202]));
    assert_eq!(file(&model, "generation_config.json")["eos_token_id"], json!([200, 202]));
    // Whatever its type says: a normal token of that text is one all the same, and special then.
    let chatml = [("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 1)];
    for (arch, model) in all() {
        let model = with_tokens(model, "qwen2", &chatml);
        assert_eq!(config(&model)["eos_token_id"], json!([200, 202]), "{arch}");
        let tokens = file(&model, "tokenizer.json")["added_tokens"].clone();
        let end = tokens.as_array().unwrap().iter().find(|t| t["id"] == 202).unwrap().clone();
        assert_eq!(end["special"], true, "{arch}");
    }
    // `tokenizer.ggml.eos_token_ids` is an array of them.
    let model = with_tokens(QWEN3.build(&q4_k), "qwen2", &[("<end>", 3), ("<a>", 3), ("<b>", 3)]);
    let model = model.kv("tokenizer.ggml.eos_token_ids", vec![202i32, 200]);
    assert_eq!(config(&model)["eos_token_id"], json!([200, 202]));
}

/// llama.cpp PR 18980, ik_llama.cpp PR 1174: GLM-4.7-Flash, whose file does not name its gating.
#[test]
fn a_selection_bias_means_sigmoid_where_the_gating_is_not_named() {
    let scoring = |model: &Builder| {
        let c = config(model);
        (c["architectures"][0].clone(), c["scoring_func"].clone(), c["topk_method"].clone())
    };
    let v3 = (json!("DeepseekV3ForCausalLM"), json!("sigmoid"), json!("noaux_tc"));
    let v2 = (json!("DeepseekV2ForCausalLM"), json!("softmax"), json!("greedy"));
    let model = DEEPSEEK.build(&q4_k);
    for unnamed in [
        model.clone().unset("deepseek2.expert_gating_func"),
        model.clone().set("deepseek2.expert_gating_func", 0u32),
    ] {
        assert_eq!(scoring(&unnamed), v3);
        let without = (1..3).fold(unnamed, |m, l| m.without(&format!("blk.{l}.exp_probs_b.bias")));
        assert_eq!(scoring(&without), v2);
    }
    let both = model.clone().set("deepseek2.expert_gating_func", 1u32);
    refused(
        &both,
        &[],
        &["deepseek2.expert_gating_func: softmax, beside selection biases", "--hf-config DIR"],
    );
    refused(&model.set("deepseek2.expert_gating_func", 4u32), &[], &["expert_gating_func: neither 1"]);
    refused(
        &GLM.build(&q4_k).set("glm-dsa.expert_gating_func", 1u32),
        &[],
        &["expert_gating_func: 1, expected 0 or 2"],
    );
}

/// vLLM PR 3767, 2860; llama.cpp PR 3743: the class declares all biases or none.
#[test]
fn biases_that_the_class_declares_and_the_file_lacks_are_zeros() {
    let own = |layer: u64, name: &str| format!("blk.{layer}.{name}.bias");
    // Queries, keys and values of layer 0 alone have biases; the output has none anywhere.
    let sizes = [("attn_q", 512u64), ("attn_k", 128), ("attn_v", 128)];
    let model = sizes.iter().fold(LLAMA.build(&q4_k), |m, (n, rows)| add(m, &own(0, n), &[*rows], F32));
    assert_eq!(config(&model)["attention_bias"], true);
    let c = converted(&model, bf16(2));
    for (layer, zero) in [(0, false), (1, true)] {
        for rank in [0, 1] {
            let tensors = c.rank(rank);
            let qkv = get(&tensors, &format!("model.layers.{layer}.self_attn.qkv_proj.bias"));
            assert_eq!(qkv.shape, [384], "(512 + 128 + 128) / 2");
            assert_eq!(qkv.bytes.iter().all(|b| *b == 0), zero, "layer {layer}");
            let out = get(&tensors, &format!("model.layers.{layer}.self_attn.o_proj.bias"));
            assert_eq!((out.shape.as_slice(), out.bytes.iter().all(|b| *b == 0)), (&[256][..], true));
        }
    }
    // Of the MLP, one suffices.
    let model = add(LLAMA.build(&q4_k), &own(1, "ffn_down"), &[256], F32);
    assert_eq!(config(&model)["mlp_bias"], true);
    let tensors = converted(&model, bf16(2)).rank(1);
    let zero = |name: &str| get(&tensors, name).bytes.iter().all(|b| *b == 0);
    assert!(zero("model.layers.0.mlp.gate_up_proj.bias") && zero("model.layers.0.mlp.down_proj.bias"));
    assert!(zero("model.layers.1.mlp.gate_up_proj.bias") && !zero("model.layers.1.mlp.down_proj.bias"));
    // Routing by a sigmoid declares a selection bias.
    let model = (1..3).fold(DEEPSEEK.build(&q4_k), |m, l| m.without(&format!("blk.{l}.exp_probs_b.bias")));
    let tensors = converted(&model, tp(2)).rank(0);
    let bias = get(&tensors, "model.layers.1.mlp.experts.gate.e_score_correction_bias");
    assert_eq!((bias.dtype.as_str(), bias.bytes.clone()), ("F32", vec![0; 16]));
    // No class has experts and such biases.
    refused(&add(MIXTRAL.build(&q4_k), &own(0, "attn_q"), &[512], F32), &[], &["experts beside biases"]);
}

/// llama.cpp 7116, PR 7481; vLLM PR 4636: Granite Code and Bielik have biases in the MLP.
#[test]
fn biases_of_the_mlp_are_kept() {
    let sizes = [("ffn_gate", 512u64), ("ffn_up", 512), ("ffn_down", 256)];
    let mut model = LLAMA.build(&q4_k);
    for layer in 0..2 {
        for (name, rows) in sizes {
            let values: Vec<f32> = (0..rows).map(|i| i as f32 + 1.0).collect();
            model = model.f32s(format!("blk.{layer}.{name}.bias"), &[rows], &values);
        }
    }
    assert_eq!(config(&model)["mlp_bias"], true);
    let tensors =
        converted(&model, preshard::policy::Policy { weights: preshard::policy::Weights::F32, ..tp(2) })
            .rank(1);
    let floats = |name: &str| -> Vec<f32> {
        get(&tensors, name).bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    // Gate and up are each cut, then joined; down is whole on every rank.
    let half: Vec<f32> = (257..=512).map(|i| i as f32).collect();
    assert_eq!(floats("model.layers.1.mlp.gate_up_proj.bias"), [half.clone(), half].concat());
    assert_eq!(floats("model.layers.1.mlp.down_proj.bias"), (1..=256).map(|i| i as f32).collect::<Vec<_>>());
}

/// What llama.cpp computes with and no class has: refused, with the way out; the neutral value is none.
#[test]
fn keys_that_change_the_function_are_refused_unless_neutral() {
    let cases: [(&str, Kv, Kv); 9] = [
        ("attention.causal", false.into(), true.into()),
        ("attention.scale", 0.5f32.into(), 0f32.into()),
        ("attention.clamp_kqv", 8f32.into(), 0f32.into()),
        ("attention.temperature_scale", 0.1f32.into(), 0f32.into()),
        ("logit_scale", 0.25f32.into(), 1f32.into()),
        ("embedding_scale", 12f32.into(), 1f32.into()),
        ("residual_scale", 0.22f32.into(), 1f32.into()),
        ("final_logit_softcapping", 30f32.into(), 0f32.into()),
        ("pooling_type", 1u32.into(), 0u32.into()),
    ];
    for (arch, model) in all() {
        for (name, wrong, neutral) in &cases {
            let key = format!("{arch}.{name}");
            let message = refused(&model.clone().kv(key.clone(), wrong.clone()), &[], &["--hf-config DIR"]);
            assert!(message.contains(&format!("{key}: ")), "{message}");
            assert_eq!(config(&model.clone().kv(key, neutral.clone())), config(&model), "{arch}: {name}");
        }
        // Another architecture's keys and a tool's own say nothing about this model.
        let foreign =
            model.clone().kv("mamba.attention.scale", 0.5f32).kv("quantize.imatrix.chunks_count", 7u32);
        assert_eq!(config(&foreign), config(&model), "{arch}");
    }
}

#[test]
fn what_a_refusal_advises_works() {
    let dir = tempfile::tempdir().unwrap();
    let convert = |model: &Builder, args: &[&std::ffi::OsStr]| {
        let source = model.write(dir.path().join("model.gguf"));
        let out = dir.path().join("out");
        let _ = std::fs::remove_dir_all(&out);
        let run =
            preshard().args(["convert", "-q"]).arg(source).arg("-o").arg(&out).args(args).output().unwrap();
        (run.status.code(), stderr(&run))
    };
    for (arch, model) in all() {
        let given = dir.path().join(arch);
        std::fs::create_dir_all(&given).unwrap();
        std::fs::write(given.join("config.json"), config(&model).to_string()).unwrap();
        let scaled = model.clone().kv(format!("{arch}.logit_scale"), 0.5f32);
        assert_eq!(convert(&scaled, &["--hf-config".as_ref(), given.as_os_str()]).0, Some(0), "{arch}");
        let unknown = model.clone().kv(format!("{arch}.attention.of_tomorrow"), 3u32);
        let (code, text) = convert(&unknown, &[]);
        assert_eq!(code, Some(1), "{text}");
        assert!(
            text.contains("of_tomorrow: 3, a key unknown here") && text.contains("--allow-unknown-keys"),
            "{text}"
        );
        assert_eq!(convert(&unknown, &["--allow-unknown-keys".as_ref()]).0, Some(0), "{arch}");
    }
}

/// ggml docs/gguf.md; llama.cpp's loader: an absent type is linear, an absent factor is `scale_linear`, 0 is none.
#[test]
fn rope_scaling_is_what_llama_cpp_reads() {
    let scaling = |arch: &str, model: &Builder, keys: &[(&str, Kv)]| {
        let keyed = |m: Builder, (k, v): &(&str, Kv)| m.kv(format!("{arch}.rope.{k}"), v.clone());
        config(&keys.iter().fold(model.clone(), keyed))["rope_scaling"].clone()
    };
    for (arch, model) in all().into_iter().filter(|(arch, _)| *arch != "glm-dsa") {
        let of = |keys: &[(&str, Kv)]| scaling(arch, &model, keys);
        let linear: [&[(&str, Kv)]; 4] = [
            &[("scale_linear", 8f32.into())],
            &[("scaling.factor", 8f32.into())],
            &[("scaling.factor", 8f32.into()), ("scale_linear", 2f32.into())],
            &[("scaling.type", "linear".into()), ("scaling.factor", 8f32.into())],
        ];
        for keys in linear {
            if arch == "deepseek2" {
                // vLLM's class computes YaRN whatever type of scaling its config.json names.
                let keyed = |m: Builder, (k, v): &(&str, Kv)| m.kv(format!("deepseek2.rope.{k}"), v.clone());
                refused(
                    &keys.iter().fold(model.clone(), keyed),
                    &[],
                    &["deepseek2.rope.scaling.type: not YaRN"],
                );
                continue;
            }
            let made = of(keys);
            assert_eq!((&made["rope_type"], &made["factor"]), (&json!("linear"), &json!(8.0)), "{arch}");
        }
        for none in [
            of(&[("scaling.type", "linear".into()), ("scaling.factor", 0f32.into())]),
            of(&[("scaling.type", "none".into()), ("scaling.factor", 8f32.into())]),
            of(&[("scaling.factor", 1f32.into())]),
            of(&[("scaling.type", "linear".into())]),
        ] {
            assert_eq!(none, Value::Null, "{arch}");
        }
    }
    let yarn: [(&str, Kv); 3] = [
        ("scaling.type", "yarn".into()),
        ("scaling.factor", 4f32.into()),
        ("scaling.yarn_attn_factor", 0.5f32.into()),
    ];
    for (model, built) in gqa() {
        assert_eq!(scaling(model.arch, &built, &yarn)["attention_factor"], 0.5, "{}", model.arch);
    }
    // Without the length that was scaled, it is the context's; a 0 is none.
    for (arch, model) in all().into_iter().filter(|(arch, _)| *arch != "glm-dsa") {
        let context = config(&model)["max_position_embeddings"].clone();
        let zero = ("scaling.original_context_length", 0u32.into());
        for keys in [&yarn[..2], &[yarn[0].clone(), yarn[1].clone(), zero]] {
            assert_eq!(scaling(arch, &model, keys)["original_max_position_embeddings"], context, "{arch}");
        }
    }
    // GLM-5 has no scaling to put it in.
    let glm = GLM.build(&q4_k).kv("glm-dsa.rope.scaling.factor", 4f32);
    refused(&glm, &[], &["glm-dsa.rope.scaling.factor: 4.0, expected 0 or 1"]);
}

/// `attn_factor` is longrope's factor; beside another scaling llama.cpp multiplies by it (llama-context.cpp,
/// `yarn_attn_factor *= hparams.rope_attn_factor`), and `attention_factor` of config.json would replace instead.
#[test]
fn a_factor_beside_linear_or_yarn_scaling_is_refused() {
    for (arch, model) in all() {
        let scaled = |kind: &str, factor: f32| {
            let model = model.clone().kv(format!("{arch}.rope.scaling.type"), kind);
            model.kv(format!("{arch}.rope.scaling.attn_factor"), factor)
        };
        for kind in ["linear", "yarn", "none"] {
            let with = |m: Builder| m.kv(format!("{arch}.rope.scaling.factor"), 1f32);
            refused(&with(scaled(kind, 0.5)), &[], &[&format!("{arch}.rope.scaling.attn_factor: ")]);
            assert_eq!(config(&with(scaled(kind, 1.0))), config(&model), "{arch}: {kind}");
        }
    }
}

/// llama.cpp PR 14028: the files of Qwen3-Embedding say that an embedding is the last token's state, as engines take
/// it by default; what the model computes is the same.
#[test]
fn an_embedding_of_the_last_token_is_no_other_function() {
    for (arch, model) in all() {
        let pooled = |kind: u32| model.clone().kv(format!("{arch}.pooling_type"), kind);
        assert_eq!(config(&pooled(3)), config(&model), "{arch}");
        for kind in [1, 2, 4] {
            refused(&pooled(kind), &[], &["pooling_type", "expected 0 or 3"]);
        }
    }
}

/// llama.cpp never chooses these tokens (llama-vocab.cpp, `suppress_tokens`, without ids that are no tokens).
#[test]
fn suppressed_tokens_reach_generation_config_json() {
    for (arch, model) in all() {
        let model = with_tokens(model, "qwen2", &[("<|endoftext|>", 3), ("<a>", 3), ("<b>", 3)]);
        let made = |ids: Vec<i32>| {
            file(&model.clone().kv("tokenizer.ggml.suppress_tokens", ids), "generation_config.json")
        };
        assert_eq!(made(vec![202, -1, 201, 4000])["suppress_tokens"], json!([202, 201]), "{arch}");
        assert_eq!(made(vec![-1])["suppress_tokens"], Value::Null, "{arch}");
    }
}

/// llama.cpp 24820, PR 7225.
#[test]
fn longrope_factors_reach_config_json() {
    let long: Vec<f32> = (1..=32).map(|i| i as f32).collect();
    let keys = |m: Builder, arch: &str| m.kv(format!("{arch}.rope.scaling.type"), "longrope");
    let model = keys(LLAMA.build(&q4_k), "llama")
        .kv("llama.rope.scaling.attn_factor", 1.19f32)
        .f32s("rope_factors_long.weight", &[32], &long)
        .f32s("rope_factors_short.weight", &[32], &[1.0; 32]);
    let scaling = &config(&model)["rope_scaling"];
    assert_eq!(scaling["rope_type"], "longrope");
    assert_eq!(scaling["long_factor"], json!((1..=32).map(f64::from).collect::<Vec<_>>()));
    assert_eq!(scaling["short_factor"], json!(vec![1.0; 32]));
    assert_eq!(scaling["attention_factor"], 1.19);
    for (model, built) in gqa() {
        let message = refused(&keys(built, model.arch), &[], &["long_factor of config.json"]);
        assert!(message.contains("rope_factors.long"), "{message}");
    }
}

/// llama.cpp PR 12957: only part of a head is rotated.
#[test]
fn a_rotation_of_part_of_a_head_is_refused() {
    for (model, built) in gqa() {
        let part = built.kv(format!("{}.rope.dimension_count", model.arch), 32u32);
        refused(&part, &[], &[&format!("{}.rope.dimension_count: 32, expected 64", model.arch)]);
    }
}

/// llama.cpp's loader takes these with the value 0 for absent.
#[test]
fn zero_means_absent_where_llama_cpp_has_it_so() {
    let model = DEEPSEEK.build(&q4_k);
    let zeros = model
        .clone()
        .set("deepseek2.expert_weights_scale", 0f32)
        .set("deepseek2.expert_group_count", 0u32)
        .set("deepseek2.expert_group_used_count", 0u32);
    let absent = model.clone().unset("deepseek2.expert_weights_scale");
    assert_eq!(config(&zeros), config(&absent));
    assert_eq!(config(&zeros)["routed_scaling_factor"], 1.0);
    let glm =
        GLM.build(&q4_k).set("glm-dsa.expert_weights_scale", 0f32).kv("glm-dsa.expert_group_count", 0u32);
    assert_eq!((&config(&glm)["routed_scaling_factor"], &config(&glm)["n_group"]), (&json!(1.0), &json!(1)));
    let lite = Mla { q_lora: 0, ..DEEPSEEK }.build(&q4_k).kv("deepseek2.attention.q_lora_rank", 0u32);
    assert_eq!(config(&lite)["q_lora_rank"], Value::Null);
}

/// LlamaFactory PR 9707, mlx-lm PR 720: Youtu-LLM is latent attention without experts.
#[test]
fn latent_attention_without_experts_is_converted_as_dense() {
    let dense = Mla { layers: 1, ..DEEPSEEK };
    let model =
        dense.build(&q4_k).set("deepseek2.expert_count", 0u32).set("deepseek2.expert_shared_count", 0u32);
    let config = config(&model);
    assert_eq!(config["architectures"], json!(["DeepseekV3ForCausalLM"]));
    assert_eq!((&config["first_k_dense_replace"], &config["num_hidden_layers"]), (&json!(1), &json!(1)));
    let tensors = converted(&model, tp(2)).rank(0);
    assert!(tensors.contains_key("model.layers.0.mlp.gate_up_proj.qweight"), "{:?}", tensors.keys());
}

/// vLLM PR 25281: a special token is cut from the text before a tool parser sees it.
#[test]
fn tokens_that_tool_parsers_read_are_not_special() {
    let tools =
        ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>"];
    let mut tokens = vec![("<｜end▁of▁sentence｜>", 3)];
    tokens.extend(tools.iter().map(|t| (*t, 3)));
    let made = file(&with_tokens(DEEPSEEK.build(&q4_k), "deepseek-v3", &tokens), "tokenizer.json");
    for token in made["added_tokens"].as_array().unwrap() {
        let tool = tools.contains(&token["content"].as_str().unwrap());
        assert_eq!(token["special"], !tool, "{token}");
    }
    assert_eq!(made["added_tokens"].as_array().unwrap().len(), 5);
}

/// transformers 24514: without it generate fails on token_type_ids.
#[test]
fn the_tokenizer_names_the_inputs_that_decoders_take() {
    for (arch, model) in all() {
        let model = with_tokens(model, "qwen2", &[("<|endoftext|>", 3)]);
        let made = file(&model, "tokenizer_config.json");
        assert_eq!(made["model_input_names"], json!(["input_ids", "attention_mask"]), "{arch}");
    }
}

/// A count of tokens that is not the embedding's contradicts the file itself.
#[test]
fn a_vocabulary_of_another_size_is_refused() {
    for (arch, model) in all() {
        let other = model.set(&format!("{arch}.vocab_size"), 301u32);
        refused(
            &other,
            &[],
            &[&format!("{arch}.vocab_size: 301, expected 300: token_embd.weight has so many rows")],
        );
    }
}

/// Mistral 7B v0.1 looks back 4096 tokens, which only Mistral's class computes.
#[test]
fn a_window_selects_the_class_that_has_one() {
    let of = |window: u32| config(&LLAMA.build(&q4_k).kv("llama.attention.sliding_window", window));
    let windowed = of(512);
    assert_eq!(windowed["architectures"], json!(["MistralForCausalLM"]));
    assert_eq!(windowed["sliding_window"], 512);
    for none in [0, 2048, 4096] {
        assert_eq!(of(none), config(&LLAMA.build(&q4_k)), "{none} in a context of 2048");
    }
    for model in [QWEN2, QWEN3, QWEN3MOE, MIXTRAL] {
        let windowed = model.build(&q4_k).kv(format!("{}.attention.sliding_window", model.arch), 512u32);
        refused(&windowed, &[], &["attention.sliding_window: 512, expected 0"]);
    }
}

/// Converters differ in whether arrays of layers count the MTP block.
#[test]
fn arrays_of_layers_have_an_entry_for_each_layer_and_no_more() {
    let of = |values: Vec<u32>| GLM.build(&q4_k).set("glm-dsa.expert_feed_forward_length", values);
    for right in [vec![512; 3], vec![512; 4]] {
        assert_eq!(config(&of(right))["moe_intermediate_size"], 512);
    }
    for wrong in [2, 5] {
        let words = [&format!("glm-dsa.expert_feed_forward_length: {wrong} values, expected 3 or 4")[..]];
        refused(&of(vec![512; wrong]), &[], &words);
    }
    refused(&of(vec![512, 512, 256, 512]), &[], &["512 in layer 0, but 256 in layer 2"]);
    let heads = |n: usize| GLM.build(&q4_k).set("glm-dsa.attention.head_count", vec![4u32; n]);
    for right in [3, 4] {
        converted(&heads(right), tp(2));
    }
    refused(
        &heads(2),
        &[],
        &["glm-dsa.attention.head_count", "2 entries, expected one for each of 4 layers (3 without"],
    );
    let types = |n: usize| GLM.build(&q4_k).kv("glm-dsa.attention.indexer.types", vec![1u32; n]);
    for right in [3, 4] {
        converted(&types(right), tp(2));
    }
    refused(
        &types(6),
        &[],
        &["glm-dsa.attention.indexer.types: 6 entries", "3 layers, or 4 with the MTP block"],
    );
}

/// The small files are part of what is converted: a rank that follows with others is refused, and
/// recomputing from the source sees them.
#[test]
fn ranks_of_one_directory_have_one_config_json() {
    let dir = tempfile::tempdir().unwrap();
    let model = LLAMA.build(&q4_k);
    let source = model.write(dir.path().join("model.gguf"));
    let (out, given) = (dir.path().join("out"), dir.path().join("given"));
    std::fs::create_dir(&given).unwrap();
    let mut other = config(&model);
    other["rms_norm_eps"] = json!(0.123);
    std::fs::write(given.join("config.json"), other.to_string()).unwrap();
    let run = |args: &[&str], hf: bool| {
        let mut command = preshard();
        command.args(args);
        if hf {
            command.arg("--hf-config").arg(&given);
        }
        let output = command.output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let (source, out) = (source.to_str().unwrap(), out.to_str().unwrap());
    let convert =
        |rank: &str, hf: bool| run(&["convert", "-q", source, "--tp", "2", "--ranks", rank, "-o", out], hf);
    let verify = |hf: bool| run(&["verify", "-q", out, "--source", source], hf);
    assert_eq!(convert("0", false), (Some(0), String::new()));
    let before = std::fs::read(dir.path().join("out/config.json")).unwrap();
    let (code, text) = convert("1", true);
    assert!(code == Some(1) && text.contains("with another config.json"), "{text}");
    assert_eq!(std::fs::read(dir.path().join("out/config.json")).unwrap(), before);
    assert_eq!(convert("1", false).0, Some(0));
    assert_eq!(verify(false), (Some(0), String::new()));

    std::fs::remove_dir_all(out).unwrap();
    assert_eq!(convert("0", true).0, Some(0));
    let (code, text) = verify(false);
    assert!(code == Some(1) && text.contains("config.json: is not what this GGUF gives"), "{text}");
    assert_eq!(verify(true), (Some(0), String::new()));
    assert_eq!(run(&["verify", out], true).0, Some(2), "--hf-config is of use with --source alone");
}
