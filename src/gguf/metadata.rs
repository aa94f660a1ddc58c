//! Metadata values and the accessors that say what is wrong with one.

use crate::error::{Error, Result, shown, shown_path};
use std::collections::BTreeMap;
use std::path::Path;

/// Layers past which a `block_count` is a lie: the largest models have some hundreds.
const MAX_LAYERS: u64 = 1 << 16;

/// The metadata of the first file (the only one that carries any but the `split.*` keys).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// The file, as messages show it.
    source: String,
    values: BTreeMap<String, Value>,
}

/// One metadata value. Integers and floats of every width are widened, which is exact.
/// Strings stay bytes: tokens need not be UTF-8.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(Vec<u8>),
    Array(Array),
}

/// An array of scalars or strings. It costs as much memory as the file's bytes of it: numbers keep
/// their width, strings lie in one run with 8 bytes each for where they end.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    element: Element,
    /// Numbers as stored (little endian), or the text of all strings.
    bytes: Vec<u8>,
    /// Where each string ends in `bytes`; empty for numbers.
    ends: Vec<usize>,
}

/// The type of a scalar, or of an array's elements (`enum gguf_type` of the GGUF specification).
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    U64,
    I64,
    F64,
}

impl Element {
    /// The element type of a `gguf_type` id; `None` for arrays (9) and unknown ids.
    pub(super) fn by_id(id: u32) -> Option<Element> {
        Some(match id {
            0 => Element::U8,
            1 => Element::I8,
            2 => Element::U16,
            3 => Element::I16,
            4 => Element::U32,
            5 => Element::I32,
            6 => Element::F32,
            7 => Element::Bool,
            8 => Element::String,
            10 => Element::U64,
            11 => Element::I64,
            12 => Element::F64,
            _ => return None,
        })
    }

    /// Bytes of one stored element; of a string, its 8-byte length alone.
    pub(super) fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 | Element::Bool => 1,
            Element::U16 | Element::I16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 | Element::String => 8,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Element::U8 => "u8",
            Element::I8 => "i8",
            Element::U16 => "u16",
            Element::I16 => "i16",
            Element::U32 => "u32",
            Element::I32 => "i32",
            Element::F32 => "f32",
            Element::Bool => "bool",
            Element::String => "string",
            Element::U64 => "u64",
            Element::I64 => "i64",
            Element::F64 => "f64",
        }
    }

    /// The scalar stored little endian in `bytes`, exactly as many as [`Element::bytes`] says.
    pub(super) fn scalar(self, bytes: &[u8]) -> Value {
        let mut wide = [0u8; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let u = u64::from_le_bytes(wide);
        match self {
            Element::U8 | Element::U16 | Element::U32 | Element::U64 => Value::U64(u),
            Element::I8 => Value::I64((u as i8).into()),
            Element::I16 => Value::I64((u as i16).into()),
            Element::I32 => Value::I64((u as i32).into()),
            Element::I64 => Value::I64(u as i64),
            Element::F32 => Value::F64(f32::from_bits(u as u32).into()),
            Element::F64 => Value::F64(f64::from_bits(u)),
            Element::Bool => Value::Bool(u != 0),
            Element::String => Value::String(bytes.to_vec()),
        }
    }
}

impl Array {
    /// An array of numbers or truth values from its stored bytes.
    pub(super) fn numbers(element: Element, bytes: Vec<u8>) -> Array {
        Array { element, bytes, ends: Vec::new() }
    }
    /// An array of strings from their joined bytes and the end of each.
    pub(super) fn strings(bytes: Vec<u8>, ends: Vec<usize>) -> Array {
        Array { element: Element::String, bytes, ends }
    }
    /// The type of its elements; says nothing when the array is empty.
    pub fn element(&self) -> Element {
        self.element
    }
    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self.element {
            Element::String => self.ends.len(),
            other => self.bytes.len() / other.bytes(),
        }
    }
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The element at `index`.
    pub fn get(&self, index: usize) -> Option<Value> {
        match self.element {
            Element::String => self.string(index).map(|s| Value::String(s.to_vec())),
            other => {
                let start = index.checked_mul(other.bytes())?;
                self.bytes.get(start..start + other.bytes()).map(|b| other.scalar(b))
            }
        }
    }
    /// All elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = Value> {
        (0..self.len()).filter_map(|i| self.get(i))
    }
    fn string(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.bytes.get(start..end)
    }
}

