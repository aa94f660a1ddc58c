//! TYP: quant types and values.

use super::*;
use crate::common::*;
use crate::support::models::{GLM, Gqa, LLAMA, QWEN3MOE, add, block, q4_k};
use crate::support::{How, converted, converted_how, get, preshard, refused, stderr};
use preshard::policy::Fit;

/// LLAMA with the blocks of one tensor replaced.
fn with(name: &str, ty: u32, ne: &[u64], data: Vec<u8>) -> Builder {
    LLAMA.build(&q4_k).without(name).tensor(name, ty, ne, data)
}

#[test]
fn typ_04_nan_and_infinite_scales() {
    let name = "blk.0.attn_q.weight";
    let ne = [256, 512];
    for (ty, bits) in [(Q4_K, 0x7e00u16), (Q8_0, 0x7c00)] {
        let (_, bytes, scales) = block(ty);
        let mut data = source(name, ty, &ne);
        data[48 * bytes + scales[0]..][..2].copy_from_slice(&bits.to_le_bytes());
        let model = with(name, ty, &ne, data.clone());
        // Kept packed: bit for bit, and counted.
        let c = converted(&model, tp(1));
        let qkv = "model.layers.0.self_attn.qkv_proj.qweight";
        let width = 256 / block(ty).0 as usize * bytes;
        let stored = columns(&get(&c.rank(0), qkv).bytes, 512 + 256, 0..width);
        assert_eq!(stored[..data.len()], unpermuted(&data, 8, 64));
        assert_eq!(c.entry(qkv).nonfinite, 1);
        // Decoded: refused, with the block as it lies in the file.
        refused(&model, &["--weights", "bf16"], &[name, "block 48", "--allow-nonfinite"]);
        let how = How { allow_nonfinite: true, ..How::default() };
        let c = converted_how(&model, bf16(1), how);
        assert!(c.entry("model.layers.0.self_attn.qkv_proj.weight").nonfinite > 0);
    }
    // MXFP4 has no kernel and is decoded: the scale 0xff is NaN.
    let mut data = source("blk.1.ffn_down.weight", MXFP4, &[512, 256]);
    data[5 * 17] = 0xff;
    refused(
        &with("blk.1.ffn_down.weight", MXFP4, &[512, 256], data),
        &[],
        &["blk.1.ffn_down.weight", "block 5"],
    );
    // A norm with one NaN: refused where it is cast, kept and counted where it stays f32.
    let mut norm = vec![1f32; 256];
    norm[77] = f32::from_bits(0x7fc1_2345);
    let model = LLAMA.build(&q4_k).without("output_norm.weight").f32s("output_norm.weight", &[256], &norm);
    refused(&model, &[], &["output_norm.weight", "77", "NaN"]);
    let c = converted(&model, Policy { weights: Weights::F32, ..tp(1) });
    assert_eq!(get(&c.rank(0), "model.norm.weight").bytes[77 * 4..][..4], 0x7fc1_2345u32.to_le_bytes());
    assert_eq!(c.entry("model.norm.weight").nonfinite, 1);
}

