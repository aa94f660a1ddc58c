//! Writes seed inputs for every target under the directory given: `seeds fuzz/corpus`.

use arbitrary::Unstructured;
use preshard::convert::{self, Settings};
use preshard::eval::Decoder;
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Fit, Policy};
use preshard_fuzz::gguf::{Builder, F32, Kv, Q4_K, Q8_0};
use preshard_fuzz::model;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn main() {
    let corpus = std::env::args().nth(1).expect("usage: seeds DIRECTORY");
    let corpus = Path::new(&corpus);
    let put = |target: &str, name: &str, bytes: &[u8]| {
        let dir = corpus.join(target);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(name), bytes).unwrap();
    };
    // Reproducible noise; a structured target makes a model of it.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut noise = |n: usize| -> Vec<u8> {
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect()
    };
    for i in 0..64 {
        put("plan_eval", &format!("noise-{i}"), &noise(64 + 16 * i));
        put("hf", &format!("noise-{i}"), &noise(64 + 16 * i));
    }

    let tiny = Builder::new("llama")
        .kv("llama.block_count", 1u32)
        .kv("llama.attention.head_count", 2u32)
        .kv("general.alignment", 32u32)
        .kv("tokenizer.ggml.tokens", vec!["a", "b"])
        .kv("a.flags", vec![true, false])
        .kv("a.nested", Kv::Array(9, vec![Kv::from(vec![1u8, 2]), Kv::from(vec![3u8])]))
        .tensor("token_embd.weight", F32, &[8, 2], vec![1; 64])
        .tensor("output_norm.weight", F32, &[8], vec![0; 32])
        .tensor("blk.0.attn_q.weight", Q8_0, &[32, 1], vec![2; 34])
        .tensor("blk.0.ffn_up_exps.weight", Q4_K, &[256, 1, 2], vec![3; 288]);
    put("gguf", "tiny", &tiny.bytes());
    put("gguf", "version-2", &tiny.clone().version(2).bytes());
    put("gguf", "big-endian", &tiny.clone().big_endian().bytes());
    put("gguf", "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
    let splits: Vec<Vec<u8>> = tiny.splits(&[2, 1, 1]).iter().map(Builder::bytes).collect();
    put("gguf", "splits", &splits.join(&b"=SPLIT=="[..]));
    put("gguf", "all-values", &std::fs::read("../tests/fixtures/parse/all-values.gguf").unwrap_or_default());
    let mut small = Vec::new();
    for _ in 0..400 {
        let bytes = noise(600);
        let Ok(m) = model::random(&mut Unstructured::new(&bytes)) else { continue };
        let bytes = m.gguf.bytes();
        if bytes.len() < 24 << 10 {
            small.push(bytes);
        }
    }
    for (i, bytes) in small.iter().take(24).enumerate() {
        put("gguf", &format!("model-{i}"), bytes);
    }

    for (folder, byte) in [("arch", 0u8), ("engine", 1u8)] {
        for name in ["llama", "deepseek2", "vllm-dense", "vllm-mla", "hf"] {
            if let Ok(text) = std::fs::read(format!("../mappings/{folder}/{name}.toml")) {
                put("mapping", &format!("{folder}-{name}"), &[&[byte][..], &text].concat());
            }
        }
    }

    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source.gguf");
    model::fixed().gguf.write(&source);
    let gguf = Gguf::open(&[source]).unwrap();
    for tp in [1, 2] {
        let fit = Fit::Dequantise;
        let options = Policy { tp, misaligned: fit, mixed: fit, ..Policy::default() };
        let plan = Plan::new(&gguf, &Tables::default(), options).unwrap();
        let out = dir.path().join(format!("tp{tp}"));
        let stop = AtomicBool::new(false);
        let settings = Settings {
            ranks: None,
            threads: 1,
            memory: 1 << 30,
            checkpoint: preshard::convert::CHECKPOINT_BYTES,
            force: false,
            allow_nonfinite: true,
            decoder: &Decoder::CPU,
            files: vec![("config.json".into(), b"{}".to_vec())],
            class: "LlamaForCausalLM".into(),
            progress: &|_| (),
            stop: &stop,
        };
        convert::run(&plan, &gguf, &out, &settings).unwrap();
        put("manifest", &format!("tp{tp}"), &std::fs::read(out.join("preshard.json")).unwrap());
        let shard = std::fs::read(out.join("model-rank-0-part-0.safetensors")).unwrap();
        // The header alone says it all: tensors of the same bytes, cut to what is left.
        put("header", &format!("tp{tp}"), &shard[..shard.len().min(64 << 10)]);
    }
    let view = |n: usize| vec![0u8; n];
    let (a, b) = (view(24), view(4));
    let tensors = [
        ("a", safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, vec![3, 4], &a).unwrap()),
        ("b", safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &b).unwrap()),
    ];
    put("header", "library", &safetensors::serialize(tensors, None).unwrap());
}
