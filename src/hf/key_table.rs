//! docs/metadata.md, made from the config tables; `UPDATE=1 cargo test key_table` writes it.
//!
//! The keys are those that the tables speak of and those that llama.cpp knows for the architecture
//! (tests/fixtures/metadata/llama_cpp.tsv, from its source by scripts/metadata_keys.py): a key that llama.cpp
//! reads or writes must be known to the table.

use super::config::{Architecture, Use, json};
use super::keys::{Fate, Reads};
use crate::mapping::Tables;
use crate::mapping::tables::built_in_names;
use std::collections::{BTreeMap, BTreeSet};

const LLAMA_CPP: &str = include_str!("../../tests/fixtures/metadata/llama_cpp.tsv");
const ABOUT: &str = "\
# Metadata keys

What becomes of each metadata key of a GGUF, by architecture. Names are without the architecture's prefix
(`llama.block_count` is `block_count` here). Made from `mappings/config` by the test in `src/hf/key_table.rs`, with
`UPDATE=1 cargo test key_table`; the keys are those of the tables, and all that llama.cpp reads, or its converter
writes, for these architectures. The rules behind the words are in [mappings.md](mappings.md#every-metadata-key-is-accounted-for).

| word | meaning |
|---|---|
| read | the value goes where the tables below say |
| must be | refused unless the value is one of these: no class of the architecture computes with another. An expression in `code` is over other keys |
| no effect | known to change nothing that is converted |
| refused | not known: `--allow-unknown-keys` goes on without it. Of `tokenizer.*`, a note instead |
";

struct Table {
    name: &'static str,
    rules: Architecture,
}

impl Table {
    fn all() -> Vec<Table> {
        built_in_names("config")
            .map(|name| Table { name, rules: Architecture::named(name, &Tables::default()).unwrap() })
            .collect()
    }

    /// The keys to show.
    fn keys(&self, reads: &Reads) -> BTreeSet<String> {
        let keys = &self.rules.keys;
        let metadata = |name: &&String| name.contains('.') || !MADE.contains(&name.as_str());
        reads
            .keys()
            .filter(metadata)
            .chain(keys.neutral.keys())
            .chain(keys.ignored.keys())
            .chain(keys.read.keys())
            .cloned()
            .chain(known_to_llama_cpp(self.name))
            .filter(|key| {
                !MADE.contains(&key.as_str()) && !key.starts_with("rope_f") && !key.starts_with("indexer.")
            })
            .collect()
    }

    /// What becomes of a key, in the words of the document.
    fn fate(&self, key: &str, reads: &Reads) -> String {
        match self.rules.fate(key, reads) {
            Fate::Read => "read".into(),
            Fate::Ignored => "no effect".into(),
            Fate::Unknown => "refused".into(),
            Fate::Neutral(rule) => {
                let (rules, _) = rule.rules();
                let mut values: Vec<String> = Vec::new();
                for rule in rules {
                    let text = match rule {
                        toml::Value::String(text) => match self.rules.symbol(text).unwrap_or(text) {
                            "0" => "0".into(),
                            text => format!("`{text}`"),
                        },
                        constant => json(constant).to_string(),
                    };
                    if !values.contains(&text) {
                        values.push(text);
                    }
                }
                format!("must be {}", values.join(" or "))
            }
        }
    }
}

/// Names that expressions use and that are no metadata keys: [`super::facts`] makes them.
const MADE: [&str; 8] = ["vocab_rows", "tied", "dtype", "indexer", "mtp_layers", "bos", "pad", "eos"];

fn known_to_llama_cpp(architecture: &str) -> impl Iterator<Item = String> {
    LLAMA_CPP
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .filter(move |(name, _)| *name == architecture)
        .filter_map(|(_, rest)| Some(rest.split_once('\t')?.0.to_owned()))
}

/// What the value of a key that is read decides.
fn decided(uses: &BTreeSet<Use>) -> String {
    let mut config: Vec<&str> = Vec::new();
    let mut rest = Vec::new();
    for decides in uses {
        match decides {
            Use::Config(key) => config.push(key),
            Use::Class => rest.push("the class".to_owned()),
            Use::Refusal(reason) => rest.push(format!("refused: {reason}")),
            Use::Symbol(_) => {}
        }
    }
    let mut words = Vec::new();
    if !config.is_empty() {
        words.push(format!(
            "config.json: {}",
            config.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ")
        ));
    }
    words.extend(rest);
    words.join("; ")
}

/// The document.
fn document() -> String {
    let tables = Table::all();
    let reads: Vec<Reads> = tables.iter().map(|t| t.rules.reads().unwrap()).collect();
    let mut fates: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let keys: BTreeSet<String> = tables.iter().zip(&reads).flat_map(|(t, r)| t.keys(r)).collect();
    for key in keys {
        let row = tables.iter().zip(&reads).map(|(t, r)| t.fate(&key, r)).collect();
        fates.insert(key, row);
    }
    // What is behind the word: where the value goes, or why it has no effect.
    let behind = |key: &str| -> String {
        let mut uses: BTreeSet<Use> = BTreeSet::new();
        let mut words: BTreeSet<&str> = BTreeSet::new();
        for (table, reads) in tables.iter().zip(&reads) {
            uses.extend(reads.get(key).into_iter().flatten().cloned());
            let keys = &table.rules.keys;
            words.extend(keys.read.get(key).or(keys.ignored.get(key)).map(String::as_str));
        }
        let read = decided(&uses);
        let all: Vec<&str> = std::iter::once(read.as_str()).chain(words).filter(|w| !w.is_empty()).collect();
        all.join("; ")
    };
    let mut text = ABOUT.to_owned();
    text.push_str("\n## The same in every architecture\n\n| key | becomes |\n|---|---|\n");
    for (key, row) in fates.iter().filter(|(_, row)| row.iter().all(|cell| cell == &row[0])) {
        let behind = behind(key);
        let colon = if behind.is_empty() { "" } else { ": " };
        text.push_str(&format!("| `{key}` | {}{colon}{behind} |\n", row[0]));
    }
    let names: Vec<&str> = tables.iter().map(|t| t.name).collect();
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    text.push_str("\n## By architecture\n\n");
    text.push_str(&format!("| key | {} |\n|---{}|\n", names.join(" | "), "|---".repeat(names.len())));
    let differ = || fates.iter().filter(|(_, row)| row.iter().any(|cell| cell != &row[0]));
    for (key, row) in differ() {
        let cells: Vec<String> = std::iter::once(format!("`{key}`")).chain(row.iter().cloned()).collect();
        text.push_str(&line(&cells));
    }
    text.push_str("\nWhere they go that are read, and why those have no effect that have none:\n\n| key | |\n|---|---|\n");
    for (key, _) in differ() {
        let behind = behind(key);
        if !behind.is_empty() {
            text.push_str(&line(&[format!("`{key}`"), behind]));
        }
    }
    text
}

/// llama.cpp's own list, which our tables have no part in.
#[test]
fn every_key_that_llama_cpp_knows_is_accounted_for() {
    let mut seen = 0;
    let mut missing = Vec::new();
    for table in Table::all() {
        let reads = table.rules.reads().unwrap();
        for key in known_to_llama_cpp(table.name) {
            seen += 1;
            if matches!(table.rules.fate(&key, &reads), Fate::Unknown) {
                missing.push(format!("{}.{key}", table.name));
            }
        }
    }
    assert!(seen > 600, "{seen} keys in the list");
    assert!(missing.is_empty(), "no table says what becomes of {missing:?}");
}

#[test]
fn the_document_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metadata.md");
    let made = document();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(there == made, "docs/metadata.md is not what the tables say: UPDATE=1 cargo test key_table");
}
