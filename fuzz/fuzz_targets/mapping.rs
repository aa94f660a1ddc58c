//! Any text as a mapping table of an architecture and of an engine, used for a small model.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../../tests/support/models.rs"]
mod models;

use libfuzzer_sys::fuzz_target;
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::{Options, Plan};
use std::sync::LazyLock;

struct World {
    dir: tempfile::TempDir,
    /// One model of each architecture with a table of interest.
    models: Vec<(&'static str, Gguf)>,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("a directory");
    for folder in ["arch", "engine"] {
        std::fs::create_dir(dir.path().join(folder)).expect("a directory");
    }
    let gqa = |of: models::Gqa| models::Gqa {
        hidden: 32,
        inter: 64,
        heads: 2,
        kv_heads: 2,
        head: 32,
        vocab: 40,
        experts: of.experts.min(2),
        ..of
    };
    let made = [("llama", gqa(models::LLAMA)), ("qwen3moe", gqa(models::QWEN3MOE))];
    let models = made.map(|(name, dims)| {
        let path = dims.build(&|_| common::Q8_0).write(dir.path().join(format!("{name}.gguf")));
        (name, Gguf::open(&[path]).expect("a sound model"))
    });
    World { dir, models: models.into() }
});

fuzz_target!(|text: &[u8]| {
    let tables = Tables { dir: Some(WORLD.dir.path()) };
    // As the table of either kind; the other stays the built-in one.
    for (folder, file) in [("arch", None), ("engine", Some("vllm-dense"))] {
        for (name, gguf) in &WORLD.models {
            let path = WORLD.dir.path().join(folder).join(format!("{}.toml", file.unwrap_or(name)));
            std::fs::write(&path, text).expect("a written table");
            for tp in [1, 2] {
                if let Err(error) = Plan::new(gguf, &tables, Options { tp, ..Options::default() }) {
                    assert!(!error.to_string().is_empty());
                }
            }
            std::fs::remove_file(path).expect("a removed table");
        }
    }
});
