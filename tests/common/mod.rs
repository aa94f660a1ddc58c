//! A writer of GGUF files for tests: sound ones in a few lines, damaged ones in a line more.
//!
//! ```ignore
//! Builder::new("llama")
//!     .kv("llama.block_count", 2u32)
//!     .tensor("blk.0.attn_q.weight", Q8_0, &[32, 4], vec![0; 4 * 34])
//!     .write(directory.join("model.gguf"));
//! ```
//!
//! Written from the GGUF specification, with no code of the crate under test.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

// ggml type ids (`enum ggml_type`).
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q4_0: u32 = 2;
pub const Q4_1: u32 = 3;
pub const Q5_0: u32 = 6;
pub const Q5_1: u32 = 7;
pub const Q8_0: u32 = 8;
pub const Q2_K: u32 = 10;
pub const Q3_K: u32 = 11;
pub const Q4_K: u32 = 12;
pub const Q5_K: u32 = 13;
pub const Q6_K: u32 = 14;
pub const IQ4_NL: u32 = 20;
pub const IQ4_XS: u32 = 23;
pub const I8: u32 = 24;
pub const I16: u32 = 25;
pub const I32: u32 = 26;
pub const I64: u32 = 27;
pub const F64: u32 = 28;
pub const BF16: u32 = 30;
pub const TQ1_0: u32 = 34;
pub const TQ2_0: u32 = 35;
pub const MXFP4: u32 = 39;
pub const NVFP4: u32 = 40;
pub const Q1_0: u32 = 41;
pub const Q2_0: u32 = 42;

/// A metadata value: `gguf_type` id and how to write it.
#[derive(Clone)]
pub enum Kv {
    /// A scalar: its id and its bytes, most significant first.
    Scalar(u32, Vec<u8>),
    Text(Vec<u8>),
    /// Element id and elements.
    Array(u32, Vec<Kv>),
    /// Any id and any bytes, written as they are.
    Raw(u32, Vec<u8>),
}

macro_rules! scalars {
    ($($ty:ty => $id:literal),*) => {$(
        impl From<$ty> for Kv {
            fn from(value: $ty) -> Kv {
                Kv::Scalar($id, value.to_be_bytes().to_vec())
            }
        }
        impl From<Vec<$ty>> for Kv {
            fn from(values: Vec<$ty>) -> Kv {
                Kv::Array($id, values.into_iter().map(Kv::from).collect())
            }
        }
    )*};
}
scalars!(u8 => 0, i8 => 1, u16 => 2, i16 => 3, u32 => 4, i32 => 5, f32 => 6, u64 => 10, i64 => 11, f64 => 12);

impl From<bool> for Kv {
    fn from(value: bool) -> Kv {
        Kv::Scalar(7, vec![value.into()])
    }
}
impl From<Vec<bool>> for Kv {
    fn from(values: Vec<bool>) -> Kv {
        Kv::Array(7, values.into_iter().map(Kv::from).collect())
    }
}
impl From<&str> for Kv {
    fn from(text: &str) -> Kv {
        Kv::Text(text.into())
    }
}
impl From<String> for Kv {
    fn from(text: String) -> Kv {
        Kv::Text(text.into())
    }
}
impl From<Vec<&str>> for Kv {
    fn from(texts: Vec<&str>) -> Kv {
        Kv::Array(8, texts.into_iter().map(Kv::from).collect())
    }
}
impl From<Vec<String>> for Kv {
    fn from(texts: Vec<String>) -> Kv {
        Kv::Array(8, texts.into_iter().map(Kv::from).collect())
    }
}

/// One tensor of a [`Builder`].
#[derive(Clone)]
struct Entry {
    name: Vec<u8>,
    ty: u32,
    ne: Vec<u64>,
    /// The number of dimensions to write, when it is not the length of `ne`.
    dims: Option<u32>,
    data: Vec<u8>,
    /// Where the data lies, when not after the tensor before it.
    at: Option<u64>,
    /// The offset to write, when it is not where the data lies.
    offset: Option<u64>,
}

/// A GGUF file to be written.
#[derive(Clone)]
pub struct Builder {
    magic: [u8; 4],
    version: u32,
    big_endian: bool,
    alignment: u64,
    pairs: Vec<(Vec<u8>, Kv)>,
    entries: Vec<Entry>,
    claimed_pairs: Option<u64>,
    claimed_tensors: Option<u64>,
    final_padding: bool,
    tail: Vec<u8>,
}