#[test]
fn typ_04_the_command_says_that_something_is_not_finite() {
    let mut data = source("blk.0.attn_q.weight", Q4_K, &[256, 512]);
    data[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let model = with("blk.0.attn_q.weight", Q4_K, &[256, 512], data).write(dir.path().join("m.gguf"));
    let run = preshard().arg("convert").arg(model).arg("-o").arg(dir.path().join("out")).output().unwrap();
    assert!(run.status.success());
    assert!(stderr(&run).contains("1 block") && stderr(&run).contains("NaN or infinite"), "{}", stderr(&run));
}

#[test]
fn typ_05_fused_members_of_several_types() {
    let types = |name: &str| match name {
        n if n.contains("attn_q.") => Q4_K,
        n if n.contains("attn_k.") => Q6_K,
        n if n.contains("attn_v.") => Q8_0,
        _ => q4_k(name),
    };
    let c = converted(&LLAMA.build(&types), tp(2));
    let q = unpermuted(&source("blk.1.attn_q.weight", Q4_K, &[256, 512]), 8, 64);
    let k = unpermuted(&source("blk.1.attn_k.weight", Q6_K, &[256, 128]), 2, 64);
    let v = source("blk.1.attn_v.weight", Q8_0, &[256, 128]);
    for rank in 0..2 {
        let tensors = c.rank(rank);
        let stored = get(&tensors, "model.layers.1.self_attn.qkv_proj.qweight");
        let types = get(&tensors, "model.layers.1.self_attn.qkv_proj.qweight_type");
        assert_eq!(types.bytes, [Q4_K as u8, Q6_K as u8, Q8_0 as u8]);
        let mut expected = Vec::new();
        for (member, count, width) in [(&q, 512, 144), (&k, 128, 210), (&v, 128, 272)] {
            let half = count / 2;
            for row in &rows(member, count)[rank as usize * half..(rank as usize + 1) * half] {
                assert_eq!(row.len(), width);
                expected.extend_from_slice(row);
                expected.resize(expected.len() + 272 - width, 0);
            }
        }
        assert!(stored.bytes == expected, "rank {rank}");
    }
}

#[test]
fn typ_05_packed_and_float_members_are_refused_or_decoded_together() {
    let types = |name: &str| match name {
        n if n.contains("attn_k.") => BF16,
        n if n.contains("attn_v.") => F16,
        n if n.contains("ffn_gate.") => Q5_K,
        n if n.contains("ffn_up.") => F32,
        _ => q4_k(name),
    };
    let model = LLAMA.build(&types);
    refused(
        &model,
        &[],
        &[
            "model.layers.0.self_attn.qkv_proj.weight",
            "q4_K",
            "bf16",
            "f16",
            "mlp.gate_up_proj.weight",
            "q5_K",
            "f32",
        ],
    );
    let c = converted(&model, Policy { mixed: Fit::Dequantise, ..tp(2) });
    let all = converted(&model, bf16(2));
    for rank in 0..2 {
        let (tensors, all) = (c.rank(rank), all.rank(rank));
        for name in ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"] {
            assert_eq!(get(&tensors, name).dtype, "BF16");
            assert_eq!(get(&tensors, name), get(&all, name));
        }
        // The rest stays packed.
        get(&tensors, "model.layers.0.mlp.down_proj.qweight");
    }
    let why = c.entry("model.layers.0.self_attn.qkv_proj.weight").decoded.clone().unwrap();
    assert!(why.contains("--mixed dequantise"), "{why}");
}

#[test]
fn typ_07_types_without_a_kernel_are_decoded_and_it_is_said() {
    for ty in [TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0] {
        let types = move |name: &str| if name.contains("ffn_") { ty } else { Q8_0 };
        let c = converted(&LLAMA.build(&types), tp(2));
        let name = "model.layers.1.mlp.down_proj.weight";
        let whole = decoded(ty, &source("blk.1.ffn_down.weight", ty, &[512, 256]));
        for rank in 0..2 {
            let stored = c.rank(rank);
            let expected = columns(&whole, 256, rank as usize * 512..(rank as usize + 1) * 512);
            assert!(get(&stored, name).bytes == expected, "type {ty}, rank {rank}");
            get(&stored, "model.layers.1.self_attn.o_proj.qweight");
        }
        let why = c.entry(name).decoded.clone().unwrap();
        assert!(why.contains("no kernel for"), "{why}");
        assert_eq!(c.entry(name).members[0].types.len(), 1);
    }
}

#[test]
fn typ_07_types_that_are_no_weights_are_refused() {
    let name = "blk.0.attn_output.weight";
    // Q8_K: 292 bytes for 256 elements; llama.cpp computes with it and never stores it.
    for (ty, bytes, word) in [(15, 292 * 512, "q8_K"), (I8, 512 * 256, "i8")] {
        let model = with(name, ty, &[512, 256], vec![0; bytes]);
        for weights in ["keep", "bf16"] {
            refused(&model, &["--weights", weights], &[name, word]);
        }
    }
    // f64 is a float: cast, as every float.
    let values: Vec<u8> = (0..512 * 256).flat_map(|i| (i as f64 / 64.0).to_le_bytes()).collect();
    let c = converted(&with(name, F64, &[512, 256], values), tp(1));
    let stored = c.rank(0);
    let o = get(&stored, "model.layers.0.self_attn.o_proj.weight");
    // 1.984375 (127/64) is a bf16.
    assert_eq!((o.dtype.as_str(), &o.bytes[254..256]), ("BF16", &[0xfe, 0x3f][..]));
}

