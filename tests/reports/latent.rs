//! MLA, DSA and MTP: latent attention, the indexer, the draft.

use super::*;
use crate::common::*;
use crate::support::models::{DEEPSEEK, GLM, Mla, add, q4_k};
use crate::support::{converted, get, preshard, refused, stderr};
use preshard::policy::{Keep, Mtp};

/// As q4_k, with rows that need no multiple of 256 where heads are small.
fn small_heads(name: &str) -> u32 {
    if name.contains("attn_output") { Q8_0 } else { q4_k(name) }
}

/// kv_b in Hugging Face order: per head, k_b transposed, then v_b.
fn kv_b(dims: &Mla, k: &[u8], v: &[u8]) -> Vec<u8> {
    let [nope, lora, vd, heads] = [dims.nope, dims.kv_lora, dims.v, dims.heads].map(|n| n as usize);
    let mut out = Vec::new();
    for h in 0..heads {
        for n in 0..nope {
            for l in 0..lora {
                // k_b: [head][lora][nope].
                let at = ((h * lora + l) * nope + n) * 2;
                out.extend_from_slice(&k[at..at + 2]);
            }
        }
        out.extend_from_slice(&v[h * vd * lora * 2..(h + 1) * vd * lora * 2]);
    }
    out
}

#[test]
fn mla_01_kv_b_is_rebuilt_from_halves_of_two_types() {
    let small = Mla { nope: 64, v: 32, layers: 2, ..DEEPSEEK };
    // GLM-5's head sizes.
    let large = Mla { nope: 192, v: 256, layers: 2, ..GLM };
    for (dims, name) in [
        (small, "model.layers.1.self_attn.kv_b_proj.weight"),
        (large, "model.layers.1.self_attn.kv_b_proj.weight"),
    ] {
        let k = decoded(Q8_0, &source("blk.1.attn_k_b.weight", Q8_0, &[dims.nope, 256, 4]));
        let v = decoded(Q4_K, &source("blk.1.attn_v_b.weight", Q4_K, &[256, dims.v, 4]));
        let expected = kv_b(&dims, &k, &v);
        for n in [1, 2, 4] {
            let options = Policy { misaligned: preshard::policy::Fit::Dequantise, ..tp(n) };
            let c = converted(&dims.build(&small_heads), options);
            let part = expected.len() / n as usize;
            for rank in 0..n {
                let stored = c.rank(rank);
                let t = get(&stored, name);
                assert_eq!(
                    (t.dtype.as_str(), t.shape.as_slice()),
                    ("BF16", &[4 * (dims.nope + dims.v) / n, 256][..])
                );
                assert!(t.bytes == expected[rank as usize * part..][..part], "rank {rank} of {n}");
            }
        }
        let c = converted(&dims.build(&small_heads), tp(1));
        assert_eq!(c.entry(name).members[0].types, ["q8_0", "q4_K"]);
        assert!(c.entry(name).decoded.is_some());
    }
}

