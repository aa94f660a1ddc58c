//! `preshard diff` and `preshard verify --expect`: which tensors two conversions differ in, and why.
#![cfg(feature = "cli")]

mod common;
mod support;

use preshard::gguf::Gguf;
use preshard::hash;
use preshard::hash::LEAF;
use preshard::manifest::{FILE_NAME, Manifest};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;
use support::{fixture, preshard, read, stderr, stdout};

#[path = "common/directory.rs"]
mod directory;

fn run(args: &[&str], paths: &[&Path]) -> Output {
    preshard().args(args).args(paths).output().unwrap()
}

fn convert(source: &Path, out: PathBuf, how: &[&str]) -> PathBuf {
    let output = preshard().arg("convert").arg(source).args(how).arg("-o").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    out
}

/// Every model converted here is cut for two ranks.
const CUT: [&str; 4] = ["--tp", "2", "--misaligned", "dequantise"];

fn model() -> PathBuf {
    fixture("dense/tiny-qwen3moe-Q4_K_M.gguf")
}

/// A copy of the model in which one byte of this tensor differs, within its quants or its values.
fn touched(dir: &Path, tensor: &str) -> PathBuf {
    let gguf = Gguf::open(&[model()]).unwrap();
    let t = gguf.tensors().iter().find(|t| t.name == tensor).unwrap();
    // These bytes of a block are of its quants; of an f32 the third byte has the last bits that bf16 keeps.
    let within = match t.ty.name {
        "q4_K" => 32,
        "q6_K" => 0,
        "q8_0" | "f32" => 2,
        other => panic!("{tensor} is {other}"),
    };
    let mut bytes = std::fs::read(model()).unwrap();
    bytes[t.offset as usize + within] ^= 1;
    let path = dir.join("touched").join("tiny-qwen3moe-Q4_K_M.gguf");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The tensors whose bytes, shape or dtype differ, as the safetensors library reads them, with their rank.
fn really_differ(a: &Path, b: &Path) -> BTreeSet<(String, u64)> {
    let mut names = BTreeSet::new();
    for rank in 0..2 {
        let file = format!("model-rank-{rank}-part-0.safetensors");
        let (a, b) = (read(&a.join(&file)), read(&b.join(&file)));
        let all: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        names.extend(all.into_iter().filter(|n| a.get(*n) != b.get(*n)).map(|n| (n.clone(), rank)));
    }
    names
}

/// What `diff --json` says, and the tensors it names with their rank.
fn diff(a: &Path, b: &Path) -> (Value, BTreeSet<(String, u64)>) {
    let output = run(&["diff", "--json"], &[a, b]);
    let found: Value =
        serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    assert_eq!(output.status.code(), Some(if found["equal"] == true { 0 } else { 1 }));
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    let mut names = BTreeSet::new();
    for tensor in found["tensors"].as_array().unwrap() {
        for rank in tensor["ranks"].as_array().unwrap() {
            names.insert((tensor["name"].as_str().unwrap().to_owned(), rank[1].as_u64().unwrap()));
        }
    }
    (found, names)
}

#[test]
fn a_conversion_does_not_differ_from_itself_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let a = convert(&model(), dir.path().join("a"), &CUT);
    let b = convert(&model(), dir.path().join("b"), &CUT);
    for (x, y) in
        [(a.clone(), b.clone()), (a.join(FILE_NAME), b.clone()), (a.join(FILE_NAME), b.join(FILE_NAME))]
    {
        let output = run(&["diff"], &[&x, &y]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(stdout(&output).lines().count(), 1);
        assert!(stdout(&output).contains("all are equal"), "{}", stdout(&output));
    }
    for expected in [a.join(FILE_NAME), a.join("B3SUMS"), a.clone()] {
        let output = run(&["verify", "--expect"], &[&expected, &b]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stdout(&output).contains("and as"), "{}", stdout(&output));
        assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    }
}

#[test]
fn one_byte_of_one_gguf_tensor_is_found_in_the_tensor_it_went_to() {
    let dir = tempfile::tempdir().unwrap();
    let a = convert(&model(), dir.path().join("a"), &CUT);
    for tensor in ["blk.1.attn_k.weight", "blk.0.ffn_down_exps.weight", "output_norm.weight"] {
        let source = touched(dir.path(), tensor);
        let b = convert(&source, dir.path().join("b"), &CUT);
        let truth = really_differ(&a, &b);
        assert!(!truth.is_empty(), "{tensor}");
        let (found, names) = diff(&a, &b);
        assert_eq!(names, truth, "{tensor}: {found}");
        assert_eq!(found["causes"].as_array().unwrap().len(), 0);
        assert!(found["tensors"].as_array().unwrap().iter().all(|t| t["certain"] == true));
        let text = stdout(&run(&["diff"], &[&a, &b]));
        assert!(
            text.contains("the first at") && text.contains("data of the GGUF's tensors changed"),
            "{text}"
        );

        // By the manifests alone: a file of one leaf, so that every tensor of it may be the one.
        let (found, names) = diff(&a.join(FILE_NAME), &b.join(FILE_NAME));
        assert!(names.is_superset(&truth));
        assert!(found["tensors"].as_array().unwrap().iter().all(|t| t["certain"] == false), "{found}");

        for (expected, words) in [
            (a.clone(), truth.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>()),
            (a.join(FILE_NAME), truth.iter().map(|(name, _)| name.as_str()).collect()),
            (
                a.join("B3SUMS"),
                vec!["model-rank-0-part-0.safetensors", "a manifest instead of B3SUMS would name"],
            ),
        ] {
            let output = run(&["verify", "--expect"], &[&expected, &b]);
            assert_eq!(output.status.code(), Some(1));
            let text = stderr(&output);
            assert!(words.iter().all(|w| text.contains(w)), "{words:?}: {text}");
            assert!(text.lines().all(|l| l.starts_with("error: ")), "{text}");
        }
        std::fs::remove_dir_all(&b).unwrap();
    }
}

#[test]
fn another_policy_is_named_with_what_it_did_to_each_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let a = convert(&model(), dir.path().join("a"), &CUT);
    let b = convert(&model(), dir.path().join("b"), &["--tp", "2", "--weights", "bf16"]);
    let (found, names) = diff(&a, &b);
    // A parameter that is packed in the one and decoded in the other is one entry, not two.
    let truth = really_differ(&a, &b);
    let packed = |name: &str| name.strip_suffix("weight").map(|stem| format!("{stem}qweight"));
    let again = |(name, rank): &&(String, u64)| packed(name).is_some_and(|p| truth.contains(&(p, *rank)));
    assert!(truth.iter().any(|entry| again(&entry)));
    assert_eq!(names, truth.iter().filter(|entry| !again(entry)).cloned().collect());
    let causes: Vec<&str> =
        found["causes"].as_array().unwrap().iter().filter_map(|c| c["what"].as_str()).collect();
    assert!(causes.contains(&"policy weights") && causes.contains(&"policy misaligned"), "{found}");
    assert!(causes.iter().all(|c| c.starts_with("policy ")), "{found}");
    let text = stdout(&run(&["diff"], &[&a, &b]));
    assert!(text.contains("policy weights: keep -> bf16"), "{text}");
    let line = text
        .lines()
        .find(|l| l.starts_with("model.layers.0.self_attn.o_proj.qweight (rank 0, 1): "))
        .unwrap();
    for word in
        ["it is model.layers.0.self_attn.o_proj.weight", "U8 [", "-> BF16 [", "now decoded: --weights bf16"]
    {
        assert!(line.contains(word), "{line}");
    }
    assert!(text.contains("o_proj.qweight_type (rank 0, 1): only in"), "{text}");

    // Fewer ranks: a shard that is not there, and other shapes on the one that is.
    let c = convert(&model(), dir.path().join("c"), &["--weights", "bf16"]);
    let text = stdout(&run(&["diff"], &[&b, &c]));
    assert!(text.contains("policy tp: 2 -> 1"), "{text}");
    assert!(text.contains("model-rank-1-part-0.safetensors: only in"), "{text}");
    assert!(text.contains("o_proj.weight (rank 0): BF16 ["), "{text}");
}

