//! Opening a converted directory: everything that can be refused before a byte is loaded.

use super::header;
use crate::error::{Error, Result, shown};
use crate::hash;
use crate::manifest::{self, Manifest};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A converted directory with its manifest, checked.
pub struct Directory {
    /// Free of symbolic links.
    path: PathBuf,
    manifest: Arc<Manifest>,
}

/// One shard file, open and checked against the manifest; its data is not yet read.
pub struct Shard {
    path: PathBuf,
    file: File,
    opened: Metadata,
    manifest: Arc<Manifest>,
    index: usize,
    leaves: Vec<[u8; 32]>,
}

impl Manifest {
    /// Refuses an engine of another shape than the one converted for.
    pub fn expect_world(&self, tp: u64, pp: u64, ep: bool) -> Result<()> {
        let on = |ep: bool| if ep { "on" } else { "off" };
        let p = &self.policy;
        if (p.tp, p.pp, p.ep) == (tp, pp, ep) {
            return Ok(());
        }
        Err(Error::shards(
            manifest::FILE_NAME,
            format!(
                "converted for tensor parallel {}, pipeline parallel {}, expert parallel {}; the engine runs {tp}, {pp}, {}: \
                 start the engine so, or convert again",
                p.tp,
                p.pp,
                on(p.ep),
                on(ep)
            ),
        ))
    }
}

impl Directory {
    /// Opens `dir`: the manifest is there and valid, its own numbers agree, and the directory holds
    /// no safetensors file that the manifest does not name (a stale part, another run's rank).
    ///
    /// Shards that the manifest names and the directory lacks are refused when they are opened: a
    /// host may hold its own ranks only.
    pub fn open(dir: &Path) -> Result<Directory> {
        let path = dir.canonicalize().map_err(|e| Error::io(dir, "open", e))?;
        let manifest = Manifest::read(&path)?;
        check_config(&path, &manifest)?;
        let known: BTreeSet<&str> = manifest.shards.iter().map(|s| s.file.as_str()).collect();
        let mut extra = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(|e| Error::io(&path, "list", e))? {
            let name = entry.map_err(|e| Error::io(&path, "list", e))?.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(".safetensors") && !known.contains(name.as_ref()) {
                extra.push(Error::shards(
                    path.join(name.as_ref()).display(),
                    "not in the manifest, perhaps left by another conversion: remove it",
                ));
            }
        }
        extra.sort_by_key(ToString::to_string);
        Error::all(extra)?;
        Ok(Directory { path, manifest: Arc::new(manifest) })
    }

    /// Where it lies, free of symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Opens the trunk (part `model`) of tensor-parallel rank `tp` of a directory of one stage.
    pub fn shard(&self, tp: u64) -> Result<Shard> {
        self.part("model", 0, tp)
    }

    /// Opens one part (`model`, or `mtp` for the draft) of pipeline stage `pp` and rank `tp`.
    pub fn part(&self, part: &str, pp: u64, tp: u64) -> Result<Shard> {
        let mut found = self
            .manifest
            .shards
            .iter()
            .enumerate()
            .filter(|(_, s)| (s.pp, s.tp) == (pp, tp) && s.part == part);
        let Some((index, _)) = found.next() else {
            let p = &self.manifest.policy;
            return Err(Error::shards(
                self.path.join(manifest::FILE_NAME).display(),
                format!(
                    "holds no part {} of stage {pp}, rank {tp} (converted for {} stages of {} ranks, {} files here)",
                    shown(part),
                    p.pp,
                    p.tp,
                    self.manifest.shards.len()
                ),
            ));
        };
        if found.next().is_some() {
            return Err(Error::shards(
                self.path.join(manifest::FILE_NAME).display(),
                format!("part {} of stage {pp}, rank {tp} twice", shown(part)),
            ));
        }
        self.open_shard(index)
    }

    /// Opens every shard of the manifest; all that cannot be opened are reported.
    pub fn all(&self) -> Result<Vec<Shard>> {
        self.select(|_| true)
    }

    /// Opens the shards that `wanted` wants; all that cannot be opened are reported.
    pub fn select(&self, wanted: impl Fn(&manifest::Shard) -> bool) -> Result<Vec<Shard>> {
        let (shards, problems): (Vec<_>, Vec<_>) = (0..self.manifest.shards.len())
            .filter(|&i| wanted(&self.manifest.shards[i]))
            .map(|i| self.open_shard(i))
            .partition(Result::is_ok);
        Error::all(problems.into_iter().filter_map(Result::err).collect())?;
        Ok(shards.into_iter().filter_map(Result::ok).collect())
    }

    fn open_shard(&self, index: usize) -> Result<Shard> {
        let entry = &self.manifest.shards[index];
        let named = self.path.join(&entry.file);
        let bad = |detail: String| Err(Error::shards(named.display(), detail));
        let path = named.canonicalize().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::shards(
                named.display(),
                "missing, the manifest names it: copy it here, or convert again",
            ),
            _ => Error::io(&named, "open", e),
        })?;
        if !path.starts_with(&self.path) {
            return bad(format!(
                "a link that leaves the directory, to {}: put the file itself here",
                crate::error::shown_path(&path)
            ));
        }
        // Not blocking, so that a FIFO cannot hold the program; its kind is looked at next.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file: File =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| Error::io(&named, "open", e))?.into();
        let opened = file.metadata().map_err(|e| Error::io(&named, "open", e))?;
        if !opened.is_file() {
            return bad("no regular file".into());
        }
        if opened.len() != entry.bytes {
            return bad(format!(
                "{} bytes, expected {}: copy the file again, or convert again",
                opened.len(),
                entry.bytes
            ));
        }
        let leaves = entry.leaves.iter().map(|text| hash::from_hex(text)).collect::<Result<_>>()?;
        check_header(&named, &file, entry)?;
        Ok(Shard { path: named, file, opened, manifest: self.manifest.clone(), index, leaves })
    }
}

