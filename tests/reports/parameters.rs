//! What the class of config.json declares is what is written: nothing missing, nothing over. What transformers' classes
//! declare is held by mappings/class, whose own test compares it with what transformers saves.

use crate::common::{Builder, F32};
use crate::support::models::{DEEPSEEK, GLM, LLAMA, MIXTRAL, Mla, QWEN2, QWEN3, QWEN3MOE, q4_k};
use crate::support::{preshard, stderr};
use serde_json::{Value, json};

/// Plans with a config.json that is the model's own but for some keys; gives the exit code and the messages.
fn plan_with(model: &Builder, changes: &[(&str, Value)]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let source = model.write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let run = preshard().args(["convert", "-q"]).arg(&source).arg("-o").arg(&out).output().unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
    let mut config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let run =
        preshard().args(["-q", "plan"]).arg(source).arg("--hf-config").arg(dir.path()).output().unwrap();
    (run.status.code(), stderr(&run))
}

#[track_caller]
fn refused_with(model: &Builder, changes: &[(&str, Value)], expected: &[&str]) {
    let (code, text) = plan_with(model, changes);
    assert_eq!(code, Some(1), "{changes:?}: {text}");
    for part in expected {
        assert!(text.contains(part), "{changes:?}: {part:?} is not in {text}");
    }
}

#[test]
fn a_parameter_of_the_class_that_no_file_has_is_refused() {
    let (llama, deepseek) = (LLAMA.build(&q4_k), DEEPSEEK.build(&q4_k));
    assert_eq!(plan_with(&llama, &[]), (Some(0), String::new()));
    for (model, key, value, missing) in [
        (&llama, "mlp_bias", json!(true), "model.layers.0.mlp.down_proj.bias"),
        (&llama, "attention_bias", json!(true), "model.layers.0.self_attn.o_proj.bias"),
        (&QWEN3.build(&q4_k), "attention_bias", json!(true), "model.layers.0.self_attn.q_proj.bias"),
        (&QWEN3MOE.build(&q4_k), "attention_bias", json!(true), "model.layers.0.self_attn.v_proj.bias"),
        (&deepseek, "attention_bias", json!(true), "model.layers.0.self_attn.q_a_proj.bias"),
    ] {
        refused_with(model, &[(key, value)], &[missing, "declared by", "no tensor of the GGUF gives it"]);
    }
}

#[test]
fn a_tensor_that_is_no_parameter_of_the_class_is_refused() {
    let bias = |model: Builder, name: &str, n: usize| {
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        model.tensor(name, F32, &[n as u64], bytes)
    };
    let mut biased = LLAMA.build(&q4_k);
    for layer in 0..LLAMA.layers {
        biased = bias(biased, &format!("blk.{layer}.attn_output.bias"), 256);
    }
    assert_eq!(plan_with(&biased, &[]), (Some(0), String::new()));
    // The class would leave them out without a word.
    refused_with(
        &biased,
        &[("attention_bias", json!(false))],
        &[
            "model.layers.0.self_attn.k_proj.bias",
            "LlamaForCausalLM declares no such parameter",
            "more like it",
        ],
    );
    refused_with(
        &biased,
        &[("architectures", json!(["MistralForCausalLM"])), ("model_type", json!("mistral"))],
        &["MistralForCausalLM declares no such parameter"],
    );
    let lite = Mla { q_lora: 0, ..DEEPSEEK };
    assert_eq!(plan_with(&lite.build(&q4_k), &[]), (Some(0), String::new()));
}

#[test]
fn every_class_is_complete_as_it_is_converted() {
    for model in [LLAMA, QWEN2, QWEN3, QWEN3MOE, MIXTRAL] {
        assert_eq!(plan_with(&model.build(&q4_k), &[]).0, Some(0), "{}", model.arch);
    }
    for model in [DEEPSEEK, GLM] {
        let model = model.build(&q4_k);
        assert_eq!(plan_with(&model, &[]).0, Some(0));
    }
}
