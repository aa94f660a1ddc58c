//! A manifest that contradicts itself, or the files beside it, is refused: every field of real ones, altered.
#![cfg(feature = "cli")]

mod common;
mod support;

use preshard::load::Directory;
use preshard::manifest::FILE_NAME;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use support::{fixture, preshard, stderr};
use tempfile::TempDir;

/// A directory as the command writes it, and its manifest.
struct Made {
    _dir: TempDir,
    out: PathBuf,
    manifest: Value,
}

fn made(source: &str, args: &[&str]) -> Made {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let run = preshard().arg("convert").arg(fixture(source)).arg("-o").arg(&out).args(args).output().unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
    let manifest = serde_json::from_slice(&std::fs::read(out.join(FILE_NAME)).unwrap()).unwrap();
    Made { _dir: dir, out, manifest }
}

impl Made {
    /// The refusal of `manifest` in place of the real one.
    fn refusal(&self, manifest: &Value) -> Option<String> {
        std::fs::write(self.out.join(FILE_NAME), manifest.to_string()).unwrap();
        Directory::open(&self.out).and_then(|d| d.all()).err().map(|e| e.to_string())
    }

    /// The manifest with the value at `pointer` replaced.
    #[track_caller]
    fn with(&self, pointer: &str, value: Value) -> Value {
        let mut manifest = self.manifest.clone();
        *manifest.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        manifest
    }
}

const GLM: &str = "glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf";
const DSV3: &str = "dsv3/tiny-dsv3-Q4_K_M.gguf";
const LLAMA: &str = "dense/tiny-llama-Q4_K_M.gguf";
const MOE: &str = "dense/tiny-qwen3moe-Q4_K_M.gguf";

/// Fields that nothing else in the directory bears out, so that an alteration passes: docs/security.md names
/// them. Array indices are left out.
const ALONE: &[&str] = &[
    "/tool",
    "/plan",
    "/sources//file",
    "/sources//bytes",
    "/sources//header_blake3",
    "/model/architecture",
    "/model/layout",
    "/policy/layout",
    "/policy/max_file_size",
    "/policy/max_error",
    "/shards//tensors//nonfinite",
    "/files//file",
    "/files//bytes",
    "/files//blake3",
    "/dropped//tensor",
    "/dropped//reason",
];

/// More of them in an ordinary checkpoint, which no second rank bears out.
const ALONE_IN_A_CHECKPOINT: &[&str] =
    &["/model/experts", "/shards//tensors//members//from/", "/shards//tensors//decoded"];

/// Every scalar of a manifest with its place, of each kind of place the first, the last and one between.
fn places(value: &Value) -> Vec<(String, String)> {
    fn walk(value: &Value, at: String, kind: String, found: &mut BTreeMap<String, Vec<String>>) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    walk(value, format!("{at}/{key}"), format!("{kind}/{key}"), found);
                }
            }
            Value::Array(list) => {
                for (i, value) in list.iter().enumerate() {
                    walk(value, format!("{at}/{i}"), format!("{kind}/"), found);
                }
            }
            _ => found.entry(kind).or_default().push(at),
        }
    }
    let mut found = BTreeMap::new();
    walk(value, String::new(), String::new(), &mut found);
    let some = |(kind, all): (String, Vec<String>)| {
        let mut picked = vec![0, all.len() / 3, all.len() / 2, all.len() - 1];
        picked.dedup();
        picked.into_iter().map(move |i| (kind.clone(), all[i].clone())).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(some).collect()
}

/// Other values of the same JSON type.
fn others(value: &Value) -> Vec<Value> {
    match value {
        Value::Bool(b) => vec![json!(!b)],
        Value::Number(n) => {
            let n = n.as_u64().unwrap();
            [0, n / 2, n + 1, n * 2 + 1, u64::MAX].into_iter().filter(|o| *o != n).map(Value::from).collect()
        }
        Value::String(s) => {
            let hex = s.len() == 64 && s.bytes().all(|b| b.is_ascii_hexdigit());
            let changed =
                if hex { s.replace(['0', '1', '2', '3', '4', '5', '6', '7'], "9") } else { format!("{s}x") };
            vec![json!(changed), json!("")]
        }
        _ => vec![],
    }
}