impl Builder {
    /// A version 3 file with `general.architecture`.
    pub fn new(architecture: &str) -> Builder {
        Builder::bare().kv("general.architecture", architecture)
    }
    /// A version 3 file with no metadata.
    pub fn bare() -> Builder {
        Builder {
            magic: *b"GGUF",
            version: 3,
            big_endian: false,
            alignment: 32,
            pairs: Vec::new(),
            entries: Vec::new(),
            claimed_pairs: None,
            claimed_tensors: None,
            final_padding: true,
            tail: Vec::new(),
        }
    }
    /// Adds a key, also when it is there already.
    pub fn kv(mut self, key: impl Into<Vec<u8>>, value: impl Into<Kv>) -> Builder {
        self.pairs.push((key.into(), value.into()));
        self
    }
    /// Replaces a key, or adds it.
    pub fn set(mut self, key: &str, value: impl Into<Kv>) -> Builder {
        let value = value.into();
        match self.pairs.iter_mut().find(|(k, _)| k == key.as_bytes()) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key.into(), value)),
        }
        self
    }
    /// Removes a key.
    pub fn unset(mut self, key: &str) -> Builder {
        self.pairs.retain(|(k, _)| k != key.as_bytes());
        self
    }
    /// Adds a tensor; `ne` has the fastest dimension first, `data` is its blocks as stored.
    pub fn tensor(
        mut self,
        name: impl Into<Vec<u8>>,
        ty: u32,
        ne: &[u64],
        data: impl Into<Vec<u8>>,
    ) -> Builder {
        let (name, ne, data) = (name.into(), ne.to_vec(), data.into());
        self.entries.push(Entry { name, ty, ne, dims: None, data, at: None, offset: None });
        self
    }
    /// Adds an f32 tensor of these values.
    pub fn f32s(self, name: impl Into<Vec<u8>>, ne: &[u64], values: &[f32]) -> Builder {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, F32, ne, data)
    }
    /// Removes the tensor `name`.
    pub fn without(mut self, name: &str) -> Builder {
        self.entries.retain(|e| e.name != name.as_bytes());
        self
    }
    /// Puts the data of the tensor added last at this offset of the data section.
    pub fn at(mut self, at: u64) -> Builder {
        self.last().at = Some(at);
        self
    }
    /// Writes this offset for the tensor added last, wherever its data lies.
    pub fn offset(mut self, offset: u64) -> Builder {
        self.last().offset = Some(offset);
        self
    }
    /// Writes this number of dimensions for the tensor added last.
    pub fn dims(mut self, dims: u32) -> Builder {
        self.last().dims = Some(dims);
        self
    }
    fn last(&mut self) -> &mut Entry {
        self.entries.last_mut().expect("a tensor was added")
    }
    /// Another magic.
    pub fn magic(mut self, magic: &[u8; 4]) -> Builder {
        self.magic = *magic;
        self
    }
    /// Another version.
    pub fn version(mut self, version: u32) -> Builder {
        self.version = version;
        self
    }
    /// Writes every number of the header big endian. Tensor data stays as given.
    pub fn big_endian(mut self) -> Builder {
        self.big_endian = true;
        self
    }
    /// Aligns the data to `alignment` and says so in `general.alignment`.
    pub fn alignment(self, alignment: u32) -> Builder {
        self.pad_to(alignment.into()).set("general.alignment", alignment)
    }
    /// Aligns the data to `alignment` and says nothing.
    pub fn pad_to(mut self, alignment: u64) -> Builder {
        self.alignment = alignment;
        self
    }
    /// Writes this `metadata_kv_count`.
    pub fn claim_pairs(mut self, count: u64) -> Builder {
        self.claimed_pairs = Some(count);
        self
    }
    /// Writes this `tensor_count`.
    pub fn claim_tensors(mut self, count: u64) -> Builder {
        self.claimed_tensors = Some(count);
        self
    }
    /// Leaves out the padding after the last tensor.
    pub fn no_final_padding(mut self) -> Builder {
        self.final_padding = false;
        self
    }
    /// Adds bytes at the end of the file.
    pub fn tail(mut self, bytes: impl Into<Vec<u8>>) -> Builder {
        self.tail = bytes.into();
        self
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Out { bytes: self.magic.to_vec(), big_endian: self.big_endian };
        out.number(self.version.to_be_bytes());
        out.number(self.claimed_tensors.unwrap_or(self.entries.len() as u64).to_be_bytes());
        out.number(self.claimed_pairs.unwrap_or(self.pairs.len() as u64).to_be_bytes());
        for (key, value) in &self.pairs {
            out.text(key);
            out.number(value.id().to_be_bytes());
            out.value(value);
        }
        let mut data = Vec::new();
        for entry in &self.entries {
            let at = entry.at.unwrap_or((data.len() as u64).next_multiple_of(self.alignment)) as usize;
            data.resize(data.len().max(at + entry.data.len()), 0);
            data[at..at + entry.data.len()].copy_from_slice(&entry.data);
            out.text(&entry.name);
            out.number(entry.dims.unwrap_or(entry.ne.len() as u32).to_be_bytes());
            for n in &entry.ne {
                out.number(n.to_be_bytes());
            }
            out.number(entry.ty.to_be_bytes());
            out.number(entry.offset.unwrap_or(at as u64).to_be_bytes());
        }
        out.pad(self.alignment);
        out.bytes.extend_from_slice(&data);
        if self.final_padding {
            out.pad(self.alignment);
        }
        out.bytes.extend_from_slice(&self.tail);
        out.bytes
    }

    /// Writes the file and returns its path.
    pub fn write(&self, path: impl AsRef<Path>) -> PathBuf {
        std::fs::write(path.as_ref(), self.bytes()).expect("the test directory can be written");
        path.as_ref().to_owned()
    }

    /// Deals the tensors out to splits of so many each, as `llama-gguf-split` does: all keys and
    /// `split.*` in the first, `split.*` alone in the others.
    pub fn splits(&self, tensors: &[usize]) -> Vec<Builder> {
        assert_eq!(tensors.iter().sum::<usize>(), self.entries.len());
        let mut entries = self.entries.iter();
        tensors
            .iter()
            .zip(0u16..)
            .map(|(&count, number)| {
                let mut split =
                    Builder { entries: entries.by_ref().take(count).cloned().collect(), ..self.clone() };
                if number > 0 {
                    split.pairs.retain(|(key, _)| key == b"general.alignment");
                }
                split
                    .kv("split.no", number)
                    .kv("split.count", tensors.len() as u16)
                    .kv("split.tensors.count", self.entries.len() as i32)
            })
            .collect()
    }
}