impl Value {
    /// What it is, in messages: `"text"`, `an array of 3 u32`.
    fn kind(&self) -> String {
        match self {
            Value::U64(n) => format!("the integer {n}"),
            Value::I64(n) => format!("the integer {n}"),
            Value::F64(x) => format!("the float {x}"),
            Value::Bool(b) => format!("the truth value {b}"),
            Value::String(s) => format!("the text {:?}", shown(&String::from_utf8_lossy(s))),
            Value::Array(a) => format!("an array of {} {}", a.len(), a.element.name()),
        }
    }
    fn count(&self) -> Option<u64> {
        match *self {
            Value::U64(n) => Some(n),
            Value::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }
    fn number(&self) -> Option<f64> {
        match *self {
            Value::U64(n) => Some(n as f64),
            Value::I64(n) => Some(n as f64),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }
    fn flag(&self) -> Option<bool> {
        match *self {
            Value::Bool(b) => Some(b),
            _ => None,
        }
    }
}

impl Metadata {
    /// Empty metadata of the file at `path`.
    pub(super) fn of(path: &Path) -> Metadata {
        Metadata { source: shown_path(path), values: BTreeMap::new() }
    }
    /// Adds a value; false when the key is there already.
    pub(super) fn insert(&mut self, key: String, value: Value) -> bool {
        use std::collections::btree_map::Entry;
        match self.values.entry(key) {
            Entry::Vacant(slot) => {
                slot.insert(value);
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }
    /// All keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(k, v)| (k.as_str(), v))
    }
    /// The text under `key`; `None` when absent. An error when it is no text or no UTF-8.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value {
            Value::String(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.wrong(key, value, "UTF-8 text")),
            },
            _ => Err(self.wrong(key, value, "text")),
        }
    }
    /// The bytes of the string under `key`, UTF-8 or not; `None` when absent.
    pub fn bytes(&self, key: &str) -> Result<Option<&[u8]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(bytes)) => Ok(Some(bytes)),
            Some(other) => Err(self.wrong(key, other, "text")),
        }
    }
    /// The whole number under `key` (any integer type, not negative); an error when it is anything else.
    pub fn count(&self, key: &str) -> Result<Option<u64>> {
        self.scalar(key, Value::count, "a whole number, not negative")
    }
    /// The number under `key`, integer or float. An f32 is widened exactly: 1e-5 stored as f32 comes
    /// back as 9.999999747378752e-6.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.scalar(key, Value::number, "a number")
    }
    /// The truth value under `key`.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.scalar(key, Value::flag, "a truth value")
    }
    /// The array under `key`, of any element type.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(other) => Err(self.wrong(key, other, "an array")),
        }
    }
    /// The strings of the array under `key`, as bytes. An empty array of any type has none.
    pub fn texts(&self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = &[u8]>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) if array.element == Element::String || array.is_empty() => {
                Ok(Some((0..array.ends.len()).map(|i| array.string(i).unwrap_or_default())))
            }
            Some(other) => Err(self.wrong(key, other, "an array of strings")),
        }
    }
    /// The whole numbers, not negative, of the array under `key`.
    pub fn counts(&self, key: &str) -> Result<Option<Vec<u64>>> {
        self.elements(key, Value::count, "a whole number, not negative")
    }
    /// The numbers of the array under `key`, integer or float.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.elements(key, Value::number, "a number")
    }
    /// The truth values of the array under `key`.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.elements(key, Value::flag, "a truth value")
    }
    /// A per-layer count: a scalar stands for all `layers`, an array must have one entry for each of them,
    /// or for each of the first `trunk`, without the MTP block.
    pub fn per_layer(&self, key: &str, layers: u64, trunk: u64) -> Result<Option<Vec<u64>>> {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            let Some(count) = self.count(key)? else { return Ok(None) };
            if layers > MAX_LAYERS {
                return Err(
                    self.bad(key, format!("asked for {layers} layers; no model has more than {MAX_LAYERS}"))
                );
            }
            return Ok(Some(vec![count; layers as usize]));
        }
        let counts = self.counts(key)?.unwrap_or_default();
        let found = counts.len() as u64;
        if found != layers && (found != trunk || found == 0) {
            let without =
                if trunk < layers { format!(" ({trunk} without the MTP block)") } else { String::new() };
            return Err(
                self.bad(key, format!("{found} entries, expected one for each of {layers} layers{without}"))
            );
        }
        Ok(Some(counts))
    }

    fn scalar<T>(&self, key: &str, get: fn(&Value) -> Option<T>, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        get(value).map(Some).ok_or_else(|| self.wrong(key, value, expected))
    }
    fn elements<T>(&self, key: &str, get: fn(&Value) -> Option<T>, expected: &str) -> Result<Option<Vec<T>>> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        array
            .iter()
            .enumerate()
            .map(|(i, value)| {
                get(&value).ok_or_else(|| {
                    self.bad(key, format!("entry {i} is {}, expected {expected}", value.kind()))
                })
            })
            .collect::<Result<Vec<T>>>()
            .map(Some)
    }
    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        self.bad(key, format!("is {}, expected {expected}", value.kind()))
    }
    fn bad(&self, key: &str, detail: String) -> Error {
        let key = shown(key);
        Error::source(&self.source, format!("metadata key {key}: {detail}"))
    }
}

/// Metadata made by hand, of no file.
impl FromIterator<(String, Value)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (String, Value)>>(pairs: I) -> Metadata {
        Metadata { source: "metadata".into(), values: pairs.into_iter().collect() }
    }
}

impl FromIterator<Vec<u8>> for Array {
    /// An array of strings.
    fn from_iter<I: IntoIterator<Item = Vec<u8>>>(strings: I) -> Array {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for string in strings {
            bytes.extend_from_slice(&string);
            ends.push(bytes.len());
        }
        Array::strings(bytes, ends)
    }
}
