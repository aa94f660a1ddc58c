//! `--weights fast`: codes and scales, read as compressed-tensors describes them, give ggml's values.
//!
//! The blocks are those of `zoo/all-types.gguf`, which llama.cpp quantised, and the values expected are ggml C's
//! own. `scripts/interop/check_recoded.py` holds the same files against compressed-tensors and transformers.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::manifest::{self, Manifest};
use preshard::policy::{Policy, Weights};
use serde_json::Value;
use support::models::{GLM, Gqa, LLAMA, QWEN3MOE, blocks};
use support::{
    Converted, How, Stored, Tensors, converted, converted_how, fixture, get, preshard, refused, snapshot,
    stderr, stdout,
};

fn fast(weights: Weights) -> Policy {
    Policy { layout: "hf".into(), weights, ..Policy::default() }
}

fn humming(weights: Weights) -> Policy {
    Policy { layout: "hf-humming".into(), ..fast(weights) }
}

/// A type of the zoo: its blocks, and ggml's values of them.
struct Zoo {
    id: u32,
    name: String,
    blocks: Vec<u8>,
    values: Vec<f32>,
}

fn zoo() -> Vec<Zoo> {
    let read = |name: &str| std::fs::read(fixture(name)).unwrap();
    let entries: Vec<Value> = serde_json::from_slice(&read("zoo/all-types.json")).unwrap();
    let (gguf, values) = (read("zoo/all-types.gguf"), read("zoo/all-types.expected.f32"));
    let number = |e: &Value, key: &str| e[key].as_u64().unwrap() as usize;
    let elements = |e: &Value| number(e, "rows") * number(e, "cols");
    let size = |e: &Value| elements(e) / number(e, "block") * number(e, "bytes");
    // The tensors fill the end of the file in this order, each padded to 32 bytes.
    let mut at = gguf.len() - entries.iter().map(|e| size(e).next_multiple_of(32)).sum::<usize>();
    let mut values = values.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    let zoo = |e: &Value| {
        let blocks = gguf[at..at + size(e)].to_vec();
        at += size(e).next_multiple_of(32);
        let values = values.by_ref().take(elements(e)).collect();
        Zoo { id: number(e, "id") as u32, name: e["name"].as_str().unwrap().into(), blocks, values }
    };
    entries.iter().map(zoo).collect()
}

/// A value of 16 bits.
fn float(dtype: &str, bits: u16) -> f64 {
    if dtype == "BF16" {
        return f64::from(f32::from_bits(u32::from(bits) << 16));
    }
    let (sign, exponent, fraction) = (bits >> 15, bits >> 10 & 31, f64::from(bits & 0x3ff));
    let size = match exponent {
        0 => fraction / 1024.0 * (-14f64).exp2(),
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * f64::from(i32::from(exponent) - 15).exp2(),
    };
    if sign == 1 { -size } else { size }
}

/// The floats of 16 bits in a tensor.
fn floats(t: &Stored) -> Vec<f64> {
    t.bytes.chunks_exact(2).map(|b| float(&t.dtype, u16::from_le_bytes([b[0], b[1]]))).collect()
}

/// A matrix of codes, each row a stream of so many bits from the lowest of each word on, times the scale of their
/// group of columns, after the zero of the group is taken off: half of what the bits hold, or what `zeros` says.
fn matrix(codes: &Stored, scales: &Stored, zeros: Option<&Stored>, bits: u64, group: u64) -> Vec<f64> {
    assert_eq!(codes.dtype, "I32");
    let (rows, words) = (codes.shape[0], codes.shape[1]);
    let cols = words * 32 / bits;
    assert_eq!(scales.shape, [rows, cols / group]);
    let scales = floats(scales);
    let zeros = zeros.map_or(vec![(1u64 << (bits - 1)) as f64; scales.len()], floats);
    let value = |i: u64| {
        let bit = |n: u64| {
            let at = i / cols * words * 32 + i % cols * bits + n;
            u64::from(codes.bytes[(at / 8) as usize] >> (at % 8) & 1)
        };
        let code: u64 = (0..bits).map(|n| bit(n) << n).sum();
        let g = (i / group) as usize;
        scales[g] * (code as f64 - zeros[g])
    };
    (0..rows * cols).map(value).collect()
}

