//! The output directory: what may be written where, positioned writes, and the order in which things
//! become visible.
//!
//! Everything is written under `OUT/.partial/`. Data is synced before the journal says so; at the end
//! files are renamed into place, the directory is synced, and the manifest appears last. A directory
//! without a manifest is never complete. A conversion that is replaced stays whole until the new one is
//! on disk.

use crate::error::{Error, Result, shown};
use crate::hash::{self, leaf_range};
use crate::journal::{self, Journal, Records};
use crate::manifest::{FILE_NAME, Manifest};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The working directory inside the output directory.
pub const PARTIAL: &str = ".partial";
/// The list of hashes that `b3sum --check` reads.
pub const SUMS: &str = "B3SUMS";

/// Where the manifest of the conversion that is being replaced goes, in the working directory.
const REPLACED: &str = "replaced.json";

/// An output directory, held by one run at a time.
pub struct Output {
    dir: PathBuf,
    partial: PathBuf,
    /// Whether this run made the directory.
    made: bool,
    /// Holds the lock for as long as the run lasts.
    _lock: Lock,
    /// The manifest of an earlier run for other ranks of the same plan.
    pub earlier: Option<Manifest>,
    /// The whole conversion that this one replaces once it is complete.
    replaced: Option<Manifest>,
}

/// What decides whether a run may resume an earlier one.
pub struct Work<'a> {
    /// The plan, which a finished conversion names.
    pub plan: &'a [u8; 32],
    /// The plan and the state of the source files, which an unfinished conversion names.
    pub key: &'a [u8; 32],
    /// The shards to write: names and lengths.
    pub shards: &'a [(String, u64)],
}

