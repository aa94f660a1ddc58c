//! config.json and the tokenizer that come out of a GGUF are those that went in.
#![cfg(feature = "convert")]

mod common;
#[path = "common/packed.rs"]
mod packed;

use common::{Builder, F16};
use packed::unpacked;
use preshard::gguf::Gguf;
use preshard::hf::{self, Files, Request};
use preshard::indexer;
use preshard::mapping::Tables;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The models with an original config.json: its directory, and the GGUF made from it.
const MODELS: &[(&str, &str)] = &[
    ("tiny-llama", "dense/tiny-llama-Q4_K_M.gguf"),
    ("tiny-qwen2", "hf/tiny-qwen2/metadata.gguf"),
    ("tiny-qwen3moe", "hf/tiny-qwen3moe/metadata.gguf"),
    ("tiny-dsv3", "hf/tiny-dsv3/metadata.gguf"),
    ("tiny-dsv3", "hf/tiny-dsv3-legacy-kvb/metadata.gguf"),
    ("tiny-glm5", "glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf"),
    ("deepseek32", "arch/deepseek32-q8_0.gguf.z"),
    ("glm4moe", "arch/glm4moe-q8_0.gguf.z"),
    ("glm52", "hf/glm52/metadata.gguf"),
    ("kimi", "hf/kimi/metadata.gguf"),
    ("llamabias", "hf/llamabias/metadata.gguf"),
    ("minimax-m2", "arch/minimax-m2-q8_0.gguf.z"),
    ("mixtral", "hf/mixtral/metadata.gguf"),
    ("qwen35", "arch/qwen35-q8_0.gguf.z"),
    ("qwen35moe", "arch/qwen35moe-q8_0.gguf.z"),
    ("qwen3next", "arch/qwen3next-q8_0.gguf.z"),
    ("qwen3", "hf/qwen3/metadata.gguf"),
    ("v2", "hf/v2/metadata.gguf"),
    ("v2lite", "hf/v2lite/metadata.gguf"),
];

/// Keys that say nothing about the model, or nothing that its class does not default to.
const SILENT: &[&str] = &["ep_size", "initializer_range", "pretraining_tp", "use_cache"];

fn open(file: &str) -> Gguf {
    let path = file.strip_suffix(".z").map_or_else(|| fixtures().join(file), unpacked);
    Gguf::open(&[path]).expect(file)
}

fn request(gguf: &Gguf) -> Request {
    Request::of(gguf).unwrap()
}

fn json_of(files: &Files, name: &str) -> Value {
    let (_, bytes) = files.files.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}"));
    serde_json::from_slice(bytes).unwrap()
}

fn read(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .unwrap()
}

/// Equal values; a whole number equals the float of the same value, as in Python.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(k, v)| b.get(k).is_some_and(|w| same(v, w)))
        }
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (a, b) => a == b,
    }
}

/// The ids that end a reply: the original's own, and those of a text by which llama.cpp ends replies too
/// (`special_eog_ids` in src/llama-vocab.cpp), which an original may lack.
fn ends_are(made: &Value, original: &Value, files: &Files) -> bool {
    const TEXTS: [&str; 5] = ["<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"];
    let list = |v: &Value| v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]);
    let added = json_of(files, "tokenizer.json")["added_tokens"].as_array().unwrap().clone();
    let by_text = |id: &Value| {
        added.iter().any(|t| t["id"] == *id && TEXTS.contains(&t["content"].as_str().unwrap_or_default()))
    };
    let (made, original) = (list(made), list(original));
    original.iter().all(|id| made.contains(id))
        && made.iter().all(|id| original.contains(id) || by_text(id))
        && added.iter().all(|t| !by_text(&t["id"]) || made.contains(&t["id"]))
}