#[test]
fn every_field_is_held_against_the_others() {
    for (source, args) in [
        (GLM, &["--tp", "2", "--misaligned", "dequantise"][..]),
        (MOE, &["--tp", "2", "--ep", "--weights", "bf16"]),
        (LLAMA, &["--tp", "2", "--pp", "2", "--misaligned", "dequantise"]),
        (MOE, &["--layout", "hf", "--max-file-size", "200KB"]),
        (LLAMA, &["--layout", "hf", "--weights", "fast", "--max-file-size", "200KB"]),
        (DSV3, &["--layout", "sglang", "--tp", "2", "--shared-experts", "fused"]),
        (GLM, &["--layout", "sglang", "--tp", "2", "--mtp", "only"]),
        (LLAMA, &["--layout", "hf-humming", "--weights", "fast-f16"]),
    ] {
        let made = made(source, args);
        assert_eq!(made.refusal(&made.manifest), None);
        let mut seen = 0;
        let mut passed = Vec::new();
        for (kind, place) in places(&made.manifest) {
            for other in others(made.manifest.pointer(&place).unwrap()) {
                let refusal = made.refusal(&made.with(&place, other.clone()));
                match &refusal {
                    None if ALONE.contains(&kind.as_str()) => {}
                    None if args[1].starts_with("hf") && ALONE_IN_A_CHECKPOINT.contains(&kind.as_str()) => {}
                    // No experts: their placement is nothing.
                    None if place == "/policy/ep" && made.manifest["model"]["experts"] == 0 => {}
                    None => passed.push(format!("{place} = {other}")),
                    Some(text) => assert_eq!(text.lines().count(), 1, "{place} = {other}: {text}"),
                }
                seen += 1;
            }
        }
        assert!(passed.is_empty(), "{source} {args:?} passes with {passed:#?}");
        assert!(seen > 200, "{seen}");
    }
}

