//! SentencePiece's BPE in the form of tokenizer.json, as transformers' own converter makes it
//! (`LlamaConverter`, `GemmaConverter` and `generate_merges` in convert_slow_tokenizer.py).

use super::vocab::{TokenType, Vocab};
use serde_json::{Value, json};
use std::collections::HashMap;

/// SentencePiece's mark for a space.
const SPACE: &str = "\u{2581}";

/// The merges that scores imply: every way to make a token of two, the highest score first. Of equal
/// scores the longer left part, then the longer right part comes first, then the lower id.
pub(super) fn merges(vocab: &Vocab) -> Vec<[String; 2]> {
    let plain: HashMap<&str, u32> = vocab
        .tokens
        .iter()
        .enumerate()
        .filter(|(_, token)| matches!(token.ty, TokenType::Normal | TokenType::UserDefined))
        .filter_map(|(id, token)| Some((token.text.as_deref()?, id as u32)))
        .collect();
    let mut found = Vec::new();
    for (id, token) in vocab.tokens.iter().enumerate() {
        let Some(text) = token.text.as_deref().filter(|_| token.ty == TokenType::Normal) else { continue };
        if plain.get(text) != Some(&(id as u32)) {
            continue;
        }
        let mut ways: Vec<_> = text
            .char_indices()
            .skip(1)
            .filter_map(|(cut, _)| {
                let (left, right) = text.split_at(cut);
                Some((*plain.get(left)?, *plain.get(right)?, left, right))
            })
            .collect();
        ways.sort_unstable();
        found.extend(ways.into_iter().map(|(_, _, left, right)| (token.score, left, right)));
    }
    let long = |text: &str| text.chars().count();
    // A stable sort: equal keys stay in the order of ids.
    found.sort_by(|(a, al, ar), (b, bl, br)| {
        b.total_cmp(a).then_with(|| long(bl).cmp(&long(al))).then_with(|| long(br).cmp(&long(ar)))
    });
    found.into_iter().map(|(_, left, right)| [left.to_owned(), right.to_owned()]).collect()
}

/// Whether every byte has a token, so that any text can be written.
pub(super) fn has_all_bytes(vocab: &Vocab) -> bool {
    let ids = vocab.ids();
    (0..=255).all(|byte| ids.contains_key(format!("<0x{byte:02X}>").as_str()))
}

/// Spaces to marks; with `prefix` one more in front of every stretch of text.
pub(super) fn normalizer(prefix: bool) -> Value {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    if prefix {
        json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": SPACE }, replace] })
    } else {
        replace
    }
}

/// Marks to spaces, byte tokens to bytes; with `prefix` the space in front goes.
pub(super) fn decoder(prefix: bool) -> Value {
    let mut steps = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}