#[test]
fn config_is_the_original() {
    for (name, file) in MODELS {
        let gguf = open(file);
        let files = hf::files(&gguf, &request(&gguf)).unwrap();
        let config = json_of(&files, "config.json");
        let original = read(fixtures().join("hf").join(name).join("config.json"));
        for (key, value) in original.as_object().unwrap() {
            // The converter leaves DeepSeek-V3's draft layer out, so there is none to announce.
            let value =
                if *name == "tiny-dsv3" && key == "num_nextn_predict_layers" { &json!(0) } else { value };
            // A key of DeepSeek-V3 that DeepSeek-V2's class does not know.
            let foreign = name.starts_with("v2") && key == "rope_interleave";
            if key == "eos_token_id" {
                assert!(ends_are(&config[key], value, &files), "{file}: {key} is {}", config[key]);
            } else if !SILENT.contains(&key.as_str()) && !foreign {
                assert!(same(&config[key], value), "{file}: {key} is {}, expected {value}", config[key]);
            }
        }
        let added: Vec<_> = config
            .as_object()
            .unwrap()
            .keys()
            .filter(|k| original.get(k.as_str()).is_none())
            .cloned()
            .collect();
        let allowed = [
            "attention_bias",
            "attention_dropout",
            "mlp_bias",
            "moe_router_dtype",
            "mtp_num_hidden_layers",
            "pad_token_id",
        ];
        assert!(added.iter().all(|k| allowed.contains(&k.as_str())), "{file}: added {added:?}");
        let model = hf::files(&gguf, &request(&gguf)).unwrap().model;
        assert_eq!(original["architectures"], json!([model.class]), "{file}");
        assert_eq!(original["model_type"], model.model_type, "{file}");
    }
}