/// What takes more than one field to say.
#[test]
fn contradictions_between_fields_are_refused() {
    let made = made(GLM, &["--tp", "2", "--misaligned", "dequantise"]);
    let refused = |manifest: Value, parts: &[&str]| {
        let text = made.refusal(&manifest).expect("refused");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}\nexpected {parts:?}");
        assert_eq!(text.lines().count(), 1, "{text}");
    };
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut manifest = made.manifest.clone();
        edit(&mut manifest);
        manifest
    };
    let shard = |m: &Value, i: usize| m["shards"][i].clone();
    assert_eq!(shard(&made.manifest, 1)["file"], "model-rank-1-part-0.safetensors");

    refused(
        edited(&|m| {
            m["shards"][0]["tp"] = json!(1);
            m["shards"][1]["tp"] = json!(0);
        }),
        &["model-rank-0", "rank 1, whose file is called model-rank-1"],
    );
    // The ranks' names swapped too: the rows of the vocabulary tell.
    refused(
        edited(&|m| {
            let (a, b) = (shard(m, 0), shard(m, 1));
            for (i, other) in [(0, b), (1, a)] {
                for key in ["file", "tp"] {
                    m["shards"][i][key] = other[key].clone();
                }
            }
        }),
        &["vocab_rows", "rank"],
    );
    refused(edited(&|m| m["shards"][1]["tp"] = json!(0)), &["model-rank-1", "rank 0"]);
    refused(edited(&|m| m["policy"]["tp"] = json!(4)), &["vocab_rows", "rank 0 of 4"]);
    refused(
        edited(&|m| m["policy"]["tp"] = json!(1)),
        &["vocab_rows [0, 256], expected [0, 512] for rank 0 of 1"],
    );
    refused(
        edited(&|m| {
            m["policy"]["pp"] = json!(2);
            m["policy"]["stages"] = json!([0, 2, m["model"]["layers"]]);
        }),
        &["whose file is called model-pp-0-tp-0"],
    );
    refused(edited(&|m| m["policy"]["ep"] = json!(true)), &["experts are not 0..4"]);
    refused(
        edited(&|m| {
            m["model"]["layers"] = json!(5);
            m["policy"]["stages"] = json!([0, 5]);
        }),
        // The draft's layer 3 would be the fourth of a draft that counts from 0.
        &["made of layers 3, 8"],
    );
    refused(edited(&|m| m["policy"]["weights"] = json!("bf16")), &["U8, with --weights bf16"]);
    refused(edited(&|m| m["policy"]["misaligned"] = json!("refuse")), &["the policy is --misaligned refuse"]);
    refused(edited(&|m| m["policy"]["mtp"] = json!("drop")), &["mtp-rank-0", "a draft"]);
    refused(
        edited(&|m| m["policy"]["mtp"] = json!("only")),
        &["model-rank-0", "--mtp only has the draft alone"],
    );
    refused(
        edited(&|m| m["policy"]["shared_experts"] = json!("auto")),
        &["shared_experts", "fused or separate"],
    );
    refused(edited(&|m| m["policy"]["shared_experts"] = json!("fused")), &["the shard holds 9 experts"]);
    refused(edited(&|m| m["policy"]["layout"] = json!("hf")), &["layout"]);
    refused(
        edited(&|m| m["model"]["class"] = json!("LlamaForCausalLM")),
        &["config.json", "LlamaForCausalLM"],
    );
    refused(edited(&|m| m["shards"] = json!([])), &["names no shard"]);
    refused(edited(&|m| m["sources"] = json!([])), &["names no source"]);
    // A tensor that is both used and dropped.
    let name = made.manifest["shards"][0]["tensors"][0]["members"][0]["from"][0].clone();
    refused(edited(&|m| m["dropped"] = json!([{ "tensor": name, "reason": "a buffer" }])), &["dropped"]);

    // A packed tensor: its members' rows and types, its shapes.
    let tensors = made.manifest["shards"][0]["tensors"].as_array().unwrap();
    let joined = tensors
        .iter()
        .position(|t| t.get("logical").is_some() && t["members"].as_array().unwrap().len() == 2);
    let at = |rest: &str| format!("/shards/0/tensors/{}{rest}", joined.expect("a joined packed tensor"));
    let read = |rest: &str| made.manifest.pointer(&at(rest)).unwrap().clone();
    let end = read("/members/0/rows/1").as_u64().unwrap();
    refused(made.with(&at("/members/0/rows"), json!([0, end + 1])), &["expected to start at"]);
    refused(made.with(&at("/members/1/rows/1"), json!(end * 3)), &["its members end at row"]);
    refused(made.with(&at("/members/0/types/0"), json!("q9_K")), &["type \"q9_K\""]);
    refused(made.with(&at("/members/0/types/0"), json!("q8_1")), &["type \"q8_1\""]);
    refused(made.with(&at("/members/0/types/0"), json!("f32")), &["packed as f32"]);
    let other = if read("/members/0/types/0") == "q8_0" { "q4_0" } else { "q8_0" };
    refused(made.with(&at("/members/0/types/0"), json!(other)), &["row_bytes"]);
    refused(made.with(&at("/members"), json!([])), &["packed, but without members"]);
    refused(made.with(&at("/dtype"), json!("F32")), &["bytes"]);
    refused(
        edited(&|m| m["shards"][0]["tensors"][joined.unwrap()]["decoded"] = json!("no reason")),
        &["decoded (no reason), but no packed source is"],
    );
    refused(
        edited(&|m| {
            drop(m["shards"][0]["tensors"][joined.unwrap()].as_object_mut().unwrap().remove("logical"))
        }),
        &["row_bytes"],
    );

    let made = self::made(LLAMA, &[]);
    let mut manifest = made.with("/model/layers", json!(3));
    manifest["policy"]["stages"] = json!([0, 3]);
    let text = made.refusal(&manifest).unwrap();
    assert!(text.contains("1 of layers 0 to 2 in no file of stage 0, rank 0"), "{text}");
}
