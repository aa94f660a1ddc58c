//! Says what a file is that is no GGUF, and what kind a GGUF is that is no model.

use super::header::Header;
use std::path::Path;

/// What the file is when it does not start with `GGUF`, with advice; `None` when it does.
pub(super) fn not_gguf(bytes: &[u8]) -> Option<String> {
    if bytes.starts_with(b"GGUF") {
        return None;
    }
    let start: Vec<u8> =
        bytes.iter().take(512).skip_while(|b| b.is_ascii_whitespace()).map(u8::to_ascii_lowercase).collect();
    let is = |prefix: &str| start.starts_with(prefix.as_bytes());
    // Magic numbers are stored little endian, so their letters read backwards.
    let found = if bytes.is_empty() {
        "an empty file (0 bytes): get it again"
    } else if bytes.starts_with(b"FUGG") {
        "a big-endian GGUF: get the little-endian file"
    } else if is("version https://git-lfs") {
        "a Git LFS pointer, not the file itself: run git lfs pull, or download the file"
    } else if is("<!doctype html") || is("<html") || is("<?xml") {
        "an HTML or XML page, probably an error or login page of the server: download the file again"
    } else if [b"tjgg", b"lmgg", b"fmgg", b"algg"].iter().any(|m| bytes.starts_with(*m)) {
        "a legacy GGML file from before GGUF: get a GGUF of the model or convert it again with llama.cpp"
    } else if bytes.starts_with(b"PK\x03\x04") {
        "a ZIP or PyTorch checkpoint, not a GGUF: convert it with llama.cpp first"
    } else if bytes.get(8) == Some(&b'{') && bytes.get(5..8) == Some(&[0; 3]) {
        "a safetensors file, not a GGUF: convert the model with llama.cpp first"
    } else if is("{") {
        "JSON text, perhaps a server's error message: download the file again"
    } else {
        return Some(format!(
            "not a GGUF: it starts with \"{}\", expected \"GGUF\"; check that it is the right file and whole",
            bytes[..bytes.len().min(4)].escape_ascii()
        ));
    };
    Some(found.to_owned())
}

/// What a name says of a file that is only a part of one: byte-split parts and broken-off downloads.
pub(super) fn partial(path: &Path) -> Option<String> {
    const UNFINISHED: [&str; 7] =
        [".part", ".incomplete", ".crdownload", ".download", ".tmp", ".aria2", ".filepart"];
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let (stem, suffix) = name.rsplit_once(".gguf")?;
    if UNFINISHED.contains(&suffix) {
        return Some("an unfinished download: finish it first".to_owned());
    }
    let part = suffix
        .strip_prefix(['.', '-', '_'])
        .is_some_and(|s| s.starts_with("part") || s.starts_with("split") || is_counter(s));
    part.then(|| {
        format!(
            "a byte-split part of a GGUF, not a GGUF split: join all parts in order first, \
             for example cat {stem}.gguf* > {stem}-joined.gguf"
        )
    })
}

/// `001`, `aa`: what `split` puts after a name.
fn is_counter(suffix: &str) -> bool {
    let bytes = suffix.as_bytes();
    let digits = (2..=4).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_digit);
    digits || matches!(bytes, [b'a', b'a'..=b'z'])
}

/// What kind of GGUF this first file is when it is no language model; `None` when it looks like one.
pub(super) fn not_a_model(header: &Header) -> Option<String> {
    const EXPECTED: &str = "expected a language model";
    let text = |key: &str| header.metadata.text(key).ok().flatten();
    let kind = match (text("general.type"), text("general.architecture")) {
        (Some("mmproj"), _) => "a multimodal projector (general.type mmproj)".to_owned(),
        (_, Some("clip")) => "a multimodal projector (general.architecture clip)".to_owned(),
        (Some("adapter"), _) => "a LoRA adapter (general.type adapter)".to_owned(),
        (Some("imatrix"), _) => "an importance matrix (general.type imatrix)".to_owned(),
        (Some("model") | None, Some("controlvector")) => {
            "a control vector (general.architecture controlvector)".to_owned()
        }
        (Some("model"), _) => return sidecar(header),
        (None, _) if text("adapter.type").is_some() => "an adapter (it has adapter.type)".to_owned(),
        (None, None) if header.metadata.iter().any(|(key, _)| key.starts_with("imatrix.")) => {
            "an importance matrix (it has imatrix.* keys)".to_owned()
        }
        (None, _) => return sidecar(header),
        (Some(other), _) => format!("a GGUF of general.type \"{}\"", crate::error::shown(other)),
    };
    Some(format!("{kind}; {EXPECTED}"))
}

/// A draft sidecar holds the multi-token-prediction block alone.
fn sidecar(header: &Header) -> Option<String> {
    let block = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u64>().ok();
    let first = block(&header.entries.first()?.name)?;
    let alone = header.entries.iter().all(|e| block(&e.name) == Some(first));
    let draft = header.entries.iter().any(|e| e.name.contains(".nextn."));
    let in_set = header.metadata.count("split.count").is_ok_and(|n| n.unwrap_or(0) > 1);
    (alone && draft && !in_set).then(|| {
        format!("a draft (MTP) sidecar: it holds blk.{first} alone; expected a whole language model")
    })
}
