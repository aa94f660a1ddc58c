//! The journal of an unfinished conversion: which leaves are on disk, so that a run that died can go on.
//!
//! A text file, one line per leaf, written only after the leaf's bytes are synced. It is valid for one
//! hash of the plan and the state of the sources. A torn last line (no newline) is ignored.

use crate::error::{Error, Result};
use crate::hash;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The name of the journal in the working directory of a conversion.
pub const FILE_NAME: &str = "journal";
const MAGIC: &str = "preshard journal 1";

/// What is known of a finished leaf.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Its chaining value.
    pub hash: [u8; 32],
    /// Tensors (by index in the shard) with non-finite values that start in the leaf, and how many.
    pub nonfinite: Vec<(usize, u64)>,
}

/// Finished leaves, by file name and leaf.
pub type Records = HashMap<(String, u64), Record>;

/// An open journal.
pub struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Opens the journal in `dir`, or begins one; returns the leaves it holds. `None` when it belongs to
    /// another plan.
    pub fn open(dir: &Path, plan: &[u8; 32]) -> Result<Option<(Journal, Records)>> {
        let path = dir.join(FILE_NAME);
        let head = format!("{MAGIC} {}", hash::to_hex(plan));
        let text = match std::fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(Error::io(&path, "read", e)),
        };
        // Only whole lines count; what follows the last newline was being written when the run died.
        let whole = &text[..text.rfind('\n').map_or(0, |i| i + 1)];
        let mut lines = whole.lines();
        let first = lines.next();
        if first.is_some_and(|f| f != head) {
            return Ok(None);
        }
        let records = lines.filter_map(parse).collect();
        let open = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(|e| Error::io(&path, "open", e))?;
        let mut journal = Journal { file, path };
        journal.file.set_len(whole.len() as u64).map_err(|e| Error::io(&journal.path, "truncate", e))?;
        std::io::Seek::seek(&mut journal.file, std::io::SeekFrom::End(0))
            .map_err(|e| Error::io(&journal.path, "seek in", e))?;
        if first.is_none() {
            journal.write(&format!("{head}\n"))?;
        }
        Ok(Some((journal, records)))
    }

    /// Adds leaves whose bytes are on disk, and syncs.
    pub fn append(&mut self, records: &[(String, u64, Record)]) -> Result<()> {
        let mut text = String::new();
        for (file, leaf, record) in records {
            line(&mut text, file, *leaf, record);
        }
        self.write(&text)
    }

    /// Keeps only these leaves. A crash here can lose records but never invent one.
    pub fn rewrite(&mut self, plan: &[u8; 32], records: &Records) -> Result<()> {
        let mut text = format!("{MAGIC} {}\n", hash::to_hex(plan));
        for ((file, leaf), record) in records {
            line(&mut text, file, *leaf, record);
        }
        self.file.set_len(0).map_err(|e| Error::io(&self.path, "truncate", e))?;
        std::io::Seek::rewind(&mut self.file).map_err(|e| Error::io(&self.path, "seek in", e))?;
        self.write(&text)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io(&self.path, "write", e))?;
        self.file.sync_data().map_err(|e| Error::io(&self.path, "sync", e))
    }
}

fn line(text: &mut String, file: &str, leaf: u64, record: &Record) {
    *text += &format!("{file} {leaf} {}", hash::to_hex(&record.hash));
    for (tensor, n) in &record.nonfinite {
        *text += &format!(" {tensor}:{n}");
    }
    text.push('\n');
}

fn parse(line: &str) -> Option<((String, u64), Record)> {
    let mut words = line.split(' ');
    let (file, leaf, hex) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
    let mut nonfinite = Vec::new();
    for word in words {
        let (tensor, n) = word.split_once(':')?;
        nonfinite.push((tensor.parse().ok()?, n.parse().ok()?));
    }
    Some(((file.to_owned(), leaf), Record { hash: hash::from_hex(hex).ok()?, nonfinite }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_is_forgotten_and_another_plan_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record { hash: [7; 32], nonfinite: vec![(3, 9)] };
        let (mut journal, none) = Journal::open(dir.path(), &[1; 32]).unwrap().unwrap();
        assert!(none.is_empty());
        journal.append(&[("a".into(), 0, record.clone()), ("a".into(), 1, record.clone())]).unwrap();
        drop(journal);
        let path = dir.path().join(FILE_NAME);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut journal, records) = Journal::open(dir.path(), &[1; 32]).unwrap().unwrap();
            let lines = whole[..cut].iter().filter(|b| **b == b'\n').count();
            assert_eq!(records.len(), lines.saturating_sub(1), "cut at {cut}");
            journal.append(&[("b".into(), 5, record.clone())]).unwrap();
            let (_, records) = Journal::open(dir.path(), &[1; 32]).unwrap().unwrap();
            assert_eq!(records[&("b".into(), 5)], record);
            std::fs::write(&path, &whole).unwrap();
        }
        assert!(Journal::open(dir.path(), &[2; 32]).unwrap().is_none());
    }
}
