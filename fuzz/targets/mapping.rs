//! Mapping tables of any text, used to plan a small model. The first byte says which table it is.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::{Fit, Policy};
use preshard_fuzz::{check_message, model, scratch};

fuzz_target!(|data: &[u8]| {
    let Some((which, text)) = data.split_first() else { return };
    let source = scratch().join("source.gguf");
    if !source.exists() {
        model::fixed().gguf.write(&source);
        for folder in ["arch", "engine"] {
            std::fs::create_dir_all(scratch().join("mappings").join(folder)).unwrap();
        }
    }
    let table = match which % 2 {
        0 => "arch/llama.toml",
        _ => "engine/vllm-dense.toml",
    };
    let path = scratch().join("mappings").join(table);
    std::fs::write(&path, text).unwrap();
    let dir = scratch().join("mappings");
    let gguf = Gguf::open(&[source]).expect("the model is sound");
    let fit = Fit::Dequantise;
    let options = Policy { tp: 2, misaligned: fit, mixed: fit, ..Policy::default() };
    if let Err(error) = Plan::new(&gguf, &Tables { dir: Some(&dir) }, options) {
        check_message(&error);
    }
    std::fs::remove_file(path).unwrap();
});
