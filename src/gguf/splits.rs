//! Finds all files of one model: from any member, a directory, or a list.

use super::file::{Opened, open};
use super::identify;
use crate::error::{Error, Result, shown_path};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Splits of one model at most; `split.count` is a u16.
const MAX_SPLITS: u64 = u16::MAX as u64;

/// Opens all files of the model, in split order.
pub(super) fn find(inputs: &[PathBuf], notes: &mut Vec<String>) -> Result<Vec<Opened>> {
    let files = match inputs {
        [] => return Err(Error::request("GGUF", "no file given: give a file, a directory or all splits")),
        [one] if one.is_dir() => from_directory(one, notes)?,
        [one] => from_member(open(one)?, notes)?,
        many => from_list(many)?,
    };
    check_set(&files, notes)?;
    Ok(files)
}

/// The parts of a split's name, `PREFIX-00001-of-00003.gguf`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    directory: PathBuf,
    prefix: String,
    /// The count as written, with its zeros.
    count: String,
    /// `.gguf` as written.
    extension: String,
    /// Digits of the number.
    width: usize,
}

impl Name {
    /// The name's parts and its number, when it is a split's name.
    fn parse(path: &Path) -> Option<(Name, u64)> {
        let name = path.file_name()?.to_str()?;
        let stem = name.len().checked_sub(".gguf".len())?;
        let (stem, extension) = (name.get(..stem)?, name.get(stem..)?);
        if !extension.eq_ignore_ascii_case(".gguf") {
            return None;
        }
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| !s.is_empty() && s.len() <= 9 && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(count) || !digits(number) {
            return None;
        }
        let parts = Name {
            directory: path.parent()?.to_owned(),
            prefix: prefix.to_owned(),
            count: count.to_owned(),
            extension: extension.to_owned(),
            width: number.len(),
        };
        Some((parts, number.parse().ok()?))
    }
    fn count(&self) -> u64 {
        self.count.parse().unwrap_or(0)
    }
    /// The path of the split `number`, counted from 1.
    fn path(&self, number: u64) -> PathBuf {
        let Name { directory, prefix, count, extension, width } = self;
        directory.join(format!("{prefix}-{number:0width$}-of-{count}{extension}"))
    }
    /// How the whole set is called in messages.
    fn set(&self) -> String {
        format!("{}-*-of-{}{}", shown_path(&self.directory.join(&self.prefix)), self.count, self.extension)
    }
}

/// The splits the file says it is one of; 1 for a file that is whole (`--merge` writes 0).
fn split_count(file: &Opened) -> Result<u64> {
    let count = file.header.metadata.count("split.count")?.unwrap_or(1).max(1);
    if count > MAX_SPLITS {
        return Err(Error::source_file(
            &file.path,
            format!("metadata key split.count: {count}, expected at most {MAX_SPLITS}"),
        ));
    }
    Ok(count)
}

/// Whether a file that says it is the first of several splits holds every tensor of the set all the same:
/// some tools join splits and leave `split.count` as it was.
fn joined(file: &Opened) -> Result<bool> {
    let metadata = &file.header.metadata;
    Ok(split_count(file)? > 1
        && metadata.count("split.no")?.unwrap_or(0) == 0
        && metadata.count("split.tensors.count")? == Some(file.header.entries.len() as u64))
}

