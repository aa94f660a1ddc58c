//! The command itself: help, JSON, what goes to which stream, and readers that go away.
#![cfg(feature = "cli")]

mod common;
mod support;

use serde_json::Value;
use std::io::Read;
use std::process::Stdio;
use support::models::{GLM, q4_k};
use support::{fixture, preshard, snapshot, stderr, stdout};

fn llama() -> String {
    fixture("dense/tiny-llama-Q4_K_M.gguf").to_str().unwrap().to_owned()
}

fn json(args: &[&str]) -> Value {
    let run = preshard().args(args).output().unwrap();
    assert!(run.status.success(), "{args:?}: {}", stderr(&run));
    serde_json::from_str(&stdout(&run)).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", stdout(&run)))
}

/// Every command, in the order of the help.
const COMMANDS: [&str; 9] =
    ["inspect", "plan", "convert", "verify", "diff", "merge", "load", "completions", "man"];

#[test]
fn help_names_every_command_and_option() {
    let help = |args: &[&str]| {
        let run = preshard().args(args).output().unwrap();
        assert!(run.status.success() && stderr(&run).is_empty(), "{args:?}");
        stdout(&run)
    };
    let all = help(&["--help"]);
    for command in COMMANDS {
        assert!(all.contains(command), "{all}");
        let text = help(&[command, "--help"]);
        assert!(text.contains(&format!("Usage: preshard {command}")), "{text}");
        assert_eq!(text, help(&["help", command]));
    }
    let text = help(&["convert", "--help"]);
    for option in [
        "--tp",
        "--pp",
        "--pp-layers",
        "--ep",
        "--ranks",
        "--weights",
        "--indexer",
        "--mtp",
        "--layout",
        "--misaligned",
        "--mixed",
        "--hf-config",
        "--mappings",
        "--threads",
        "--memory",
        "--device",
        "--force",
        "--json",
        "--quiet",
        "--verbose",
        "--max-file-size",
        "--allow-nonfinite",
        "--out",
    ] {
        assert!(
            text.contains(&format!("{option} ")) || text.contains(&format!("{option}\n")),
            "{option}: {text}"
        );
    }
    assert_eq!(
        stdout(&preshard().arg("--version").output().unwrap()),
        format!("preshard {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn json_is_json_and_agrees_with_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let source = llama();

    let inspected = json(&["inspect", "--json", &source]);
    assert_eq!(inspected["metadata"]["general.architecture"], "llama");
    let planned = json(&["plan", "--json", &source, "--tp", "2", "--weights", "bf16"]);
    assert_eq!(inspected["tensors"].as_array().unwrap().len(), planned["tensors"].as_array().unwrap().len());
    assert!(!out.exists());
    let converted =
        json(&["convert", "--json", &source, "--tp", "2", "--weights", "bf16", "-o", out.to_str().unwrap()]);
    let files = snapshot(&out);
    for (file, plan) in
        converted["files"].as_array().unwrap().iter().zip(planned["files"].as_array().unwrap())
    {
        let bytes = &files[file["file"].as_str().unwrap()];
        assert_eq!(file["bytes"], bytes.len());
        assert_eq!(file["blake3"], blake3::hash(bytes).to_hex().as_str());
        // The plan knew.
        assert_eq!((&plan["file"], &plan["bytes"]), (&file["file"], &file["bytes"]));
    }
    assert_eq!(converted["written"], converted["bytes"]);
    let verified = json(&["verify", "--json", out.to_str().unwrap()]);
    assert_eq!(verified["ok"], true);
    let verified = json(&["verify", "--json", out.to_str().unwrap(), "--source", &source]);
    assert_eq!((&verified["ok"], &verified["against"]), (&true.into(), &"source".into()));

    // A changed byte: still JSON, status 1, and the file is named.
    let shard = out.join("model-rank-1-part-0.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    for extra in [&[][..], &["--source", &source]] {
        let run = preshard().args(["verify", "--json"]).arg(&out).args(extra).output().unwrap();
        assert_eq!(run.status.code(), Some(1));
        let found: Value = serde_json::from_str(&stdout(&run)).unwrap();
        assert_eq!(found["ok"], false);
        assert!(
            found["problems"][0].as_str().unwrap().contains("model-rank-1-part-0.safetensors"),
            "{found}"
        );
    }
}

#[test]
fn results_go_to_standard_output_and_nothing_else_does() {
    let dir = tempfile::tempdir().unwrap();
    let source = GLM.build(&q4_k).write(dir.path().join("model.gguf"));
    let source = source.to_str().unwrap();
    let out = |n: &str| dir.path().join(n).to_str().unwrap().to_owned();
    let run = preshard().args(["convert", "--tp", "2", "-o", &out("a"), source]).output().unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
    for file in ["model-rank-0-part-0.safetensors", "mtp-rank-1-part-0.safetensors"] {
        assert!(stdout(&run).contains(file), "{}", stdout(&run));
    }
    let run = preshard().args(["convert", "-q", "--tp", "2", "-o", &out("b"), source]).output().unwrap();
    assert_eq!((stdout(&run).as_str(), stderr(&run).as_str()), ("", ""));
    for args in [&["plan", source][..], &["inspect", source], &["verify", &out("a")]] {
        let run = preshard().args(args).output().unwrap();
        assert!(run.status.success() && !stdout(&run).is_empty(), "{args:?}: {}", stderr(&run));
        // Not on a terminal: no colours, no progress.
        assert!(!(stdout(&run) + &stderr(&run)).contains(['\u{1b}', '\r']), "{args:?}");
    }
    let plan =
        stdout(&preshard().args(["plan", "--gpu-memory", "1M", "--tp", "2", source]).output().unwrap());
    assert!(plan.contains("does not fit"), "{plan}");
}

#[test]
fn a_reader_that_went_away_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let source = GLM.build(&q4_k).write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let commands = [
        vec!["--help".to_owned()],
        vec!["plan".into(), "-v".into(), source.display().to_string()],
        vec!["plan".into(), "--json".into(), source.display().to_string()],
        vec!["inspect".into(), "-v".into(), source.display().to_string()],
        vec!["convert".into(), source.display().to_string(), "-o".into(), out.display().to_string()],
    ];
    for args in commands {
        let mut child = preshard().args(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}: {text}");
        assert!(!text.contains("panicked") && !text.contains("error"), "{args:?}: {text}");
    }
    assert!(out.join("preshard.json").exists(), "the conversion itself is done");
}

#[test]
fn load_refuses_ranks_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let source = llama();
    let run = |args: &[&str]| preshard().args(args).arg(&out).output().unwrap();
    assert!(
        run(&["convert", &source, "--tp", "2", "--weights", "bf16", "--ranks", "0", "-o"]).status.success()
    );
    for (ranks, why) in [
        ("2", "--ranks: rank 2 of 2; the last is 1"),
        ("0,7", "--ranks: rank 7 of 2; the last is 1"),
        ("0-1", "--ranks: rank 1 is not in this directory"),
    ] {
        let refused = run(&["load", "--device", "cpu", "--ranks", ranks]);
        assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
        assert!(stdout(&refused).is_empty());
    }
    let loaded = run(&["load", "--device", "cpu", "--ranks", "0"]);
    assert!(loaded.status.success(), "{}", stderr(&loaded));
    assert_eq!(stdout(&loaded).lines().count(), 1);
    // -v says where the time went, in the order in which it passed.
    let told = run(&["load", "-v", "--device", "cpu", "--ranks", "0"]);
    let text = stdout(&told);
    let lines: Vec<&str> = text.lines().skip(1).collect();
    let ends = ["processor time before main", "directory open", "memory", "last byte", "all of it verified"];
    assert!(lines.len() == ends.len() && lines.iter().zip(ends).all(|(l, e)| l.contains(e)), "{text}");
    let times: Vec<f64> =
        lines[1..].iter().map(|l| l.split_whitespace().next().unwrap().parse().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn a_new_architecture_is_two_tables_and_no_rust() {
    let dir = tempfile::tempdir().unwrap();
    // llama under a name of the same length that no table compiled in knows.
    let bytes = std::fs::read(fixture("dense/tiny-llama-Q4_K_M.gguf")).unwrap();
    let mut renamed = bytes.clone();
    for at in 0..bytes.len() - 6 {
        if &bytes[at..at + 6] == b"llama." {
            renamed[at..at + 5].copy_from_slice(b"novel");
        }
    }
    let key = b"general.architecture";
    let value = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 12;
    assert_eq!(&bytes[value..value + 5], b"llama");
    renamed[value..value + 5].copy_from_slice(b"novel");
    let model = dir.path().join("novel.gguf");
    std::fs::write(&model, renamed).unwrap();
    for folder in ["arch", "config"] {
        let table =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings").join(folder).join("llama.toml");
        let text = std::fs::read_to_string(table).unwrap().replace("llama.", "novel.");
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        let text = text.replace("architecture = \"llama\"", "architecture = \"novel\"");
        std::fs::write(dir.path().join(folder).join("novel.toml"), text).unwrap();
    }
    let convert = |out: &str, source: &std::path::Path, mappings: bool| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_preshard"));
        command.arg("convert").arg(source).arg("-o").arg(dir.path().join(out));
        if mappings {
            command.arg("--mappings").arg(dir.path());
        }
        command.output().unwrap()
    };
    assert_eq!(convert("refused", &model, false).status.code(), Some(1));
    let output = convert("novel", &model, true);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(convert("llama", &fixture("dense/tiny-llama-Q4_K_M.gguf"), false).status.success());
    for file in ["model-rank-0-part-0.safetensors", "config.json", "tokenizer.json"] {
        let read = |out: &str| std::fs::read(dir.path().join(out).join(file)).unwrap();
        assert!(read("novel") == read("llama"), "{file}");
    }
}

/// The plan that a page of `plan --html` holds.
fn page_data(page: &str) -> Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="plan">"#).unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn the_page_of_a_plan_counts_every_byte_of_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("plan.html"), dir.path().join("out"));
    let source = fixture("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf");
    let how = [source.to_str().unwrap(), "--tp", "2", "--misaligned", "dequantise"];
    let page = ["--html", file.to_str().unwrap(), "--gpu-memory", "96GB", "--json"];
    let plan = json(&[&["plan"], &how[..], &page[..]].concat());
    let page = std::fs::read_to_string(&file).unwrap();
    for outside in ["http:", "https:", "//", "@import", "url("] {
        // Comments of the script begin with two strokes and a space.
        assert!(!page.replace("// ", "").contains(outside), "{outside}");
    }
    let page = page_data(&page);
    assert_eq!(page["memory"], 96_000_000_000u64);
    json(&[&["convert"], &how[..], &["-o", out.to_str().unwrap(), "--json"]].concat());
    for rank in 0..2 {
        let row = &page["rows"][rank];
        assert_eq!(row["bytes"], plan["ranks"][rank]["bytes"]);
        let kind = |k: usize| -> u64 {
            row["cells"].as_array().unwrap().iter().map(|cell| cell[k].as_u64().unwrap()).sum()
        };
        // The weights are random: two ranks' tensors are equal only where they are copies.
        let (mut packed, mut replicated, mut all) = (0, 0, 0);
        for name in ["model", "mtp"] {
            let read =
                |rank| std::fs::read(out.join(format!("{name}-rank-{rank}-part-0.safetensors"))).unwrap();
            let (ours, theirs) = (read(rank), read(1 - rank));
            let theirs = safetensors::SafeTensors::deserialize(&theirs).unwrap();
            let ours_read = safetensors::SafeTensors::deserialize(&ours).unwrap();
            for (tensor, view) in ours_read.tensors() {
                let bytes = view.data().len() as u64;
                match theirs.tensor(&tensor).unwrap().data() == view.data() {
                    true => replicated += bytes,
                    false if tensor.ends_with("qweight") => packed += bytes,
                    false => {}
                }
            }
            all += ours.len() as u64;
        }
        assert_eq!((kind(0), kind(3)), (packed, replicated), "rank {rank}");
        assert_eq!((0..4).map(kind).sum::<u64>(), all);
        assert!(kind(1) > 0 && kind(2) > 0);
    }
    let listed = page["tensors"].as_array().unwrap();
    let names = |file: usize| plan["files"][file]["tensors"].as_array().unwrap().len();
    assert_eq!(listed.len(), names(0) + names(2));
}

