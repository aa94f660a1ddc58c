//! Parses the header of one file: every count and length is checked against the bytes left before
//! anything is allocated, so memory stays proportional to the bytes consumed.

use super::metadata::{Array, Element, Metadata, Value};
use crate::error::shown;
use std::fmt::Display;
use std::path::Path;

/// Dimensions of a tensor at most (`GGML_MAX_DIMS`).
const MAX_DIMS: u32 = 4;
/// Bytes of a tensor name at most (`GGML_MAX_NAME` is 64 with the final NUL).
const MAX_NAME: u64 = 63;
/// Bytes of a metadata key at most (GGUF specification).
const MAX_KEY: u64 = 65535;
/// The alignment when `general.alignment` is absent (GGUF specification).
const DEFAULT_ALIGNMENT: u64 = 32;
/// The largest alignment taken for real; writers use 32 to 4096.
const MAX_ALIGNMENT: u64 = 16 << 20;
/// Bytes of the shortest metadata pair: a key of one byte with a value of one byte.
const MIN_PAIR: u64 = 8 + 1 + 4 + 1;
/// Bytes of the shortest tensor entry: a name of one byte, one dimension.
const MIN_ENTRY: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The header of one file.
pub(super) struct Header {
    pub metadata: Metadata,
    pub entries: Vec<Entry>,
    pub alignment: u64,
    /// Where the tensor data starts; past the end of a file without tensors that lacks the padding.
    pub data_start: u64,
}

/// One row of the tensor table, as stored.
pub(super) struct Entry {
    pub name: String,
    pub ne: Vec<u64>,
    pub type_id: u32,
    /// Relative to `data_start`.
    pub offset: u64,
}

/// What is wrong, without the file's name.
type Parsed<T> = std::result::Result<T, String>;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// What the header claims to hold.
    pairs: u64,
    tensors: u64,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }
    fn take(&mut self, n: u64, what: impl Display) -> Parsed<&'a [u8]> {
        if n > self.left() {
            return Err(format!(
                "{what} needs {n} bytes at byte {}, {} are left; {}",
                self.at,
                self.left(),
                self.damaged()
            ));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }
    fn damaged(&self) -> String {
        format!(
            "the file of {} bytes, whose header claims {} metadata keys and {} tensors, \
             is cut off or damaged: get it again",
            self.bytes.len(),
            self.pairs,
            self.tensors
        )
    }
    fn array<const N: usize>(&mut self, what: impl Display) -> Parsed<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }
    fn u32(&mut self, what: impl Display) -> Parsed<u32> {
        self.array(what).map(u32::from_le_bytes)
    }
    fn u64(&mut self, what: impl Display) -> Parsed<u64> {
        self.array(what).map(u64::from_le_bytes)
    }
}

/// Parses a file that starts with `GGUF`.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Parsed<Header> {
    let mut cursor = Cursor { bytes, at: 4, pairs: 0, tensors: 0 };
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        // A small number stored big endian.
        _ if matches!(version.swap_bytes(), 1..=16) => {
            return Err("big-endian GGUF: the numbers inside the tensor blocks are swapped too; \
                 get the little-endian file or convert it with gguf-py's gguf_convert_endian"
                .into());
        }
        _ => {
            return Err(format!(
                "GGUF version {version} (0x{version:08x}), supported are 2 and 3: \
                 get a newer file or convert the model again with llama.cpp"
            ));
        }
    }
    let tensors = cursor.u64("tensor_count")?;
    let pairs = cursor.u64("metadata_kv_count")?;
    for (field, value, min) in [("tensor_count", tensors, MIN_ENTRY), ("metadata_kv_count", pairs, MIN_PAIR)]
    {
        if value > cursor.left() / min {
            return Err(format!(
                "{field} is {value}, more than fit in a file of {} bytes: it is cut off or damaged, get it again",
                bytes.len()
            ));
        }
    }
    (cursor.tensors, cursor.pairs) = (tensors, pairs);
    let cursor = &mut cursor;
    let mut metadata = Metadata::of(path);
    let mut alignment = DEFAULT_ALIGNMENT;
    for index in 0..pairs {
        let key = key(cursor, index)?;
        let (element, value) = value(cursor, &key)?;
        if key == "general.alignment" {
            alignment = checked_alignment(element, &value)?;
        }
        if metadata.get(&key).is_some() {
            return Err(format!("metadata key {} is there twice", shown(&key)));
        }
        metadata.insert(key, value);
    }
    let mut entries = Vec::new();
    for index in 0..tensors {
        entries.push(entry(cursor, index)?);
    }
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    Ok(Header { metadata, entries, alignment, data_start })
}

fn key(cursor: &mut Cursor, index: u64) -> Parsed<String> {
    let what = format_args!("metadata key {index}");
    let length = cursor.u64(format_args!("the length of {what}"))?;
    if length == 0 {
        return Err(format!("empty metadata key, number {index} counted from 0; {}", cursor.damaged()));
    }
    if length > MAX_KEY {
        return Err(format!(
            "{what} claims {length} bytes, {} are left and at most {MAX_KEY} are legal; {}",
            cursor.left(),
            cursor.damaged()
        ));
    }
    let bytes = cursor.take(length, what)?;
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(format!("{what}: \"{}\" is no UTF-8", shown(&bytes.escape_ascii().to_string()))),
    }
}

