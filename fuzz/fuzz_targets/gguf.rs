//! Any bytes as a GGUF: opened, planned, and every leaf evaluated.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::eval::{Decoder, Evaluator};
use preshard::gguf::Gguf;
use preshard::hash::leaves;
use preshard::hf;
use preshard::mapping::Tables;
use preshard::plan::{Fit, Keep, Layout, Options, Plan, Weights};
use std::sync::LazyLock;

static FILE: LazyLock<tempfile::NamedTempFile> =
    LazyLock::new(|| tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file"));

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(FILE.path(), bytes).expect("a written file");
    let Ok(gguf) = Gguf::open(&[FILE.path().to_owned()]) else { return };
    for i in 0..4 {
        let options = Options {
            tp: if i % 2 == 0 { 1 } else { 2 },
            ep: i == 3,
            weights: [Weights::Keep, Weights::Keep, Weights::F16, Weights::Bf16][i],
            misaligned: Fit::Dequantise,
            mixed: if i == 0 { Fit::Refuse } else { Fit::Dequantise },
            indexer: if i == 3 { Keep::Drop } else { Keep::Keep },
            mtp: if i == 1 { Keep::Drop } else { Keep::Keep },
            layout: if i == 2 { Layout::Hf } else { Layout::Vllm },
            ..Options::default()
        };
        let plan = match Plan::new(&gguf, &Tables::default(), options) {
            Ok(plan) => plan,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        let request = plan.directory(None);
        let _ = hf::model(&gguf, &request).and_then(|_| hf::files(&gguf, &request));
        let evaluator =
            Evaluator { plan: &plan, gguf: &gguf, decoder: &Decoder::CPU, allow_nonfinite: i % 2 == 0 };
        let mut buffer = Vec::new();
        for shard in plan.shards.iter().filter(|s| s.bytes < 4 << 20) {
            for leaf in 0..leaves(shard.bytes) {
                let _ = evaluator.leaf(shard, leaf, &mut buffer);
            }
        }
    }
});