#[test]
fn another_type_of_a_tensor_is_named() {
    use common::{Q4_K, Q8_0};
    use support::models::LLAMA;
    let dir = tempfile::tempdir().unwrap();
    let build = |name: &str, ty: u32| {
        let other = move |tensor: &str| if tensor == "blk.0.attn_output.weight" { ty } else { Q4_K };
        let source = LLAMA.build(&other).write(dir.path().join("model.gguf"));
        convert(&source, dir.path().join(name), &["--weights", "keep"])
    };
    let (a, b) = (build("a", Q4_K), build("b", Q8_0));
    let output = run(&["diff"], &[&a, &b]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    let line = text.lines().find(|l| l.contains("type q4_K -> q8_0")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.starts_with("model.layers.0.self_attn.o_proj.qweight") && line.contains("U8 ["), "{line}");
    assert!(text.contains("header of model.gguf: "), "{text}");
}

#[test]
fn a_version_by_itself_differs_but_is_no_other_content() {
    let dir = tempfile::tempdir().unwrap();
    let a = convert(&model(), dir.path().join("a"), &CUT);
    let tool = format!("preshard {}", env!("CARGO_PKG_VERSION"));
    let text = std::fs::read_to_string(a.join(FILE_NAME)).unwrap();
    assert_eq!(text.matches(&tool).count(), 1);
    let other = dir.path().join("other.json");
    std::fs::write(&other, text.replace(&tool, "preshard 0.0.9")).unwrap();
    let output = run(&["diff"], &[&other, &a]);
    assert_eq!(output.status.code(), Some(1));
    let said = stdout(&output);
    assert!(said.starts_with(&format!("version: preshard 0.0.9 -> {tool}\n")), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    let output = run(&["verify", "--expect"], &[&other, &a]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("note: version: preshard 0.0.9"), "{}", stderr(&output));

    let sums = std::fs::read_to_string(a.join("B3SUMS")).unwrap();
    let (others, last) = sums.trim_end().rsplit_once('\n').unwrap();
    assert!(last.ends_with("  preshard.json"));
    let other = dir.path().join("B3SUMS");
    // As git may check it out, with another manifest.
    let mut text = format!("{others}\n{}  preshard.json\n", "0".repeat(64)).replace('\n', "\r\n");
    std::fs::write(&other, &text).unwrap();
    let output = run(&["verify", "--expect"], &[&other, &a]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("note: preshard.json differs"), "{}", stderr(&output));
    text = text.replace("config.json", "konfig.json");
    std::fs::write(&other, &text).unwrap();
    let output = run(&["verify", "--expect"], &[&other, &a]);
    assert_eq!(output.status.code(), Some(1));
    for line in ["error: konfig.json: expected, but not there", "error: config.json: not expected"] {
        assert!(stderr(&output).contains(line), "{}", stderr(&output));
    }
    std::fs::write(&other, "not sums\n").unwrap();
    let output = run(&["verify", "--expect"], &[&other, &a]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("neither a manifest nor lines of b3sum"), "{}", stderr(&output));
}

/// Two manifests in which one leaf has another hash.
#[test]
fn a_changed_leaf_names_the_tensors_that_overlap_it_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let megabytes = |name: &str, n: u64| (format!("model.layers.0.{name}"), "U8", vec![n << 20]);
    // Leaf 0: the header, a, the start of b. Leaf 1: b alone. Leaf 2: the end of b, c, d.
    let tensors = [megabytes("a", 4), megabytes("b", 30), megabytes("c", 1), megabytes("d", 2)];
    let manifest = directory::write(dir.path(), 1, &tensors);
    assert_eq!((manifest.shards[0].leaves.len(), LEAF), (3, 16 << 20));
    let changed = |leaves: &[usize]| {
        let mut other = Manifest::clone(&manifest);
        let shard = &mut other.shards[0];
        for leaf in leaves {
            shard.leaves[*leaf] = hash::to_hex(&[7; 32]);
        }
        let values: Vec<_> = shard.leaves.iter().map(|l| hash::from_hex(l).unwrap()).collect();
        shard.blake3 = hash::to_hex(&hash::fold(&values, shard.bytes));
        let path = dir.path().join("other.json");
        std::fs::write(&path, other.to_bytes()).unwrap();
        let (found, _) = diff(&dir.path().join(FILE_NAME), &path);
        let tensors = found["tensors"].as_array().unwrap().iter();
        tensors.map(|t| (t["name"].as_str().unwrap().to_owned(), t["certain"] == true)).collect::<Vec<_>>()
    };
    let expect = |list: &[(&str, bool)]| {
        list.iter().map(|(n, c)| (format!("model.layers.0.{n}"), *c)).collect::<Vec<_>>()
    };
    assert_eq!(changed(&[]), []);
    assert_eq!(changed(&[0]), expect(&[("a", false), ("b", false)]));
    assert_eq!(changed(&[1]), expect(&[("b", true)]));
    assert_eq!(changed(&[2]), expect(&[("b", false), ("c", false), ("d", false)]));
    assert_eq!(changed(&[1, 2]), expect(&[("b", true), ("c", false), ("d", false)]));
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let a = convert(&model(), dir.path().join("a"), &CUT);
    let b = convert(&touched(dir.path(), "output_norm.weight"), dir.path().join("b"), &CUT);
    let refused = |a: &Path, b: &Path, words: &[&str]| {
        let output = run(&["diff"], &[a, b]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stdout(&output).is_empty(), "{}", stdout(&output));
        assert!(words.iter().all(|w| stderr(&output).contains(w)), "{}", stderr(&output));
    };
    refused(&a, &dir.path().join("nowhere"), &["nowhere"]);
    refused(&a, &model(), &["not a manifest"]);
    // Files that are not what their manifests say: other hashes, equal bytes.
    for rank in 0..2 {
        let file = format!("model-rank-{rank}-part-0.safetensors");
        std::fs::copy(a.join(&file), b.join(&file)).unwrap();
    }
    refused(&a, &b, &["its tensors are equal", "run preshard verify on both"]);
    std::fs::remove_file(b.join("model-rank-1-part-0.safetensors")).unwrap();
    refused(&a, &b, &["model-rank-1-part-0.safetensors", "is missing"]);
    assert_eq!(run(&["diff"], &[&a]).status.code(), Some(2));
}

/// The commands of docs/ci.md, as a runner would run them.
#[test]
fn the_workflow_of_the_docs_passes_and_fails_naming_the_tensor() {
    let docs = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/ci.md")).unwrap();
    let (_, workflow) = docs.split_once("```yaml\n").unwrap();
    let (workflow, _) = workflow.split_once("```").unwrap();
    let steps: Vec<&str> = workflow.lines().filter_map(|l| l.trim().strip_prefix("run: ")).collect();
    assert_eq!(steps.len(), 3, "{workflow}");
    let dir = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_preshard")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let job = |model: &Path, steps: &[&str]| {
        let _ = std::fs::remove_dir_all(dir.path().join("out"));
        std::process::Command::new("bash")
            .args(["-e", "-c", &steps.join("\n")])
            .env("PATH", &path)
            .env("MODEL", model)
            .env("OPTIONS", CUT.join(" "))
            .current_dir(dir.path())
            .output()
            .unwrap()
    };
    let first = job(&model(), &[steps[1], "mkdir -p expected && cp out/preshard.json expected/"]);
    assert!(first.status.success(), "{}", stderr(&first));
    let same = job(&model(), &steps[1..]);
    assert!(same.status.success(), "{}", stderr(&same));
    let other = job(&touched(dir.path(), "blk.1.attn_k.weight"), &steps[1..]);
    assert_eq!(other.status.code(), Some(1));
    assert!(stderr(&other).contains("model.layers.1.self_attn.qkv_proj.qweight"), "{}", stderr(&other));
}