/// The name of split `number`, counted from 1.
pub fn split_name(prefix: &str, number: usize, count: usize) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// Writes splits under their usual names and returns the paths.
pub fn write_splits(directory: &Path, prefix: &str, splits: &[Builder]) -> Vec<PathBuf> {
    splits
        .iter()
        .zip(1..)
        .map(|(split, number)| split.write(directory.join(split_name(prefix, number, splits.len()))))
        .collect()
}

impl Kv {
    fn id(&self) -> u32 {
        match self {
            Kv::Scalar(id, _) | Kv::Raw(id, _) => *id,
            Kv::Text(_) => 8,
            Kv::Array(..) => 9,
        }
    }
    /// An array that claims a length it need not have: element id, claimed length, bytes that follow.
    pub fn claimed_array(element: u32, length: u64, bytes: &[u8]) -> Kv {
        let mut raw = element.to_le_bytes().to_vec();
        raw.extend_from_slice(&length.to_le_bytes());
        raw.extend_from_slice(bytes);
        Kv::Raw(9, raw)
    }
    /// A string that claims a length it need not have.
    pub fn claimed_text(length: u64, bytes: &[u8]) -> Kv {
        let mut raw = length.to_le_bytes().to_vec();
        raw.extend_from_slice(bytes);
        Kv::Raw(8, raw)
    }
}

struct Out {
    bytes: Vec<u8>,
    big_endian: bool,
}

impl Out {
    fn number<const N: usize>(&mut self, big_endian: [u8; N]) {
        self.scalar(&big_endian);
    }
    fn scalar(&mut self, big_endian: &[u8]) {
        if self.big_endian {
            self.bytes.extend_from_slice(big_endian);
        } else {
            self.bytes.extend(big_endian.iter().rev());
        }
    }
    fn text(&mut self, text: &[u8]) {
        self.number((text.len() as u64).to_be_bytes());
        self.bytes.extend_from_slice(text);
    }
    fn value(&mut self, value: &Kv) {
        match value {
            Kv::Scalar(_, bytes) => self.scalar(bytes),
            Kv::Text(text) => self.text(text),
            Kv::Raw(_, bytes) => self.bytes.extend_from_slice(bytes),
            Kv::Array(id, elements) => {
                self.number(id.to_be_bytes());
                self.number((elements.len() as u64).to_be_bytes());
                for element in elements {
                    self.value(element);
                }
            }
        }
    }
    fn pad(&mut self, alignment: u64) {
        let end = (self.bytes.len() as u64).next_multiple_of(alignment);
        self.bytes.resize(end as usize, 0);
    }
}