/// The value of `key`, with its stored type when it is a scalar or string.
fn value(cursor: &mut Cursor, key: &str) -> Parsed<(Option<Element>, Value)> {
    const ARRAY: u32 = 9;
    let shown_key = shown(key);
    let what = format_args!("metadata key {shown_key}");
    let id = cursor.u32(format_args!("{what}: the value type"))?;
    if id == ARRAY {
        return Ok((None, Value::Array(array(cursor, &shown_key)?)));
    }
    let Some(element) = Element::by_id(id) else {
        return Err(format!("{what}: value type {id}, expected 0 to 12"));
    };
    let value = match element {
        Element::String => Value::String(string(cursor, what)?.to_vec()),
        Element::Bool => {
            let bytes = cursor.take(1, what)?;
            check_bools(bytes, what)?;
            element.scalar(bytes)
        }
        _ => element.scalar(cursor.take(element.bytes() as u64, what)?),
    };
    Ok((Some(element), value))
}

fn string<'a>(cursor: &mut Cursor<'a>, what: impl Display + Copy) -> Parsed<&'a [u8]> {
    let length = cursor.u64(format_args!("{what}: the length of a string"))?;
    cursor.take(length, format_args!("{what}: a string of {length} bytes"))
}

fn check_bools(bytes: &[u8], what: impl Display) -> Parsed<()> {
    match bytes.iter().find(|&&b| b > 1) {
        Some(byte) => Err(format!("{what}: bool byte {byte}, expected 0 or 1")),
        None => Ok(()),
    }
}

fn array(cursor: &mut Cursor, key: &str) -> Parsed<Array> {
    let what = format_args!("metadata key {key}");
    let id = cursor.u32(format_args!("{what}: the element type"))?;
    let length = cursor.u64(format_args!("{what}: the array length"))?;
    let Some(element) = Element::by_id(id) else {
        return Err(match id {
            9 => format!("{what}: an array of arrays, which no model needs and this reader refuses"),
            _ => format!("{what}: array element type {id}, expected 0 to 8 or 10 to 12"),
        });
    };
    // For strings this counts their lengths alone; their text is checked one by one.
    let bytes = match length.checked_mul(element.bytes() as u64) {
        Some(bytes) if bytes <= cursor.left() => bytes,
        _ => {
            return Err(format!(
                "{what}: an array of {length} {} does not fit in the {} bytes left; {}",
                element.name(),
                cursor.left(),
                cursor.damaged()
            ));
        }
    };
    if element != Element::String {
        let stored = cursor.take(bytes, what)?;
        if element == Element::Bool {
            check_bools(stored, what)?;
        }
        return Ok(Array::numbers(element, stored.to_vec()));
    }
    let (mut text, mut ends) = (Vec::new(), Vec::new());
    for index in 0..length {
        text.extend_from_slice(string(cursor, format_args!("{what}, entry {index}"))?);
        ends.push(text.len());
    }
    text.shrink_to_fit();
    ends.shrink_to_fit();
    Ok(Array::strings(text, ends))
}

fn checked_alignment(element: Option<Element>, value: &Value) -> Parsed<u64> {
    match (element, value) {
        (Some(Element::U32), &Value::U64(n)) if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
        (Some(Element::U32), &Value::U64(n)) => Err(format!(
            "metadata key general.alignment is {n}, expected a power of two up to {MAX_ALIGNMENT}"
        )),
        (element, _) => Err(format!(
            "metadata key general.alignment has the type {}, expected u32",
            element.map_or("array", Element::name)
        )),
    }
}

fn entry(cursor: &mut Cursor, index: u64) -> Parsed<Entry> {
    let length = cursor.u64(format_args!("the length of the name of tensor {index}"))?;
    if length > MAX_NAME {
        // What there is of it helps to find the tensor.
        let start = cursor.take(length.min(cursor.left()).min(2 * MAX_NAME), "")?;
        return Err(format!(
            "tensor {index}: its name \"{}{}\" has {length} bytes, at most {MAX_NAME} are legal",
            shown(&String::from_utf8_lossy(start)),
            if length > start.len() as u64 { "…" } else { "" }
        ));
    }
    let bytes = cursor.take(length, format_args!("the name of tensor {index}"))?;
    let Ok(name) = std::str::from_utf8(bytes) else {
        return Err(format!("tensor {index}: its name \"{}\" is no UTF-8", bytes.escape_ascii()));
    };
    if name.is_empty() {
        return Err(format!("tensor {index}: its name is empty; {}", cursor.damaged()));
    }
    let shown_name = shown(name);
    let what = format_args!("tensor {shown_name}");
    let dims = cursor.u32(format_args!("{what}: the number of dimensions"))?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(format!("{what}: {dims} dimensions, expected 1 to {MAX_DIMS}"));
    }
    let mut ne = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        ne.push(cursor.u64(format_args!("{what}: its shape"))?);
    }
    let type_id = cursor.u32(format_args!("{what}: its type"))?;
    let offset = cursor.u64(format_args!("{what}: its offset"))?;
    Ok(Entry { name: name.to_owned(), ne, type_id, offset })
}
