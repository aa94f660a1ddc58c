//! The output directory: what may be written where, positioned writes, and the order in which things
//! become visible.
//!
//! Everything is written under `OUT/.partial/`. Data is synced before the journal says so; at the end
//! files are renamed into place, the directory is synced, and the manifest appears last. A directory
//! without a manifest is never complete.

use crate::error::{Error, Result, shown};
use crate::hash;
use crate::journal::{Journal, Records};
use crate::manifest::{FILE_NAME, Manifest};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The working directory inside the output directory.
pub const PARTIAL: &str = ".partial";
/// The list of hashes that `b3sum --check` reads.
pub const SUMS: &str = "B3SUMS";

/// An output directory, held by one run at a time.
pub struct Output {
    dir: PathBuf,
    partial: PathBuf,
    /// Holds the lock for as long as the run lasts.
    _lock: File,
    /// The manifest of an earlier run for other ranks of the same plan.
    pub earlier: Option<Manifest>,
}

impl Output {
    /// Takes `dir` for a conversion of `plan` that writes the shards `names` and the files `small`;
    /// returns the leaves already there.
    ///
    /// Goes on where a run of the same plan died. `force` replaces an earlier conversion, whole or
    /// unfinished; files preshard did not write are never deleted.
    pub fn open(
        dir: &Path,
        plan: &[u8; 32],
        names: &[String],
        small: &[String],
        force: bool,
    ) -> Result<(Output, Journal, Records)> {
        let partial = dir.join(PARTIAL);
        let earlier = check(dir, plan, names, small, force)?;
        std::fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, "create", e))?;
        let lock = lock(&partial)?;
        // Looked at again now that no other run can change it.
        if force {
            remove_ours(dir, &partial)?;
        }
        let Some((journal, mut records)) = Journal::open(&partial, plan)? else {
            return Err(Error::output(
                dir,
                "holds an unfinished conversion with other options or another source; repeat the old command to finish it, or pass --force to discard it",
            ));
        };
        let output =
            Output { dir: dir.to_owned(), partial, _lock: lock, earlier: if force { None } else { earlier } };
        // A leaf counts only as long as its file is there.
        let found: Vec<&String> = names.iter().filter(|n| output.place(n).exists()).collect();
        records.retain(|(file, _), _| found.contains(&file));
        sync_dir(dir)?;
        Ok((output, journal, records))
    }

    /// Where a file is now: in place already, when a run died while renaming.
    fn place(&self, name: &str) -> PathBuf {
        let done = self.dir.join(name);
        if done.exists() { done } else { self.partial.join(name) }
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

    /// Writes a small file and syncs it; it appears with [`Output::finish`].
    pub fn small_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_synced(&self.partial.join(name), bytes)
    }

    /// Makes the conversion visible: files, then `B3SUMS`, then the manifest.
    pub fn finish(self, manifest: &Manifest) -> Result<()> {
        let mut sums = String::new();
        let shards = manifest.shards.iter().map(|s| (&s.file, &s.blake3));
        for (file, hash) in shards.chain(manifest.files.iter().map(|f| (&f.file, &f.blake3))) {
            sums += &format!("{hash}  {file}\n");
        }
        self.small_file(SUMS, sums.as_bytes())?;
        self.small_file(FILE_NAME, &manifest.to_bytes())?;
        let names = manifest.shards.iter().map(|s| &s.file).chain(manifest.files.iter().map(|f| &f.file));
        for name in names.map(String::as_str).chain([SUMS]) {
            let from = self.partial.join(name);
            if from.exists() {
                self.rename(name)?;
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
        let _ = std::fs::remove_dir(&self.dir);
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

/// Whether `dir` may be written to; the manifest of an earlier run that this one adds ranks to.
fn check(
    dir: &Path,
    plan: &[u8; 32],
    names: &[String],
    small: &[String],
    force: bool,
) -> Result<Option<Manifest>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(dir, "read", e)),
    };
    let mut found: Vec<String> = Vec::new();
    for entry in entries {
        found.push(entry.map_err(|e| Error::io(dir, "read", e))?.file_name().to_string_lossy().into_owned());
    }
    let earlier = if found.iter().any(|f| f == FILE_NAME) { Some(Manifest::read(dir)?) } else { None };
    let unfinished = found.iter().any(|f| f == PARTIAL);
    let ours = |f: &String| {
        let listed =
            |m: &Manifest| m.shards.iter().any(|s| s.file == *f) || m.files.iter().any(|s| s.file == *f);
        f == PARTIAL
            || f == SUMS
            || f == FILE_NAME
            || earlier.as_ref().is_some_and(listed)
            || unfinished && (names.contains(f) || small.contains(f))
    };
    if let Some(foreign) = found.iter().filter(|f| !ours(f)).min() {
        return Err(Error::output(
            dir,
            format!("is not empty: it holds {}; choose another directory", shown(foreign)),
        ));
    }
    let Some(manifest) = earlier else { return Ok(None) };
    if force {
        return Ok(None);
    }
    let same = manifest.plan == hash::to_hex(plan);
    let new = names.iter().all(|n| manifest.shards.iter().all(|s| s.file != *n));
    match (same, new) {
        (true, true) => Ok(Some(manifest)),
        (true, false) => Err(Error::output(
            dir,
            "already holds this conversion; preshard verify checks it, --force makes it again",
        )),
        (false, _) => Err(Error::output(
            dir,
            "holds a conversion with other options or of another source; choose another directory, or pass --force to replace it",
        )),
    }
}

/// Deletes an earlier conversion: the manifest first, so that it is never taken for a whole one.
fn remove_ours(dir: &Path, partial: &Path) -> Result<()> {
    let remove = |path: PathBuf| match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&path, "delete", e)),
        _ => Ok(()),
    };
    if let Ok(manifest) = Manifest::read(dir) {
        remove(dir.join(FILE_NAME))?;
        sync_dir(dir)?;
        for name in manifest.shards.iter().map(|s| &s.file).chain(manifest.files.iter().map(|f| &f.file)) {
            remove(dir.join(name))?;
        }
        remove(dir.join(SUMS))?;
    }
    for entry in std::fs::read_dir(partial).map_err(|e| Error::io(partial, "read", e))?.flatten() {
        if entry.file_name() != LOCK {
            remove(entry.path())?;
        }
    }
    Ok(())
}

const LOCK: &str = "lock";

/// Keeps a second run out for as long as the returned file is open.
fn lock(partial: &Path) -> Result<File> {
    let path = partial.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = open.map_err(|e| Error::io(&path, "create", e))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::output(
            partial,
            "another preshard convert is writing here; wait for it or choose another directory",
        )),
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
