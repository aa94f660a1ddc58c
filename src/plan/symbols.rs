//! The numbers of a model, from metadata, by the names its mapping gives them.

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::mapping::expr::{self, Names, Outcome};
use crate::mapping::{Arch, SymbolSource};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// The numbers of a model, by the names its mapping gives them.
pub struct Symbols {
    values: BTreeMap<String, (Vec<u64>, String)>,
    /// Decoder layers, the MTP block included.
    pub blocks: u64,
    /// Decoder layers, the MTP block not included.
    pub trunk: u64,
    /// Routed experts.
    pub experts: u64,
}

impl Symbols {
    pub(super) fn read(arch: &Arch, gguf: &Gguf) -> Result<Symbols> {
        let file = gguf.files()[0].path.display().to_string();
        let mut symbols = Symbols { values: BTreeMap::new(), blocks: 0, trunk: 0, experts: 0 };
        let blocks = symbols.read_one(arch, gguf, "blocks", 1)?.map_or(0, |v| v[0]);
        // Every block has at least one tensor: a larger count is a mistake or an attack, and per-layer
        // work must not follow it.
        if blocks == 0 || blocks > gguf.tensors().len() as u64 {
            let found = gguf.tensors().len();
            return Err(Error::source(
                file,
                format!(
                    "{} is {blocks}, but the model has {found} tensors; the metadata is wrong",
                    symbols.key("blocks")
                ),
            ));
        }
        // Converters differ in whether arrays of layers count the MTP block: it is read first.
        symbols.blocks = blocks;
        symbols.read_one(arch, gguf, "mtp", blocks)?;
        let mtp = symbols.get("mtp", 0);
        symbols.trunk = blocks.saturating_sub(mtp);
        for name in arch.symbols.keys().filter(|n| *n != "blocks") {
            symbols.read_one(arch, gguf, name, blocks)?;
        }
        symbols.derive(arch, blocks)?;
        let (experts, dense) = (symbols.get("experts", 0), symbols.get("dense", 0));
        if mtp >= blocks || dense > blocks {
            return Err(Error::source(
                file,
                format!(
                    "{} is {blocks}, with {mtp} MTP blocks and {dense} dense layers in it; the metadata is wrong",
                    symbols.key("blocks")
                ),
            ));
        }
        for name in ["heads", "kv_heads"] {
            if symbols.values.get(name).is_some_and(|(v, _)| v.contains(&0)) {
                return Err(Error::source(
                    file,
                    format!("{} is 0, expected at least 1; the metadata is wrong", symbols.key(name)),
                ));
            }
        }
        symbols.experts = experts;
        Ok(symbols)
    }

    /// Reads a symbol and those it falls back to.
    fn read_one(&mut self, arch: &Arch, gguf: &Gguf, name: &str, layers: u64) -> Result<Option<Vec<u64>>> {
        if let Some((values, _)) = self.values.get(name) {
            return Ok(Some(values.clone()));
        }
        let Some(source) = arch.symbols.get(name) else { return Ok(None) };
        let (values, key) = match source {
            SymbolSource::Number(n) => (vec![*n], name.to_owned()),
            // Once the others are read.
            SymbolSource::Key(text) if text.starts_with('=') => return Ok(None),
            SymbolSource::Key(text) => {
                let (key, fallback) = match text.split_once('?') {
                    Some((key, fallback)) => (key, Some(fallback)),
                    None => (text.as_str(), None),
                };
                let found = gguf.metadata().per_layer(key, layers, self.trunk)?;
                let values = match (found, fallback) {
                    (Some(values), _) => values,
                    (None, Some("")) => vec![0],
                    // One step only, so that two symbols cannot wait for each other.
                    (None, Some(other))
                        if other != name
                            && matches!(arch.symbols.get(other), Some(SymbolSource::Key(k)) if !k.contains('?')) =>
                    {
                        self.read_one(arch, gguf, other, layers)?.unwrap_or_default()
                    }
                    (None, Some(other)) => {
                        return Err(Error::mapping(
                            &arch.file,
                            format!("symbol {name} falls back to {other:?}, which is no required symbol"),
                        ));
                    }
                    (None, None) => {
                        return Err(Error::source(
                            gguf.files()[0].path.display(),
                            format!(
                                "metadata key {key} is missing; the architecture {} needs it",
                                arch.architecture
                            ),
                        ));
                    }
                };
                (values, key.to_owned())
            }
        };
        self.values.insert(name.to_owned(), (values.clone(), key));
        Ok(Some(values))
    }

