//! The small files of a Hugging Face directory, from the metadata of a GGUF: config.json,
//! generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja.
//!
//! What the metadata does not tell is a rule of the architecture, with its source, in
//! mappings/config; how text is cut before it is tokenised is in mappings/pretokenizers.toml. Files
//! that the user gives (`--hf-config DIR`) win over all of it, after a check that they belong to the
//! same model.

mod config;
mod facts;
mod given;
#[cfg(test)]
mod key_table;
mod keys;
mod parameters;
mod pretokenizer;
mod rope;
mod spm;
mod tokenizer;
mod vocab;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::mapping::Tables;
use config::Architecture;
use given::Given;
use keys::Doubt;
use serde_json::{Map, Value};
use std::path::PathBuf;
use vocab::Vocab;

pub use parameters::check_parameters;

/// What decides the files besides the GGUF.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Whether the DSA indexer is kept; says nothing for a model without one.
    pub indexer: bool,
    /// Whether the multi-token-prediction layers are kept; says nothing for a model without any.
    pub mtp: bool,
    /// The dtype of the weights that are not packed: `bfloat16`, `float16` or `float32`.
    pub dtype: String,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Rows of the embedding.
    pub vocab_rows: u64,
    /// A directory whose files win over made ones.
    pub hf_config: Option<PathBuf>,
    /// A directory of mapping tables that override the built-in ones.
    pub mappings: Option<PathBuf>,
    /// Go on when the metadata has keys that are not known here.
    pub allow_unknown_keys: bool,
    /// `quantization_config` of config.json; `None` leaves the key out, which is right for vLLM with
    /// packed weights, where the plugin passes its own.
    pub quantization: Option<Value>,
}

impl Request {
    fn tables(&self) -> Tables<'_> {
        Tables { dir: self.mappings.as_deref() }
    }

    /// Everything kept, bfloat16, no given directory; the rest from the tensors of `gguf`.
    pub fn of(gguf: &Gguf) -> Result<Request> {
        let rows = gguf.tensors().iter().find(|t| t.name == "token_embd.weight").and_then(|t| t.ne.get(1));
        let Some(&vocab_rows) = rows else {
            return Err(Error::source(
                "token_embd.weight",
                "missing or one-dimensional: not a language model",
            ));
        };
        Ok(Request {
            indexer: true,
            mtp: true,
            dtype: "bfloat16".to_owned(),
            tied: !gguf.tensors().iter().any(|t| t.name == "output.weight"),
            vocab_rows,
            hf_config: None,
            mappings: None,
            allow_unknown_keys: false,
            quantization: None,
        })
    }
}

/// The Hugging Face model that the directory describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The class of `architectures`, `GlmMoeDsaForCausalLM`.
    pub class: String,
    /// `model_type`, `glm_moe_dsa`.
    pub model_type: String,
}

/// The files, and what the user should know about them.
#[derive(Clone, Debug, PartialEq)]
pub struct Files {
    /// The model that they describe.
    pub model: Model,
    /// config.json.
    pub config: Map<String, Value>,
    /// Name and content, sorted by name.
    pub files: Vec<(String, Vec<u8>)>,
    /// One line each.
    pub notes: Vec<String>,
}

/// Which Hugging Face model `gguf` becomes under `request`: the given config.json's, else the rules'.
fn model_of(gguf: &Gguf, rules: &Architecture, given: &Given, request: &Request) -> Result<Model> {
    let kept = rules.model(gguf, &Request { indexer: true, ..request.clone() })?;
    given.model(rules, &rules.model(gguf, request)?, &kept)
}

/// The small files for `gguf`; the same input gives the same bytes.
///
/// # Errors
/// When metadata that a file needs is missing, the tokenizer is of a kind or pre-tokeniser unknown
/// here, or a given file contradicts the GGUF. Where a given file makes up for it, it is no error.
pub fn files(gguf: &Gguf, request: &Request) -> Result<Files> {
    made(gguf, &Architecture::of(gguf, &request.tables())?, request)
}

/// As [`files`], with config.json held against the tensors' shapes.
///
/// # Errors
/// Those of [`files`], and a config.json that contradicts the tensors.
pub fn checked_files(gguf: &Gguf, request: &Request) -> Result<Files> {
    let rules = Architecture::of(gguf, &request.tables())?;
    let made = made(gguf, &rules, request)?;
    rules.check_shapes(gguf, &made.config)?;
    Ok(made)
}

