//! What two conversions differ in, tensor by tensor, and why.
//!
//! Manifests alone say it for names, shapes, types and policies; for bytes they hold one hash for each
//! leaf, and a leaf may hold several tensors. Where both directories are at hand, the bytes of the
//! tensors in changed leaves are read and compared, so that only those that differ are named.

mod bytes;
mod expect;
mod text;

pub use expect::expected;

use crate::error::{Error, Result, shown, shown_path};
use crate::manifest::{Manifest, Member, Shard, Tensor};
use crate::workers;
use bytes::{Bytes, Read};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// One of the two conversions compared.
pub struct Side {
    /// As the user named it.
    name: String,
    manifest: Manifest,
    /// Where its shards are; `None` when only the manifest was given.
    dir: Option<PathBuf>,
}

impl Side {
    /// Opens a converted directory, or a manifest by itself.
    pub fn open(path: &Path) -> Result<Side> {
        let name = shown_path(path);
        if path.is_dir() {
            return Ok(Side { name, manifest: Manifest::read(path)?, dir: Some(path.to_owned()) });
        }
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", e))?;
        Ok(Side { name, manifest: Manifest::from_slice(&bytes, path)?, dir: None })
    }
}

/// Everything in which two conversions differ.
#[derive(Debug, Serialize)]
pub struct Diff {
    /// The names of the two sides, as given.
    pub sides: [String; 2],
    /// What the two runs were given or told: version, sources, policy, tables.
    pub causes: Vec<Change>,
    /// Shard files that one side lacks.
    pub shards: Vec<OneSided>,
    /// Tensors that differ, in the order of the files.
    pub tensors: Vec<TensorDiff>,
    /// Files beside the shards that differ.
    pub files: Vec<FileDiff>,
    /// Tensors, by name, in the first side's shards that the second has too.
    pub compared: usize,
    /// Tensors, by name, that lie elsewhere in their file, so that hashes say nothing of their bytes.
    pub unknown: usize,
}

/// One fact of the run.
#[derive(Debug, Serialize)]
pub struct Change {
    /// What it is, `policy weights`.
    pub what: String,
    /// The first side's value.
    pub a: String,
    /// The second side's value.
    pub b: String,
}

/// A shard file that one side alone has.
#[derive(Debug, Serialize)]
pub struct OneSided {
    /// File name.
    pub file: String,
    /// The side that has it.
    pub only: String,
    /// Its tensors.
    pub tensors: usize,
}

/// A tensor that differs in one way on some ranks.
#[derive(Debug, Serialize)]
pub struct TensorDiff {
    /// Its name in the shards.
    pub name: String,
    /// `model` or `mtp`.
    pub part: String,
    /// Pipeline stage and tensor-parallel rank of each shard in which it differs so.
    pub ranks: Vec<[u64; 2]>,
    /// What differs.
    pub why: Vec<String>,
    /// False when it shares a changed leaf with other tensors and nothing else is known.
    pub certain: bool,
}

/// A file beside the shards.
#[derive(Debug, Serialize)]
pub struct FileDiff {
    /// File name.
    pub file: String,
    /// The side that has it, when the other has not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub only: Option<String>,
}

/// How to compare bytes.
pub struct Settings<'a> {
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Set when the run is to stop.
    pub stop: &'a AtomicBool,
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Settings { threads: 0, stop: &workers::NEVER }
    }
}

