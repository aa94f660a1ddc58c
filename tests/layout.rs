//! What a converted directory looks like: names, shapes and files as the engine wants them, a header
//! that any safetensors reader takes, data aligned, hashes that `b3sum` agrees with.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::policy::{Fit, Keep, Policy, Weights};
use std::collections::{BTreeMap, BTreeSet};
use support::models::{DEEPSEEK, GLM, Gqa, LLAMA, Mla, QWEN3, QWEN3MOE, q4_k};
use support::{Converted, converted, fixture, get, read};

fn bf16(tp: u64) -> Policy {
    Policy { tp, weights: Weights::Bf16, ..Policy::default() }
}

/// Every safetensors file of a conversion.
fn files(c: &Converted) -> Vec<String> {
    c.manifest.shards.iter().map(|s| s.file.clone()).collect()
}

/// The header of a safetensors file: its JSON as written, and where the data starts.
fn header(bytes: &[u8]) -> (String, usize) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (String::from_utf8(bytes[8..8 + length].to_vec()).unwrap(), 8 + length)
}

#[test]
fn headers_are_padded_tensors_aligned_and_nothing_lies_between() {
    let cases = [
        (LLAMA.build(&q4_k), Policy { tp: 2, ..Policy::default() }),
        (GLM.build(&q4_k), Policy { tp: 2, ..Policy::default() }),
        (GLM.build(&q4_k), bf16(1)),
        (QWEN3MOE.build(&q4_k), Policy { layout: "hf".into(), weights: Weights::F32, ..Policy::default() }),
    ];
    for (model, options) in cases {
        let c = converted(&model, options);
        for shard in &c.manifest.shards {
            let bytes = std::fs::read(c.out().join(&shard.file)).unwrap();
            let (json, start) = header(&bytes);
            assert_eq!(start % 4096, 0, "{}: data starts at {start}", shard.file);
            assert_eq!(start as u64, shard.data_start);
            assert!(json.starts_with('{') && json.trim_end_matches(' ').ends_with('}'), "padding is spaces");
            // In file order, which serde_json keeps here.
            let map: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&json).unwrap();
            assert_eq!(map["__metadata__"], serde_json::json!({ "format": "pt" }));
            let mut end = 0;
            for (name, entry) in map.iter().filter(|(n, _)| *n != "__metadata__") {
                let [begin, stop] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap());
                assert_eq!(begin, end, "{name} follows the tensor before it");
                end = stop;
                let power = 1u64 << (stop - begin).trailing_zeros().min(12);
                assert_eq!((start as u64 + begin) % power, 0, "{name}: {} bytes", stop - begin);
            }
            assert_eq!(start as u64 + end, bytes.len() as u64, "no byte after the last tensor");
            // The library agrees with the manifest.
            let tensors = read(&c.out().join(&shard.file));
            assert_eq!(tensors.len(), shard.tensors.len());
            for t in &shard.tensors {
                let stored = get(&tensors, &t.name);
                assert_eq!((&stored.dtype, &stored.shape), (&t.dtype, &t.shape), "{}", t.name);
                assert_eq!(
                    stored.bytes,
                    bytes[t.offset as usize..(t.offset + t.bytes) as usize],
                    "{}",
                    t.name
                );
            }
        }
    }
}

#[test]
fn b3sums_and_the_manifest_agree_with_the_files() {
    for options in [Policy { tp: 2, ..Policy::default() }, bf16(2), Policy { pp: 2, ..bf16(2) }] {
        let c = converted(&GLM.build(&q4_k), options);
        let sums = std::fs::read_to_string(c.out().join("B3SUMS")).unwrap();
        let mut listed = BTreeSet::new();
        for line in sums.lines() {
            let (hash, file) =
                line.split_once("  ").expect("hash, two spaces, name: what b3sum --check reads");
            let bytes = std::fs::read(c.out().join(file)).unwrap();
            assert_eq!(blake3::hash(&bytes).to_hex().as_str(), hash, "{file}");
            listed.insert(file.to_owned());
        }
        let written = files(&c).into_iter().chain(["preshard.json".to_owned()]);
        assert_eq!(listed, written.collect());
        for shard in &c.manifest.shards {
            assert!(sums.contains(&format!("{}  {}\n", shard.blake3, shard.file)));
        }
        let mut found: Vec<_> = std::fs::read_dir(c.out())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        found.retain(|f| !listed.contains(f));
        found.sort();
        assert_eq!(found, ["B3SUMS"], "nothing else is left in the directory");
    }
}

/// What a dump of vLLM's workers says of one file: tensors, and names that share their storage.
#[derive(Default)]
struct Dump {
    tensors: BTreeMap<String, (String, Vec<u64>)>,
    aliases: BTreeSet<String>,
}