/// The files by the rules of an architecture.
fn made(gguf: &Gguf, rules: &Architecture, request: &Request) -> Result<Files> {
    let mut notes = Vec::new();
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let given = request.hf_config.as_deref().map(Given::read).transpose()?;
    let has_tokenizer = given.as_ref().is_some_and(Given::has_tokenizer);

    let mut vocab_notes = Vec::new();
    let vocab = match Vocab::of(gguf, rules.texts(), &mut vocab_notes) {
        Ok(vocab) => {
            if !has_tokenizer {
                notes.append(&mut vocab_notes);
            }
            vocab
        }
        // A tokenizer that cannot be made is no matter where one is given.
        Err(_) if has_tokenizer => None,
        Err(error) => return Err(error),
    };
    if let Some(vocab) = &vocab
        && vocab.tokens.len() as u64 > request.vocab_rows
    {
        let spare = vocab.tokens.len() as u64 - request.vocab_rows;
        notes.push(format!(
            "the last {spare} tokens of tokenizer.ggml.tokens have no row in token_embd.weight ({} rows): the model cannot read them",
            request.vocab_rows
        ));
    }

    // A given config.json says itself what the model computes.
    let doubt = if given.as_ref().is_some_and(Given::has_config) { Doubt::Note } else { Doubt::Refuse };
    let facts = rules.facts(gguf, request, vocab.as_ref());
    rules.check_keys(gguf, &facts, doubt, request.allow_unknown_keys, &mut notes)?;
    let (mut config, problems) = rules.config(gguf, request, vocab.as_ref())?;
    let model = match &given {
        Some(given) if given.has_config() => {
            let model = model_of(gguf, rules, given, request)?;
            config = given.config(rules, &config, &model, request, &mut notes)?;
            model
        }
        _ => {
            Error::all(problems)?;
            rules.model(gguf, request)?
        }
    };
    if let Some(quantization) = &request.quantization {
        config.insert("quantization_config".into(), quantization.clone());
    }
    files.push(("config.json".to_owned(), pretty(config.clone())));

    if let Some(given) = &given {
        if let Some(vocab) = &vocab {
            given.check_tokenizer(vocab, request.vocab_rows)?;
        }
        files.extend(given.files(&mut notes));
    }
    let missing = |files: &[(String, Vec<u8>)], name: &str| !files.iter().any(|(n, _)| n == name);
    if let Some(vocab) = &vocab
        && missing(&files, "generation_config.json")
    {
        files.push(("generation_config.json".to_owned(), pretty(rules.generation(gguf, request, vocab)?)));
    }
    let has_template = given.as_ref().is_some_and(Given::has_template);
    if !has_template && vocab.is_some() {
        let templates = tokenizer::templates(gguf.metadata(), &mut notes)?;
        match templates.as_slice() {
            [(_, text)] => files.push(("chat_template.jinja".to_owned(), text.clone().into_bytes())),
            // Several go to tokenizer_config.json, which a given tokenizer brings itself.
            [(_, text), ..] if has_tokenizer => {
                files.push(("chat_template.jinja".to_owned(), text.clone().into_bytes()));
            }
            _ => {}
        }
        if let Some(vocab) = vocab.as_ref().filter(|_| !has_tokenizer) {
            made_tokenizer(gguf, vocab, &templates, &mut files, &mut notes)?;
        }
    } else if let Some(vocab) = vocab.as_ref().filter(|_| !has_tokenizer) {
        made_tokenizer(gguf, vocab, &[], &mut files, &mut notes)?;
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(Files { model, config, files, notes })
}

/// tokenizer.json and tokenizer_config.json from the GGUF.
fn made_tokenizer(
    gguf: &Gguf,
    vocab: &Vocab,
    templates: &[(String, String)],
    files: &mut Vec<(String, Vec<u8>)>,
    notes: &mut Vec<String>,
) -> Result<()> {
    let architecture = gguf.metadata().text("general.architecture")?.unwrap_or("");
    let context = gguf.metadata().count(&format!("{architecture}.context_length"))?;
    let made = tokenizer::tokenizer(vocab, notes)?;
    files.push(("tokenizer.json".to_owned(), made.to_string().into_bytes()));
    if !files.iter().any(|(name, _)| name == "tokenizer_config.json") {
        let Value::Object(config) = tokenizer::tokenizer_config(vocab, context, templates)? else {
            return Ok(());
        };
        files.push(("tokenizer_config.json".to_owned(), pretty(config)));
    }
    Ok(())
}

/// As transformers writes it: keys sorted, two spaces, a last line break.
fn pretty(mut object: Map<String, Value>) -> Vec<u8> {
    object.sort_keys();
    let mut text = format!("{:#}", Value::Object(object));
    text.push('\n');
    text.into_bytes()
}
