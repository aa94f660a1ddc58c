//! Joins the ranks of one plan that several hosts converted, each into a directory of its own.
//!
//! A shard does not depend on the host that wrote it, so joining is a matter of names: whole files are
//! linked, or copied where the file system cannot, and their manifests become one.

use crate::error::{Error, Result, shown};
use crate::hash;
use crate::load::Directory;
use crate::manifest::{self, Manifest, Shard};
use crate::store::{Output, Work};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Joins the ranks of `dirs` in `out`, which may hold some of them already. The directories are left
/// as they are. A run that died is continued by the same call.
///
/// # Errors
///
/// A directory that is damaged, that holds another plan than the first, or a rank that differs between
/// two of them; ranks that none of them has; a copy whose bytes are not those of the manifest.
pub fn merge(dirs: &[PathBuf], out: &Path) -> Result<Manifest> {
    // What `out` has stays there; a directory given twice, or `out` among them, adds nothing.
    let there = out.join(manifest::FILE_NAME).exists().then(|| Directory::open(out)).transpose()?;
    let out_path = out.canonicalize().ok();
    let mut opened = Vec::new();
    for dir in dirs {
        if dir.canonicalize().ok() != out_path || out_path.is_none() {
            opened.push(Directory::open(dir)?);
        }
    }
    let all: Vec<&Directory> = there.iter().chain(&opened).collect();
    let Some(first) = all.first() else {
        return Err(Error::request("DIR", "no directory to merge: give those that hold the ranks"));
    };
    let mut shards: BTreeMap<&str, (&Shard, &Directory)> = BTreeMap::new();
    let mut problems = Vec::new();
    for dir in &all {
        problems.extend(same_plan(first, dir).err());
        for shard in &dir.manifest().shards {
            let (known, holder) = *shards.entry(&shard.file).or_insert((shard, dir));
            if known != shard {
                problems.push(Error::shards(
                    dir.path().join(&shard.file).display(),
                    format!("differs from the one in {}: convert this rank again", holder.path().display()),
                ));
            }
        }
    }
    Error::all(problems)?;
    let mut manifest = Manifest::clone(first.manifest());
    manifest.shards = shards.values().map(|(shard, _)| Shard::clone(shard)).collect();
    manifest.shards.sort_by_key(|s| (s.part != "model", s.pp, s.tp));
    complete(&manifest, out)?;

    let new = |(_, (_, dir)): &(&&str, &(&Shard, &Directory))| {
        there.as_ref().is_none_or(|t| !std::ptr::eq(*dir, t))
    };
    let new: Vec<_> = shards.iter().filter(new).map(|(_, found)| *found).collect();
    if new.is_empty() {
        return Ok(manifest);
    }
    let plan = hash::from_hex(&manifest.plan)?;
    let names: Vec<(String, u64)> = new.iter().map(|(s, _)| (s.file.clone(), s.bytes)).collect();
    let key = key(&manifest);
    let (output, ..) = Output::open(out, &Work { plan: &plan, key: &key, shards: &names }, false)?;
    for (shard, dir) in &new {
        // Opened as for loading: its length and its header are those of the manifest.
        dir.part(&shard.part, shard.pp, shard.tp)?;
        let path = dir.path().join(&shard.file);
        output.adopt(&path, &shard.file, |leaf, bytes| {
            if hash::to_hex(&hash::leaf(bytes, leaf, shard.bytes)) == shard.leaves[leaf as usize] {
                return Ok(());
            }
            Err(Error::shards(
                path.display(),
                format!("leaf {leaf} is not as converted: copy the file again, or convert this rank again"),
            ))
        })?;
    }
    for file in &manifest.files {
        let path = first.path().join(&file.file);
        let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
        if blake3::hash(&bytes).to_hex().as_str() != file.blake3 {
            return Err(Error::shards(path.display(), "is not as converted: restore it, or convert again"));
        }
        output.small_file(&file.file, &bytes)?;
    }
    output.finish(&manifest)?;
    Ok(manifest)
}

/// A merge may resume only if the plan and every shard are unchanged.
fn key(manifest: &Manifest) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("preshard merge key 1");
    hasher.update(manifest.plan.as_bytes());
    for shard in &manifest.shards {
        hasher.update(shard.blake3.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Refuses two directories that were not made by one plan.
fn same_plan(a: &Directory, b: &Directory) -> Result<()> {
    let (ours, theirs) = (a.manifest(), b.manifest());
    let differs = [
        ("version", ours.tool != theirs.tool),
        ("source", ours.sources != theirs.sources),
        ("options", ours.policy != theirs.policy),
        ("model", ours.model != theirs.model),
        ("config.json, tokenizer and the like", ours.files != theirs.files),
        ("dropped tensors", ours.dropped != theirs.dropped),
        ("plan", ours.plan != theirs.plan),
    ];
    let names: Vec<&str> = differs.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::shards(
        b.path().join(manifest::FILE_NAME).display(),
        format!(
            "not of the same plan as {}: differs in {}; convert all ranks with the same options, GGUF and version",
            a.path().display(),
            names.join(", ")
        ),
    ))
}

/// Refuses a manifest without all ranks of its policy.
fn complete(manifest: &Manifest, out: &Path) -> Result<()> {
    let (tp, pp) = (manifest.policy.tp, manifest.policy.pp);
    let has: BTreeSet<(u64, u64, &str)> =
        manifest.shards.iter().map(|s| (s.pp, s.tp, s.part.as_str())).collect();
    // Every rank has a trunk; a stage has drafts for all its ranks or for none.
    let parts: BTreeSet<(u64, &str)> =
        has.iter().map(|(pp, _, part)| (*pp, *part)).chain((0..pp).map(|stage| (stage, "model"))).collect();
    let missing: BTreeSet<u64> = parts
        .iter()
        .flat_map(|(stage, part)| (0..tp).map(move |rank| (*stage, rank, *part)))
        .filter(|shard| !has.contains(shard))
        .map(|(stage, rank, _)| stage * tp + rank)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let ranks = missing.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    Err(Error::shards(
        out.display(),
        format!(
            "{} of {} ranks in none of the directories: convert them with --ranks {} and merge again",
            missing.len(),
            tp * pp,
            shown(&ranks)
        ),
    ))
}
