//! What a table under `--mappings` can do without a line of Rust, and how a wrong one is refused.
#![cfg(feature = "cli")]

mod common;
mod support;

use common::*;
use preshard::manifest::Manifest;
use std::path::Path;
use std::process::Output;
use support::models::{LLAMA, blocks, q4_k};
use support::{Tensors, fixture, get, preshard, read, stderr, stdout};

/// An engine that does not exist: its own file names, parameter names, packed suffixes and cuts.
const TOY: &str = r#"
engine = "toy 1"
block  = "decoder.{L}"

[files]
rank  = "weights.{tp}.safetensors"
stage = "weights.{pp}.{tp}.safetensors"

[packed]
types  = ["q4_K"]
blocks = "ggml"
type   = "kind"

[serve]
command = "toy run {dir}"
packed  = "toy run --ggml {dir}"
tp      = "-n {tp}"

[[param]]
to    = "embedding.weight"
join  = ["model.embed_tokens.weight"]
stage = "first"
[[param]]
to    = "head.weight"
join  = ["lm_head.weight"]
cut   = "cols"
float = "it has no kernel"
stage = "last"
[[param]]
to    = "norm.weight"
join  = ["model.norm.weight"]
stage = "last"
[[param]]
to   = "{B}.norms.weight"
join = ["model.layers.{L}.input_layernorm.weight", "model.layers.{L}.post_attention_layernorm.weight"]
[[param]]
to   = "{B}.q.weight"
join = ["model.layers.{L}.self_attn.q_proj.weight"]
cut  = "heads"
[[param]]
to   = "{B}.kv.weight"
join = ["model.layers.{L}.self_attn.v_proj.weight", "model.layers.{L}.self_attn.k_proj.weight"]
cut  = "kv_heads"
float = "it is split after loading"
[[param]]
to   = "{B}.o.weight"
join = ["model.layers.{L}.self_attn.o_proj.weight"]
[[param]]
to   = "{B}.up.weight"
join = ["model.layers.{L}.mlp.up_proj.weight", "model.layers.{L}.mlp.gate_proj.weight"]
cut  = "rows"
[[param]]
to   = "{B}.down.weight"
join = ["model.layers.{L}.mlp.down_proj.weight"]
"#;

/// Writes tables by their path under a mappings directory, and runs a command on a model with them.
fn run(dir: &Path, tables: &[(&str, &str)], args: &[&str]) -> Output {
    for (path, text) in tables {
        let path = dir.join("mappings").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let source = dir.join("model.gguf");
    LLAMA.build(&q4_k).write(&source);
    let mut command = preshard();
    command
        .arg("convert")
        .arg(source)
        .arg("-o")
        .arg(dir.join("out"))
        .arg("--mappings")
        .arg(dir.join("mappings"));
    // The tokenizer is not in a model made in code.
    command.arg("--hf-config").arg(config(dir)).args(args).output().unwrap()
}

/// The small files that a user would give beside LLAMA.
fn config(dir: &Path) -> std::path::PathBuf {
    let text = std::fs::read_to_string(fixture("hf/tiny-llama/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("hidden_size", LLAMA.hidden),
        ("intermediate_size", LLAMA.inter),
        ("num_hidden_layers", LLAMA.layers),
        ("num_attention_heads", LLAMA.heads),
        ("num_key_value_heads", LLAMA.kv_heads),
        ("head_dim", LLAMA.head),
        ("vocab_size", LLAMA.vocab),
    ] {
        config[key] = value.into();
    }
    config["tie_word_embeddings"] = false.into();
    let path = dir.join("config");
    std::fs::create_dir_all(&path).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture(&format!("hf/tiny-llama/{file}")), path.join(file)).unwrap();
    }
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    path
}

