//! Reads GGUF: maps the files, parses and checks every header, finds the splits.
//!
//! Strict on purpose: a file that llama.cpp would refuse is refused here, and so are files it would
//! misread. Tensor data is not looked at; it is handed out as stored.
//!
//! `header` parses one file, `file` opens it, `splits` finds the files of one model, `check` holds the tensors
//! of all files against each other and the files' sizes, `identify` names what is no model.

mod check;
mod file;
mod header;
mod identify;
mod metadata;
mod splits;

pub use metadata::{Array, Element, Metadata, Value};

use crate::error::{Error, Result};
use crate::quant::GgmlType;
use file::Opened;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::time::SystemTime;

/// A model: one GGUF file or all files of a split set, checked and mapped.
#[derive(Debug)]
pub struct Gguf {
    files: Vec<SourceFile>,
    metadata: Metadata,
    tensors: Vec<Tensor>,
    notes: Vec<String>,
}

/// One mapped file of the model, in split order.
#[derive(Debug)]
pub struct SourceFile {
    /// Where it was opened.
    pub path: PathBuf,
    /// Length in bytes.
    pub size: u64,
    /// Bytes before the tensor data: header, metadata, tensor table, padding.
    pub data_start: u64,
    /// BLAKE3 of the first `data_start` bytes.
    pub header_hash: [u8; 32],
    file: File,
    map: Mmap,
    modified: Option<SystemTime>,
}

/// One tensor of the model.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name, 1 to 63 bytes of UTF-8.
    pub name: String,
    /// Its type.
    pub ty: &'static GgmlType,
    /// Dimensions in ggml's order, the fastest first; 1 to 4 of them. A dimension may be 0.
    pub ne: Vec<u64>,
    /// Index into [`Gguf::files`].
    pub file: usize,
    /// Byte offset in that file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Tensor {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        if self.ne.contains(&0) { 0 } else { self.ne.iter().product() }
    }
}

impl SourceFile {
    fn new(opened: Opened) -> SourceFile {
        let Opened { path, file, map, size, stat, header } = opened;
        let data_start = header.data_start.min(size);
        // The header lies inside the mapping, so it fits in a usize.
        let header_hash = *blake3::hash(&map[..data_start as usize]).as_bytes();
        SourceFile { path, size, data_start, header_hash, file, map, modified: stat.modified().ok() }
    }
    /// The open file, for reads that go past the mapping.
    pub fn file(&self) -> &File {
        &self.file
    }
    /// All bytes of the file, from the mapping. No access pattern is advised to the kernel; a caller
    /// that reads on a large scale knows its own.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
    /// Gives the mapped pages of a byte range back; they are fetched again when they are touched.
    pub fn unmap(&self, range: Range<u64>) {
        let end = range.end.min(self.map.len() as u64);
        let begin = range.start.min(end);
        // SAFETY: the mapping is of a file and was never written to, so the pages that are dropped come
        // back from the file with what a first access would have found.
        let _ = unsafe {
            self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin as usize, (end - begin) as usize)
        };
    }
    /// When it was last written to, as it was opened; `None` where the file system does not tell.
    pub fn modified(&self) -> Option<SystemTime> {
        self.modified
    }
    fn unchanged(&self) -> Result<()> {
        let stat = self.file.metadata().map_err(|e| Error::io(&self.path, "examine", e))?;
        let detail = if stat.len() != self.size {
            format!("it had {} bytes when it was opened and has {} now", self.size, stat.len())
        } else if stat.modified().ok() != self.modified {
            "it was modified since it was opened".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::source_file(
            &self.path,
            format!("{detail}: run again when nothing else writes to the file"),
        ))
    }
}

impl Gguf {
    /// Opens a model from any file of a split set, a directory, or an explicit list of all its files.
    ///
    /// A directory must hold one model; projectors, adapters and the like beside it are left aside
    /// with a note. A list may be in any order.
    ///
    /// # Errors
    ///
    /// Everything that makes the files no sound, whole, single language model, all problems of one
    /// kind at once. Whether the tensors are those that the architecture needs is not asked here.
    pub fn open(inputs: &[PathBuf]) -> Result<Gguf> {
        let mut notes = Vec::new();
        let mut files = splits::find(inputs, &mut notes)?;
        let first = &files[0];
        if let Some(kind) = identify::not_a_model(&first.header) {
            return Err(Error::source_file(&first.path, kind));
        }
        match first.header.metadata.text("general.architecture")? {
            Some("") | None => {
                return Err(Error::source_file(
                    &first.path,
                    "metadata key general.architecture is missing: not a model made by llama.cpp's converter",
                ));
            }
            Some(_) => {}
        }
        if files.iter().all(|file| file.header.entries.is_empty()) {
            return Err(Error::source_file(
                &first.path,
                "a vocabulary alone (0 tensors); expected a language model: get the file with the weights",
            ));
        }
        let tensors = check::tensors(&files, &mut notes)?;
        let metadata = std::mem::take(&mut files[0].header.metadata);
        let files = files.into_iter().map(SourceFile::new).collect();
        Ok(Gguf { files, metadata, tensors, notes })
    }
    /// The files, in split order.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }
    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }
    /// The tensors of all files, in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
    /// Remarks that are no errors, each a line: bytes after the last tensor, files left aside.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
    /// The bytes of a tensor of this model, as stored, straight from the mapping.
    ///
    /// Another process may change the file underneath: see [`Gguf::unchanged`]. When it shrinks, access
    /// past its new end raises SIGBUS, which a program that must not die of it has to handle.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        if tensor.bytes == 0 {
            // Its offset may lie in padding that the file does not have.
            return &[];
        }
        // `open` has checked the extent against the mapping, which fits in a usize.
        &self.files[tensor.file].map[tensor.offset as usize..][..tensor.bytes as usize]
    }
    /// Checks that no file has changed its length or modification time since it was opened.
    pub fn unchanged(&self) -> Result<()> {
        Error::all(self.files.iter().filter_map(|file| file.unchanged().err()).collect())
    }
}