/// Compares two conversions.
///
/// # Errors
///
/// A shard that is needed and cannot be read, or whose bytes are not those of its manifest.
pub fn diff(a: &Side, b: &Side, settings: &Settings) -> Result<Diff> {
    let sides = [a.name.clone(), b.name.clone()];
    let mut diff = Diff {
        causes: causes(&a.manifest, &b.manifest),
        shards: Vec::new(),
        tensors: Vec::new(),
        files: small_files(a, b),
        compared: 0,
        unknown: 0,
        sides,
    };
    let ours: BTreeMap<Place, &Shard> = a.manifest.shards.iter().map(|s| (place(s), s)).collect();
    let theirs: BTreeMap<Place, &Shard> = b.manifest.shards.iter().map(|s| (place(s), s)).collect();
    let ordinary = |m: &Manifest| crate::policy::is_ordinary(&m.policy.layout);
    let pairs: Vec<Pair> = if ordinary(&a.manifest) || ordinary(&b.manifest) {
        vec![Pair { a: a.manifest.shards.iter().collect(), b: b.manifest.shards.iter().collect() }]
    } else {
        for (side, mine, other) in [(a, &ours, &theirs), (b, &theirs, &ours)] {
            diff.shards.extend(mine.iter().filter(|(place, _)| !other.contains_key(*place)).map(
                |(_, shard)| OneSided {
                    file: shard.file.clone(),
                    only: side.name.clone(),
                    tensors: shard.tensors.len(),
                },
            ));
        }
        let both = ours.iter().filter_map(|(place, a)| Some((*a, *theirs.get(place)?)));
        both.map(|(a, b)| Pair { a: vec![a], b: vec![b] }).collect()
    };
    let mut found = Vec::new();
    let mut reads = Vec::new();
    for pair in &pairs {
        tensors(pair, a, b, &mut found, &mut reads);
    }
    if let (Some(ours), Some(theirs)) = (&a.dir, &b.dir) {
        for (at, bytes) in bytes::compare((ours, theirs), &found, &reads, settings)? {
            found[at].bytes = bytes;
        }
        for pair in &pairs {
            as_their_manifests_say(pair, a, b, &found)?;
        }
    }
    let names = pairs.iter().flat_map(|p| each_tensor(&p.a)).map(|(s, t)| (&s.part, &t.name));
    diff.compared = names.collect::<BTreeSet<_>>().len();
    let unknown = found.iter().filter(|f| f.why.is_empty() && matches!(f.bytes, Bytes::Unknown));
    diff.unknown = unknown.map(|f| (&f.shard.part, f.name)).collect::<BTreeSet<_>>().len();
    diff.tensors = grouped(found);
    Ok(diff)
}

/// Part, stage and rank: what makes two shards the same.
type Place<'a> = (&'a str, u64, u64);

fn place(shard: &Shard) -> Place<'_> {
    (&shard.part, shard.pp, shard.tp)
}

/// Shards whose tensors stand against each other: one on each side, or all files of an ordinary
/// checkpoint, in which a tensor may move from file to file.
struct Pair<'m> {
    a: Vec<&'m Shard>,
    b: Vec<&'m Shard>,
}

/// A tensor on both sides or one, and what is known of it.
struct Found<'m> {
    name: &'m str,
    /// The shard of the first side, or of the second where the first has no such tensor.
    shard: &'m Shard,
    /// In what the manifests differ, but the bytes.
    why: Vec<String>,
    bytes: Bytes,
}

impl Found<'_> {
    fn differs(&self) -> bool {
        !self.why.is_empty() || self.bytes.text().is_some()
    }
}

/// Adds the tensors of a pair that differ, or may, and the bytes that would decide.
fn tensors<'m>(pair: &Pair<'m>, a: &Side, b: &Side, found: &mut Vec<Found<'m>>, reads: &mut Vec<Read<'m>>) {
    let (ours, theirs) = (each_tensor(&pair.a), each_tensor(&pair.b));
    let by_name = |all: &[(&'m Shard, &'m Tensor)]| -> BTreeMap<&'m str, (&'m Shard, &'m Tensor)> {
        all.iter().map(|(s, t)| (t.name.as_str(), (*s, *t))).collect()
    };
    let (known, named) = (by_name(&ours), by_name(&theirs));
    // A parameter that is packed on one side alone has another name there.
    let mut renamed: BTreeMap<Vec<&str>, (&Shard, &Tensor)> = theirs
        .iter()
        .filter(|(_, t)| !t.members.is_empty() && !known.contains_key(t.name.as_str()))
        .map(|(s, t)| (t.members.iter().map(|m| m.hf.as_str()).collect(), (*s, *t)))
        .collect();
    for &(shard, tensor) in &ours {
        let name = tensor.name.as_str();
        let members: Vec<&str> = tensor.members.iter().map(|m| m.hf.as_str()).collect();
        let mut why = Vec::new();
        let (their_shard, their) = match named.get(name).copied() {
            Some(same) => same,
            None => match renamed.remove(&members) {
                Some(other) => {
                    why.push(format!("in {} it is {}", b.name, shown(&other.1.name)));
                    other
                }
                None => {
                    let why = vec![format!("only in {}", a.name)];
                    found.push(Found { name, shard, why, bytes: Bytes::Unknown });
                    continue;
                }
            },
        };
        why.extend(described(tensor, their));
        let bytes = bytes::hashed((shard, tensor), (their_shard, their));
        if why.is_empty() && matches!(bytes, Bytes::Equal) {
            continue;
        }
        let undecided = !matches!(bytes, Bytes::Equal);
        if undecided && tensor.bytes == their.bytes && tensor.dtype == their.dtype {
            reads.push(Read { found: found.len(), a: (shard, tensor), b: (their_shard, their) });
        }
        found.push(Found { name, shard, why, bytes });
    }
    for (shard, tensor) in theirs {
        let members: Vec<&str> = tensor.members.iter().map(|m| m.hf.as_str()).collect();
        let new = tensor.members.is_empty() || renamed.contains_key(&members);
        if new && !known.contains_key(tensor.name.as_str()) {
            let why = vec![format!("only in {}", b.name)];
            found.push(Found { name: &tensor.name, shard, why, bytes: Bytes::Unknown });
        }
    }
}

