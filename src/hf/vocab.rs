//! The vocabulary and the special tokens of a GGUF (`tokenizer.*`).

use crate::error::{Error, Result};
use crate::gguf::{self, Gguf};
use std::collections::HashMap;

/// How text becomes tokens (`tokenizer.ggml.model`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `gpt2`: byte-level BPE with a list of merges.
    ByteLevel,
    /// `llama`: SentencePiece's BPE with a score per token.
    SentencePiece,
}

/// What a token is (`tokenizer.ggml.token_type`, `enum llama_token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// One token.
#[derive(Debug)]
pub(super) struct Token {
    /// Its text; `None` when it has none (empty or no UTF-8).
    pub text: Option<String>,
    pub ty: TokenType,
    /// Its score; 0 without `tokenizer.ggml.scores`.
    pub score: f32,
}

/// The vocabulary of a model.
#[derive(Debug)]
pub(super) struct Vocab {
    pub kind: Kind,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// By id.
    pub tokens: Vec<Token>,
    /// Pairs, the first to be merged first; none for SentencePiece.
    pub merges: Vec<(String, String)>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    /// Ends of a turn and of a message, by key or by text.
    ends: Vec<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// Whether SentencePiece text gets a space in front; llama.cpp's default is yes.
    pub space_prefix: bool,
}

/// Texts of tokens that are treated by their text, whatever their type says.
#[derive(Clone, Copy)]
pub(super) struct Texts<'a> {
    /// They end a reply.
    pub stop: &'a [String],
    /// Readers of replies look for them: never special.
    pub visible: &'a [String],
}

impl Vocab {
    /// The vocabulary, or `None` where the file has none. What cannot be used is told in `notes`.
    pub(super) fn of(gguf: &Gguf, texts: Texts, notes: &mut Vec<String>) -> Result<Option<Vocab>> {
        let known = texts;
        let meta = gguf.metadata();
        let kind = match meta.text("tokenizer.ggml.model")? {
            Some("gpt2") => Kind::ByteLevel,
            Some("llama") => Kind::SentencePiece,
            None | Some("none" | "no_vocab") => {
                notes.push(
                    "no tokenizer in the GGUF: none is written; give one with --hf-config DIR".to_owned(),
                );
                return Ok(None);
            }
            Some(other) => {
                return Err(Error::source(
                    "tokenizer.ggml.model",
                    format!(
                        "{:?}, expected gpt2 or llama: give the model's own tokenizer with --hf-config DIR",
                        crate::error::shown(other)
                    ),
                ));
            }
        };
        let Some(texts) = meta.texts("tokenizer.ggml.tokens")? else {
            return Err(Error::source("tokenizer.ggml.tokens", "missing: convert to GGUF again"));
        };
        let count = texts.len();
        // Ids are 32 bits wide everywhere.
        if u32::try_from(count).is_err() {
            return Err(Error::source("tokenizer.ggml.tokens", format!("{count} tokens: more than ids")));
        }
        let types = meta.numbers("tokenizer.ggml.token_type")?;
        let scores = meta.numbers("tokenizer.ggml.scores")?;
        for (key, len) in [
            ("tokenizer.ggml.token_type", types.as_ref().map(Vec::len)),
            ("tokenizer.ggml.scores", scores.as_ref().map(Vec::len)),
        ] {
            if let Some(len) = len.filter(|len| *len < count) {
                return Err(Error::source(
                    key,
                    format!("{len} entries for {count} tokens: convert to GGUF again"),
                ));
            }
        }
        if kind == Kind::SentencePiece && scores.is_none() {
            return Err(Error::source(
                "tokenizer.ggml.scores",
                "missing: without scores no merges can be made; give the model's own tokenizer with --hf-config DIR",
            ));
        }
        let mut unreadable = Vec::new();
        let mut tokens: Vec<Token> = texts
            .enumerate()
            .map(|(id, bytes)| {
                let text = match std::str::from_utf8(bytes) {
                    Ok("") | Err(_) => {
                        unreadable.push(id);
                        None
                    }
                    Ok(text) => Some(text.to_owned()),
                };
                let ty = match types.as_ref().map_or(1, |t| t[id] as i64) {
                    2 => TokenType::Unknown,
                    3 => TokenType::Control,
                    4 => TokenType::UserDefined,
                    5 => TokenType::Unused,
                    6 => TokenType::Byte,
                    _ => TokenType::Normal,
                };
                Token { text, ty, score: scores.as_ref().map_or(0.0, |s| s[id] as f32) }
            })
            .collect();
        if !unreadable.is_empty() {
            notes.push(format!(
                "tokens {} are empty or no UTF-8: left out of tokenizer.json",
                listed(&unreadable)
            ));
        }

        // llama.cpp's defaults for SentencePiece vocabularies.
        let default = |id| (kind == Kind::SentencePiece && (id as usize) < count).then_some(id);
        let mut special = |name: &str, default: Option<u32>| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match gguf.metadata().get(&key) {
                None => Ok(default),
                // Some writers say "none" as 2^32 - 1 or -1.
                Some(gguf::Value::I64(-1)) | Some(gguf::Value::U64(0xffff_ffff)) => Ok(None),
                Some(_) => match meta.count(&key)? {
                    Some(id) if id < count as u64 => Ok(Some(id as u32)),
                    id => {
                        notes.push(format!("{key} {}: not one of {count} tokens, ignored", id.unwrap_or(0)));
                        Ok(default)
                    }
                },
            }
        };
        let bos = special("bos", default(1))?;
        let eos = special("eos", default(2))?;
        let unk = special("unknown", default(0))?;
        let pad = special("padding", None)?;
        let mut ends = Vec::new();
        for name in ["eot", "eom"] {
            ends.extend(special(name, None)?);
        }
        const EOS_IDS: &str = "tokenizer.ggml.eos_token_ids";
        for id in meta.counts(EOS_IDS)?.unwrap_or_default() {
            match u32::try_from(id).ok().filter(|id| (*id as usize) < count) {
                Some(id) => ends.push(id),
                None => notes.push(format!("{EOS_IDS} {id}: not one of {count} tokens, ignored")),
            }
        }
        let ids_of = |list: &[String]| {
            let found = |t: &Token| t.text.as_ref().is_some_and(|text| list.contains(text));
            tokens.iter().enumerate().filter(|(_, t)| found(t)).map(|(id, _)| id as u32).collect::<Vec<_>>()
        };
        ends.extend(ids_of(known.stop));
        let visible = ids_of(known.visible);
        // A special token is one whatever its type says: old files have them as normal tokens,
        // which text could never reach.
        for id in [bos, eos, pad].into_iter().flatten().chain(ends.iter().copied()) {
            let token = &mut tokens[id as usize];
            if matches!(token.ty, TokenType::Normal | TokenType::Unused) {
                token.ty = TokenType::Control;
            }
        }
        for id in visible {
            let token = &mut tokens[id as usize];
            if token.ty == TokenType::Control {
                token.ty = TokenType::UserDefined;
            }
        }

