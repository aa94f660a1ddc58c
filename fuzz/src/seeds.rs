//! Writes seeds to fuzz/corpus: small models of every architecture, their manifests and headers, and
//! the mapping tables.

#[path = "../../tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../../tests/support/models.rs"]
mod models;

use models::{DEEPSEEK, GLM, Gqa, LLAMA, MIXTRAL, Mla, QWEN2, QWEN3, QWEN3MOE};
use preshard::convert::{self, Settings};
use preshard::eval::Decoder;
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::{Options, Plan};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn small_gqa(of: Gqa) -> Gqa {
    Gqa { hidden: 32, inter: 64, heads: 2, kv_heads: 2, head: 32, vocab: 40, experts: of.experts.min(2), ..of }
}

fn small_mla(of: Mla) -> Mla {
    let (hidden, inter, moe_inter, heads, nope, rope, v) = (32, 64, 64, 2, 32, 32, 32);
    let (q_lora, kv_lora, experts, vocab) = (of.q_lora.min(32), 32, 2, 40);
    Mla {
        layers: 2,
        hidden,
        inter,
        moe_inter,
        heads,
        nope,
        rope,
        v,
        q_lora,
        kv_lora,
        experts,
        vocab,
        index_dim: 32,
        ..of
    }
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = |name: &str| {
        let dir = root.join("corpus").join(name);
        std::fs::create_dir_all(&dir).expect("the corpus can be written");
        dir
    };
    let q8 = |_: &str| common::Q8_0;
    let models = [
        ("llama", small_gqa(LLAMA).build(&q8)),
        ("mixtral", small_gqa(MIXTRAL).build(&q8)),
        ("qwen2", small_gqa(QWEN2).build(&|_| common::Q4_0)),
        ("qwen3", small_gqa(QWEN3).build(&|_| common::BF16)),
        ("qwen3moe", small_gqa(QWEN3MOE).build(&|_| common::MXFP4)),
        ("glm", small_mla(GLM).build(&q8)),
        ("deepseek", small_mla(DEEPSEEK).build(&q8)),
        ("deepseek-legacy", small_mla(Mla { legacy: true, q_lora: 0, ..DEEPSEEK }).build(&|_| common::F16)),
    ];
    for (name, model) in models {
        let source = model.write(corpus("gguf").join(name));
        let gguf = Gguf::open(&[source]).expect("a sound model");
        for tp in [1, 2] {
            let options = Options { tp, ..Options::default() };
            let plan = Plan::new(&gguf, &Tables::default(), options).expect("a plan");
            let settings = Settings {
                ranks: None,
                threads: 1,
                memory: 1 << 30,
                force: false,
                allow_nonfinite: false,
                decoder: &Decoder::CPU,
                files: Vec::new(),
                class: String::new(),
                progress: &|_| {},
                stop: &AtomicBool::new(false),
            };
            let out = tempfile::tempdir().expect("a directory");
            convert::run(&plan, &gguf, out.path(), &settings).expect("a conversion");
            let copy = |from: &str, to: &str| {
                std::fs::copy(out.path().join(from), corpus(to).join(format!("{name}-{tp}"))).expect("a copy");
            };
            copy("preshard.json", "manifest");
            copy("model-rank-0-part-0.safetensors", "header");
        }
    }
    for folder in ["arch", "engine"] {
        for entry in std::fs::read_dir(root.join("../mappings").join(folder)).expect("the mapping tables") {
            let path = entry.expect("an entry").path();
            std::fs::copy(&path, corpus("mapping").join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
}