fn from_member(member: Opened, notes: &mut Vec<String>) -> Result<Vec<Opened>> {
    let count = split_count(&member)?;
    let name = Name::parse(&member.path);
    if count == 1 && name.as_ref().is_none_or(|(name, _)| name.count() <= 1) {
        return Ok(vec![member]);
    }
    // Where all files of the set are there, they are taken as the set they are.
    let whole_set = name.as_ref().is_some_and(|(name, _)| {
        name.count() == count && (1..=count).all(|number| name.path(number).exists())
    });
    if !whole_set && joined(&member)? {
        notes.push(format!(
            "{}: its metadata says split 1 of {count}, but it holds all {} tensors of the set \
             (split.tensors.count): taken as whole",
            shown_path(&member.path),
            member.header.entries.len()
        ));
        return Ok(vec![member]);
    }
    let Some((name, number)) = name else {
        let number = member.header.metadata.count("split.no")?.unwrap_or(0).saturating_add(1);
        return Err(Error::source_file(
            &member.path,
            format!(
                "split {number} of {count}, but its name does not tell the others' names: give all {count} \
                 files, or name them NAME-00001-of-{count:05}.gguf to NAME-{count:05}-of-{count:05}.gguf"
            ),
        ));
    };
    if count != name.count() {
        return Err(mismatch(&member, "split.count", count, name.count(), "by its name"));
    }
    extra(&name)?;
    let paths = (1..=count).map(|n| name.path(n));
    let missing: Vec<String> = paths.clone().filter(|p| !p.exists()).map(|p| shown_path(&p)).collect();
    if !missing.is_empty() {
        return Err(Error::source_file(
            &member.path,
            format!(
                "{} of its {count} split files missing: {}; get all files of the set",
                missing.len(),
                listed(&missing)
            ),
        ));
    }
    let mut files = Vec::new();
    let mut problems = Vec::new();
    let mut member = Some(member);
    for (index, path) in paths.enumerate() {
        let opened = match member.take_if(|_| index as u64 + 1 == number) {
            Some(member) => Ok(member),
            None => open(&path),
        };
        match opened {
            Ok(file) => files.push(file),
            Err(error) => problems.push(error),
        }
    }
    Error::all(problems)?;
    Ok(files)
}

/// Refuses files named as splits of the same set with numbers that it cannot have.
fn extra(name: &Name) -> Result<()> {
    let directory = if name.directory.as_os_str().is_empty() { Path::new(".") } else { &name.directory };
    let mut surplus: Vec<String> = std::fs::read_dir(directory)
        .map_err(|e| Error::io(directory, "list", e))?
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            let (other, number) = Name::parse(&path)?;
            let same = other.prefix == name.prefix && other.count() == name.count();
            (same && !(1..=name.count()).contains(&number)).then(|| shown_path(&path))
        })
        .collect();
    surplus.sort();
    if surplus.is_empty() {
        return Ok(());
    }
    Err(Error::source(
        name.set(),
        format!("no set of {} has {}: remove what does not belong to it", name.count(), listed(&surplus)),
    ))
}

fn from_list(paths: &[PathBuf]) -> Result<Vec<Opened>> {
    let mut files = Vec::new();
    let mut problems = Vec::new();
    for path in paths {
        match open(path) {
            Ok(file) => files.push(file),
            Err(error) => problems.push(error),
        }
    }
    Error::all(problems)?;
    // Where the set lacks files, the first one that says how many there are speaks for it.
    let mut numbered = BTreeMap::new();
    let mut count = None;
    for file in files {
        let own = split_count(&file)?;
        let Some(number) = file.header.metadata.count("split.no")?.filter(|_| own > 1) else {
            return Err(Error::source_file(
                &file.path,
                "not a split (it has no split.no and split.count), yet given with other files: \
                 give one model at a time",
            ));
        };
        let path = file.path.clone();
        count.get_or_insert(own);
        if let Some(other) = numbered.insert(number, file) {
            return Err(Error::source_file(
                &path,
                format!(
                    "metadata key split.no: {number}, the same as in {}: give each split once",
                    shown_path(&other.path)
                ),
            ));
        }
    }
    let count = count.unwrap_or(1);
    let missing: Vec<String> = (0..count)
        .filter(|number| !numbered.contains_key(number))
        .map(|number| match numbered.values().find_map(|f| Name::parse(&f.path)) {
            Some((name, _)) if name.count() == count => shown_path(&name.path(number + 1)),
            _ => format!("split {} of {count}", number + 1),
        })
        .collect();
    if !missing.is_empty() {
        return Err(Error::source_file(
            &paths[0],
            format!(
                "{} of the {count} split files not given: {}; give all of them",
                missing.len(),
                listed(&missing)
            ),
        ));
    }
    Ok(numbered.into_values().collect())
}