/// The files of a dump, by class and name.
fn dumps(name: &str) -> BTreeMap<(String, String), Dump> {
    let text = std::fs::read_to_string(fixture(&format!("keys/{name}.txt"))).unwrap();
    let mut files: BTreeMap<(String, String), Dump> = BTreeMap::new();
    let mut current = Default::default();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let (file, class) = rest.split_once(' ').unwrap();
            current = (class.to_owned(), file.to_owned());
            continue;
        }
        let (tensor, rest) = line.trim().split_once(' ').unwrap();
        let dump = files.entry(current.clone()).or_default();
        if rest.contains("ALIAS-NOT-IN-FILE") {
            dump.aliases.insert(tensor.to_owned());
            continue;
        }
        let (dtype, rest) = rest.split_once(' ').unwrap();
        let dtype = match dtype {
            "bfloat16" => "BF16",
            "float32" => "F32",
            other => panic!("{other}"),
        };
        let shape = rest.split(['[', ']']).nth(1).unwrap_or_default();
        let shape = shape.split(", ").filter(|n| !n.is_empty()).map(|n| n.parse().unwrap_or(0)).collect();
        dump.tensors.insert(tensor.to_owned(), (dtype.to_owned(), shape));
    }
    assert!(!files.is_empty());
    files
}

/// The structure of the models that the dumps were made with.
const DUMPED_LLAMA: Gqa =
    Gqa { hidden: 512, inter: 1024, heads: 8, kv_heads: 4, head: 64, vocab: 1024, ..LLAMA };
const DUMPED_MLA: Mla = Mla {
    hidden: 512,
    inter: 1024,
    moe_inter: 512,
    nope: 128,
    rope: 64,
    v: 128,
    kv_lora: 512,
    vocab: 1024,
    index_heads: 4,
    index_dim: 128,
    ..GLM
};

/// Compares the files whose name has `prefix` with those of the dump's class, names, dtypes and shapes.
#[track_caller]
fn as_dumped(c: &Converted, dump: &str, class: &str, rename: (&str, &str)) {
    let mut compared = 0;
    for ((of, file), expected) in dumps(dump) {
        if !of.ends_with(class) {
            continue;
        }
        let ours = file.replace(rename.0, rename.1);
        let found: BTreeMap<_, _> =
            c.file(&ours).into_iter().map(|(name, t)| (name, (t.dtype, t.shape))).collect();
        assert_eq!(found, expected.tensors, "{dump} {ours}");
        let shard = c.manifest.shards.iter().find(|s| s.file == ours).unwrap();
        let aliases: BTreeSet<_> = shard.tensors.iter().flat_map(|t| t.aliases.clone()).collect();
        assert_eq!(aliases, expected.aliases, "{dump} {ours}: other names of the same storage");
        compared += 1;
    }
    assert!(compared > 0, "{dump} has no file of {class}");
}

const SAME: (&str, &str) = ("", "");

#[test]
fn names_and_shapes_are_those_of_vllm_llama() {
    let model = DUMPED_LLAMA.build(&|_| BF16);
    as_dumped(&converted(&model, bf16(1)), "llama_tp1", "LlamaForCausalLM", SAME);
    as_dumped(&converted(&model, bf16(2)), "llama_tp2", "LlamaForCausalLM", SAME);
    as_dumped(&converted(&model, Policy { pp: 2, ..bf16(1) }), "llama_pp2", "LlamaForCausalLM", SAME);
    let one = Gqa { kv_heads: 1, ..DUMPED_LLAMA }.build(&|_| BF16);
    as_dumped(&converted(&one, bf16(2)), "llama_kv1_tp2", "LlamaForCausalLM", SAME);
}

#[test]
fn names_and_shapes_are_those_of_vllm_qwen() {
    let dims = Gqa { kv_heads: 2, ..DUMPED_LLAMA };
    let qwen3 = Gqa { arch: QWEN3.arch, head_norms: true, ..dims.clone() }.build(&|_| BF16);
    as_dumped(&converted(&qwen3, bf16(2)), "qwen3_tp2", "Qwen3ForCausalLM", SAME);
    let moe = Gqa { arch: QWEN3MOE.arch, head_norms: true, experts: 4, inter: 512, ..dims }.build(&|_| BF16);
    as_dumped(&converted(&moe, bf16(2)), "qwen3moe_tp2", "Qwen3MoeForCausalLM", SAME);
    let ep = Policy { ep: true, ..bf16(2) };
    as_dumped(&converted(&moe, ep), "qwen3moe_tp2ep", "Qwen3MoeForCausalLM", SAME);
}

const DRAFT: (&str, &str) = ("model-rank", "mtp-rank");