#[test]
fn an_engine_that_differs_in_names_and_cuts_is_a_table_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), &[("engine/toy.toml", TOY)], &["--layout", "toy", "--tp", "2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let out = dir.path().join("out");
    assert!(
        stdout(&output).contains(&format!("toy run --ggml {} -n 2\n", out.display())),
        "{}",
        stdout(&output)
    );
    let ranks: Vec<Tensors> = (0..2).map(|r| read(&out.join(format!("weights.{r}.safetensors")))).collect();
    // Packed whole: the blocks of the source, under the engine's own names.
    let down = blocks("blk.1.attn_output.weight", Q4_K, 512 * 256);
    for rank in &ranks {
        assert_eq!(get(rank, "decoder.1.o.ggml").bytes, down);
        assert_eq!(get(rank, "decoder.1.o.kind").bytes, [12]);
        assert!(!rank.keys().any(|name| name.contains("qweight") || name.starts_with("model.")));
        // Q6_K, which this engine's table does not list.
        assert_eq!(get(rank, "decoder.0.down.weight").dtype, "BF16");
    }
    // Packed and cut by rows, up before gate: each rank has half of the rows of both.
    let half = |name: &str, rank: usize| {
        let bytes = blocks(name, Q4_K, 256 * 512);
        bytes[rank * bytes.len() / 2..(rank + 1) * bytes.len() / 2].to_vec()
    };
    for (r, rank) in ranks.iter().enumerate() {
        let expected = [half("blk.0.ffn_up.weight", r), half("blk.0.ffn_gate.weight", r)].concat();
        assert_eq!(get(rank, "decoder.0.up.ggml").bytes, expected);
        assert_eq!(get(rank, "decoder.0.up.kind").bytes, [12, 12]);
        // Not padded: the table names no multiple.
        assert_eq!(get(rank, "head.weight").shape, [300, 128]);
    }
    // The loader's own checks take it, and verify finds it sound.
    let manifest = Manifest::read(&out).unwrap();
    assert_eq!((manifest.policy.layout.as_str(), manifest.model.layout.as_str()), ("toy", "toy"));
    let verify = preshard().arg("verify").arg(&out).output().unwrap();
    assert!(verify.status.success(), "{}", stderr(&verify));
}