#[test]
fn text_from_files_is_never_markup_in_the_page_of_a_plan() {
    let dir = tempfile::tempdir().unwrap();
    let why = "vLLM splits it into W_UK and W_UV after loading";
    let hostile = "</script><img src=x onerror=alert(1)>&lt;\u{202e}";
    let tables = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("mappings/engine");
    let table = std::fs::read_to_string(tables.join("vllm-dsa.toml")).unwrap();
    let base = std::fs::read_to_string(tables.join("vllm-mla.toml")).unwrap();
    assert!(table.contains(why) || base.contains(why));
    std::fs::create_dir(dir.path().join("engine")).unwrap();
    for (name, text) in [("vllm-dsa", table), ("vllm-mla", base)] {
        std::fs::write(dir.path().join(format!("engine/{name}.toml")), text.replace(why, hostile)).unwrap();
    }
    let file = dir.path().join("plan.html");
    let source = fixture("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf");
    let run = preshard()
        .args(["plan", source.to_str().unwrap(), "--mappings", dir.path().to_str().unwrap()])
        .args(["--html", file.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", stderr(&run));
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(!page.contains("<img") && !page.contains('\u{202e}'));
    assert_eq!(page.matches("</script>").count(), 2);
    let seen = hostile.replace('\u{202e}', "\\u{202e}");
    assert!(page_data(&page)["decoded"].as_array().unwrap().iter().any(|r| r[2] == *seen));
}

/// Both spellings of the word are the same policy; the files and manifests keep the one.
#[test]
fn dequantize_is_dequantise() {
    let source = llama();
    let planned =
        |word: &str| json(&["plan", "--json", &source, "--tp", "4", "--misaligned", word, "--mixed", word]);
    // Without the policy the cut inside a block is refused, so the plans below are its work.
    let refused = preshard().args(["plan", &source, "--tp", "4"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("--misaligned dequantise"), "{}", stderr(&refused));
    assert_eq!(planned("dequantize"), planned("dequantise"));
}

#[test]
fn completions_know_every_command_in_shells_that_accept_them() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = preshard().args(["completions", shell]).output().unwrap();
        assert!(run.status.success() && stderr(&run).is_empty(), "{shell}: {}", stderr(&run));
        let script = stdout(&run);
        assert!(COMMANDS.iter().all(|command| script.contains(command)), "{shell}: {script}");
        assert!(["--misaligned", "--expect"].iter().all(|o| script.contains(&o[2..])), "{shell}: {script}");
        // Every shell that is installed parses its script.
        let path = dir.path().join(shell);
        std::fs::write(&path, script).unwrap();
        let parsed = std::process::Command::new(shell).arg("-n").arg(&path).output();
        match parsed {
            Ok(output) => assert!(output.status.success(), "{shell}: {}", stderr(&output)),
            Err(_) => assert_ne!(shell, "bash", "bash is needed to run the tests"),
        }
    }
    // What bash offers after `preshard ver` and `preshard plan --misal`.
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let script = format!(
            "source {}; COMP_WORDS=({line}); COMP_CWORD={}; COMP_LINE='{line}'; COMP_POINT={}; \
             _preshard preshard '{last}' '{before}'; echo \"${{COMPREPLY[@]}}\"",
            dir.path().join("bash").display(),
            words.len() - 1,
            line.len()
        );
        stdout(&std::process::Command::new("bash").args(["-c", &script]).output().unwrap())
    };
    assert_eq!(complete("preshard ver").trim(), "verify");
    assert_eq!(complete("preshard plan --misal").trim(), "--misaligned");
    assert_eq!(complete("preshard plan --misaligned ref").trim(), "refuse");
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("share/man/man1");
    let run = preshard().arg("man").arg(&man).output().unwrap();
    assert!(run.status.success() && stdout(&run).is_empty(), "{}", stderr(&run));
    let pages = snapshot(&man);
    let mut names: Vec<String> = COMMANDS.iter().map(|command| format!("preshard-{command}.1")).collect();
    names.push("preshard.1".into());
    names.sort();
    assert!(pages.keys().eq(&names), "{:?}", pages.keys());
    let printed = preshard().arg("man").output().unwrap();
    assert!(printed.stdout == pages["preshard.1"]);
    for command in COMMANDS {
        let page = String::from_utf8_lossy(&pages[&format!("preshard-{command}.1")]).into_owned();
        assert!(page.contains(&format!(".TH preshard-{command} 1")), "{page}");
        // Hyphens are escaped in roff.
        let page = page.replace("\\-", "-");
        let help = stdout(&preshard().args([command, "--help"]).output().unwrap());
        for option in help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 2) {
            let option = option.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
            assert!(page.contains(option), "{command}: {option}: {page}");
        }
        let text = String::from_utf8_lossy(&pages["preshard.1"]).replace("\\-", "-");
        assert!(text.contains(&format!("preshard-{command}(1)")), "{text}");
    }
    assert!(String::from_utf8_lossy(&pages["preshard.1"]).contains("Exit status"));
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let refused = preshard().arg("man").arg(&file).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).starts_with("error: ") && stderr(&refused).contains("file"),
        "{}",
        stderr(&refused)
    );
}