#[test]
fn names_and_shapes_are_those_of_vllm_deepseek_v3_and_its_draft() {
    let dims = Mla { arch: DEEPSEEK.arch, mtp: 0, index_heads: 0, ..DUMPED_MLA };
    let model = dims.build(&|_| BF16);
    as_dumped(&converted(&model, bf16(2)), "dsv3_tp2", "DeepseekV3ForCausalLM", SAME);
    as_dumped(
        &converted(&model, Policy { ep: true, ..bf16(2) }),
        "dsv3_tp2ep",
        "DeepseekV3ForCausalLM",
        SAME,
    );
    let c = converted(&Mla { mtp: 1, ..dims }.build(&|_| BF16), bf16(2));
    as_dumped(&c, "dsv3_mtp_tp2", "DeepSeekMTP", DRAFT);
    as_dumped(&c, "dsv3_mtp_tp2", "DeepseekV3ForCausalLM", SAME);
}

#[test]
fn names_and_shapes_are_those_of_vllm_glm_5_and_its_draft() {
    let model = DUMPED_MLA.build(&|_| BF16);
    as_dumped(&converted(&model, bf16(1)), "glm_nvidia_tp1", "DeepseekV32ForCausalLM", SAME);
    let c = converted(&model, bf16(2));
    as_dumped(&c, "glm_nvidia_tp2", "DeepseekV32ForCausalLM", SAME);
    as_dumped(&c, "glm_nvidia_mtp_tp2", "DeepseekV32MTP", DRAFT);
    let dropped = converted(&model, Policy { indexer: Keep::Drop, ..bf16(2) });
    as_dumped(&dropped, "glm_noidx_tp2", "GlmMoeDsaForCausalLM", SAME);
}

#[test]
fn packed_names_are_those_of_the_gguf_plugin() {
    let model = DUMPED_MLA.build(&|name| match name {
        n if n.contains("ffn_gate_inp") || n.contains("indexer.proj") => F32,
        _ => Q8_0,
    });
    let c = converted(&model, Policy { tp: 2, ..Policy::default() });
    for ((_, file), expected) in dumps("glm_nvidia_gguf_tp2") {
        // The plugin keeps kv_b_proj packed; it is made of a transpose, so that it has to be decoded.
        // It lists the names of one storage each, which the file has once.
        let aliases: BTreeSet<_> =
            c.manifest.shards.iter().flat_map(|s| &s.tensors).flat_map(|t| t.aliases.clone()).collect();
        let expected: BTreeSet<_> = expected
            .tensors
            .into_keys()
            .filter(|n| !n.ends_with("kv_b_proj.qweight_type"))
            .map(|n| n.replace("kv_b_proj.qweight", "kv_b_proj.weight"))
            .filter(|n| !aliases.contains(n))
            .collect();
        assert_eq!(c.file(&file).into_keys().collect::<BTreeSet<_>>(), expected, "{file}");
    }
}

/// Stages share out the layers; together they hold exactly what one stage would.
#[test]
fn pipeline_stages_hold_the_model_once() {
    let model = GLM.build(&q4_k);
    for tp in [1, 2] {
        let whole = converted(&model, bf16(tp));
        let cut = converted(&model, Policy { pp: 2, ..bf16(tp) });
        assert_eq!(cut.manifest.policy.stages, [0, 2, 3]);
        for t in 0..tp {
            let mut joined = cut.file(&format!("model-pp-0-tp-{t}-part-0.safetensors"));
            assert!(
                joined.contains_key("model.embed_tokens.weight") && !joined.contains_key("lm_head.weight")
            );
            let last = cut.file(&format!("model-pp-1-tp-{t}-part-0.safetensors"));
            assert!(last.contains_key("model.norm.weight") && last.contains_key("lm_head.weight"));
            let (a, b) = (joined.len(), last.len());
            joined.extend(last);
            assert_eq!(joined.len(), a + b, "no tensor on two stages");
            assert_eq!(joined, whole.rank(t));
            let draft = format!("mtp-rank-{t}-part-0.safetensors");
            assert_eq!(cut.file(&draft), whole.file(&draft));
        }
    }
}