#[test]
fn an_architecture_chooses_the_tables_of_its_engines() {
    let dir = tempfile::tempdir().unwrap();
    let arch =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings/arch/llama.toml"));
    let arch =
        arch.unwrap().replacen("[engines]\n", "[engines]\nnew = { table = \"toy\", without = {} }\n", 1);
    let tables = [("engine/toy.toml", TOY), ("arch/llama.toml", &arch)];
    let output = run(dir.path(), &tables, &["--layout", "new", "--pp", "2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let first = read(&dir.path().join("out/weights.0.0.safetensors"));
    let last = read(&dir.path().join("out/weights.1.0.safetensors"));
    assert!(first.contains_key("embedding.ggml") && !first.contains_key("head.weight"));
    assert!(last.contains_key("head.weight") && last.contains_key("decoder.1.o.ggml"));
}

#[test]
fn an_engine_table_that_cannot_work_is_refused() {
    let without = |line: &str| {
        assert!(TOY.contains(line), "{line}");
        TOY.replacen(line, "", 1)
    };
    let file = "mappings/engine/toy.toml";
    for (table, args, words) in [
        (TOY.replace("weights.{tp}", "weights"), &["--tp", "2"][..], &[file, "files.rank", "{tp}"][..]),
        (TOY.replace("weights.{tp}", "../w.{tp}"), &[], &[file, "files.rank", "plain file name"]),
        (
            without("stage = \"weights.{pp}.{tp}.safetensors\"\n"),
            &["--pp", "2"],
            &["--pp", "toy 1", "files.stage"],
        ),
        (without("blocks = \"ggml\"\n"), &[], &[file, "line", "blocks"]),
        (TOY.replace("[serve]", "[server]"), &[], &[file, "line", "server"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let args = [&["--layout", "toy"], args].concat();
        let output = run(dir.path(), &[("engine/toy.toml", &table)], &args);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let message = stderr(&run(dir.path(), &[("engine/toy.toml", TOY)], &["--layout", "nobody"]));
    assert!(message.contains("nobody") && message.contains("vllm-dense"), "{message}");
}

/// A table of the repository with one thing changed, and what is said of it.
fn refused_table(path: &str, change: (&str, &str), args: &[&str], words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings").join(path)).unwrap();
    assert!(text.contains(change.0), "{path}: {}", change.0);
    let output = run(dir.path(), &[(path, &text.replacen(change.0, change.1, 1))], args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{change:?}: {message}");
    let file = dir.path().join("mappings").join(path).display().to_string();
    let lines: Vec<&str> = message.lines().filter(|l| l.starts_with("error: ")).collect();
    assert!(lines.iter().any(|l| l.contains(&file)), "{change:?}: no {file} in {message}");
    for word in words {
        assert!(lines.iter().any(|l| l.contains(word)), "{change:?}: no {word:?} in {message}");
    }
    assert!(!dir.path().join("out").exists());
}

/// The number of the line of `path` in which `text` stands first.
fn line_of(path: &str, text: &str) -> String {
    let all = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings").join(path));
    let line = all.unwrap().lines().position(|l| l.contains(text)).unwrap() + 1;
    format!("line {line}: ")
}

#[test]
fn a_mistake_in_a_table_is_found_in_its_file_rule_and_line() {
    let arch = "arch/llama.toml";
    refused_table(
        arch,
        ("heads = \"heads\"", "heads = \"hedas\""),
        &[],
        &["rule for [\"blk.{L}.attn_q.weight\"]", "heads names the symbol \"hedas\"", "kv_heads"],
    );
    refused_table(
        arch,
        ("from = [\"output_norm.weight\"]", "when = \"!exprets\"\nfrom = [\"output_norm.weight\"]"),
        &[],
        &["rule for [\"output_norm.weight\"]", "when names the symbol \"exprets\""],
    );
    refused_table(arch, ("optional =", "optonal ="), &[], &[&line_of(arch, "optional ="), "`optonal`"]);
    refused_table(
        arch,
        ("vllm = \"vllm-dense\"", "vllm = { table = \"vllm-dense\", without = { nobody = \"hf\" } }"),
        &[],
        &["engines.vllm.without names the group \"nobody\""],
    );

    // A table that extends another: errors have lines all the same, those of the text they stand in.
    let engine = "engine/vllm-dense.toml";
    refused_table(
        engine,
        ("cut   = \"vocab\"", "cut   = \"vokab\""),
        &[],
        &[&line_of(engine, "cut   = \"vocab\""), "unknown variant `vokab`", "`kv_heads`"],
    );
    refused_table(
        engine,
        ("cut   = \"vocab\"", "cut   = [\"vokab\"]"),
        &[],
        &[&line_of(engine, "cut   = \"vocab\""), "unknown variant `vokab`"],
    );
    refused_table(
        engine,
        ("unless_tied", "unless_tide"),
        &[],
        &[&line_of(engine, "unless_tied"), "unknown field `unless_tide`"],
    );
    let base = "engine/_vllm-grouped.toml";
    refused_table(base, ("[[param]]\n", "[[param]]\ncutt = 1\n"), &[], &["line ", "unknown field `cutt`"]);

    let config = "config/llama.toml";
    refused_table(
        config,
        ("\"nonzero(expert_count)\"", "\"nonzero(expert_count\""),
        &[],
        &["symbols, moe: nonzero(expert_count: expected ) at byte 20"],
    );
    refused_table(config, ("[symbols]\n", "[symbls]\n"), &[], &[&line_of(config, "[symbols]"), "`symbls`"]);
    refused_table(
        config,
        ("\"intermediate_size\"]\n\"ffn_down", "\"intermediat_size\"]\n\"ffn_down"),
        &[],
        &["shapes, ffn_gate.weight: intermediat_size is no key"],
    );
}

#[test]
fn a_typo_in_an_engine_table_is_not_the_models_fault() {
    let refused = |from: &str, to: &str, words: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        assert!(TOY.contains(from), "{from}");
        let output =
            run(dir.path(), &[("engine/toy.toml", &TOY.replacen(from, to, 1))], &["--layout", "toy"]);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(!message.contains("GGUF is incomplete"), "{message}");
        for word in [&["mappings/engine/toy.toml: "], words].concat() {
            assert!(message.contains(word), "{word}: {message}");
        }
    };
    // The first member: nothing joins, and the tensor is left over.
    refused("model.norm.weight", "model.nrom.weight", &["no rule takes model.norm.weight"]);
    // A later one.
    refused(
        "self_attn.k_proj.weight",
        "self_attn.k_porj.weight",
        &["rule for \"{B}.kv.weight\" joins model.layers.{L}.self_attn.k_porj.weight, which no rule"],
    );
}

#[test]
fn an_mtp_block_needs_a_name_in_the_engine_table() {
    use support::models::GLM;
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings/engine").join(name);
        std::fs::read_to_string(path).unwrap()
    };
    std::fs::create_dir_all(dir.path().join("mappings/engine")).unwrap();
    let mut changed = 0;
    for name in ["vllm-dsa.toml", "vllm-mla.toml", "_vllm-latent.toml", "_vllm.toml"] {
        let text = read(name);
        let rest: Vec<&str> = text.lines().filter(|l| !l.starts_with("mtp_block")).collect();
        changed += text.lines().count() - rest.len();
        std::fs::write(dir.path().join("mappings/engine").join(name), rest.join("\n")).unwrap();
    }
    assert!(changed > 0);
    let source = GLM.build(&q4_k).write(dir.path().join("model.gguf"));
    let plan = |more: &[&str]| {
        let mut command = preshard();
        command.arg("plan").arg(&source).arg("--mappings").arg(dir.path().join("mappings")).args(more);
        command.output().unwrap()
    };
    let output = plan(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("for which the table names no mtp_block"), "{}", stderr(&output));
}

#[test]
fn a_directory_without_tables_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    for name in ["nowhere", "empty"] {
        let path = dir.path().join(name);
        let output = preshard()
            .arg("plan")
            .arg(fixture("dense/tiny-llama-Q4_K_M.gguf"))
            .arg("--mappings")
            .arg(&path)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let expected = format!("error: --mappings: {} has none of the folders arch, ", path.display());
        assert!(stderr(&output).starts_with(&expected), "{}", stderr(&output));
    }
}

/// Rows, symbols and values that do not fit the model: refused by name, before anything is written.
#[test]
fn rows_symbols_and_values_that_do_not_fit_are_refused() {
    let llama =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings/arch/llama.toml"))
            .unwrap();
    let norm = "to   = \"model.norm.weight\"\n";
    assert!(llama.contains(norm));
    let (arch, engine) = ("mappings/arch/llama.toml", "engine/toy.toml");
    for (more, words) in [
        ("via = \"rows\"\nrows = [{ take = \"0..5\" }]\n", &["output_norm.weight", "takes 5"][..]),
        ("via = \"rows\"\nrows = [{ swap = [\"3\", \"5\", \"7\"] }]\n", &["output_norm.weight", "3 x 5 x 7"]),
        ("via = \"rows\"\nrows = [{ take = \"0..nosuch\" }]\n", &["output_norm.weight", "nosuch"]),
        ("via = \"rows\"\nrows = [{ take = \"2..1 / 0\" }]\n", &["output_norm.weight", "1 / 0"]),
        ("via = \"rows\"\ngroups = \"7\"\n", &["output_norm.weight", "7 groups"]),
        ("via = \"rows\"\nrows = [{ of = 1 }]\n", &[arch, "one of the from names"]),
        ("groups = \"heads\"\n", &[arch, "via = \"rows\""]),
        ("via = \"zeros\"\nvalues = \"log_negative\"\n", &[arch, "values and unsqueeze"]),
        ("values = \"log_negative\"\n", &["output_norm.weight", "no number"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let table = llama.replacen(norm, &format!("{norm}{more}"), 1);
        let message = stderr(&run(dir.path(), &[("arch/llama.toml", &table)], &["--layout", "hf"]));
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
        assert!(!dir.path().join("out/model.safetensors").exists());
    }
    let dir = tempfile::tempdir().unwrap();
    let table = llama.replacen("[symbols]\n", "[symbols]\nodd = \"=blocks * nosuch\"\n", 1);
    let message = stderr(&run(dir.path(), &[("arch/llama.toml", &table)], &[]));
    assert!(message.contains(arch) && message.contains("symbol odd"), "{message}");
    for (table, words) in [
        (TOY.replace("block  = \"decoder.{L}\"\n", ""), &["block is missing"][..]),
        (
            TOY.replace("mlp.down_proj.weight", "mlp.down_proj.weight[0..2 * nosuch]"),
            &["down_proj", "nosuch"],
        ),
        (TOY.replace("mlp.down_proj.weight", "mlp.down_proj.weight[1..]"), &["down_proj", "rows of"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let message = stderr(&run(dir.path(), &[(engine, &table)], &["--layout", "toy"]));
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
    }
}