/// Newer files look like one key head (MQA); the older ones hold kv_b whole. Same numbers, same shards.
#[test]
fn mla_02_metadata_that_looks_like_mqa() {
    let dims = Mla { nope: 64, rope: 64, v: 32, layers: 1, ..DEEPSEEK };
    let types = |name: &str| {
        if name.contains("attn_k_b") || name.contains("attn_v_b") { BF16 } else { small_heads(name) }
    };
    let new = dims.build(&types);
    let k = source("blk.0.attn_k_b.weight", BF16, &[64, 256, 4]);
    let v = source("blk.0.attn_v_b.weight", BF16, &[256, 32, 4]);
    let whole = kv_b(&dims, &k, &v);
    let old = Mla { legacy: true, ..dims.clone() };
    let old = old.build(&types).without("blk.0.attn_kv_b.weight").tensor(
        "blk.0.attn_kv_b.weight",
        BF16,
        &[256, 4 * 96],
        whole,
    );
    // Without the keys of the true sizes, the shapes tell.
    let bare =
        new.clone().unset("deepseek2.attention.key_length_mla").unset("deepseek2.attention.value_length_mla");
    for n in [1, 2] {
        let options = || Policy { misaligned: preshard::policy::Fit::Dequantise, ..tp(n) };
        let expected = converted(&new, options());
        for (what, model) in [("whole kv_b", &old), ("no *_mla keys", &bare)] {
            let c = converted(model, options());
            for rank in 0..n {
                assert!(c.rank(rank) == expected.rank(rank), "{what}, rank {rank} of {n}");
            }
        }
    }
    // ik_llama.cpp's files: the heads' matrices one under the other.
    let mut flat = new.clone();
    for (name, ne, data) in
        [("blk.0.attn_k_b.weight", [64, 4 * 256], &k), ("blk.0.attn_v_b.weight", [256, 4 * 32], &v)]
    {
        flat = flat.without(name).tensor(name, BF16, &ne, data.clone());
    }
    for n in [1, 2] {
        let options = || Policy { misaligned: preshard::policy::Fit::Dequantise, ..tp(n) };
        let (expected, c) = (converted(&new, options()), converted(&flat, options()));
        for rank in 0..n {
            assert!(c.rank(rank) == expected.rank(rank), "2-D halves, rank {rank} of {n}");
        }
    }
    // The command compares config.json with the shapes besides.
    let dir = tempfile::tempdir().unwrap();
    let source = flat.write(dir.path().join("flat.gguf"));
    let plan = preshard().arg("plan").arg(source).args(["--misaligned", "dequantise"]).output().unwrap();
    assert!(!stderr(&plan).contains("shape"), "{}", stderr(&plan));
    let uneven =
        add(flat.without("blk.0.attn_v_b.weight"), "blk.0.attn_v_b.weight", &[256, 4 * 32 + 1], Q4_K);
    refused(&uneven, &[], &["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", "one under the other"]);
    // Halves that do not fit each other.
    let model = add(new.without("blk.0.attn_v_b.weight"), "blk.0.attn_v_b.weight", &[256, 32, 3], Q4_K);
    refused(&model, &[], &["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", "expected [nope, kv_lora, 4]"]);
}

/// ik_llama.cpp's files may hold kv_b whole beside its halves.
#[test]
fn mla_02_kv_b_beside_its_halves_is_taken_and_the_halves_are_compared_with_it() {
    let deepseek = Mla { nope: 64, rope: 64, v: 32, layers: 2, ..DEEPSEEK };
    let glm = Mla { nope: 64, v: 32, layers: 2, ..GLM };
    for (dims, k_type, v_type) in [(&deepseek, BF16, BF16), (&glm, Q8_0, Q4_K)] {
        let types = |name: &str| match name {
            _ if name.contains("attn_k_b") => k_type,
            _ if name.contains("attn_v_b") => v_type,
            _ => small_heads(name),
        };
        let mut both = dims.build(&types);
        let mut whole = Vec::new();
        let blocks: Vec<String> = dims
            .shapes()
            .iter()
            .filter_map(|(name, _)| Some(name.strip_suffix(".attn_k_b.weight")?.to_owned()))
            .collect();
        for block in &blocks {
            let half = |name: &str, ty: u32, ne: &[u64]| {
                let bytes = source(&format!("{block}.{name}.weight"), ty, ne);
                if ty == BF16 { bytes } else { decoded(ty, &bytes) }
            };
            let k = half("attn_k_b", k_type, &[dims.nope, 256, 4]);
            let v = half("attn_v_b", v_type, &[256, dims.v, 4]);
            whole.push(kv_b(dims, &k, &v));
            let name = format!("{block}.attn_kv_b.weight");
            both = both.tensor(name, BF16, &[256, 4 * (dims.nope + dims.v)], whole[whole.len() - 1].clone());
        }
        let c = converted(&both, Policy { misaligned: preshard::policy::Fit::Dequantise, ..tp(1) });
        let stored = c.rank(0);
        for (layer, whole) in whole.iter().enumerate().take(2) {
            let name = format!("model.layers.{layer}.self_attn.kv_b_proj.weight");
            assert!(get(&stored, &name).bytes == *whole, "layer {layer}");
            assert_eq!(c.entry(&name).members[0].from, [format!("blk.{layer}.attn_kv_b.weight")]);
        }
        for half in ["attn_k_b", "attn_v_b"] {
            let why = c.dropped(&format!("blk.1.{half}.weight"));
            assert!(why.is_some_and(|why| why.contains("attn_kv_b")), "{why:?}");
        }
        let good = tempfile::tempdir().unwrap();
        let file = both.write(good.path().join("model.gguf"));
        let plan = preshard().arg("plan").arg(&file).args(["--misaligned", "dequantise"]).output().unwrap();
        assert!(!stderr(&plan).contains("differs"), "{}", stderr(&plan));

        // The halves of another layer.
        let of_another = source("blk.0.attn_v_b.weight", v_type, &[256, dims.v, 4]);
        let other = both.clone().without("blk.1.attn_v_b.weight").tensor(
            "blk.1.attn_v_b.weight",
            v_type,
            &[256, dims.v, 4],
            of_another,
        );
        let how = ["--misaligned", "dequantise"];
        refused(&other, &how, &["blk.1.attn_v_b.weight", "differs from blk.1.attn_kv_b.weight", "explain"]);
        let narrow =
            add(both.clone().without("blk.1.attn_v_b.weight"), "blk.1.attn_v_b.weight", &[256, 16, 4], Q8_0);
        refused(&narrow, &how, &["blk.1.attn_k_b.weight", "makes", "attn_kv_b.weight one of"]);
        // Half a pair is compared with nothing, and dropped.
        let half = converted(&both.without("blk.1.attn_v_b.weight"), tp(1));
        assert!(half.dropped("blk.1.attn_k_b.weight").is_some());
    }
}

