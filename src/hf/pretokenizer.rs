//! How byte-level BPE text is cut before merging: the table in mappings/pretokenizers.toml.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    pre: Vec<PreTokenizer>,
}

/// One entry of the table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PreTokenizer {
    names: Vec<String>,
    #[serde(default)]
    steps: Vec<Step>,
    #[serde(default)]
    after: Vec<Step>,
    #[serde(default)]
    words: bool,
    #[serde(default)]
    nfc: bool,
    /// A piece that is a token stays whole.
    #[serde(default)]
    pub(super) ignore_merges: bool,
    /// A first token is added where the file does not say.
    #[serde(default)]
    pub(super) add_bos: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Step {
    /// Every match of the pattern on its own.
    Split(String),
    /// Digits from the rest; `each` on its own, or in `runs`.
    Digits(Digits),
    /// Punctuation from the rest.
    Punctuation(Punctuation),
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Digits {
    Each,
    Runs,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Punctuation {
    Contiguous,
}

impl PreTokenizer {
    /// The entry of `tokenizer.ggml.pre`. An unknown name is refused: cut by other rules the text would
    /// become other tokens, and the model would answer a little worse with no one knowing why. A file
    /// that names none (from before 2024) is read as llama.cpp reads it, with a note.
    pub(super) fn named(name: Option<&str>, notes: &mut Vec<String>) -> Result<PreTokenizer> {
        let table: Table = toml::from_str(include_str!("../../mappings/pretokenizers.toml"))
            .map_err(|e| Error::mapping("mappings/pretokenizers.toml", e.message()))?;
        let wanted = name.unwrap_or("default");
        if wanted == "default" {
            notes.push(
                "the GGUF names no pre-tokeniser (tokenizer.ggml.pre): text is cut by llama.cpp's default rules, \
                 which no model was trained with; give the model's own tokenizer with --hf-config DIR"
                    .to_owned(),
            );
        }
        table.pre.into_iter().find(|pre| pre.names.iter().any(|n| n == wanted)).ok_or_else(|| {
            Error::source(
                "tokenizer.ggml.pre",
                format!(
                    "{:?} is unknown: give the model's own tokenizer with --hf-config DIR",
                    crate::error::shown(wanted)
                ),
            )
        })
    }

    /// The normalizer of tokenizer.json.
    pub(super) fn normalizer(&self) -> Value {
        if self.nfc { json!({ "type": "NFC" }) } else { Value::Null }
    }

    /// The pre_tokenizer of tokenizer.json.
    pub(super) fn to_json(&self) -> Value {
        let step = |step: &Step| match step {
            Step::Split(pattern) => {
                json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
            }
            Step::Digits(digits) => json!({ "type": "Digits", "individual_digits": *digits == Digits::Each }),
            Step::Punctuation(Punctuation::Contiguous) => {
                json!({ "type": "Punctuation", "behavior": "Contiguous" })
            }
        };
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": self.words,
        });
        let mut all: Vec<Value> = self.steps.iter().map(step).collect();
        all.push(bytes);
        all.extend(self.after.iter().map(step));
        if all.len() == 1 { all.remove(0) } else { json!({ "type": "Sequence", "pretokenizers": all }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_name_once() {
        let table: Table = toml::from_str(include_str!("../../mappings/pretokenizers.toml")).unwrap();
        let mut names: Vec<_> = table.pre.iter().flat_map(|p| &p.names).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        for wanted in [
            "glm4",
            "deepseek-v3",
            "deepseek-llm",
            "kimi-k2",
            "qwen2",
            "llama-bpe",
            "smollm",
            "gpt-2",
            "tekken",
        ] {
            assert!(names.iter().any(|n| *n == wanted), "{wanted}");
        }
    }

    #[test]
    fn an_unknown_name_is_refused_and_a_missing_one_noted() {
        let mut notes = Vec::new();
        let error = PreTokenizer::named(Some("klingon"), &mut notes).unwrap_err().to_string();
        assert!(error.contains("klingon") && error.contains("--hf-config"), "{error}");
        assert!(notes.is_empty());
        PreTokenizer::named(None, &mut notes).unwrap();
        assert_eq!(notes.len(), 1);
    }
}
