//! Checks a converted directory: every leaf against its hash, or every byte against the GGUF.

use crate::convert::{self, Progress};
use crate::error::{Error, Result};
use crate::eval::{Decoder, Evaluator, source_order};
use crate::gguf::Gguf;
use crate::hash::{self, leaf_range};
use crate::manifest::{self, Manifest, Shard};
use crate::plan::Plan;
use crate::source_pages::{Place, SourcePages};
use crate::store;
use crate::sync::{into_inner, lock};
use crate::workers;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// More bad leaves than this are counted, not listed.
const LISTED: usize = 100;

/// How to verify.
pub struct Settings<'a> {
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Told the bytes checked.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Set when the run is to stop.
    pub stop: &'a AtomicBool,
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Settings { threads: 0, progress: &|_| {}, stop: &workers::NEVER }
    }
}

/// What was checked.
#[derive(Debug)]
pub struct Outcome {
    /// Files, the small ones included.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Checks every file against the manifest's hashes.
pub fn hashes(dir: &Path, settings: &Settings) -> Result<Outcome> {
    let manifest = Manifest::read(dir)?;
    let mut problems = small_files(dir, &manifest);
    problems.extend(unlisted(dir, &manifest)?);
    for shard in &manifest.shards {
        let leaves = shard.leaves.iter().map(|l| hash::from_hex(l)).collect::<Result<Vec<_>>>();
        let folded = leaves.map(|l| hash::to_hex(&hash::fold(&l, shard.bytes)));
        if folded.as_ref().ok() != Some(&shard.blake3) {
            problems.push(Error::shards(
                &shard.file,
                "its leaf hashes do not give its BLAKE3; the manifest was changed",
            ));
        }
    }
    let checked = each_leaf(dir, &manifest, settings, &mut problems, None, |shard, _, leaf, bytes| {
        Ok(hash::to_hex(&hash::leaf(bytes, leaf, shard.bytes)) == shard.leaves[leaf as usize])
    });
    finish(checked, problems, &manifest)
}

/// Recomputes every byte of a directory from the GGUF and the plan it was made by, and compares. `files`: the small
/// files that they give.
pub fn source(
    dir: &Path,
    manifest: &Manifest,
    (gguf, plan): (&Gguf, &Plan),
    files: Vec<(String, Vec<u8>)>,
    decoder: &Decoder,
    settings: &Settings,
) -> Result<Outcome> {
    // The library writes shards alone where it is given no files.
    let alone = !manifest.files.iter().any(|f| f.file == "config.json");
    let files = convert::small_files(plan, if alone { Vec::new() } else { files });
    let mut other = Vec::new();
    for (name, bytes) in &files {
        let made = blake3::hash(bytes).to_hex();
        match manifest.files.iter().find(|f| f.file == *name) {
            Some(file) if file.blake3 == made.as_str() => {}
            Some(_) => other.push((name, "is not what this GGUF gives")),
            None => other.push((name, "comes of this GGUF and is not in the manifest")),
        }
    }
    for file in manifest.files.iter().filter(|f| !files.iter().any(|(name, _)| *name == f.file)) {
        other.push((&file.file, "does not come of this GGUF"));
    }
    let remedy = "name the files it was converted with by --hf-config, or convert again";
    Error::all(
        other
            .into_iter()
            .map(|(name, what)| Error::shards(dir.join(name).display(), format!("{what}; {remedy}")))
            .collect(),
    )?;
    if hash::to_hex(&plan.with_files(&files)) != manifest.plan {
        let sources = manifest.sources.iter().map(|s| s.file.as_str()).collect::<Vec<_>>().join(", ");
        return Err(Error::shards(
            dir.display(),
            format!(
                "was not made from this GGUF by this version: it was made from {sources} by {}",
                manifest.tool
            ),
        ));
    }
    let mut problems = small_files(dir, manifest);
    problems.extend(unlisted(dir, manifest)?);
    let evaluator = Evaluator { plan, gguf, decoder, allow_nonfinite: true };
    let planned = |shard: &Shard| plan.shards.iter().find(|s| s.name == shard.file && s.bytes == shard.bytes);
    let place = |shard: &Shard, leaf| planned(shard).map_or((0, 0), |p| source_order(gguf, p, leaf));
    let pages = SourcePages::new(gguf);
    let from = Some((&pages, &place as &PlaceOf));
    let checked = each_leaf(dir, manifest, settings, &mut problems, from, |shard, fresh, leaf, bytes| {
        let Some(planned) = planned(shard) else {
            return Err(Error::shards(&shard.file, "is not part of the plan; the manifest was changed"));
        };
        evaluator.leaf(planned, leaf, fresh)?;
        Ok(fresh == bytes)
    });
    pages.finish();
    finish(checked, problems, manifest)
}

fn finish(checked: Result<()>, problems: Vec<Error>, manifest: &Manifest) -> Result<Outcome> {
    checked?;
    Error::all(problems)?;
    let small: u64 = manifest.files.iter().map(|f| f.bytes).sum();
    Ok(Outcome {
        files: manifest.shards.len() + manifest.files.len(),
        bytes: manifest.shards.iter().map(|s| s.bytes).sum::<u64>() + small,
    })
}

/// Where the source of a shard's leaf begins.
type PlaceOf<'a> = dyn Fn(&Shard, u64) -> Place + Sync + 'a;

/// Reads every leaf of every shard and adds those `good` does not accept to the problems. With a source that
/// `good` reads, the leaves come in its order, so that all ranks read each stretch of it together, once.
fn each_leaf(
    dir: &Path,
    manifest: &Manifest,
    settings: &Settings,
    problems: &mut Vec<Error>,
    source: Option<(&SourcePages, &PlaceOf)>,
    good: impl Fn(&Shard, &mut Vec<u8>, u64, &[u8]) -> Result<bool> + Sync,
) -> Result<()> {
    let mut files = Vec::new();
    for shard in &manifest.shards {
        match open(dir, &shard.file, shard.bytes) {
            Ok(file) => files.push((shard, file)),
            Err(e) => problems.push(e),
        }
    }
    let total = files.iter().map(|(s, _)| s.bytes).sum();
    (settings.progress)(Progress::Start { total, done: 0 });
    let mut jobs = Vec::new();
    for opened in &files {
        let shard: &Shard = opened.0;
        for leaf in 0..hash::leaves(shard.bytes) {
            jobs.push((opened, leaf, source.map_or((0, 0), |(_, place)| place(shard, leaf))));
        }
    }
    jobs.sort_by_key(|(_, _, place)| *place);
    let bad = Mutex::new(Vec::new());
    let threads = workers::count(settings.threads, u64::MAX);
    workers::each(threads, &jobs, settings.stop, |((shard, file), leaf, place), fresh| {
        if let Some((pages, _)) = source {
            pages.begin(*place);
        }
        let range = leaf_range(*leaf, shard.bytes);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let path = dir.join(&shard.file);
        file.read_exact_at(&mut bytes, range.start).map_err(|e| Error::io(&path, "read", e))?;
        let good = good(shard, fresh, *leaf, &bytes)?;
        if let Some((pages, _)) = source {
            pages.end(*place);
        }
        if !good {
            lock(&bad).push((&shard.file, *leaf, wrong_leaf(shard, *leaf)));
        }
        (settings.progress)(Progress::Wrote(range.end - range.start));
        Ok(())
    })?;
    if settings.stop.load(Ordering::Relaxed) {
        return Err(Error::Interrupted("stopped before everything was checked".into()));
    }
    let mut bad = into_inner(bad);
    bad.sort_by_key(|(file, leaf, _)| (*file, *leaf));
    let more = bad.len().saturating_sub(LISTED);
    problems.extend(bad.into_iter().take(LISTED).map(|(_, _, e)| e));
    if more > 0 {
        problems.push(Error::shards(dir.display(), format!("{more} more leaves differ; convert again")));
    }
    Ok(())
}

/// The message for a leaf that differs: its number, bytes and tensors.
fn wrong_leaf(shard: &Shard, leaf: u64) -> Error {
    let range = leaf_range(leaf, shard.bytes);
    let mut names: Vec<_> = shard
        .tensors
        .iter()
        .filter(|t| t.offset < range.end && t.offset + t.bytes > range.start)
        .map(|t| t.name.as_str())
        .collect();
    if range.start < shard.data_start {
        names.insert(0, "the header");
    }
    let more = names.len().saturating_sub(3);
    names.truncate(3);
    let more = if more > 0 { format!(" and {more} more tensors") } else { String::new() };
    Error::shards(
        &shard.file,
        format!(
            "leaf {leaf} (bytes {} to {}) differs from what was converted; it holds {}{more}; convert again",
            range.start,
            range.end,
            names.join(", ")
        ),
    )
}

/// Opens a file of the directory: a regular file of the size the manifest gives.
pub(crate) fn open(dir: &Path, name: &str, bytes: u64) -> Result<File> {
    let path = dir.join(name);
    let file = File::open(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::shards(path.display(), "is missing; convert again"),
        _ => Error::io(&path, "open", e),
    })?;
    let meta = file.metadata().map_err(|e| Error::io(&path, "ask for the size of", e))?;
    if !meta.is_file() || meta.len() != bytes {
        return Err(Error::shards(
            path.display(),
            format!("{} bytes, expected a file of {bytes}; convert again", meta.len()),
        ));
    }
    Ok(file)
}