fn each_tensor<'m>(shards: &[&'m Shard]) -> Vec<(&'m Shard, &'m Tensor)> {
    shards.iter().flat_map(|s| s.tensors.iter().map(|t| (*s, t))).collect()
}

/// In what two tensors of one name differ by their manifests, but for bytes.
fn described(a: &Tensor, b: &Tensor) -> Vec<String> {
    let mut why = Vec::new();
    let hf = |t: &Tensor| t.members.iter().map(|m| shown(&m.hf)).collect::<Vec<_>>().join(", ");
    if hf(a) == hf(b) {
        for (ours, theirs) in a.members.iter().zip(&b.members) {
            let of = if a.members.len() > 1 { format!(" of {}", shown(&ours.hf)) } else { String::new() };
            let text = |list: &[String]| shown(&list.join(", "));
            let types = |m: &Member| {
                text(&m.types.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>())
            };
            if ours.from != theirs.from {
                why.push(format!("source{of} {} -> {}", text(&ours.from), text(&theirs.from)));
            }
            if ours.types != theirs.types {
                why.push(format!("type{of} {} -> {}", types(ours), types(theirs)));
            }
        }
    } else {
        why.push(format!("made of {} -> {}", hf(a), hf(b)));
    }
    let stored = |t: &Tensor| format!("{} {:?}", shown(&t.dtype), t.shape);
    if stored(a) != stored(b) {
        why.push(format!("{} -> {}", stored(a), stored(b)));
    }
    match (&a.decoded, &b.decoded) {
        (None, Some(reason)) => why.push(format!("now decoded: {}", shown(reason))),
        (Some(reason), None) => why.push(format!("no longer decoded: {}", shown(reason))),
        // Another reason for the same bytes is no difference; the policies tell it.
        _ => {}
    }
    if a.nonfinite != b.nonfinite {
        why.push(format!("NaN or infinite {} -> {}", a.nonfinite, b.nonfinite));
    }
    if a.aliases != b.aliases {
        why.push(format!("aliases {} -> {}", shown(&a.aliases.join(", ")), shown(&b.aliases.join(", "))));
    }
    // What is left: rows of a cut that moved, or the logical shape under the same bytes.
    if why.is_empty() && (a.members != b.members || a.logical != b.logical) {
        why.push("rows of its members".into());
    }
    why
}

/// Refuses shards whose hashes differ though nothing in them does: one is not what its manifest says.
fn as_their_manifests_say(pair: &Pair, a: &Side, b: &Side, found: &[Found]) -> Result<()> {
    let ([ours], [theirs]) = (pair.a.as_slice(), pair.b.as_slice()) else { return Ok(()) };
    let within = |f: &&Found| std::ptr::eq(f.shard, *ours) || std::ptr::eq(f.shard, *theirs);
    if ours.blake3 == theirs.blake3 || found.iter().filter(within).any(Found::differs) {
        return Ok(());
    }
    Err(Error::shards(
        &ours.file,
        format!(
            "its tensors are equal in {} and {}, but the manifests give other hashes: run preshard verify on both",
            a.name, b.name
        ),
    ))
}