    /// The value of a symbol in a layer; 0 when the mapping does not name it.
    pub fn get(&self, name: &str, layer: u64) -> u64 {
        match name {
            "trunk" => self.trunk,
            _ => self.values.get(name).map_or(0, |(v, _)| *v.get(layer as usize).or(v.last()).unwrap_or(&0)),
        }
    }

    /// Symbols that are expressions over others.
    fn derive(&mut self, arch: &Arch, layers: u64) -> Result<()> {
        let mut left: Vec<(&String, &str)> = Vec::new();
        for (name, source) in &arch.symbols {
            if let SymbolSource::Key(text) = source
                && let Some(text) = text.strip_prefix('=')
            {
                left.push((name, text));
            }
        }
        while !left.is_empty() {
            let before = left.len();
            left.retain(|(name, text)| {
                let values: Option<Vec<u64>> =
                    (0..layers).map(|layer| self.evaluate(text, layer, None)).collect();
                let Some(mut values) = values else { return true };
                values.dedup();
                // One value for all layers, or each its own.
                if values.len() > 1 {
                    values = (0..layers).filter_map(|layer| self.evaluate(text, layer, None)).collect();
                }
                self.values.insert((*name).clone(), (values, (*name).clone()));
                false
            });
            if left.len() == before {
                let (name, text) = left[0];
                return Err(Error::mapping(
                    format!("mappings/arch/{}.toml", arch.architecture),
                    format!(
                        "symbol {name} = \"={text}\": no whole number for this model, or an unknown symbol in it"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The value of an expression over symbols in a layer. `rows`: what that name stands for. `None` where a name is
    /// unknown, or the value is no whole number from 0 on.
    pub fn evaluate(&self, text: &str, layer: u64, rows: Option<u64>) -> Option<u64> {
        match expr::evaluate(text, &AtLayer { symbols: self, layer, rows }) {
            Ok(Outcome::Is(value)) => value.as_u64(),
            _ => None,
        }
    }

    /// The metadata key a symbol comes from, for messages.
    pub fn key(&self, name: &str) -> &str {
        self.values.get(name).map_or("block_count", |(_, key)| key)
    }

    /// `first..end` over symbols and numbers.
    pub(super) fn range(&self, text: &str) -> Option<Range<u64>> {
        let value = |t: &str| match t.trim() {
            "trunk" => Some(self.trunk),
            t if t.bytes().all(|b| b.is_ascii_digit()) => t.parse().ok(),
            t => self.values.get(t).map(|(v, _)| v[0]),
        };
        let (first, end) = text.split_once("..")?;
        Some(value(first)?..value(end)?.min(self.blocks))
    }
}

/// The symbols in a layer, for expressions.
struct AtLayer<'a> {
    symbols: &'a Symbols,
    layer: u64,
    rows: Option<u64>,
}

impl Names for AtLayer<'_> {
    fn value(&self, name: &str) -> Result<Option<Value>> {
        Ok(match name {
            "rows" if self.rows.is_some() => self.rows.map(Value::from),
            "trunk" => Some(self.symbols.trunk.into()),
            _ => self.symbols.values.contains_key(name).then(|| self.symbols.get(name, self.layer).into()),
        })
    }

    fn has_tensor(&self, _: &str) -> bool {
        false
    }
}
