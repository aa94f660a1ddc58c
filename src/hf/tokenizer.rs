//! tokenizer.json and tokenizer_config.json, in the form the `tokenizers` library reads.

use super::pretokenizer::PreTokenizer;
use super::spm;
use super::vocab::{Kind, TokenType, Vocab};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// tokenizer.json. What is not as in the original is told in `notes`.
pub(super) fn tokenizer(vocab: &Vocab, notes: &mut Vec<String>) -> Result<Value> {
    let added = added_tokens(vocab);
    let (rules, normalizer, pre_tokenizer, decoder, model) = match vocab.kind {
        Kind::ByteLevel => {
            let pre = PreTokenizer::named(vocab.pre.as_deref(), notes)?;
            let model = json!({
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre.ignore_merges,
                "vocab": base_vocab(vocab, &added), "merges": reachable_merges(vocab, notes),
            });
            let (normalizer, steps) = (pre.normalizer(), pre.to_json());
            (Some(pre), normalizer, steps, byte_level(true), model)
        }
        Kind::SentencePiece => {
            let unk = vocab.text(vocab.unk);
            let model = json!({
                "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": spm::has_all_bytes(vocab),
                "ignore_merges": false,
                "vocab": base_vocab(vocab, &added), "merges": spm::merges(vocab),
            });
            (None, spm::normalizer(vocab.space_prefix), Value::Null, spm::decoder(vocab.space_prefix), model)
        }
    };
    let added: Vec<Value> = added
        .iter()
        .map(|id| {
            let mut token = added_token(vocab, *id);
            let mut entry = Map::new();
            entry.insert("id".into(), (*id).into());
            entry.append(&mut token);
            Value::Object(entry)
        })
        .collect();
    let default_bos = rules.as_ref().map_or(vocab.kind == Kind::SentencePiece, |r| r.add_bos);
    let first = vocab.bos.filter(|_| vocab.add_bos.unwrap_or(default_bos));
    let last = vocab.eos.filter(|_| vocab.add_eos.unwrap_or(false));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(vocab, first, last),
        "decoder": decoder,
        "model": model,
    }))
}

/// tokenizer_config.json.
pub(super) fn tokenizer_config(
    vocab: &Vocab,
    context: Option<u64>,
    templates: &[(String, String)],
) -> Result<Value> {
    let mut config = Map::new();
    // Class of any tokenizer.json; classes of their own (LlamaTokenizer, …) rebuild parts of it from code.
    config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    for (key, id) in [
        ("bos_token", vocab.bos),
        ("eos_token", vocab.eos),
        ("pad_token", vocab.pad),
        ("unk_token", vocab.unk),
    ] {
        if let Some(text) = vocab.text(id) {
            config.insert(key.into(), text.into());
        }
    }
    let rules = match vocab.kind {
        Kind::ByteLevel => PreTokenizer::named(vocab.pre.as_deref(), &mut Vec::new())?.add_bos,
        Kind::SentencePiece => true,
    };
    config.insert("add_bos_token".into(), (vocab.bos.is_some() && vocab.add_bos.unwrap_or(rules)).into());
    if let (Some(add), Some(_)) = (vocab.add_eos, vocab.eos) {
        config.insert("add_eos_token".into(), add.into());
    }
    // Cleaning up would change the text of a reply: "a ," to "a,".
    config.insert("clean_up_tokenization_spaces".into(), false.into());
    // transformers 4 makes token_type_ids where it is not told the names, and decoders refuse them.
    config.insert("model_input_names".into(), json!(["input_ids", "attention_mask"]));
    if let Some(context) = context {
        config.insert("model_max_length".into(), context.into());
    }
    let decoder: Map<String, Value> = added_tokens(vocab)
        .iter()
        .map(|id| (id.to_string(), Value::Object(added_token(vocab, *id))))
        .collect();
    config.insert("added_tokens_decoder".into(), decoder.into());
    // One template is a file of its own, chat_template.jinja; several are named here.
    if templates.len() > 1 {
        let named: Vec<Value> =
            templates.iter().map(|(name, text)| json!({ "name": name, "template": text })).collect();
        config.insert("chat_template".into(), named.into());
    }
    Ok(config.into())
}

/// Ids of the tokens that are matched before anything else, in order.
fn added_tokens(vocab: &Vocab) -> Vec<u32> {
    // Of equal texts only the id that the text stands for.
    let ids = vocab.ids();
    let mut added: Vec<u32> = vocab
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, token)| {
            matches!(token.ty, TokenType::Control | TokenType::Unknown | TokenType::UserDefined)
                && token.text.as_deref().is_some_and(|text| ids.get(text) == Some(&(*id as u32)))
        })
        .map(|(id, _)| id as u32)
        .collect();
    added.sort_unstable();
    added
}