/// Overflow to infinity, and the router's correction bias, whose rounding changes which experts run.
#[test]
fn typ_09_the_target_dtype() {
    let mut norm = vec![1f32; 256];
    (norm[3], norm[4]) = (1e5, 3e-8);
    let bias = [1.0f32, 1.000_01, 0.999_99, -3.0];
    let gate_name = "blk.2.ffn_gate_inp.weight";
    let mut gate = source(gate_name, Q8_0, &[256, 4]);
    // 127 × 552 = 70104.
    gate[..3].copy_from_slice(&[0x50, 0x60, 127]);
    let model = GLM
        .build(&q4_k)
        .without("blk.1.attn_norm.weight")
        .f32s("blk.1.attn_norm.weight", &[256], &norm)
        .without("blk.2.exp_probs_b.bias")
        .f32s("blk.2.exp_probs_b.bias", &[4], &bias)
        .without(gate_name)
        .tensor(gate_name, Q8_0, &[256, 4], gate.clone());
    let c = converted(&model, tp(2));
    let t = c.rank(1);
    let stored = get(&t, "model.layers.1.input_layernorm.weight");
    // bf16 nearest to 1e5 and to 3e-8.
    assert_eq!((&stored.bytes[6..8], &stored.bytes[8..10]), (&[0xc3, 0x47][..], &[0x01, 0x33][..]));
    let stored = get(&t, "model.layers.2.mlp.experts.gate.e_score_correction_bias");
    assert_eq!(stored.dtype, "F32");
    assert_eq!(stored.bytes, bias.map(f32::to_le_bytes).concat());
    let stored = get(&t, "model.layers.2.mlp.experts.gate.weight");
    assert_eq!((stored.dtype.as_str(), stored.shape.as_slice()), ("BF16", &[4, 256][..]));
    assert_eq!(stored.bytes, decoded(Q8_0, &gate));
    assert_eq!(&stored.bytes[..2], [0x89, 0x47], "70144, the bf16 nearest to 70104");
    // f16 holds at most 65504.
    let message = refused(&model, &["--weights", "f16"], &["f16"]);
    assert!(message.contains("blk.1.attn_norm.weight") || message.contains(gate_name), "{message}");
}

#[test]
fn typ_09_f16_overflow_names_the_tensor_and_the_value() {
    let mut norm = vec![1f32; 256];
    norm[3] = -1e5;
    let model = LLAMA.build(&q4_k).without("output_norm.weight").f32s("output_norm.weight", &[256], &norm);
    refused(&model, &["--weights", "f16"], &["output_norm.weight", "-100000", "65504", "f16"]);
    let c = converted(&LLAMA.build(&q4_k), Policy { weights: Weights::F16, ..tp(2) });
    assert!(c.rank(0).values().all(|t| t.dtype == "F16" || t.shape.is_empty()));
}

#[test]
fn typ_10_integer_tensors() {
    let mut model = LLAMA.build(&q4_k);
    for (name, ty) in
        [("blk.0.ffn_table.weight", I32), ("a.i8", I8), ("a.i16", I16), ("a.i64", I64), ("a.f64", F64)]
    {
        model = add(model, name, &[8, 10], ty);
    }
    let message = refused(
        &model,
        &[],
        &["blk.0.ffn_table.weight: unknown tensor (i32", "a.i8", "a.i16", "a.i64 ", "a.f64"]
            .map(|w| w.trim_end()),
    );
    assert_eq!(message.lines().count(), 5, "{message}");
    // A weight by name, a table by type.
    let model = with("blk.0.ffn_up.weight", I32, &[256, 512], vec![0; 4 * 256 * 512]);
    refused(&model, &[], &["blk.0.ffn_up.weight", "i32"]);
}

#[test]
fn typ_11_nvfp4_under_the_row_permutation() {
    let name = "blk.0.attn_q.weight";
    let dims = Gqa { hidden: 128, heads: 4, kv_heads: 4, head: 16, inter: 128, layers: 1, ..LLAMA };
    let types = |n: &str| if n == name { NVFP4 } else { Q8_0 };
    let c = converted(&dims.build(&types), bf16(2));
    let whole = unpermuted(&decoded(NVFP4, &source(name, NVFP4, &[128, 64])), 4, 16);
    for rank in 0..2 {
        let stored = c.rank(rank);
        let qkv = get(&stored, "model.layers.0.self_attn.qkv_proj.weight");
        let half = whole.len() / 2;
        assert!(qkv.bytes[..half] == whole[rank as usize * half..][..half], "rank {rank}");
    }
    // Companion scales are a product that no rule makes: they stop the run, one line each.
    let model = dims.build(&types).f32s("blk.0.attn_q.scale", &[1], &[0.5]).f32s(
        "blk.0.attn_q.input_scale",
        &[64],
        &[1.0; 64],
    );
    let message = refused(&model, &[], &["blk.0.attn_q.scale", "blk.0.attn_q.input_scale", "unknown tensor"]);
    assert_eq!(message.lines().count(), 2, "{message}");
}

/// TYP-02's other half: MXFP4 under its own id is decoded, experts too.
#[test]
fn typ_02_mxfp4_under_id_39() {
    let types = |name: &str| if name.contains("_exps") { MXFP4 } else { q4_k(name) };
    let c = converted(&QWEN3MOE.build(&types), tp(2));
    let down = decoded(MXFP4, &source("blk.0.ffn_down_exps.weight", MXFP4, &[512, 256, 4]));
    let stored = c.rank(1);
    let w2 = get(&stored, "model.layers.0.mlp.experts.routed_experts.w2_weight");
    assert_eq!(w2.shape, [4, 256, 256]);
    assert!(w2.bytes == columns(&down, 4 * 256, 512..1024));
}
