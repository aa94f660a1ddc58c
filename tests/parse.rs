//! Sound files read as gguf-py reads them: names, shapes, types, offsets, bytes, every metadata value.
//! The expected values are written by `scripts/gguf_expected.py`.
#![cfg(feature = "convert")]

use preshard::gguf::{Gguf, Value};
use serde_json::{Value as Json, json};
use std::path::Path;

/// Opens `file` and compares with `parse/NAME.json`.
fn compare(name: &str, file: &str) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let expected: Json =
        serde_json::from_slice(&std::fs::read(fixtures.join(format!("parse/{name}.json"))).unwrap()).unwrap();
    let gguf = Gguf::open(&[fixtures.join(file)]).unwrap();
    assert!(gguf.notes().is_empty());

    let files: Vec<Json> = gguf
        .files()
        .iter()
        .map(|f| json!({"file": f.path.file_name().unwrap().to_str(), "data_start": f.data_start}))
        .collect();
    assert_eq!(json!(files), expected["files"]);

    let tensors = expected["tensors"].as_array().unwrap();
    assert_eq!(gguf.tensors().len(), tensors.len());
    for (t, want) in gguf.tensors().iter().zip(tensors) {
        let data = gguf.data(t);
        let found = json!({
            "name": t.name, "type": t.ty.id, "ne": t.ne, "file": t.file, "offset": t.offset, "bytes": t.bytes,
            "first": hex(&data[..4]), "last": hex(&data[data.len() - 4..]),
        });
        assert_eq!(&found, want);
    }

    let metadata = expected["metadata"].as_object().unwrap();
    assert_eq!(gguf.metadata().iter().count(), metadata.len());
    for (key, value) in gguf.metadata().iter() {
        assert_eq!(plain(value), metadata[key], "{key}");
    }
}

/// A value as the script writes it.
fn plain(value: &Value) -> Json {
    match value {
        Value::U64(n) => json!(n),
        Value::I64(n) => json!(n),
        Value::F64(x) => json!({"f64": format!("{:016x}", x.to_bits())}),
        Value::Bool(b) => json!(b),
        Value::String(bytes) => json!(bytes.iter().map(|&b| char::from(b)).collect::<String>()),
        Value::Array(array) => array.iter().map(|v| plain(&v)).collect(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn reads_glm5_in_three_splits_as_gguf_py_does() {
    compare("tiny-glm5-UD-Q4_K_XL", "glm5/tiny-glm5-UD-Q4_K_XL-00002-of-00003.gguf");
}

#[test]
fn reads_llama_as_gguf_py_does() {
    compare("tiny-llama-Q4_K_M", "dense/tiny-llama-Q4_K_M.gguf");
}

#[test]
fn reads_every_kind_of_value_as_gguf_py_does() {
    compare("all-values", "parse/all-values.gguf");
}
