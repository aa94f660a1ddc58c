//! The safetensors header, parsed as untrusted input.
//!
//! Stricter than the format's own library where that one is lax: a tensor named twice is refused
//! (safetensors 0.8 keeps the last), and so are unknown keys. Nothing is allocated beyond a small
//! multiple of the header's own bytes.

use crate::error::shown;
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

/// The largest header that safetensors itself reads: 100 MB.
pub const MAX_HEADER: u64 = 100_000_000;

/// One tensor as the header describes it.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// First byte and end, counted from the end of the header.
    pub data_offsets: [u64; 2],
}

/// The length of the header's JSON, from the file's first 8 bytes; checked against the file's size.
pub fn json_bytes(first: [u8; 8], file_bytes: u64) -> Result<u64, String> {
    let n = u64::from_le_bytes(first);
    if n > MAX_HEADER {
        return Err(format!("claims a header of {n} bytes, {MAX_HEADER} is the most"));
    }
    if n > file_bytes.saturating_sub(8) {
        return Err(format!("claims a header of {n} bytes in a file of {file_bytes}"));
    }
    Ok(n)
}

/// Parses the header's JSON and checks every tensor against `data_bytes`, the bytes after it: known
/// dtype, shape times element size equal to the bytes, and no gap, overlap or rest.
pub fn parse(json: &[u8], data_bytes: u64) -> Result<BTreeMap<String, TensorInfo>, String> {
    if json.first() != Some(&b'{') {
        return Err("the header is no JSON object".into());
    }
    let Header(tensors) = serde_json::from_slice(json)
        .map_err(|e| format!("the header is damaged: {}", shown(&e.to_string())))?;
    let mut order: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| t.data_offsets);
    let mut end = 0;
    for (name, t) in order {
        let [begin, stop] = t.data_offsets;
        if begin != end {
            let what = if begin < end { "overlaps the tensor before it" } else { "leaves a gap before it" };
            return Err(format!("tensor {}: starts at byte {begin}, expected {end}: {what}", shown(name)));
        }
        if stop < begin || stop > data_bytes {
            return Err(format!("tensor {}: bytes {begin}..{stop} of {data_bytes}", shown(name)));
        }
        match size(t.dtype, &t.shape) {
            Some(bytes) if bytes == stop - begin => {}
            Some(bytes) => {
                return Err(format!(
                    "tensor {}: {} {:?} takes {bytes} bytes, its offsets cover {}",
                    shown(name),
                    t.dtype,
                    t.shape,
                    stop - begin
                ));
            }
            None => {
                return Err(format!(
                    "tensor {}: {} {:?} is not a whole number of bytes",
                    shown(name),
                    t.dtype,
                    t.shape
                ));
            }
        }
        end = stop;
    }
    if end != data_bytes {
        return Err(format!("tensors end at byte {end} of {data_bytes}"));
    }
    Ok(tensors)
}

/// Bytes of a tensor; `None` when that is no whole number or does not fit 64 bits.
fn size(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let mut bits = dtype.bitsize() as u64;
    for &n in shape {
        bits = bits.checked_mul(n)?;
    }
    bits.is_multiple_of(8).then_some(bits / 8)
}

