//! `preshard inspect`.

use super::{Talk, print, print_json, text};
use crate::error::{Result, shown, shown_path};
use crate::gguf::{Gguf, Value};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Longer texts and arrays are shortened unless asked for.
const SHORT: usize = 60;

#[derive(clap::Args)]
pub struct Args {
    /// The GGUF: a file, any file of a split set, all of them, or the directory.
    #[arg(required = true, value_name = "GGUF")]
    source: Vec<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let gguf = Gguf::open(&args.source)?;
    for note in gguf.notes() {
        talk.note(note);
    }
    // Per type: tensors, elements, bytes.
    let mut types: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for t in gguf.tensors() {
        let sum = types.entry(t.ty.name).or_default();
        *sum = (sum.0 + 1, sum.1 + t.elements(), sum.2 + t.bytes);
    }
    if args.json {
        return print_json(&json!({
            "files": gguf.files().iter().map(|f| json!({ "file": shown_path(&f.path), "bytes": f.size })).collect::<Vec<_>>(),
            "metadata": gguf.metadata().iter().map(|(k, v)| (k.to_owned(), to_json(v))).collect::<serde_json::Map<_, _>>(),
            "types": types.iter().map(|(t, s)| (*t, json!({ "tensors": s.0, "elements": s.1, "bytes": s.2 }))).collect::<BTreeMap<_, _>>(),
            "tensors": gguf.tensors().iter().map(|t| json!({
                "name": t.name, "type": t.ty.name, "ne": t.ne, "bytes": t.bytes, "file": t.file, "offset": t.offset,
            })).collect::<Vec<_>>(),
        }));
    }
    let mut out = String::new();
    for file in gguf.files() {
        out += &format!("{}  {}\n", shown_path(&file.path), text::bytes(file.size));
    }
    out += "\nMetadata\n";
    for (key, value) in gguf.metadata().iter() {
        out += &format!("  {}  {}\n", shown(key), show(value, talk.verbose));
    }
    let elements: u64 = types.values().map(|s| s.1).sum();
    out += &format!("\nTensors: {}, {:.2} billion elements\n", gguf.tensors().len(), elements as f64 / 1e9);
    for (name, (n, elements, bytes)) in &types {
        let bits = *bytes as f64 * 8.0 / (*elements).max(1) as f64;
        out +=
            &format!("  {name:8} {n:>6} tensors  {:>10}  {bits:.2} bits each element\n", text::bytes(*bytes));
    }
    if talk.verbose {
        out += "\n";
        for t in gguf.tensors() {
            out += &format!(
                "  {}  {}  {}  {}\n",
                shown(&t.name),
                t.ty.name,
                text::shape(&t.ne),
                text::bytes(t.bytes)
            );
        }
    }
    print(&out)
}

/// A value in one line.
fn show(value: &Value, whole: bool) -> String {
    match value {
        Value::U64(n) => n.to_string(),
        Value::I64(n) => n.to_string(),
        Value::F64(n) => n.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::String(bytes) => {
            let text = String::from_utf8_lossy(bytes);
            if text.chars().count() > SHORT && !whole {
                let start: String = text.chars().take(SHORT).collect();
                format!("{}… ({} bytes)", shown(&start), bytes.len())
            } else {
                shown(&text)
            }
        }
        Value::Array(array) => {
            let n = if whole { array.len() } else { 4 };
            let items: Vec<_> = array.iter().take(n).map(|v| show(&v, whole)).collect();
            let more = if array.len() > n { ", …" } else { "" };
            format!("[{}{more}] ({} of {})", items.join(", "), array.len(), array.element().name())
        }
    }
}

fn to_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U64(n) => json!(n),
        Value::I64(n) => json!(n),
        Value::F64(n) => json!(n),
        Value::Bool(b) => json!(b),
        Value::String(bytes) => json!(String::from_utf8_lossy(bytes)),
        Value::Array(array) => array.iter().map(|v| to_json(&v)).collect(),
    }
}