impl Output {
    /// Takes `dir` for a conversion; returns the leaves already there.
    ///
    /// Goes on where a run of the same work died. `force` discards an unfinished conversion of other work
    /// at once, and replaces a whole one when this one is complete; files preshard did not write are
    /// never deleted.
    pub fn open(dir: &Path, work: &Work, force: bool) -> Result<(Output, Journal, Records)> {
        let partial = dir.join(PARTIAL);
        check(dir, work, force)?;
        let made = !dir.exists();
        let begun = !partial.exists();
        std::fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, "create", e))?;
        if made {
            sync_parent(dir)?;
        }
        let lock = lock(&partial)?;
        // Looked at again now that no other run can change it.
        let here = match check(dir, work, force) {
            Ok(here) => here,
            Err(e) => {
                if begun {
                    // Another run finished in between and took its working directory away.
                    let _ = std::fs::remove_file(partial.join(LOCK));
                    let _ = std::fs::remove_dir(&partial);
                }
                return Err(e);
            }
        };
        let mut opened = Journal::open(&partial, work.key)?;
        if opened.is_none() && force {
            discard_unfinished(dir, &partial, here.as_ref())?;
            opened = Journal::open(&partial, work.key)?;
        }
        let Some((mut journal, mut records)) = opened else {
            return Err(Error::output(
                dir,
                "holds an unfinished conversion with other options, of another source, or of one that was changed since; repeat the old command to finish it, or pass --force to discard it",
            ));
        };
        let (earlier, replaced) = if force { (None, here) } else { (here, None) };
        let output = Output { dir: dir.to_owned(), partial, made, _lock: lock, earlier, replaced };
        // A leaf counts only as long as its file is there, whole. The journal must forget the others
        // before the file is made again.
        let whole = |file: &String| match work.shards.iter().find(|(name, _)| name == file) {
            Some((name, bytes)) => output.place(name).metadata().is_ok_and(|m| m.len() == *bytes),
            None => false,
        };
        let known = records.len();
        records.retain(|(file, _), _| whole(file));
        if records.len() < known {
            journal.rewrite(work.key, &records)?;
        }
        sync_dir(dir)?;
        Ok((output, journal, records))
    }

    /// The manifest of a conversion that is whole already: the run that made it died before it had tidied
    /// up, which is done now. `None` in every other case.
    pub fn whole(dir: &Path, work: &Work) -> Result<Option<Manifest>> {
        let partial = dir.join(PARTIAL);
        if !partial.exists() || !dir.join(FILE_NAME).exists() {
            return Ok(None);
        }
        let manifest = Manifest::read(dir)?;
        let listed = |(name, bytes): &(String, u64)| {
            manifest.shards.iter().any(|s| s.file == *name && s.bytes == *bytes)
        };
        if manifest.plan != hash::to_hex(work.plan) || !work.shards.iter().all(listed) {
            return Ok(None);
        }
        let _lock = lock(&partial)?;
        std::fs::remove_dir_all(&partial).map_err(|e| Error::io(&partial, "delete", e))?;
        Ok(Some(manifest))
    }

    /// Where a file is now: in place already, when a run died while renaming.
    fn place(&self, name: &str) -> PathBuf {
        let (done, partial) = (self.dir.join(name), self.partial.join(name));
        // What stands in place may belong to the conversion that is replaced.
        let old = self.replaced.as_ref().is_some_and(|m| lists(m, name));
        if !partial.exists() && done.exists() && !old { done } else { partial }
    }

    /// Opens a shard for positioned writes and gives it its length.
    pub fn shard(&self, name: &str, bytes: u64) -> Result<ShardFile> {
        let path = self.place(name);
        let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let file = open.map_err(|e| Error::io(&path, "create", e))?;
        file.set_len(bytes).map_err(|e| Error::io(&path, "set the length of", e))?;
        Ok(ShardFile { file, path })
    }

    /// Refuses when the file system has less room than `bytes` more.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        let stat = rustix::fs::statvfs(&self.partial)
            .map_err(|e| Error::io(&self.partial, "ask for free space of", e))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < bytes {
            return Err(Error::output(
                &self.dir,
                format!(
                    "{bytes} bytes to write, {free} free on its file system; make room or choose another directory"
                ),
            ));
        }
        Ok(())
    }

    /// Takes a whole file of another directory in: by a link where the file system has links, else by a
    /// copy whose bytes `check` sees, leaf by leaf. It appears with [`Output::finish`].
    pub fn adopt(&self, from: &Path, name: &str, check: impl Fn(u64, &[u8]) -> Result<()>) -> Result<()> {
        let to = self.place(name);
        let id = |m: &std::fs::Metadata| (m.dev(), m.ino());
        let stat = from.metadata().map_err(|e| Error::io(from, "look at", e))?;
        if to.metadata().is_ok_and(|m| id(&m) == id(&stat)) {
            return Ok(());
        }
        // What a run that died has left here may be half a copy.
        remove(&to)?;
        if std::fs::hard_link(from, &to).is_ok() {
            return Ok(());
        }
        let source = File::open(from).map_err(|e| Error::io(from, "open", e))?;
        let copy = self.shard(name, stat.len())?;
        let mut buffer = Vec::new();
        for leaf in 0..hash::leaves(stat.len()) {
            let range = leaf_range(leaf, stat.len());
            buffer.resize((range.end - range.start) as usize, 0);
            source.read_exact_at(&mut buffer, range.start).map_err(|e| Error::io(from, "read", e))?;
            check(leaf, &buffer)?;
            copy.write(&buffer, range.start)?;
        }
        copy.sync()
    }

    /// Writes a small file and syncs it; it appears with [`Output::finish`].
    pub fn small_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_synced(&self.partial.join(name), bytes)
    }

    /// Makes the names of new files durable; before the journal counts on them.
    pub fn sync_names(&self) -> Result<()> {
        sync_dir(&self.partial)
    }

    /// Makes the conversion visible: files, then `B3SUMS`, then the manifest.
    pub fn finish(self, manifest: &Manifest) -> Result<()> {
        let bytes = manifest.to_bytes();
        self.small_file(SUMS, sums(manifest, &bytes).as_bytes())?;
        // From here on a run that dies has told which files in the directory are its own.
        self.small_file(FILE_NAME, &bytes)?;
        self.sync_names()?;
        if self.replaced.is_some() {
            let (from, to) = (self.dir.join(FILE_NAME), self.partial.join(REPLACED));
            std::fs::rename(&from, &to).map_err(|e| Error::io(&from, "put aside", e))?;
            sync_dir(&self.dir)?;
            self.sync_names()?;
        }
        for name in names(manifest).chain([SUMS]) {
            let from = self.partial.join(name);
            if from.exists() {
                self.rename(name)?;
            }
        }
        if let Ok(replaced) = read(&self.partial.join(REPLACED)) {
            for name in names(&replaced).filter(|n| !lists(manifest, n)) {
                remove(&self.dir.join(name))?;
            }
        }
        sync_dir(&self.dir)?;
        self.rename(FILE_NAME)?;
        sync_dir(&self.dir)?;
        // The conversion is complete; what is left is only in the way.
        let _ = std::fs::remove_dir_all(&self.partial);
        Ok(())
    }

    fn rename(&self, name: &str) -> Result<()> {
        let (from, to) = (self.partial.join(name), self.dir.join(name));
        std::fs::rename(&from, &to).map_err(|e| Error::io(&to, "put in place", e))
    }

    /// Removes what a refused run left, when it left nothing worth going on from.
    pub fn discard(self) {
        let _ = std::fs::remove_dir_all(&self.partial);
        if self.made {
            let _ = std::fs::remove_dir(&self.dir);
        }
    }
}

/// A shard open for writing.
pub struct ShardFile {
    file: File,
    path: PathBuf,
}

impl ShardFile {
    /// Writes a leaf at its place.
    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|e| Error::io(&self.path, "write", e))
    }
    /// Waits until everything written is on disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io(&self.path, "sync", e))
    }
}

/// The text of `B3SUMS`, for the manifest and its bytes: what `b3sum --check` reads.
pub fn sums(manifest: &Manifest, bytes: &[u8]) -> String {
    let shards = manifest.shards.iter().map(|s| (&s.file, &s.blake3));
    let mut text = String::new();
    for (file, hash) in shards.chain(manifest.files.iter().map(|f| (&f.file, &f.blake3))) {
        text += &format!("{hash}  {file}\n");
    }
    text + &format!("{}  {FILE_NAME}\n", blake3::hash(bytes).to_hex())
}