struct Header(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut metadata, true) {
                            return Err(A::Error::custom("__metadata__ twice"));
                        }
                        map.next_value::<Texts>()?;
                        continue;
                    }
                    match tensors.entry(name) {
                        Entry::Occupied(e) => {
                            return Err(A::Error::custom(format!("tensor {} twice", e.key())));
                        }
                        Entry::Vacant(e) => e.insert(map.next_value()?),
                    };
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// `__metadata__`: texts under different keys. Only checked.
struct Texts;

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Texts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of texts")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
                let mut seen = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if seen.insert(key, value).is_some() {
                        return Err(A::Error::custom("a key of __metadata__ twice"));
                    }
                }
                Ok(Texts)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[2,3],"data_offsets":[8,14]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   "#;

    fn refused(json: &str, data: u64, why: &str) {
        let e = parse(json.as_bytes(), data).expect_err(json);
        assert!(e.contains(why), "{json}: {e}");
        assert_eq!(e.lines().count(), 1, "{e}");
    }

    #[test]
    fn reads_what_the_library_writes() {
        let tensors = parse(GOOD.as_bytes(), 14).unwrap();
        assert_eq!(tensors["b"], TensorInfo { dtype: Dtype::U8, shape: vec![2, 3], data_offsets: [8, 14] });
        assert_eq!(tensors.len(), 2);
        let data = vec![7u8; 24];
        let view = safetensors::tensor::TensorView::new(Dtype::BF16, vec![3, 4], &data).unwrap();
        let file = safetensors::serialize([("w".to_owned(), view)], None).unwrap();
        let n = json_bytes(file[..8].try_into().unwrap(), file.len() as u64).unwrap() as usize;
        assert_eq!(parse(&file[8..8 + n], 24).unwrap()["w"].shape, [3, 4]);
    }

    #[test]
    fn header_length_is_bounded() {
        let length = |n: u64, file| json_bytes(n.to_le_bytes(), file);
        assert_eq!(length(92, 100), Ok(92));
        for (n, file) in [(93, 100), (100, 100), (1 << 63, 100), (u64::MAX, 100), (0, 7)] {
            assert_eq!(length(n, file).is_ok(), n == 0, "{n} {file}");
        }
        assert!(length(100_000_000, 1 << 40).is_ok());
        assert!(length(100_000_001, 1 << 40).unwrap_err().contains("100000000 is the most"));
    }

    #[test]
    fn a_tensor_twice_is_refused() {
        let two = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
        refused(two, 8, "tensor a twice");
        refused(two, 4, "tensor a twice");
        refused(
            r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            "duplicate field",
        );
        refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "__metadata__ twice");
        refused(r#"{"__metadata__":{"x":"1","x":"2"}}"#, 0, "twice");
    }

    #[test]
    fn metadata_holds_texts_only() {
        refused(r#"{"__metadata__":{"format":1}}"#, 0, "damaged");
        refused(r#"{"__metadata__":{"format":{"a":"b"}}}"#, 0, "damaged");
        refused(r#"{"__metadata__":null}"#, 0, "damaged");
    }

    #[test]
    fn sizes_must_agree() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        refused(&one("F32", "[1024,1024]", "[0,4]"), 4, "takes 4194304 bytes, its offsets cover 4");
        refused(&one("X9", "[4]", "[0,4]"), 4, "damaged");
        refused(&one("U8", "[9223372036854775808]", "[0,4]"), 4, "not a whole number");
        refused(&one("U8", "[9223372036854775808,2,2]", "[0,0]"), 0, "not a whole number");
        refused(&one("U8", "[4294967296,4294967296]", "[0,0]"), 0, "not a whole number");
        refused(&one("F4", "[3]", "[0,2]"), 2, "not a whole number");
        refused(&one("U8", "[-1]", "[0,4]"), 4, "damaged");
        refused(&one("U8", "[4.0]", "[0,4]"), 4, "damaged");
        refused(&one("U8", "[4]", "[4,0]"), 4, "expected 0");
        refused(&one("U8", "[0]", "[0,0]"), 4, "tensors end at byte 0 of 4");
        refused(&one("U8", "[8]", "[0,8]"), 4, "bytes 0..8 of 4");
        refused(&one("U8", "[8]", "[0,18446744073709551616]"), 4, "damaged");
        assert!(parse(one("U8", "[0]", "[0,0]").as_bytes(), 0).is_ok());
        assert!(parse(one("I64", "[]", "[0,8]").as_bytes(), 8).is_ok());
    }

    #[test]
    fn gaps_and_overlaps_are_refused() {
        let two = |a: &str, b: &str| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{b}}}}}"#
            )
        };
        assert!(parse(two("[0,4]", "[4,8]").as_bytes(), 8).is_ok());
        refused(&two("[0,4]", "[2,6]"), 6, "overlaps");
        refused(&two("[0,4]", "[0,4]"), 4, "overlaps");
        refused(&two("[0,4]", "[5,9]"), 9, "gap");
        refused(&two("[1,5]", "[5,9]"), 9, "gap");
        refused(&two("[0,4]", "[4,8]"), 9, "end at byte 8 of 9");
    }

    #[test]
    fn damaged_json_is_refused() {
        refused("", 0, "no JSON object");
        refused("[]", 0, "no JSON object");
        refused("   {}", 0, "no JSON object");
        refused("{} x", 0, "damaged");
        refused(&GOOD[..40], 14, "damaged");
        refused(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}}"#, 1, "unknown field");
        refused(r#"{"a":{"dtype":"U8","shape":[1]}}"#, 1, "missing field");
        refused(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, 1, "damaged");
        let deep = format!(r#"{{"a":{}"#, "[".repeat(1_000_000));
        refused(&deep, 1, "damaged");
        assert!(parse(b"{\"a\xff\":1}", 1).is_err());
    }
}