/// The MTP draft is cut like the trunk: the same layer as trunk and as draft gives the same bytes.
#[test]
fn the_draft_is_cut_as_a_layer_of_the_trunk() {
    for ep in [false, true] {
        let draft = converted(&GLM.build(&q4_k), Policy { tp: 2, ep, ..Policy::default() });
        // The same tensors with the MTP block counted as a layer, without what only a draft has.
        let mut flat = Mla { layers: 4, mtp: 0, ..GLM }.build(&q4_k);
        flat = flat.set("glm-dsa.nextn_predict_layers", 0u32);
        let trunk = converted(&flat, Policy { tp: 2, ep, ..Policy::default() });
        for rank in 0..2 {
            let (trunk, draft) =
                (trunk.rank(rank), draft.file(&format!("mtp-rank-{rank}-part-0.safetensors")));
            let mut compared = 0;
            for (name, tensor) in &draft {
                let expected = match name.strip_prefix("model.layers.3.mtp_block.") {
                    Some(rest) => get(&trunk, &format!("model.layers.3.{rest}")),
                    None if name.starts_with("model.layers.3.shared_head.head.") => {
                        get(&trunk, &name.replace("model.layers.3.shared_head.head", "lm_head"))
                    }
                    None if name.starts_with("model.embed_tokens.") => get(&trunk, name),
                    None => continue,
                };
                assert_eq!(tensor, expected, "rank {rank}: {name}");
                compared += 1;
            }
            assert_eq!(compared, draft.len() - 4, "all but eh_proj, enorm, hnorm, shared_head.norm");
            assert_eq!(get(&draft, "model.layers.3.eh_proj.weight").shape, [256, 512]);
        }
    }
}

/// The manifest says of every tensor what it is made of.
#[test]
fn the_manifest_says_what_every_tensor_is() {
    let types = |name: &str| match name {
        n if n.contains("attn_q.") => Q4_K,
        n if n.contains("attn_k.") => Q6_K,
        n if n.contains("attn_v.") => Q8_0,
        _ => q4_k(name),
    };
    let c = converted(&LLAMA.build(&types), Policy { tp: 2, ..Policy::default() });
    let qkv = c.entry("model.layers.1.self_attn.qkv_proj.qweight");
    // Q6_K is 210 bytes for 256 elements, Q8_0 34 for 32: 272 for a row of 256.
    assert_eq!((qkv.shape.as_slice(), qkv.logical.as_deref()), (&[384, 272][..], Some(&[384, 256][..])));
    let members: Vec<_> =
        qkv.members.iter().map(|m| (m.from[0].as_str(), m.types[0].as_str(), m.rows, m.row_bytes)).collect();
    assert_eq!(
        members,
        [
            ("blk.1.attn_q.weight", "q4_K", [0, 256], Some(144)),
            ("blk.1.attn_k.weight", "q6_K", [256, 320], Some(210)),
            ("blk.1.attn_v.weight", "q8_0", [320, 384], Some(272)),
        ]
    );
    let shards: Vec<_> = c.manifest.shards.iter().map(|s| (s.tp, s.pp, s.vocab_rows)).collect();
    // 300 rows, padded to 320.
    assert_eq!(shards, [(0, 0, Some([0, 160])), (1, 0, Some([160, 300]))]);
    assert_eq!((c.manifest.model.vocab, c.manifest.model.vocab_padded), (300, 320));
    let c = converted(&QWEN3MOE.build(&q4_k), Policy { tp: 2, ep: true, ..Policy::default() });
    let experts: Vec<_> = c.manifest.shards.iter().map(|s| s.experts.clone()).collect();
    assert_eq!(experts, [[0, 1], [2, 3]]);
    // Decoded by policy: the manifest says why.
    let options = Policy { tp: 4, misaligned: Fit::Dequantise, ..Policy::default() };
    let c = converted(&LLAMA.build(&q4_k), options);
    let down = c.entry("model.layers.0.mlp.down_proj.weight");
    assert!(down.decoded.as_deref().unwrap().contains("inside a block"), "{down:?}");
    assert_eq!((down.dtype.as_str(), down.shape.as_slice()), ("BF16", &[256, 128][..]));
}

#[test]
fn experts_stay_packed_together_or_not_at_all() {
    // A cut for two ranks falls inside the blocks of this model's down projections, not of gate and up.
    let source = fixture("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf");
    let dir = tempfile::tempdir().unwrap();
    for (misaligned, tp, suffix) in [(Fit::Dequantise, 2, "weight"), (Fit::Refuse, 1, "qweight")] {
        let out = dir.path().join(tp.to_string());
        support::convert(&source, Policy { tp, misaligned, ..Policy::default() }, &out).unwrap();
        let manifest = preshard::manifest::Manifest::read(&out).unwrap();
        let names: Vec<_> =
            manifest.shards.iter().flat_map(|s| &s.tensors).map(|t| t.name.as_str()).collect();
        let experts: Vec<_> = names.iter().filter(|n| n.contains("routed_experts.w")).collect();
        let kinds = [format!("w13_{suffix}"), format!("w2_{suffix}")];
        assert!(!experts.is_empty());
        for name in experts.iter().filter(|n| !n.ends_with("_type")) {
            assert!(kinds.iter().any(|k| name.ends_with(&format!(".{k}"))), "{name} at TP {tp}");
        }
    }
}