/// Every file a manifest names.
fn names(manifest: &Manifest) -> impl Iterator<Item = &str> {
    let shards = manifest.shards.iter().map(|s| s.file.as_str());
    shards.chain(manifest.files.iter().map(|f| f.file.as_str()))
}

fn lists(manifest: &Manifest, name: &str) -> bool {
    names(manifest).any(|n| n == name)
}

fn read(path: &Path) -> Result<Manifest> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", e))?;
    Manifest::from_slice(&bytes, path)
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, "delete", e)),
        _ => Ok(()),
    }
}

/// Manifests left in `.partial/` by a run that died while renaming: its own, and that of the conversion it
/// was replacing.
fn leftover_manifests(partial: &Path) -> Vec<Manifest> {
    [FILE_NAME, REPLACED].iter().filter_map(|name| read(&partial.join(name)).ok()).collect()
}

/// Whether `dir` may be written to; the manifest in it, if any.
fn check(dir: &Path, work: &Work, force: bool) -> Result<Option<Manifest>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(dir, "read", e)),
    };
    let mut found: Vec<String> = Vec::new();
    for entry in entries {
        found.push(entry.map_err(|e| Error::io(dir, "read", e))?.file_name().to_string_lossy().into_owned());
    }
    let here = if found.iter().any(|f| f == FILE_NAME) { Some(Manifest::read(dir)?) } else { None };
    let unfinished = found.iter().any(|f| f == PARTIAL);
    let dead = leftover_manifests(&dir.join(PARTIAL));
    let ours = |f: &String| match f.as_str() {
        PARTIAL | FILE_NAME => true,
        SUMS => unfinished || here.is_some(),
        name => here.iter().chain(&dead).any(|m| lists(m, name)),
    };
    if let Some(foreign) = found.iter().filter(|f| !ours(f)).min() {
        return Err(Error::output(
            dir,
            format!("is not empty: it holds {}; choose another directory", shown(foreign)),
        ));
    }
    let Some(manifest) = here else { return Ok(None) };
    if force {
        return Ok(Some(manifest));
    }
    let same = manifest.plan == hash::to_hex(work.plan);
    let new = work.shards.iter().all(|(n, _)| manifest.shards.iter().all(|s| s.file != *n));
    match (same, new) {
        (true, true) => Ok(Some(manifest)),
        (true, false) => Err(Error::output(
            dir,
            "already holds this conversion; preshard verify checks it, --force makes it again",
        )),
        (false, _) => Err(Error::output(
            dir,
            "holds a conversion with other options, with another config.json or tokenizer (--hf-config), or of another source; choose another directory, or pass --force to replace it",
        )),
    }
}

/// Deletes an unfinished conversion, and what it had put in place or left of an earlier one; never a
/// file of the whole conversion `here`. The manifests that tell which files those are go last.
fn discard_unfinished(dir: &Path, partial: &Path, here: Option<&Manifest>) -> Result<()> {
    remove(&partial.join(journal::FILE_NAME))?;
    for manifest in leftover_manifests(partial) {
        for name in names(&manifest).filter(|n| here.is_none_or(|m| !lists(m, n))) {
            remove(&dir.join(name))?;
        }
    }
    for entry in std::fs::read_dir(partial).map_err(|e| Error::io(partial, "read", e))?.flatten() {
        let name = entry.file_name();
        if ![LOCK, FILE_NAME, REPLACED].iter().any(|n| *n == name) {
            remove(&entry.path())?;
        }
    }
    sync_dir(dir)?;
    remove(&partial.join(FILE_NAME))?;
    remove(&partial.join(REPLACED))
}

const LOCK: &str = "lock";

/// A locked file. Unlocked by name, not by closing it: a process that another thread is just starting
/// holds copies of every open file for a moment.
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

/// Keeps a second run out for as long as the returned lock is held.
fn lock(partial: &Path) -> Result<Lock> {
    let path = partial.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = open.map_err(|e| Error::io(&path, "create", e))?;
    let busy = || {
        let text = "another preshard convert is writing here; wait for it or choose another directory";
        Err(Error::output(partial, text))
    };
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        // A run that ended between the two calls took the name away: the lock is then on nothing.
        Ok(()) => match (file.metadata(), std::fs::metadata(&path)) {
            (Ok(held), Ok(named)) if (held.dev(), held.ino()) == (named.dev(), named.ino()) => Ok(Lock(file)),
            _ => busy(),
        },
        Err(rustix::io::Errno::WOULDBLOCK) => busy(),
        Err(e) => Err(Error::io(&path, "lock", e)),
    }
}

/// Writes a whole file and waits until it is on disk.
fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(|e| Error::io(path, "create", e))?;
    file.write_all(bytes).map_err(|e| Error::io(path, "write", e))?;
    file.sync_all().map_err(|e| Error::io(path, "sync", e))
}

/// Makes renames and new names in a directory durable.
fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "sync", e))
}

/// Makes the name of a directory that was just made durable.
fn sync_parent(dir: &Path) -> Result<()> {
    match dir.canonicalize().map_err(|e| Error::io(dir, "find", e))?.parent() {
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}
