//! Files of the model's own Hugging Face directory (`--hf-config DIR`), which win over made ones.
//!
//! They are checked against the GGUF first: a config.json of another size, or another model's
//! tokenizer, would give a directory that loads and answers nonsense.

use super::config::Architecture;
use super::vocab::{TokenType, Vocab};
use super::{Model, Request};
use crate::error::{Error, Result, shown, shown_path};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Files taken over as they are. Any one of [`TOKENIZERS`] is a tokenizer.
const TAKEN: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];
const TOKENIZERS: &[&str] =
    &["tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model", "vocab.json"];
/// The largest file taken; the largest tokenizer.json known has 34 MB.
const LIMIT: u64 = 256 << 20;

/// A given directory, read.
pub(super) struct Given {
    dir: PathBuf,
    files: BTreeMap<String, Vec<u8>>,
    config: Option<Map<String, Value>>,
}

impl Given {
    /// Reads the files of `dir` that are taken over.
    pub(super) fn read(dir: &Path) -> Result<Given> {
        let mut files = BTreeMap::new();
        let entries = std::fs::read_dir(dir).map_err(|e| Error::io(dir, "read the directory", e))?;
        let mut config = None;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(dir, "read the directory", e))?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            // Code that a tokenizer needs (Kimi-K2's tokenization_kimi.py) comes with it; it runs only where
            // the user trusts it.
            let code = name.ends_with(".py") && !name.starts_with('.');
            if name != "config.json" && !TAKEN.contains(&name.as_str()) && !code {
                continue;
            }
            let path = entry.path();
            let meta = std::fs::metadata(&path).map_err(|e| Error::io(&path, "read", e))?;
            if !meta.is_file() || meta.len() > LIMIT {
                return Err(Error::request(
                    path.display(),
                    format!("{} bytes, or no plain file: expected one of at most {LIMIT} bytes", meta.len()),
                ));
            }
            let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
            if name == "config.json" {
                config = Some(object(&path, &bytes)?);
            } else {
                files.insert(name, bytes);
            }
        }
        if config.is_none() && files.is_empty() {
            return Err(Error::request(
                dir.display(),
                "has no config.json and no tokenizer: give the directory of the original model",
            ));
        }
        // The text part of a multimodal model: the GGUF has no other.
        if let Some(Value::Object(text)) = config.as_mut().and_then(|c| c.remove("text_config")) {
            config = Some(text);
        }
        Ok(Given { dir: dir.to_owned(), files, config })
    }

    pub(super) fn has_config(&self) -> bool {
        self.config.is_some()
    }

    pub(super) fn has_tokenizer(&self) -> bool {
        TOKENIZERS.iter().any(|name| self.files.contains_key(*name))
    }

    /// Whether a chat template comes along, on its own or in tokenizer_config.json.
    pub(super) fn has_template(&self) -> bool {
        let inside =
            self.files.get("tokenizer_config.json").and_then(|b| serde_json::from_slice::<Value>(b).ok());
        self.files.keys().any(|name| name.starts_with("chat_template"))
            || inside.is_some_and(|config| config.get("chat_template").is_some_and(|t| !t.is_null()))
    }

    /// The files to write, config.json not among them.
    pub(super) fn files(&self, notes: &mut Vec<String>) -> Vec<(String, Vec<u8>)> {
        for name in self.files.keys().filter(|name| name.ends_with(".py")) {
            notes.push(format!(
                "{name} is taken over from {}: code, used only where it is trusted",
                self.shown()
            ));
        }
        self.files.iter().map(|(name, bytes)| (name.clone(), bytes.clone())).collect()
    }

    fn shown(&self) -> String {
        shown_path(&self.dir)
    }

    fn refused(&self, detail: String) -> Error {
        Error::request(self.dir.join("config.json").display(), detail)
    }

    /// The model named by the given config.json. Accepted: the GGUF's class (`ours`), its class with the
    /// indexer kept (`kept`), or a listed compatible class.
    pub(super) fn model(&self, rules: &Architecture, ours: &Model, kept: &Model) -> Result<Model> {
        let theirs = |config: &'_ Map<String, Value>| {
            config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str).map(str::to_owned)
        };
        let Some((config, class)) = self.config.as_ref().and_then(|c| Some((c, theirs(c)?))) else {
            return Ok(ours.clone());
        };
        if class != kept.class && class != ours.class && !rules.kin().contains(&class) {
            return Err(self.refused(format!(
                "architectures {:?}, but the GGUF is a {}: give the directory of the same model",
                shown(&class),
                kept.class
            )));
        }
        // Without its indexer the model is of another class, whatever the file says.
        if ours != kept {
            return Ok(ours.clone());
        }
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or(&ours.model_type);
        Ok(Model { class, model_type: model_type.to_owned() })
    }

    /// The given config.json with what this conversion changes; `ours` is the made one, `model` what
    /// [`Given::model`] says.
    pub(super) fn config(
        &self,
        rules: &Architecture,
        ours: &Map<String, Value>,
        model: &Model,
        request: &Request,
        notes: &mut Vec<String>,
    ) -> Result<Map<String, Value>> {
        let Some(given) = &self.config else { return Ok(ours.clone()) };
        let mut problems = Vec::new();
        for key in &rules.structure {
            if let (Some(theirs), Some(made)) = (given.get(key), ours.get(key))
                && !same(theirs, made)
            {
                problems.push(self.refused(format!(
                    "{key} is {theirs}, but {made} in the GGUF: give the directory of the same model"
                )));
            }
        }
        let rows = request.vocab_rows;
        let vocab = given.get("vocab_size").and_then(Value::as_u64);
        if let Some(vocab) = vocab.filter(|vocab| *vocab > rows) {
            problems.push(self.refused(format!(
                "vocab_size is {vocab}, but token_embd.weight has {rows} rows: give the directory of the same model"
            )));
        }
        if request.tied && given.get("tie_word_embeddings") == Some(&Value::Bool(false)) {
            problems.push(self.refused(
                "tie_word_embeddings is false, but the GGUF has no output.weight: give the directory of the same model"
                    .to_owned(),
            ));
        }
        Error::all(problems)?;

        let mut config = given.clone();
        let mut set = |config: &mut Map<String, Value>, key: &str, value: Value| {
            if let Some(old) = config.insert(key.to_owned(), value.clone()).filter(|old| *old != value) {
                notes.push(format!("config.json: {key} changed from {old} to {value}"));
            }
        };
        set(&mut config, "architectures", vec![model.class.clone()].into());
        if given.get("model_type").and_then(Value::as_str) != Some(&model.model_type) {
            set(&mut config, "model_type", model.model_type.as_str().into());
            // Another class reads other keys and has other defaults.
            config.retain(|key, _| !key.starts_with("index") && key != "auto_map");
            for (key, value) in ours {
                config.entry(key).or_insert_with(|| value.clone());
            }
        }
        if vocab != Some(rows) {
            set(&mut config, "vocab_size", rows.into());
        }
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool);
        if tied.is_some_and(|t| t != request.tied) || (tied.is_none() && request.tied) {
            set(&mut config, "tie_word_embeddings", request.tied.into());
        }
        if let Some(dtype) = config.remove("torch_dtype") {
            config.insert("dtype".to_owned(), dtype);
        }
        set(&mut config, "dtype", request.dtype.as_str().into());
        let layers = if request.mtp { ours.get("num_nextn_predict_layers").cloned() } else { Some(0.into()) };
        if let Some(layers) = layers
            && config.contains_key("num_nextn_predict_layers")
        {
            set(&mut config, "num_nextn_predict_layers", layers);
        }
        for key in ["quantization_config", "compression_config"] {
            if config.remove(key).is_some() {
                notes.push(format!("config.json: {key} left out, it describes other weights than these"));
            }
        }
        Ok(config)
    }

    /// Refuses a tokenizer.json whose tokens are not those of the GGUF.
    pub(super) fn check_tokenizer(&self, vocab: &Vocab, rows: u64) -> Result<()> {
        let Some(bytes) = self.files.get("tokenizer.json") else { return Ok(()) };
        let path = self.dir.join("tokenizer.json");
        let tokenizer = object(&path, bytes)?;
        let refused = |detail: String| Err(Error::request(path.display(), detail));
        let mut ids: BTreeMap<&str, u64> = BTreeMap::new();
        match tokenizer.get("model").and_then(|m| m.get("vocab")) {
            // BPE and WordPiece.
            Some(Value::Object(map)) => {
                ids.extend(map.iter().filter_map(|(text, id)| Some((text.as_str(), id.as_u64()?))));
            }
            // Unigram: pairs of text and score.
            Some(Value::Array(all)) => ids.extend(
                all.iter().enumerate().filter_map(|(id, pair)| Some((pair.get(0)?.as_str()?, id as u64))),
            ),
            _ => return refused("no model.vocab: expected a tokenizer of the tokenizers library".to_owned()),
        }
        for token in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            if let (Some(text), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) {
                ids.insert(text, id);
            }
        }
        if let Some((text, id)) = ids.iter().max_by_key(|(_, id)| **id).filter(|(_, id)| **id >= rows) {
            return refused(format!(
                "token {:?} has id {id}, but token_embd.weight has {rows} rows: give the directory of the same model",
                shown(text)
            ));
        }
        // Converters rewrite the text of added tokens; normal ones are the same everywhere.
        for (id, token) in vocab.tokens.iter().enumerate().filter(|(_, t)| t.ty == TokenType::Normal) {
            let Some(text) = token.text.as_deref() else { continue };
            if let Some(other) = ids.get(text).filter(|other| **other != id as u64) {
                return refused(format!(
                    "{:?} is token {other}, but {id} in the GGUF: give the directory of the same model",
                    shown(text)
                ));
            }
        }
        Ok(())
    }
}

/// Whether two values say the same: 1 and 1.0 do.
fn same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}

fn object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    serde_json::from_slice(bytes).map_err(|e| Error::request(path.display(), format!("no JSON object: {e}")))
}