fn small_files(dir: &Path, manifest: &Manifest) -> Vec<Error> {
    let check = |f: &crate::manifest::SmallFile| -> Result<()> {
        let file = open(dir, &f.file, f.bytes)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file).map_err(|e| Error::io(&dir.join(&f.file), "read", e))?;
        if hasher.finalize().to_hex().as_str() != f.blake3 {
            return Err(Error::shards(&f.file, "differs from what was converted; convert again"));
        }
        Ok(())
    };
    let mut problems: Vec<Error> = manifest.files.iter().filter_map(|f| check(f).err()).collect();
    problems.extend(sums(dir, manifest).err());
    problems
}

/// Whether `B3SUMS` and the manifest say the same, each of itself and of the other.
fn sums(dir: &Path, manifest: &Manifest) -> Result<()> {
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::shards(path.display(), "is missing; convert again"),
            _ => Error::io(&path, "read", e),
        })
    };
    let found = read(store::SUMS)?;
    let expected = store::sums(manifest, &read(manifest::FILE_NAME)?).into_bytes();
    if found == expected {
        return Ok(());
    }
    // The last line is the manifest's own: when the others agree, it is one of the two that changed.
    let lines = |text: &[u8]| text.split_inclusive(|b| *b == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (found, expected) = (lines(&found), lines(&expected));
    let others = expected.len().saturating_sub(1);
    let name = if found.len() == expected.len() && found[..others] == expected[..others] {
        format!("{} or {}", manifest::FILE_NAME, store::SUMS)
    } else {
        store::SUMS.to_owned()
    };
    Err(Error::shards(
        name,
        "differs from what was converted: the hashes of the two do not agree; convert again",
    ))
}

/// Shard files in the directory that the manifest does not know: a loader might pick them up.
fn unlisted(dir: &Path, manifest: &Manifest) -> Result<Vec<Error>> {
    let mut problems = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, "read", e))? {
        let name = entry.map_err(|e| Error::io(dir, "read", e))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") && manifest.shards.iter().all(|s| s.file != name) {
            problems.push(Error::shards(name, "is not in the manifest; remove it, a loader may read it"));
        }
    }
    Ok(problems)
}