#[test]
fn mla_04_q_a_and_kv_a_are_joined_and_whole_on_every_rank() {
    let types = |name: &str| if name.contains("attn_kv_a_mqa") { Q8_0 } else { q4_k(name) };
    let c = converted(&GLM.build(&types), Policy { pp: 2, ..tp(2) });
    let name = "model.layers.1.self_attn.fused_qkv_a_proj.qweight";
    let q = source("blk.1.attn_q_a.weight", Q4_K, &[256, 256]);
    let kv = source("blk.1.attn_kv_a_mqa.weight", Q8_0, &[256, 288]);
    let mut expected = Vec::new();
    for row in rows(&q, 256) {
        expected.extend_from_slice(row);
        expected.resize(expected.len() + 272 - 144, 0);
    }
    expected.extend_from_slice(&kv);
    for t in 0..2 {
        let first = c.file(&format!("model-pp-0-tp-{t}-part-0.safetensors"));
        assert!(get(&first, name).bytes == expected, "rank {t}");
        assert_eq!(get(&first, &format!("{name}_type")).bytes, [Q4_K as u8, Q8_0 as u8]);
        let last = c.file(&format!("model-pp-1-tp-{t}-part-0.safetensors"));
        assert!(!last.contains_key(name) && last.contains_key(&name.replace("layers.1", "layers.2")));
    }
    // Queries without a low rank: nothing is joined.
    let lite = Mla { q_lora: 0, ..DEEPSEEK };
    let stored = converted(&lite.build(&types), tp(2)).rank(1);
    let q = source("blk.1.attn_q.weight", Q4_K, &[256, 4 * 96]);
    assert!(get(&stored, "model.layers.1.self_attn.mla_attn.q_proj.qweight").bytes == q[q.len() / 2..]);
    assert!(get(&stored, "model.layers.1.self_attn.kv_a_proj_with_mqa.qweight").bytes == kv);
    assert!(!stored.keys().any(|n| n.contains("fused_qkv_a_proj")));
}