        let merges = match (kind, meta.texts("tokenizer.ggml.merges")?) {
            (Kind::SentencePiece, _) => Vec::new(),
            (Kind::ByteLevel, Some(lines)) => merges(lines)?,
            (Kind::ByteLevel, None) => {
                return Err(Error::source(
                    "tokenizer.ggml.merges",
                    "missing: give the model's own tokenizer with --hf-config DIR",
                ));
            }
        };
        Ok(Some(Vocab {
            kind,
            pre: meta.text("tokenizer.ggml.pre")?.map(str::to_owned),
            tokens,
            merges,
            bos,
            eos,
            unk,
            pad,
            ends,
            add_bos: meta.flag("tokenizer.ggml.add_bos_token")?,
            add_eos: meta.flag("tokenizer.ggml.add_eos_token")?,
            space_prefix: meta.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        }))
    }

    /// The tokens that end a reply: the end of text first, then by id those that end a turn or a
    /// message, by key or by text.
    pub(super) fn end_ids(&self) -> Vec<u32> {
        let mut ids = self.ends.clone();
        ids.sort_unstable();
        ids.dedup();
        if let Some(eos) = self.eos {
            ids.retain(|id| *id != eos);
            ids.insert(0, eos);
        }
        ids
    }

    /// The text of token `id`.
    pub(super) fn text(&self, id: Option<u32>) -> Option<&str> {
        self.tokens.get(id? as usize)?.text.as_deref()
    }

    /// The id that a text stands for; of equal texts the last, as in llama.cpp.
    pub(super) fn ids(&self) -> HashMap<&str, u32> {
        let texts = self.tokens.iter().enumerate();
        texts.filter_map(|(id, token)| Some((token.text.as_deref()?, id as u32))).collect()
    }
}

fn merges<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Result<Vec<(String, String)>> {
    lines
        .enumerate()
        .map(|(rank, line)| {
            // "left right"; a space that is part of a token is written Ġ, except as the first byte.
            std::str::from_utf8(line)
                .ok()
                .and_then(|line| {
                    let cut = line.char_indices().skip(1).find(|(_, c)| *c == ' ')?.0;
                    Some((line[..cut].to_owned(), line[cut + 1..].to_owned()))
                })
                .ok_or_else(|| {
                    Error::source(
                        "tokenizer.ggml.merges",
                        format!(
                            "merge {rank} is {:?}, expected two tokens with a space between: convert to GGUF again",
                            crate::error::shown(&String::from_utf8_lossy(line))
                        ),
                    )
                })
        })
        .collect()
}

/// The first ids of a list, and how many more there are.
fn listed(ids: &[usize]) -> String {
    let first: Vec<_> = ids.iter().take(5).map(ToString::to_string).collect();
    match ids.len() {
        0..=5 => first.join(", "),
        n => format!("{} and {} more", first.join(", "), n - 5),
    }
}