impl Shard {
    /// Opens the trunk of tensor-parallel rank `tp` in `dir`; [`Directory`] serves for several.
    pub fn open(dir: &Path, tp: u64) -> Result<Shard> {
        Directory::open(dir)?.shard(tp)
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its entry in the manifest: size, tensors, hashes.
    pub fn entry(&self) -> &manifest::Shard {
        &self.manifest.shards[self.index]
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The expected leaf chaining values.
    pub(super) fn leaves(&self) -> &[[u8; 32]] {
        &self.leaves
    }

    /// Refuses a file that was written to or replaced since it was opened.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let same = |m: &Metadata| {
            let id = |m: &Metadata| (m.dev(), m.ino(), m.len(), m.mtime(), m.mtime_nsec());
            id(m) == id(&self.opened)
        };
        let by_handle = self.file.metadata().map_err(|e| Error::io(&self.path, "look at", e))?;
        let by_name = self.path.metadata().map_err(|e| Error::io(&self.path, "look at", e))?;
        if same(&by_handle) && same(&by_name) {
            return Ok(());
        }
        Err(Error::shards(
            self.path.display(),
            "changed while it was loaded: load again when nothing writes to it",
        ))
    }
}

/// config.json, where it lies beside the shards, is the one that was converted and names the same class.
fn check_config(dir: &Path, manifest: &Manifest) -> Result<()> {
    const NAME: &str = "config.json";
    let Some(entry) = manifest.files.iter().find(|f| f.file == NAME) else { return Ok(()) };
    let path = dir.join(NAME);
    let bad = |detail: String| Err(Error::shards(path.display(), detail));
    let bytes = match File::open(&path) {
        // A host may hold its ranks' files alone.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(&path, "open", e)),
        Ok(file) => {
            let size = file.metadata().map_err(|e| Error::io(&path, "open", e))?.len();
            if size != entry.bytes || size > header::MAX_HEADER {
                return bad(format!("{size} bytes, expected {}: copy the file again", entry.bytes));
            }
            let mut bytes = Vec::new();
            file.take(size).read_to_end(&mut bytes).map_err(|e| Error::io(&path, "read", e))?;
            bytes
        }
    };
    if blake3::hash(&bytes).to_hex().as_str() != entry.blake3 {
        return bad("its hash is not the manifest's: copy the file again, or convert again".into());
    }
    let class = serde_json::from_slice::<serde_json::Value>(&bytes)
        .ok()
        .and_then(|config| config["architectures"][0].as_str().map(str::to_owned));
    match class {
        Some(class) if class == manifest.model.class => Ok(()),
        class => bad(format!(
            "names the class {}, the manifest {}",
            class.map_or_else(|| "of no architecture".into(), |c| shown(&c)),
            shown(&manifest.model.class)
        )),
    }
}

/// The file's own header says what the manifest says, tensor by tensor.
fn check_header(path: &Path, file: &File, entry: &manifest::Shard) -> Result<()> {
    let bad = |detail: String| Error::shards(path.display(), detail);
    let read = |buffer: &mut [u8], at| file.read_exact_at(buffer, at).map_err(|e| Error::io(path, "read", e));
    let mut first = [0; 8];
    read(&mut first, 0)?;
    let length = header::json_bytes(first, entry.bytes).map_err(bad)?;
    if 8 + length != entry.data_start {
        return Err(bad(format!(
            "data starts at byte {}, the manifest says {}",
            8 + length,
            entry.data_start
        )));
    }
    let mut json = vec![0; length as usize];
    read(&mut json, 8)?;
    let tensors = header::parse(&json, entry.bytes - entry.data_start).map_err(bad)?;
    let named: BTreeSet<&str> = entry.tensors.iter().map(|t| t.name.as_str()).collect();
    if let Some(name) = tensors.keys().find(|n| !named.contains(n.as_str())) {
        return Err(bad(format!("tensor {}: in the file, not in the manifest", shown(name))));
    }
    for t in &entry.tensors {
        let differs = |what: &str, file: String, manifest: String| {
            bad(format!("tensor {}: {what} {file} in the file, {manifest} in the manifest", shown(&t.name)))
        };
        let Some(info) = tensors.get(&t.name) else {
            return Err(bad(format!("tensor {}: in the manifest, not in the file", shown(&t.name))));
        };
        if info.dtype.to_string() != t.dtype {
            return Err(differs("dtype", info.dtype.to_string(), shown(&t.dtype)));
        }
        if info.shape != t.shape {
            return Err(differs("shape", format!("{:?}", info.shape), format!("{:?}", t.shape)));
        }
        let begin = t.offset - entry.data_start;
        if info.data_offsets != [begin, begin + t.bytes] {
            return Err(differs(
                "bytes",
                format!("{:?}", info.data_offsets),
                format!("{:?}", [begin, begin + t.bytes]),
            ));
        }
    }
    Ok(())
}