#[test]
fn dsa_01_the_indexer_is_whole_or_gone() {
    let model = GLM.build(&q4_k);
    let c = converted(&model, tp(2));
    let (a, b) = (c.rank(0), c.rank(1));
    let of: Vec<_> = a.keys().filter(|n| n.contains("indexer")).collect();
    // wq_b and its type, wk_weights_proj, k_norm weight and bias.
    assert_eq!(of.len(), 3 * 5, "{of:?}");
    assert!(of.iter().all(|n| a[*n] == b[*n]), "replicated");
    let wk = decoded(Q4_K, &source("blk.2.indexer.attn_k.weight", Q4_K, &[256, 64]));
    let proj = decoded(F32, &source("blk.2.indexer.proj.weight", F32, &[256, 2]));
    assert!(get(&a, "model.layers.2.self_attn.indexer.wk_weights_proj.weight").bytes == [wk, proj].concat());

    let c = converted(&model, Policy { indexer: Keep::Drop, ..tp(2) });
    assert!(c.manifest.shards.iter().flat_map(|s| &s.tensors).all(|t| !t.name.contains("indexer")));
    let dropped = c.manifest.dropped.iter().filter(|d| d.tensor.contains(".indexer.")).count();
    assert_eq!(dropped, 4 * 5, "the draft's too");
    assert!(c.dropped("blk.1.indexer.proj.weight").unwrap().contains("--indexer drop"));

    let without = Mla { index_heads: 0, ..GLM }.build(&q4_k);
    refused(&without, &[], &["indexer", "--indexer drop"]);
    converted(&without, Policy { indexer: Keep::Drop, ..tp(2) });

    // Half a layer is refused under either policy.
    for missing in ["attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight"] {
        let name = format!("blk.2.indexer.{missing}");
        for policy in ["keep", "drop"] {
            refused(&model.clone().without(&name), &["--indexer", policy], &[&format!("{name}: missing")]);
        }
    }
}

/// GLM-5.2: shared layers use the indexer of the layer before; copies in the file are no part of them.
#[test]
fn dsa_01_shared_layers_hold_none() {
    let model = GLM.build(&q4_k).kv("glm-dsa.attention.indexer.types", vec![true, false, true]);
    let c = converted(&model, tp(2));
    let stored = c.rank(0);
    let layers: Vec<_> = (0..3)
        .filter(|l| stored.keys().any(|n| n.starts_with(&format!("model.layers.{l}.self_attn.indexer."))))
        .collect();
    assert_eq!(layers, [0, 2]);
    assert!(c.dropped("blk.1.indexer.proj.weight").unwrap().contains("shared layer"));
    // The same without the copies.
    let lean = without_indexer(model.clone(), 1);
    assert!(converted(&lean, tp(2)).rank(0) == stored);
    // A layer that has its own by the metadata and nothing of it in the file.
    refused(
        &without_indexer(lean, 2),
        &[],
        &["blk.2.indexer.", "layer 2", "by the metadata", "--indexer drop"],
    );
}

/// The model without what the indexer of a layer is made of.
fn without_indexer(mut model: Builder, layer: u64) -> Builder {
    for (name, _) in GLM.shapes().iter().filter(|(n, _)| n.starts_with(&format!("blk.{layer}.indexer."))) {
        model = model.without(name);
    }
    model
}

/// Without `indexer.types` every layer has an indexer, as llama.cpp has it, but for GLM-5.2's context.
#[test]
fn dsa_01_a_layer_without_its_indexer_is_refused() {
    let model = GLM.build(&q4_k);
    for layer in [1, 3] {
        let lacking = without_indexer(model.clone(), layer);
        let text = refused(
            &lacking,
            &[],
            &[&format!("blk.{layer}.indexer.attn_q_b.weight: missing"), "--indexer drop"],
        );
        assert_eq!(text.lines().count(), 1, "{text}");
        // What it advises works.
        converted(&lacking, Policy { indexer: Keep::Drop, ..tp(2) });
    }
    // The draft's, when the draft is dropped.
    converted(&without_indexer(model.clone(), 3), Policy { mtp: Mtp::Drop, ..tp(2) });
    let long = model.set("glm-dsa.context_length", 1u32 << 20);
    refused(&without_indexer(long, 1), &[], &["blk.1.indexer.attn_q_b.weight: missing"]);
}