/// One entry for each tensor and way to differ, with the ranks of all.
fn grouped(found: Vec<Found>) -> Vec<TensorDiff> {
    let mut all: Vec<TensorDiff> = Vec::new();
    let mut known = BTreeMap::new();
    for entry in found.into_iter().filter(Found::differs) {
        let certain = !entry.why.is_empty() || !matches!(entry.bytes, Bytes::InLeaves(_));
        let mut why = entry.why;
        why.extend(entry.bytes.text());
        let at = *known.entry((entry.name, &entry.shard.part, why.clone())).or_insert(all.len());
        if at == all.len() {
            let (name, part) = (entry.name.to_owned(), entry.shard.part.clone());
            all.push(TensorDiff { name, part, ranks: Vec::new(), why, certain });
        }
        all[at].ranks.push([entry.shard.pp, entry.shard.tp]);
    }
    all
}

/// What the two runs were given or told.
fn causes(a: &Manifest, b: &Manifest) -> Vec<Change> {
    let mut causes = Vec::new();
    let mut add = |what: String, a: String, b: String| {
        if a != b {
            causes.push(Change { what: shown(&what), a: shown(&a), b: shown(&b) });
        }
    };
    add("version".into(), a.tool.clone(), b.tool.clone());
    let names = |m: &Manifest| m.sources.iter().map(|s| s.file.as_str()).collect::<Vec<_>>().join(", ");
    add("sources".into(), names(a), names(b));
    for (ours, theirs) in a.sources.iter().zip(&b.sources) {
        add(format!("bytes of {}", theirs.file), ours.bytes.to_string(), theirs.bytes.to_string());
        let header = |hash: &str| hash.chars().take(16).collect();
        add(format!("header of {}", theirs.file), header(&ours.header_blake3), header(&theirs.header_blake3));
    }
    // Field by field, whatever fields there are.
    for (what, ours, theirs) in [
        ("model", serde_json::to_value(&a.model), serde_json::to_value(&b.model)),
        ("policy", serde_json::to_value(&a.policy), serde_json::to_value(&b.policy)),
    ] {
        let (Ok(Value::Object(ours)), Ok(Value::Object(theirs))) = (ours, theirs) else { continue };
        let text = |value: Option<&Value>| match value {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => "none".into(),
        };
        for key in ours.keys().chain(theirs.keys().filter(|key| !ours.contains_key(*key))) {
            add(format!("{what} {key}"), text(ours.get(key)), text(theirs.get(key)));
        }
    }
    if a.dropped != b.dropped {
        let count = |m: &Manifest| format!("{} tensors", m.dropped.len());
        let (ours, theirs) = (count(a), count(b));
        let other = if ours == theirs { " (others, or for other reasons)" } else { "" };
        add("dropped".into(), ours, theirs + other);
    }
    if causes.is_empty() && a.files == b.files && a.plan != b.plan {
        // The plan's hash covers the tables too, and the rest of what it covers is equal.
        let plan = |m: &Manifest| format!("plan {}", m.plan.chars().take(16).collect::<String>());
        causes.push(Change { what: "mapping tables".into(), a: plan(a), b: plan(b) });
    }
    causes
}

/// The files beside the shards, by their hashes.
fn small_files(a: &Side, b: &Side) -> Vec<FileDiff> {
    let map = |m: &Manifest| -> BTreeMap<String, String> {
        m.files.iter().map(|f| (f.file.clone(), f.blake3.clone())).collect()
    };
    let (ours, theirs) = (map(&a.manifest), map(&b.manifest));
    let only = |name: &str| match (ours.contains_key(name), theirs.contains_key(name)) {
        (true, false) => Some(a.name.clone()),
        (false, true) => Some(b.name.clone()),
        _ => None,
    };
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let differ = names.into_iter().filter(|name| ours.get(*name) != theirs.get(*name));
    differ.map(|name| FileDiff { file: name.clone(), only: only(name) }).collect()
}