/// The matrix in `NAME.weight_packed`, `_scale` and `_shape`, as compressed-tensors has it.
fn decoded(tensors: &Tensors, name: &str, bits: u64, group: u64) -> Vec<f64> {
    let part = |part: &str| get(tensors, &format!("{name}.weight_{part}"));
    let shape = part("shape");
    assert_eq!((&*shape.dtype, &shape.shape), ("I64", &vec![2]));
    let numbers: Vec<u64> =
        shape.bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
    let packed = part("packed");
    assert_eq!([packed.shape[0], packed.shape[1] * 32 / bits], numbers[..]);
    matrix(packed, part("scale"), None, bits, group)
}

/// The root mean square of the difference over that of the expected values.
fn error(found: &[f64], expected: &[f32]) -> f64 {
    let wrong: f64 = found.iter().zip(expected).map(|(a, b)| (a - f64::from(*b)).powi(2)).sum();
    (wrong / expected.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt()
}

const DOWN: &str = "model.layers.0.mlp.down_proj";

/// The small llama with the zoo's blocks of a type, over and over, as one matrix.
fn model_of(zoo: &Zoo) -> (Builder, Vec<f32>) {
    let llama = Gqa { hidden: 96, ..LLAMA };
    let elements = (llama.inter * llama.hidden) as usize;
    let bytes = elements / zoo.values.len() * zoo.blocks.len();
    assert!(elements.is_multiple_of(zoo.values.len()), "{}", zoo.name);
    let blocks: Vec<u8> = zoo.blocks.iter().copied().cycle().take(bytes).collect();
    let model = llama.build(&|name| if name.contains("norm") { F32 } else { Q8_0 });
    let name = "blk.0.ffn_down.weight";
    let model = model.without(name).tensor(name, zoo.id, &[llama.inter, llama.hidden], blocks);
    (model, zoo.values.iter().copied().cycle().take(elements).collect())
}

fn form<'c>(c: &'c Converted, name: &str) -> &'c manifest::Recoded {
    c.entry(&format!("{name}.weight_packed")).recoded.as_ref().expect("recoded")
}

/// Bits of the codes, and what is lost in percent at most with scales of f16 and of bf16.
#[rustfmt::skip]
const FORMS: [(&str, u32, [f64; 2]); 25] = [
    // Codes that are moved: nothing is lost but by rounding scales.
    ("q4_0",    4, [0.0,  0.2]),
    ("q5_0",    8, [0.0,  0.2]),
    ("q8_0",    8, [0.0,  0.2]),
    ("iq4_nl",  8, [0.0,  0.2]),
    // Scales of 2^-24 and less are no f16.
    ("mxfp4",   8, [1e-6, 0.0]),
    ("iq4_xs",  8, [0.03, 0.2]),
    // Rounded anew, by steps that are theirs.
    ("q1_0",    4, [0.03, 0.2]),
    ("q2_0",    4, [0.03, 0.2]),
    ("tq1_0",   4, [0.03, 0.2]),
    ("tq2_0",   4, [0.03, 0.2]),
    ("iq1_s",   8, [0.03, 0.1]),
    ("iq3_xxs", 8, [0.03, 0.2]),
    ("iq3_s",   8, [0.05, 0.2]),
    ("q3_K",    8, [0.06, 0.2]),
    ("iq1_m",   8, [0.2,  0.2]),
    ("iq2_xxs", 8, [0.2,  0.2]),
    ("nvfp4",   8, [0.25, 0.25]),
    ("iq2_xs",  8, [0.3,  0.3]),
    ("iq2_s",   8, [0.3,  0.3]),
    ("q4_1",    8, [0.3,  0.35]),
    ("q4_K",    8, [0.25, 0.3]),
    ("q5_1",    8, [0.4,  0.45]),
    ("q5_K",    8, [0.35, 0.4]),
    ("q6_K",    8, [0.45, 0.45]),
    ("q2_K",    8, [0.5,  0.5]),
];

