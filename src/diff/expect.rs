//! A conversion held against the one that is expected.

use super::{Change, Settings, Side, diff};
use crate::error::{Error, Result, line, shown_path};
use crate::hash;
use crate::manifest::{self, Manifest};
use crate::store;
use std::collections::BTreeMap;
use std::path::Path;

/// Problems listed by [`expected`]; more are counted.
const LISTED: usize = 100;

/// Refuses a directory whose tensors or files are not those of `file`: the manifest or the `B3SUMS` of
/// another conversion, or its directory. Returns in what the runs differed where the content does not.
///
/// Compares what the manifests say; [`crate::verify::hashes`] says whether the directory is as its own does.
///
/// # Errors
///
/// One line for each tensor and file that differs, and a last one with the whole.
pub fn expected(dir: &Path, file: &Path, settings: &Settings) -> Result<Vec<String>> {
    if !file.is_dir() {
        let bytes = std::fs::read(file).map_err(|e| Error::io(file, "read", e))?;
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return expected_sums(dir, file, &String::from_utf8_lossy(&bytes));
        }
    }
    let expected = Side::open(file)?;
    let given = Side::open(dir)?;
    let diff = diff(&expected, &given, settings)?;
    if diff.same_content() {
        return Ok(diff.causes.iter().map(Change::text).collect());
    }
    let mut problems: Vec<Error> =
        diff.causes.iter().map(|c| Error::shards(&c.what, format!("{} -> {}", c.a, c.b))).collect();
    problems.extend(diff.content().into_iter().map(|(what, why)| Error::Shards(what, line(&why))));
    let more = problems.len().saturating_sub(LISTED);
    problems.truncate(LISTED);
    let more = if more > 0 { format!("{more} more differences; ") } else { String::new() };
    problems.push(as_expected(dir, file, &format!("{more}{}", diff.summary())));
    Err(Error::Many(problems))
}

/// The same for a `B3SUMS`, which knows files alone.
fn expected_sums(dir: &Path, file: &Path, text: &str) -> Result<Vec<String>> {
    let parse = |text: &str| -> Option<BTreeMap<String, String>> {
        text.lines()
            .map(|line| {
                let (hash, name) = line.split_once("  ")?;
                hash::from_hex(hash).ok().map(|_| (name.to_owned(), hash.to_ascii_lowercase()))
            })
            .collect()
    };
    let expected = parse(text).filter(|sums| !sums.is_empty()).ok_or_else(|| {
        let detail = "neither a manifest nor lines of b3sum (64 hex digits, two spaces, a file name): give the \
                      preshard.json or B3SUMS of the conversion that is expected";
        Error::request(file.display(), detail)
    })?;
    let path = dir.join(manifest::FILE_NAME);
    let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
    let given = Manifest::from_slice(&bytes, &path)?;
    let given = parse(&store::sums(&given, &bytes)).unwrap_or_default();
    let mut problems = Vec::new();
    let mut notes = Vec::new();
    for name in expected.keys().chain(given.keys().filter(|name| !expected.contains_key(*name))) {
        let detail = match (expected.get(name), given.get(name)) {
            (Some(ours), Some(theirs)) if ours == theirs => continue,
            // It names version, options and sources, which may differ where no engine's file does.
            (Some(_), Some(_)) if name == manifest::FILE_NAME => {
                notes.push(format!("{name} differs: another version, other options or other sources"));
                continue;
            }
            (Some(ours), Some(theirs)) => format!("BLAKE3 {theirs}, expected {ours}"),
            (Some(_), None) => "expected, but not there".into(),
            (None, _) => "not expected".into(),
        };
        problems.push(Error::shards(name, detail));
    }
    if problems.is_empty() {
        return Ok(notes);
    }
    let summary = format!(
        "{} of {} files; a manifest instead of B3SUMS would name the tensors",
        problems.len(),
        expected.len().max(given.len())
    );
    problems.push(as_expected(dir, file, &summary));
    Err(Error::Many(problems))
}

/// The last line of a refusal: what to do.
fn as_expected(dir: &Path, file: &Path, summary: &str) -> Error {
    let detail = format!(
        "not as {} has it: {summary}; if the change is meant, put the new one in its place",
        shown_path(file)
    );
    Error::shards(shown_path(dir), detail)
}