fn from_directory(directory: &Path, notes: &mut Vec<String>) -> Result<Vec<Opened>> {
    // One entry per model: all names of a split set fall together, any other file is its own.
    let mut sets: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut partial = None;
    for entry in std::fs::read_dir(directory).map_err(|e| Error::io(directory, "list", e))? {
        let path = entry.map_err(|e| Error::io(directory, "list", e))?.path();
        let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        if hidden || !path.is_file() {
            continue;
        }
        if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            partial = partial.or(identify::partial(&path).map(|advice| (path, advice)));
            continue;
        }
        let set = match Name::parse(&path) {
            Some((name, _)) => name.set(),
            None => shown_path(&path),
        };
        let first = sets.entry(set).or_insert_with(|| path.clone());
        if path < *first {
            *first = path;
        }
    }
    let mut models = Vec::new();
    let mut others = Vec::new();
    for (set, first) in sets {
        let opened = open(&first);
        match opened.as_ref().ok().and_then(|file| identify::not_a_model(&file.header)) {
            Some(kind) => others.push(format!("{set}: {kind}")),
            None => models.push((set, opened)),
        }
    }
    if models.len() > 1 {
        let names: Vec<String> = models.into_iter().map(|(set, _)| set).collect();
        return Err(Error::request(
            shown_path(directory),
            format!(
                "{} models in this directory: {}; give a file of the one you mean",
                names.len(),
                listed(&names)
            ),
        ));
    }
    match models.pop() {
        Some((_, first)) => {
            notes.extend(others.into_iter().map(|other| format!("left aside {other}")));
            from_member(first?, notes)
        }
        None if !others.is_empty() => Err(Error::source_file(
            directory,
            format!("no model in this directory, only {}", listed(&others)),
        )),
        None => match partial {
            Some((path, advice)) => Err(Error::source_file(&path, advice)),
            None => Err(Error::request(shown_path(directory), "no .gguf file in this directory")),
        },
    }
}

/// What the files say of each other: numbers, counts, names, the total of tensors, shared keys.
fn check_set(files: &[Opened], notes: &mut Vec<String>) -> Result<()> {
    let count = files.len() as u64;
    let total: u64 = files.iter().map(|f| f.header.entries.len() as u64).sum();
    let mut problems = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let metadata = &file.header.metadata;
        let mut expect = |key: &str, found: Option<u64>, expected: u64, why: &str| match found {
            Some(found) if found != expected => {
                problems.push(mismatch(file, key, found, expected, why));
            }
            None if count > 1 => problems.push(Error::source_file(
                &file.path,
                format!("metadata key {key}: absent, expected {expected}, {why}"),
            )),
            _ => {}
        };
        let index = index as u64;
        if count > 1 {
            expect("split.count", metadata.count("split.count")?, count, "the number of files");
        }
        expect("split.no", metadata.count("split.no")?, index, "its place in the set, counted from 0");
        expect(
            "split.tensors.count",
            metadata.count("split.tensors.count")?,
            total,
            "the tensors of all files",
        );
        if !(count == 1 && joined(file)?)
            && let Some((name, number)) = Name::parse(&file.path)
            && (name.count() != count || number != index + 1)
        {
            problems.push(Error::source_file(
                &file.path,
                format!(
                    "its name says split {number} of {}, its metadata split {} of {count} (split.no is {index}): \
                     rename it or get the right file",
                    name.count(),
                    index + 1
                ),
            ));
        }
    }
    Error::all(problems)?;
    later_keys(files, notes)
}

/// Later splits may repeat keys of the first with the same value; others of theirs are not used.
fn later_keys(files: &[Opened], notes: &mut Vec<String>) -> Result<()> {
    let mut problems = Vec::new();
    for file in &files[1..] {
        let mut unused = Vec::new();
        for (key, value) in file.header.metadata.iter() {
            if key.starts_with("split.") || key == "general.alignment" {
                continue;
            }
            match files[0].header.metadata.get(key) {
                Some(first) if first == value => {}
                Some(_) => problems.push(Error::source_file(
                    &file.path,
                    format!(
                        "metadata key {}: differs from {}: the files are of different models",
                        crate::error::shown(key),
                        shown_path(&files[0].path)
                    ),
                )),
                None => unused.push(crate::error::shown(key)),
            }
        }
        if !unused.is_empty() {
            notes.push(format!(
                "{}: metadata of a later split is not used: {}",
                shown_path(&file.path),
                listed(&unused)
            ));
        }
    }
    Error::all(problems)
}

fn mismatch(file: &Opened, key: &str, found: u64, expected: u64, why: &str) -> Error {
    Error::source_file(
        &file.path,
        format!("metadata key {key}: {found}, expected {expected}, {why}: get the files of one set"),
    )
}

/// Names in one line, the first ten of many.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut line = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        line.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    line
}