#[test]
fn every_type_gives_ggmls_values() {
    let zoo = zoo();
    let mut wrong = Vec::new();
    for (weights, which) in [(Weights::FastF16, 0), (Weights::Fast, 1)] {
        for (name, bits, most) in FORMS {
            let zoo = zoo.iter().find(|z| z.name == name).expect(name);
            let (model, values) = model_of(zoo);
            let c = converted(&model, fast(weights));
            let recoded = form(&c, DOWN);
            let found = decoded(&c.file("model.safetensors"), DOWN, u64::from(recoded.bits), recoded.group);
            let (error, most) = (error(&found, &values) * 100.0, most[which]);
            if (recoded.bits, recoded.group) != (bits, 32) || error > most {
                wrong
                    .push(format!("{name} {weights:?}: {recoded:?} {error} %, expected int{bits}, {most} %"));
            }
            if most == 0.0 {
                let same = found.iter().zip(&values).all(|(a, b)| *a == f64::from(*b));
                assert!(same, "{name} {weights:?}: not ggml's values");
            }
            // The whole tensor is the sample here.
            let told = recoded.error as f64 / 1e4;
            assert!((told - error).abs() <= 1.001e-4, "{name}: told {told} %, is {error} %");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A type; bits, columns of a group and zero points; the largest loss, with scales of f16 and of bf16.
type Expected = (&'static str, (u32, u64, bool), [f64; 2]);

/// Humming's forms: bits, columns of a group, zero points, and the largest loss in percent, as above.
#[rustfmt::skip]
const HUMMING: [Expected; 14] = [
    ("q4_0",   (4, 32, false), [0.0,  0.2]),
    ("q5_0",   (5, 32, false), [0.0,  0.2]),
    ("q8_0",   (8, 32, false), [0.0,  0.2]),
    ("iq4_nl", (8, 32, false), [0.0,  0.2]),
    ("mxfp4",  (5, 32, false), [1e-6, 0.0]),
    ("q3_K",   (3, 16, false), [0.03, 0.2]),
    ("q6_K",   (6, 16, false), [0.03, 0.2]),
    ("iq4_xs", (8, 32, false), [0.03, 0.2]),
    ("q2_K",   (2, 16, true),  [0.2,  0.5]),
    ("q4_1",   (4, 32, true),  [0.06, 0.45]),
    ("q4_K",   (4, 32, true),  [0.06, 0.45]),
    ("q5_1",   (5, 32, true),  [0.06, 0.45]),
    ("q5_K",   (5, 32, true),  [0.06, 0.45]),
    ("q2_0",   (3, 16, false), [0.03, 0.2]),
];

#[test]
fn hummings_forms_give_ggmls_values() {
    let zoo = zoo();
    let mut wrong = Vec::new();
    for (weights, which) in [(Weights::FastF16, 0), (Weights::Fast, 1)] {
        for (name, expected, most) in HUMMING {
            let zoo = zoo.iter().find(|z| z.name == name).expect(name);
            let (model, values) = model_of(zoo);
            let c = converted(&model, humming(weights));
            let entry = c.entry(&format!("{DOWN}.weight"));
            let Some(recoded) = &entry.recoded else {
                wrong.push(format!("{name} {weights:?}: {:?}", entry.decoded));
                continue;
            };
            let tensors = c.file("model.safetensors");
            let part = |part: &str| get(&tensors, &format!("{DOWN}.{part}"));
            let zeros = recoded.zero_point.then(|| part("zero_point"));
            let (bits, group) = (u64::from(recoded.bits), recoded.group);
            let found = matrix(part("weight"), part("weight_scale"), zeros, bits, group);
            let (error, most) = (error(&found, &values) * 100.0, most[which]);
            if (recoded.bits, recoded.group, recoded.zero_point) != expected || error > most {
                wrong.push(format!(
                    "{name} {weights:?}: {recoded:?} {error} %, expected {expected:?}, {most} %"
                ));
            }
            assert!(
                (recoded.error as f64 / 1e4 - error).abs() <= 1.001e-4,
                "{name}: {recoded:?}, is {error} %"
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// vLLM takes a layer's settings from a pattern for its merged name, and no zero points of experts.
#[test]
fn humming_settings_are_by_merged_layer() {
    let types = |name: &str| match name {
        n if n.contains("norm") || n.contains("gate_inp") => F32,
        n if n.contains("attn_v.") || n.contains("ffn_down") => Q6_K,
        _ => Q4_K,
    };
    let args = ["--weights", "fast", "--layout", "hf-humming"];
    let (c, _) = by_command(&LLAMA.build(&types), &args);
    let quantization = &config(&c)["quantization_config"];
    assert_eq!(quantization["quant_method"], "humming");
    let dynamic = |pattern: &str| &quantization["dynamic"][format!(r"+:^model\.layers\.(?:0|1)\.{pattern}$")];
    let form = |bits: u32, group: u32, zero: bool| {
        serde_json::json!({
            "dtype": format!("int{bits}"), "group_size": group, "has_zero_point": zero, "is_fp_zero_point": zero
        })
    };
    // Of six bits and with zero points, both types are held.
    assert_eq!(*dynamic(r"self_attn\.qkv_proj"), form(6, 16, true));
    assert_eq!(*dynamic(r"mlp\.gate_up_proj"), form(4, 32, true));
    assert_eq!(*dynamic(r"mlp\.down_proj"), form(6, 16, false));
    let up = c.entry("model.layers.0.mlp.up_proj.zero_point");
    assert_eq!((&*up.dtype, &up.shape[..]), ("BF16", &[512, 8][..]));

    let (c, _) = by_command(&QWEN3MOE.build(&types), &args);
    let quantization = &config(&c)["quantization_config"];
    let experts = &quantization["dynamic"][r"+:^model\.layers\.(?:0|1)\.mlp\.experts$"];
    assert_eq!(*experts, form(8, 32, false), "{quantization}");
    let ignored = quantization["ignore"].to_string();
    assert!(ignored.contains(r"mlp\\.gate$"), "{ignored}");
}

/// The patterns of a form in `quantization_config`, and the names that they match.
fn targets(config: &Value, bits: u32) -> Vec<String> {
    let groups = config["quantization_config"]["config_groups"].as_object().unwrap().values();
    let of = |g: &&Value| g["weights"]["num_bits"] == bits;
    let patterns = groups.filter(of).flat_map(|g| g["targets"].as_array().unwrap());
    patterns.map(|p| p.as_str().unwrap().to_owned()).collect()
}

fn config(c: &Converted) -> Value {
    serde_json::from_slice(&std::fs::read(c.out().join("config.json")).unwrap()).unwrap()
}

/// Converts by the command, which writes config.json too.
fn by_command(model: &Builder, args: &[&str]) -> (Converted, String) {
    let dir = tempfile::tempdir().unwrap();
    let source = model.write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let mut command = preshard();
    command.arg("convert").arg(&source).arg("-o").arg(&out).args(args);
    if !args.contains(&"--layout") {
        command.args(["--layout", "hf"]);
    }
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
    let manifest = Manifest::read(&out).unwrap();
    let again = preshard().arg("verify").arg(&out).arg("--source").arg(&source).output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    (Converted { dir, manifest }, stdout(&run))
}

/// What vLLM merges, or computes in one kernel, is of one form; what it splits stays floats.
#[test]
fn what_is_merged_shares_a_form() {
    let types = |name: &str| match name {
        n if n.contains("norm") || n.contains("gate_inp") => F32,
        // Of the first layer, v and down are larger than what they are merged with.
        n if n.contains("blk.0.") && (n.contains("attn_v.") || n.contains("ffn_down")) => Q6_K,
        _ => Q4_0,
    };
    let (c, told) = by_command(&LLAMA.build(&types), &["--weights", "fast"]);
    let bits = |name: &str| form(&c, &format!("model.layers.{name}")).bits;
    let all = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    assert_eq!(all.map(|n| bits(&format!("0.{n}"))), [8, 8, 8, 4], "q and k as v");
    assert_eq!(all.map(|n| bits(&format!("1.{n}"))), [4; 4]);
    let all = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    assert_eq!(all.map(|n| bits(&format!("0.{n}"))), [4, 4, 8], "down is alone");
    assert!(told.contains("q4_0 as int4 in groups of 32: 4.50 to 4.50 bits a weight, loses"), "{told}");
    assert!(told.contains("q4_0 as int8 in groups of 32: 4.50 to 8.50 bits a weight, loses"), "{told}");
    let config = config(&c);
    let eight = targets(&config, 8);
    assert!(eight.contains(&r"re:^model\.layers\.(?:0)\.self_attn\.q_proj$".into()), "{eight:?}");
    let four = targets(&config, 4);
    assert!(four.contains(&r"re:^model\.layers\.(?:1)\.self_attn\.q_proj$".into()), "{four:?}");
    assert!(four.contains(&r"re:^model\.layers\.(?:0|1)\.mlp\.gate_proj$".into()), "{four:?}");
    assert_eq!(c.entry("model.embed_tokens.weight").dtype, "BF16");
    let why = c.entry("lm_head.weight").decoded.as_deref();
    assert_eq!(why, Some("embeddings and output heads stay floats"));

    // Both matrices of experts are one kernel's.
    let (c, _) = by_command(&QWEN3MOE.build(&types), &["--weights", "fast"]);
    for (layer, bits) in [(0, 8), (1, 4)] {
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let name = format!("model.layers.{layer}.mlp.experts.3.{name}");
            assert_eq!(form(&c, &name).bits, bits, "{name}");
        }
    }
    let eight = targets(&self::config(&c), 8);
    assert!(eight.contains(&r"re:^model\.layers\.(?:0)\.mlp\.experts\.\d+\.down_proj$".into()), "{eight:?}");

    // vLLM takes kv_b_proj apart.
    let (c, _) =
        by_command(&GLM.build(&|n| if types(n) == F32 { F32 } else { Q4_0 }), &["--weights", "fast-f16"]);
    let why = c.entry("model.layers.0.self_attn.kv_b_proj.weight").decoded.clone().unwrap();
    assert!(why.contains("W_UK and W_UV"), "{why}");
    assert_eq!(form(&c, "model.layers.1.mlp.experts.0.up_proj").error, 0);
    let ignored = self::config(&c)["quantization_config"]["ignore"].to_string();
    assert!(ignored.contains(r"self_attn\\.kv_b_proj$"), "{ignored}");
}

/// A tighter limit decodes, with the reason; a wider one takes fewer bits.
#[test]
fn the_limit_decides() {
    let types = |name: &str| if name.contains("norm") { F32 } else { Q4_K };
    let model = LLAMA.build(&types);
    let name = "model.layers.1.mlp.up_proj";
    let (c, _) = by_command(&model, &["--weights", "fast"]);
    assert_eq!((form(&c, name).bits, c.manifest.policy.max_error), (8, Some(5000)));
    let (c, told) = by_command(&model, &["--weights", "fast", "--max-error", "0.05"]);
    let why = c.entry(&format!("{name}.weight")).decoded.clone().unwrap();
    assert!(why.contains("the limit is 0.05 % (--max-error)"), "{why}");
    assert!(!told.contains(" as int"), "{told}");
    let (c, told) = by_command(&model, &["--weights", "fast", "--max-error", "30"]);
    assert_eq!(form(&c, name).bits, 4, "{told}");
    assert!(form(&c, name).error > 20_000);

    refused(&model, &["--weights", "bf16", "--max-error", "1"], &["--max-error", "--weights fast"]);
    refused(&model, &["--weights", "fast"], &["--layout vllm", "--layout hf"]);
}

/// A damaged scale has no place in a form: refused, or counted where it lies.
#[test]
fn damaged_scales_are_refused() {
    let name = "blk.1.ffn_up.weight";
    let mut data = blocks(name, Q4_K, 256 * 512);
    data[144 * 9 + 2..144 * 9 + 4].copy_from_slice(&0x7c00u16.to_le_bytes());
    let model = LLAMA.build(&|n| if n.contains("norm") { F32 } else { Q4_K });
    let model = model.without(name).tensor(name, Q4_K, &[256, 512], data);
    let args = ["--layout", "hf", "--weights", "fast"];
    refused(&model, &args, &[name, "q4_K block 9", "--allow-nonfinite"]);
    let (c, _) = by_command(&model, &["--weights", "fast", "--allow-nonfinite"]);
    assert_eq!(c.entry("model.layers.1.mlp.up_proj.weight_packed").nonfinite, 1);
}

/// The number of threads changes nothing, and what a killed run left is taken up.
#[test]
fn threads_change_nothing() {
    let model = QWEN3MOE.build(&|n| if n.contains("norm") || n.contains("gate_inp") { F32 } else { Q5_K });
    let how = |threads| How { threads, ..How::default() };
    let one = converted_how(&model, fast(Weights::Fast), how(1));
    let three = converted_how(&model, fast(Weights::Fast), how(3));
    assert!(snapshot(&one.out()) == snapshot(&three.out()));
}