#[test]
fn mtp_01_the_block_is_no_layer_of_the_trunk() {
    let model = GLM.build(&q4_k);
    let keep = converted(&model, tp(2));
    assert_eq!(keep.manifest.model.layers, 3);
    let parts: Vec<_> = keep.manifest.shards.iter().map(|s| (s.part.as_str(), s.tp)).collect();
    assert_eq!(parts, [("model", 0), ("model", 1), ("mtp", 0), ("mtp", 1)]);
    let draft = keep.file("mtp-rank-0-part-0.safetensors");
    // It borrows embedding and head.
    let trunk = keep.rank(0);
    assert_eq!(
        get(&draft, "model.layers.3.shared_head.head.qweight").bytes,
        get(&trunk, "lm_head.qweight").bytes
    );
    assert_eq!(
        get(&draft, "model.embed_tokens.qweight").bytes,
        get(&trunk, "model.embed_tokens.qweight").bytes
    );
    assert!(!trunk.keys().any(|n| n.contains("layers.3.")));
    // Its own, where it has them.
    let own = add(
        add(model.clone(), "blk.3.nextn.embed_tokens.weight", &[256, 300], Q4_K),
        "blk.3.nextn.shared_head_head.weight",
        &[256, 300],
        Q6_K,
    );
    let draft = converted(&own, tp(2)).file("mtp-rank-1-part-0.safetensors");
    let head = source("blk.3.nextn.shared_head_head.weight", Q6_K, &[256, 300]);
    let stored = get(&draft, "model.layers.3.shared_head.head.qweight");
    assert!(
        stored.bytes[..140 * 210] == head[160 * 210..] && stored.bytes[140 * 210..].iter().all(|b| *b == 0)
    );
    let embedding = source("blk.3.nextn.embed_tokens.weight", Q4_K, &[256, 300]);
    assert!(get(&draft, "model.embed_tokens.qweight").bytes[..140 * 144] == embedding[160 * 144..]);

    let drop = converted(&model, Policy { mtp: Mtp::Drop, ..tp(2) });
    assert!(drop.manifest.shards.iter().all(|s| s.part == "model"));
    for rank in 0..2 {
        assert!(drop.rank(rank) == keep.rank(rank), "the trunk is the same");
    }
    let block = GLM.shapes().iter().filter(|(n, _)| n.starts_with("blk.3.")).count();
    assert_eq!(drop.manifest.dropped.len(), block);
    assert!(drop.dropped("blk.3.attn_norm.weight").unwrap().contains("--mtp drop"));
    // In pipeline plans the trunk alone is shared out.
    let stages = converted(&model, Policy { pp: 3, ..tp(1) });
    assert_eq!(stages.manifest.policy.stages, [0, 1, 2, 3]);
    let last: Vec<_> = stages.manifest.shards.iter().filter(|s| s.part == "mtp").map(|s| s.pp).collect();
    assert_eq!(last, [2]);
}

#[test]
fn mtp_02_metadata_and_tensors_disagree() {
    let whole = GLM.build(&q4_k);
    let block: Vec<String> =
        GLM.shapes().into_iter().map(|(n, _)| n).filter(|n| n.starts_with("blk.3.")).collect();
    let gone = |names: &[String]| names.iter().fold(whole.clone(), |m, n| m.without(n));
    // None of it.
    let none = gone(&block);
    refused(&none, &[], &["nextn", "--mtp drop"]);
    let dir = tempfile::tempdir().unwrap();
    let source = none.write(dir.path().join("model.gguf"));
    let run = preshard()
        .args(["convert", "--mtp", "drop", "-o"])
        .arg(dir.path().join("out"))
        .arg(source)
        .output()
        .unwrap();
    assert!(run.status.success() && stderr(&run).contains("no tensors of it"), "{}", stderr(&run));
    // Half of it.
    let (lost, _) = block.split_at(block.len() / 2);
    for policy in ["keep", "drop"] {
        let message = refused(&gone(lost), &["--mtp", policy], &[]);
        for name in lost {
            assert!(message.contains(&format!("{name}: missing")), "{name}: {message}");
        }
    }
    // Tensors without a word in the metadata.
    let silent = whole.clone().unset("glm-dsa.nextn_predict_layers");
    refused(&silent, &[], &["blk.3.nextn.eh_proj.weight"]);
    // Two promised, one there.
    let two = whole.set("glm-dsa.nextn_predict_layers", 2u32);
    refused(&two, &[], &["blk.2.nextn.eh_proj.weight: missing"]);
}