fn added_token(vocab: &Vocab, id: u32) -> Map<String, Value> {
    let token = &vocab.tokens[id as usize];
    let special = token.ty != TokenType::UserDefined;
    let Value::Object(entry) = json!({
        "content": token.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": special,
    }) else {
        return Map::new();
    };
    entry
}

/// The vocabulary of the model part: text to id, by id.
///
/// Added tokens that follow it without a gap stay out of it, as in the originals. The library numbers
/// such tokens from the size of this vocabulary on, so where there is a gap all of them must be in it.
fn base_vocab(vocab: &Vocab, added: &[u32]) -> Map<String, Value> {
    let ids = vocab.ids();
    let written = |id: &u32| {
        let token = &vocab.tokens[*id as usize];
        // llama.cpp's converter fills ids without a token with "[PAD17]".
        let filler = token.ty == TokenType::Unused && token.text.as_deref() == Some(&format!("[PAD{id}]"));
        !filler && token.text.as_deref().is_some_and(|text| ids.get(text) == Some(id))
    };
    let all: Vec<u32> = (0..vocab.tokens.len() as u32).filter(written).collect();
    // The run of added tokens at the end of `all`.
    let tail = all.iter().rev().zip(added.iter().rev()).take_while(|(a, b)| a == b).count();
    let body = all.len() - tail;
    let gapless = all.iter().enumerate().all(|(position, id)| position == *id as usize);
    let kept = if gapless { &all[..body] } else { &all[..] };
    kept.iter().filter_map(|id| Some((vocab.tokens[*id as usize].text.clone()?, (*id).into()))).collect()
}

/// The merges whose parts and whole are tokens; the library refuses any other.
fn reachable_merges(vocab: &Vocab, notes: &mut Vec<String>) -> Vec<[String; 2]> {
    let ids = vocab.ids();
    let has = |text: &str| ids.contains_key(text);
    let kept: Vec<[String; 2]> = vocab
        .merges
        .iter()
        .filter(|(left, right)| has(left) && has(right) && has(&format!("{left}{right}")))
        .map(|(left, right)| [left.clone(), right.clone()])
        .collect();
    let lost = vocab.merges.len() - kept.len();
    if lost > 0 {
        notes.push(format!("{lost} merges of tokens that the vocabulary lacks: left out of tokenizer.json"));
    }
    kept
}

/// Adds the first and the last token of a text.
fn post_processor(vocab: &Vocab, first: Option<u32>, last: Option<u32>) -> Value {
    let (first, last) = (
        first.and_then(|id| Some((id, vocab.text(Some(id))?))),
        last.and_then(|id| Some((id, vocab.text(Some(id))?))),
    );
    let plain = match vocab.kind {
        Kind::ByteLevel => byte_level(false),
        Kind::SentencePiece => Value::Null,
    };
    if first.is_none() && last.is_none() {
        return plain;
    }
    let wrapped = |sequence: &str, kind: u32| {
        let mut parts = Vec::new();
        if let Some((_, text)) = first {
            parts.push(json!({ "SpecialToken": { "id": text, "type_id": kind } }));
        }
        parts.push(json!({ "Sequence": { "id": sequence, "type_id": kind } }));
        if let Some((_, text)) = last {
            parts.push(json!({ "SpecialToken": { "id": text, "type_id": kind } }));
        }
        parts
    };
    let single = wrapped("A", 0);
    let pair: Vec<Value> = single.iter().cloned().chain(wrapped("B", 1)).collect();
    let special: Map<String, Value> = first
        .into_iter()
        .chain(last)
        .map(|(id, text)| (text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] })))
        .collect();
    let template = json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special,
    });
    match plain {
        Value::Null => template,
        plain => json!({ "type": "Sequence", "processors": [plain, template] }),
    }
}

/// The library's byte-level step, as decoder (offsets trimmed) or post-processor.
fn byte_level(trim: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": trim, "use_regex": true })
}

/// The chat templates: name and text, `default` first. An error when one is no text.
pub(super) fn templates(
    meta: &crate::gguf::Metadata,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, String)>> {
    let mut templates = Vec::new();
    for (key, _) in meta.iter() {
        let name = match key.strip_prefix("tokenizer.chat_template") {
            Some("") => "default",
            Some(rest) => match rest.strip_prefix('.') {
                Some(name) if !name.is_empty() => name,
                _ => continue,
            },
            None => continue,
        };
        match meta.text(key)? {
            None | Some("") => {
                notes.push(format!("{key} is empty: no chat template of that name is written"))
            }
            Some(text) => templates.push((name.to_owned(), text.to_owned())),
        }
    }
    if templates.is_empty() {
        notes.push("no chat template in the GGUF: chat requests need one (vLLM: --chat-template)".to_owned());
    } else if templates[0].0 != "default" {
        return Err(Error::source(
            "tokenizer.chat_template",
            "missing although there are named templates: give the model's own tokenizer with --hf-config DIR",
        ));
    }
    Ok(templates)
}