#[test]
fn tokenizer_is_the_original() {
    for (name, file) in MODELS.iter().filter(|(name, _)| name.starts_with("tiny-")) {
        let gguf = open(file);
        let files = hf::files(&gguf, &request(&gguf)).unwrap();
        let directory = fixtures().join("hf").join(name);
        let (made, original) = (json_of(&files, "tokenizer.json"), read(directory.join("tokenizer.json")));
        for key in ["vocab", "merges"] {
            assert_eq!(made["model"][key], original["model"][key], "{file}: {key}");
        }
        assert_eq!(made["added_tokens"], original["added_tokens"], "{file}");
        assert_eq!(made["decoder"], original["decoder"], "{file}");

        let (made, original) =
            (json_of(&files, "tokenizer_config.json"), read(directory.join("tokenizer_config.json")));
        for key in [
            "added_tokens_decoder",
            "add_bos_token",
            "bos_token",
            "eos_token",
            "pad_token",
            "tokenizer_class",
        ] {
            assert_eq!(made[key], original[key], "{file}: {key}");
        }
        let template = files.files.iter().find(|(n, _)| n == "chat_template.jinja").unwrap();
        assert_eq!(original["chat_template"].as_str().unwrap().as_bytes(), template.1, "{file}");

        let made = json_of(&files, "generation_config.json");
        for (key, value) in read(directory.join("generation_config.json")).as_object().unwrap() {
            if key == "eos_token_id" {
                assert!(ends_are(&made[key], value, &files), "{file}: {key} is {}", made[key]);
            } else {
                assert_eq!(made[key], *value, "{file}: {key}");
            }
        }
        let names: Vec<_> = files.files.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(
            names,
            [
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        assert_eq!(files, hf::files(&gguf, &request(&gguf)).unwrap(), "{file}: not the same twice");
    }
}

/// What each `tokenizer.ggml.pre` of the fixtures becomes; the patterns are those of the published
/// tokenizer.json of GLM-4.5, DeepSeek-V3, Qwen2 and Llama 3.
#[test]
fn pre_tokenizers_are_the_published_ones() {
    let words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let single = words.replace(r"\p{N}{1,3}", r"\p{N}");
    for (file, patterns, ignore_merges, normalizer) in [
        ("dense/tiny-llama-Q4_K_M.gguf", vec![words], true, Value::Null),
        ("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf", vec![words], true, Value::Null),
        ("hf/tiny-qwen2/metadata.gguf", vec![single.as_str()], false, json!({ "type": "NFC" })),
        (
            "hf/tiny-dsv3/metadata.gguf",
            vec![
                r"\p{N}{1,3}",
                "[一-龥぀-ゟ゠-ヿ]+",
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
            ],
            false,
            Value::Null,
        ),
    ] {
        let gguf = open(file);
        let tokenizer = json_of(&hf::files(&gguf, &request(&gguf)).unwrap(), "tokenizer.json");
        let steps = tokenizer["pre_tokenizer"]["pretokenizers"].as_array().unwrap();
        let found: Vec<_> = steps.iter().filter_map(|s| s["pattern"]["Regex"].as_str()).collect();
        assert_eq!(found, patterns, "{file}");
        assert_eq!(steps.last().unwrap()["type"], "ByteLevel", "{file}");
        assert_eq!(steps.last().unwrap()["use_regex"], false, "{file}");
        assert_eq!(tokenizer["model"]["ignore_merges"], ignore_merges, "{file}");
        assert_eq!(tokenizer["normalizer"], normalizer, "{file}");
    }
}

#[test]
fn sentencepiece_merges_are_those_of_transformers() {
    let gguf = open("hf/spm/metadata.gguf");
    let tokenizer = json_of(&hf::files(&gguf, &request(&gguf)).unwrap(), "tokenizer.json");
    let expected = read(fixtures().join("hf/spm/expected.json"));
    assert_eq!(tokenizer["model"]["vocab"], expected["vocab"]);
    assert_eq!(tokenizer["model"]["merges"], expected["merges"]);
    assert_eq!(tokenizer["model"]["byte_fallback"], true);
    assert_eq!(tokenizer["model"]["unk_token"], "<unk>");
    assert_eq!(tokenizer["normalizer"]["normalizers"][0], json!({ "type": "Prepend", "prepend": "▁" }));
    assert_eq!(tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"], "<s>");
    let special: Vec<_> = tokenizer["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["content"].as_str().unwrap())
        .collect();
    assert_eq!(special, ["<unk>", "<s>", "</s>", "[INST]"]);
}

#[test]
fn without_its_indexer_glm_is_deepseek_v3() {
    for file in ["glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf", "hf/glm52/metadata.gguf"] {
        let gguf = open(file);
        let dropped = Request { indexer: false, mtp: false, ..request(&gguf) };
        let config = json_of(&hf::files(&gguf, &dropped).unwrap(), "config.json");
        assert_eq!(config["architectures"], json!(["DeepseekV3ForCausalLM"]));
        assert_eq!(config["model_type"], "deepseek_v3");
        assert_eq!(config["moe_router_dtype"], "float32");
        assert_eq!(config["num_nextn_predict_layers"], 0);
        assert!(config.as_object().unwrap().keys().all(|key| !key.starts_with("index")), "{config}");
        assert_eq!(hf::files(&gguf, &dropped).unwrap().model.class, "DeepseekV3ForCausalLM");

        // The same from the model's own config.json.
        let name = if file.contains("glm52") { "glm52" } else { "tiny-glm5" };
        let given = Request { hf_config: Some(fixtures().join("hf").join(name)), ..dropped };
        let rewritten = json_of(&hf::files(&gguf, &given).unwrap(), "config.json");
        for (key, value) in config.as_object().unwrap() {
            assert!(same(&rewritten[key], value), "{key} is {}, expected {value}", rewritten[key]);
        }
        assert!(rewritten.as_object().unwrap().keys().all(|key| !key.starts_with("index")), "{rewritten}");
        assert_eq!(hf::files(&gguf, &given).unwrap().model.class, "DeepseekV3ForCausalLM");
    }
}

#[test]
fn layers_that_share_an_indexer() {
    let gguf = open("hf/glm52/metadata.gguf");
    let full = [true, true, true, false, false, false, true, false];
    let group = &Tables::default().arch("glm-dsa").unwrap().0.groups["indexer"];
    assert_eq!(indexer::layers(&gguf, group, 8, 1).unwrap(), full);
    let error = indexer::layers(&gguf, group, 9, 1).unwrap_err().to_string();
    assert!(error.contains("8 entries") && error.contains("9 layers"), "{error}");

    // Without the key: from the tensors, unless every layer has a copy in a file with GLM-5.2's context.
    let with = |context: u32, layers: &[u64]| {
        let directory = tempfile::tempdir().unwrap();
        let mut builder = Builder::new("glm-dsa").kv("glm-dsa.context_length", context);
        for layer in layers {
            builder = builder.tensor(format!("blk.{layer}.indexer.attn_k.weight"), F16, &[1], vec![0; 2]);
        }
        let gguf = Gguf::open(&[builder.write(directory.path().join("model.gguf"))]).unwrap();
        indexer::layers(&gguf, group, 8, 1).unwrap()
    };
    assert_eq!(with(1 << 20, &[0, 1, 2, 6]), full);
    assert_eq!(with(1 << 20, &[0, 1, 2, 3, 4, 5, 6, 7]), full);
    assert_eq!(with(202_752, &[0, 1, 2, 3, 4, 5, 6, 7]), [true; 8]);
}

#[test]
fn dtype_ties_and_quantization_follow_the_request() {
    let gguf = open("dense/tiny-llama-Q4_K_M.gguf");
    let asked = Request {
        dtype: "float32".into(),
        tied: true,
        quantization: Some(json!({ "quant_method": "gguf" })),
        ..request(&gguf)
    };
    let config = json_of(&hf::files(&gguf, &asked).unwrap(), "config.json");
    assert_eq!(config["dtype"], "float32");
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(config["quantization_config"]["quant_method"], "gguf");
}

/// A directory with the original files of `name`, its config.json changed.
fn given(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join("hf").join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::write(directory.path().join(entry.file_name()), std::fs::read(entry.path()).unwrap())
            .unwrap();
    }
    let path = directory.path().join("config.json");
    let mut config = read(path.clone());
    change(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
    directory
}

#[test]
fn given_files_win() {
    let gguf = open("dense/tiny-llama-Q4_K_M.gguf");
    let directory = given("tiny-llama", |config| {
        config["architectures"] = json!(["MistralForCausalLM"]);
        config["model_type"] = json!("mistral");
        config["sliding_window"] = json!(128);
        config["torch_dtype"] = config["dtype"].take();
        config["quantization_config"] = json!({ "quant_method": "fp8" });
        config["vocab_size"] = json!(500);
    });
    let asked =
        Request { dtype: "float16".into(), hf_config: Some(directory.path().to_owned()), ..request(&gguf) };
    let files = hf::files(&gguf, &asked).unwrap();
    let config = json_of(&files, "config.json");
    assert_eq!(config["sliding_window"], 128);
    assert_eq!(config["dtype"], "float16");
    assert_eq!(config["vocab_size"], 512, "rows of the embedding");
    assert_eq!(config.get("quantization_config"), None);
    assert_eq!(config.get("torch_dtype"), None);
    assert_eq!(hf::files(&gguf, &asked).unwrap().model.class, "MistralForCausalLM");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let original = std::fs::read(directory.path().join(name)).unwrap();
        assert_eq!(files.files.iter().find(|(n, _)| n == name).unwrap().1, original, "{name}");
    }
    // The template is in the given tokenizer_config.json.
    assert!(files.files.iter().all(|(n, _)| n != "chat_template.jinja"));
    assert!(
        files.notes.iter().any(|n| n.contains("vocab_size changed from 500 to 512")),
        "{:?}",
        files.notes
    );
}

#[test]
fn a_given_config_of_another_model_is_refused() {
    let gguf = open("dense/tiny-llama-Q4_K_M.gguf");
    type Change = fn(&mut Value);
    let cases: &[(Change, &[&str])] = &[
        (|c| c["num_hidden_layers"] = json!(3), &["num_hidden_layers", "3", "2"]),
        (|c| c["hidden_size"] = json!(320), &["hidden_size", "320", "256"]),
        (|c| c["num_attention_heads"] = json!(4), &["num_attention_heads", "4", "8"]),
        (|c| c["num_key_value_heads"] = json!(8), &["num_key_value_heads", "8", "2"]),
        (|c| c["vocab_size"] = json!(520), &["vocab_size", "520", "512"]),
        (|c| c["architectures"] = json!(["Qwen2ForCausalLM"]), &["Qwen2ForCausalLM", "LlamaForCausalLM"]),
    ];
    for (change, words) in cases {
        let directory = given("tiny-llama", change);
        let asked = Request { hf_config: Some(directory.path().to_owned()), ..request(&gguf) };
        let error = hf::files(&gguf, &asked).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let directory = given("tiny-llama", |_| {});
    let tied = Request { tied: true, hf_config: Some(directory.path().to_owned()), ..request(&gguf) };
    let error = hf::files(&gguf, &tied).unwrap_err().to_string();
    assert!(error.contains("tie_word_embeddings") && error.contains("output.weight"), "{error}");
}

#[test]
fn a_given_tokenizer_of_another_model_is_refused() {
    let gguf = open("dense/tiny-llama-Q4_K_M.gguf");
    let directory = given("tiny-llama", |_| {});
    let path = directory.path().join("tokenizer.json");
    let asked = Request { hf_config: Some(directory.path().to_owned()), ..request(&gguf) };
    let original = read(path.clone());

    let mut swapped = original.clone();
    swapped["model"]["vocab"]["he"] = json!(258);
    std::fs::write(&path, swapped.to_string()).unwrap();
    let error = hf::files(&gguf, &asked).unwrap_err().to_string();
    assert!(error.contains("\"he\" is token 258, but 257"), "{error}");

    let mut long = original.clone();
    long["model"]["vocab"]["beyond"] = json!(512);
    std::fs::write(&path, long.to_string()).unwrap();
    let error = hf::files(&gguf, &asked).unwrap_err().to_string();
    assert!(error.contains("512 rows"), "{error}");

    std::fs::write(&path, "{").unwrap();
    assert!(hf::files(&gguf, &asked).unwrap_err().to_string().contains("tokenizer.json: no JSON"));
    let empty = tempfile::tempdir().unwrap();
    let nothing = Request { hf_config: Some(empty.path().to_owned()), ..request(&gguf) };
    assert!(hf::files(&gguf, &nothing).is_err());
}

/// A small Llama with a byte-level vocabulary of four tokens.
fn small() -> Builder {
    Builder::new("llama")
        .kv("llama.block_count", 1u32)
        .kv("llama.context_length", 64u32)
        .kv("llama.embedding_length", 2u32)
        .kv("llama.feed_forward_length", 4u32)
        .kv("llama.attention.head_count", 1u32)
        .kv("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
        .kv("tokenizer.ggml.model", "gpt2")
        .kv("tokenizer.ggml.pre", "llama-bpe")
        .kv("tokenizer.ggml.tokens", vec!["a", "b", "ab", "<|end|>"])
        .kv("tokenizer.ggml.token_type", vec![1i32, 1, 1, 3])
        .kv("tokenizer.ggml.merges", vec!["a b"])
        .kv("tokenizer.ggml.bos_token_id", 3u32)
        .kv("tokenizer.ggml.eos_token_id", 3u32)
        .kv("tokenizer.chat_template", "{{ messages }}")
        .tensor("token_embd.weight", F16, &[2, 4], vec![0; 16])
}

fn made(builder: &Builder) -> preshard::Result<Files> {
    let directory = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&[builder.write(directory.path().join("model.gguf"))])?;
    hf::files(&gguf, &Request::of(&gguf)?)
}

#[test]
fn what_cannot_be_made_is_refused() {
    assert_eq!(made(&small()).unwrap().notes, Vec::<String>::new());
    for (builder, words) in [
        (small().set("tokenizer.ggml.pre", "klingon"), "klingon"),
        (small().set("tokenizer.ggml.model", "t5"), "t5"),
        (small().unset("llama.context_length"), "llama.context_length"),
        (small().unset("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
        (small().unset("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (small().set("tokenizer.ggml.merges", vec!["ab"]), "merge 0"),
        (small().set("tokenizer.ggml.token_type", vec![1i32]), "1 entries for 4 tokens"),
        (small().set("tokenizer.ggml.model", "llama"), "tokenizer.ggml.scores"),
        (small().set("llama.attention.head_count", vec![1u32, 2]), "llama.attention.head_count"),
        (small().f32s("rope_freqs.weight", &[4], &[8.0, 1.0, 8.0, 1.0]), "rope_freqs.weight"),
        (small().f32s("rope_freqs.weight", &[1], &[f32::NAN]), "rope_freqs.weight"),
    ] {
        let error = made(&builder).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let error = made(&small().set("general.architecture", "falcon")).unwrap_err().to_string();
    assert!(error.contains("falcon") && error.contains("qwen3moe"), "{error}");
}

#[test]
fn what_is_odd_is_noted() {
    let noted = |builder: Builder, words: &str| {
        let files = made(&builder).unwrap();
        assert!(files.notes.iter().any(|note| note.contains(words)), "{words}: {:?}", files.notes);
        files
    };
    noted(small().unset("tokenizer.ggml.pre"), "tokenizer.ggml.pre");
    noted(small().unset("tokenizer.chat_template"), "chat template");
    let files = noted(small().set("tokenizer.chat_template", ""), "tokenizer.chat_template is empty");
    assert!(files.files.iter().all(|(name, _)| name != "chat_template.jinja"));
    noted(small().set("tokenizer.ggml.bos_token_id", 9u32), "tokenizer.ggml.bos_token_id 9");
    noted(small().set("tokenizer.ggml.merges", vec!["a b", "a c"]), "1 merges");
    let files = noted(small().unset("tokenizer.ggml.model"), "no tokenizer");
    assert_eq!(files.files.len(), 1);

    // Token bytes that are no UTF-8, and an empty token: both left out, the others keep their ids.
    let tokens = common::Kv::Array(
        8,
        vec!["a".into(), "b".into(), common::Kv::Text(vec![0xff, 0xfe]), "<|end|>".into()],
    );
    let files = noted(small().set("tokenizer.ggml.tokens", tokens), "tokens 2 are empty or no UTF-8");
    let vocab = json_of(&files, "tokenizer.json")["model"]["vocab"].clone();
    assert_eq!(vocab, json!({ "a": 0, "b": 1, "<|end|>": 3 }));
    let files = noted(small().set("tokenizer.ggml.tokens", vec!["a", "b", "", "<|end|>"]), "tokens 2");
    assert_eq!(json_of(&files, "tokenizer.json")["added_tokens"][0]["id"], 3);
}

#[test]
fn several_templates_are_named_in_the_tokenizer_config() {
    let files = made(&small().kv("tokenizer.chat_template.tool_use", "{{ tools }}")).unwrap();
    assert_eq!(
        json_of(&files, "tokenizer_config.json")["chat_template"],
        json!([
            { "name": "default", "template": "{{ messages }}" },
            { "name": "tool_use", "template": "{{ tools }}" }
        ])
    );
    assert!(files.files.iter().all(|(name, _)| name != "chat_template.jinja"));
}

#[test]
fn replies_end_where_the_original_ends_them() {
    // Llama 3's three, the file's own first.
    let files = made(
        &small()
            .set("tokenizer.ggml.tokens", vec!["a", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
            .set("tokenizer.ggml.token_type", vec![1i32, 3, 3, 3])
            .set("tokenizer.ggml.merges", Vec::<&str>::new())
            .kv("general.sampling.temp", 0.6f32),
    )
    .unwrap();
    let generation = json_of(&files, "generation_config.json");
    assert_eq!(generation["eos_token_id"], json!([3, 1, 2]));
    assert_eq!(generation["temperature"], 0.6);
    assert_eq!(generation["do_sample"], true);
}
