//! What a GGUF says about its model, by name: the values that expressions of mappings/config use.

use super::Request;
use super::rope::{self, Llama3};
use super::vocab::Vocab;
use crate::error::{Error, Result};
use crate::gguf::{self, Gguf};
use crate::indexer;
use crate::mapping::expr::{self, Names, Outcome};
use serde_json::Value;
use std::cell::{Cell, OnceCell, RefCell};

/// More layers are a damaged file.
const MAX_LAYERS: u64 = 1 << 16;

/// The names an architecture's expressions may use.
pub(super) struct Facts<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
    symbols: &'a toml::Table,
    request: &'a Request,
    vocab: Option<&'a Vocab>,
    /// Names that had no value since [`Facts::evaluate`] began, for the message.
    absent: RefCell<Vec<String>>,
    depth: Cell<usize>,
    llama3: OnceCell<Option<Llama3>>,
}

impl<'a> Facts<'a> {
    pub(super) fn new(
        gguf: &'a Gguf,
        architecture: &'a str,
        symbols: &'a toml::Table,
        request: &'a Request,
        vocab: Option<&'a Vocab>,
    ) -> Facts<'a> {
        Facts {
            gguf,
            architecture,
            symbols,
            request,
            vocab,
            absent: RefCell::default(),
            depth: Cell::new(0),
            llama3: OnceCell::new(),
        }
    }

    /// Evaluates an expression; with the outcome, the metadata keys it looked for in vain.
    pub(super) fn evaluate(&self, text: &str) -> Result<(Outcome, Vec<String>)> {
        self.absent.borrow_mut().clear();
        let outcome = expr::evaluate(text, self)?;
        Ok((outcome, self.absent.take()))
    }

    /// The rope scaling kept in `rope_freqs.weight`, if there is one.
    fn llama3(&self) -> Result<Option<Llama3>> {
        if let Some(known) = self.llama3.get() {
            return Ok(*known);
        }
        let found = match self.gguf.tensors().iter().find(|t| t.name == "rope_freqs.weight") {
            None => None,
            Some(tensor) => {
                let divisors: Vec<f64> = self.f32s(tensor)?.into_iter().map(f64::from).collect();
                let key = format!("{}.rope.freq_base", self.architecture);
                rope::llama3(&divisors, self.gguf.metadata().number(&key)?.unwrap_or(10_000.0))?
            }
        };
        Ok(*self.llama3.get_or_init(|| found))
    }

    /// The values of a small f32 tensor.
    fn f32s(&self, tensor: &gguf::Tensor) -> Result<Vec<f32>> {
        if tensor.ty.name != "f32" {
            return Err(Error::source(
                &tensor.name,
                format!("type {}, expected f32: convert the model to GGUF again", tensor.ty.name),
            ));
        }
        let (words, _) = self.gguf.data(tensor).as_chunks::<4>();
        Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
    }

    /// The factors of a longrope tensor, if the file has it: one for each pair of rotated dimensions.
    fn rope_factors(&self, name: &str) -> Result<Option<Value>> {
        let Some(tensor) = self.gguf.tensors().iter().find(|t| t.name == name) else { return Ok(None) };
        let factors = self.f32s(tensor)?;
        if factors.is_empty() || factors.iter().any(|f| !f.is_finite() || *f <= 0.0) {
            return Err(Error::source(name, "factors that are not positive, or none: convert to GGUF again"));
        }
        Ok(Some(factors.into_iter().map(|f| expr::number(decimal(f.into()))).collect::<Vec<_>>().into()))
    }

    /// The end-of-text tokens: the file's own, then those of the architecture that it has; one number
    /// when there is one.
    fn eos(&self) -> Option<Value> {
        let ids = self.vocab?.end_ids();
        match ids.as_slice() {
            [] => None,
            [one] => Some((*one).into()),
            _ => Some(ids.into()),
        }
    }
}

impl Names for Facts<'_> {
    fn value(&self, name: &str) -> Result<Option<Value>> {
        if let Some(symbol) = self.symbols.get(name) {
            let toml::Value::String(text) = symbol else {
                return Err(Error::mapping(name, "a symbol must be an expression in quotes"));
            };
            // A symbol may use others; one that uses itself would never end.
            if self.depth.replace(self.depth.get() + 1) > 16 {
                return Err(Error::mapping(name, "symbols that use each other in a circle"));
            }
            let outcome = expr::evaluate(text, self);
            self.depth.set(self.depth.get() - 1);
            return Ok(match outcome? {
                Outcome::Is(value) => Some(value),
                Outcome::Absent | Outcome::Omit => None,
            });
        }
        let mtp = || self.layers_of("nextn_predict_layers").map(|n| n.unwrap_or(0));
        let value = match name {
            "vocab_rows" => Some(self.request.vocab_rows.into()),
            "tied" => Some(self.request.tied.into()),
            "dtype" => Some(self.request.dtype.as_str().into()),
            "indexer" => Some(self.request.indexer.into()),
            "mtp_layers" => Some(if self.request.mtp { mtp()? } else { 0 }.into()),
            "bos" => self.vocab.and_then(|v| v.bos).map(Value::from),
            "pad" => self.vocab.and_then(|v| v.pad).map(Value::from),
            "eos" => self.eos(),
            "rope_freqs.factor" => self.llama3()?.map(|s| expr::number(s.factor)),
            "rope_freqs.low_freq" => self.llama3()?.map(|s| expr::number(s.low_freq)),
            "rope_freqs.high_freq" => self.llama3()?.map(|s| expr::number(s.high_freq)),
            "rope_freqs.original" => self.llama3()?.map(|s| expr::number(s.original).into_whole()),
            "rope_factors.long" => self.rope_factors("rope_factors_long.weight")?,
            "rope_factors.short" => self.rope_factors("rope_factors_short.weight")?,
            "indexer.types" | "indexer.freq" | "indexer.offset" | "indexer.pattern" => {
                let trunk = self.layers_of("block_count")?.unwrap_or(0).saturating_sub(mtp()?);
                let (arch, _) = self.request.tables().arch(self.architecture)?;
                let Some(group) = arch.groups.get("indexer") else { return Ok(None) };
                let full = indexer::layers(self.gguf, group, trunk, mtp()?)?;
                if full.iter().all(|f| *f) { None } else { sharing(&full, name) }
            }
            _ => {
                let key = match name.split('.').next() {
                    Some("tokenizer" | "general") => name.to_owned(),
                    _ => format!("{}.{name}", self.architecture),
                };
                let all = self.layers_of("block_count")?.unwrap_or(0);
                let layers = [all, all.saturating_sub(mtp()?)];
                let value = self.gguf.metadata().get(&key).map(|v| scalar(&key, v, layers)).transpose()?;
                if value.is_none() {
                    self.absent.borrow_mut().push(key);
                }
                return Ok(value);
            }
        };
        if value.is_none() {
            self.absent.borrow_mut().push(name.to_owned());
        }
        Ok(value)
    }

    fn list(&self, name: &str, layers: bool) -> Result<Option<Vec<Value>>> {
        let key = format!("{}.{name}", self.architecture);
        let count = |name| Ok::<_, Error>(self.layers_of(name)?.unwrap_or(0));
        let (all, mtp) = (count("block_count")?, count("nextn_predict_layers")?);
        let trunk = all.saturating_sub(mtp);
        if name.contains("{L}") {
            let there = |layer: u64| self.has_tensor(&name.replace("{L}", &layer.to_string()));
            return Ok(Some((0..trunk.min(MAX_LAYERS)).map(|layer| there(layer).into()).collect()));
        }
        let Some(value) = self.gguf.metadata().get(&key) else {
            self.absent.borrow_mut().push(key);
            return Ok(None);
        };
        let nested = || Error::source(&key, "nested arrays, expected a value");
        let mut values: Vec<Value> = match value {
            gguf::Value::Array(array) => {
                array.iter().map(|v| single(&v)).collect::<Option<_>>().ok_or_else(nested)?
            }
            value => vec![single(value).ok_or_else(nested)?],
        };
        if layers {
            match values.len() as u64 {
                n if n == trunk || n == all => values.truncate(trunk as usize),
                1 if trunk <= MAX_LAYERS => values = vec![values[0].clone(); trunk as usize],
                n => {
                    return Err(Error::source(
                        key,
                        format!(
                            "{n} values, expected {trunk} or {all}, one for each layer: convert to GGUF again"
                        ),
                    ));
                }
            }
        }
        Ok(Some(values))
    }

    fn has_tensor(&self, name: &str) -> bool {
        let tensors = self.gguf.tensors();
        let Some((begin, end)) = name.split_once("{L}") else {
            return tensors.iter().any(|t| t.name == name);
        };
        let layer =
            |t: &str| Some(t.strip_prefix(begin)?.strip_suffix(end)?.bytes().all(|b| b.is_ascii_digit()));
        tensors.iter().any(|t| layer(&t.name) == Some(true))
    }
}

impl Facts<'_> {
    fn layers_of(&self, name: &str) -> Result<Option<u64>> {
        self.gguf.metadata().count(&format!("{}.{name}", self.architecture))
    }
}

/// How config.json says which layers share: the list, and the schedule, or a pattern where none fits.
fn sharing(full: &[bool], name: &str) -> Option<Value> {
    let schedule =
        (2..=16).flat_map(|freq| (0..=16).map(move |offset| (freq, offset))).find(|(freq, offset)| {
            full.iter()
                .enumerate()
                .all(|(layer, full)| *full == indexer::follows(layer as u64, *freq, *offset))
        });
    match (name, schedule) {
        ("indexer.types", _) => {
            Some(full.iter().map(|f| if *f { "full" } else { "shared" }).collect::<Vec<_>>().into())
        }
        ("indexer.freq", Some((freq, _))) => Some(freq.into()),
        ("indexer.offset", Some((_, offset))) => Some(offset.into()),
        ("indexer.pattern", None) => {
            Some(full.iter().map(|f| if *f { 'F' } else { 'S' }).collect::<String>().into())
        }
        _ => None,
    }
}

/// A metadata value as JSON. An array of one value for every layer is that value: config.json has
/// one number where the layers agree. `layers`: with and without the MTP block; converters differ in
/// whether they count it.
fn scalar(key: &str, value: &gguf::Value, layers: [u64; 2]) -> Result<Value> {
    let gguf::Value::Array(array) = value else {
        return single(value).ok_or_else(|| Error::source(key, "nested arrays, expected a value"));
    };
    let count = array.len() as u64;
    if !layers.contains(&count) {
        let [all, trunk] = layers;
        let expected = if all == trunk { all.to_string() } else { format!("{trunk} or {all}") };
        return Err(Error::source(
            key,
            format!("{count} values, expected {expected}, one for each layer: convert to GGUF again"),
        ));
    }
    let mut values = array.iter().map(|v| single(&v)).enumerate();
    let Some((_, Some(first))) = values.next() else {
        return Err(Error::source(key, "an empty or nested array, expected a value for each layer"));
    };
    match values.find(|(_, other)| other.as_ref() != Some(&first)) {
        None => Ok(first),
        Some((layer, other)) => Err(Error::source(
            key,
            format!(
                "{first} in layer 0, but {} in layer {layer}, expected one value for all: no Hugging Face class of the \
                 architecture has this shape",
                other.unwrap_or_default()
            ),
        )),
    }
}

/// A metadata value that is no array, as JSON.
pub(super) fn single(value: &gguf::Value) -> Option<Value> {
    Some(match value {
        gguf::Value::U64(n) => (*n).into(),
        gguf::Value::I64(n) => (*n).into(),
        gguf::Value::F64(x) => expr::number(decimal(*x)),
        gguf::Value::Bool(b) => (*b).into(),
        gguf::Value::String(bytes) => String::from_utf8_lossy(bytes).into(),
        gguf::Value::Array(_) => return None,
    })
}

/// The shortest decimal that is this number. GGUF floats are f32: 1e-5 must not come out as
/// 9.999999747378752e-6.
fn decimal(value: f64) -> f64 {
    let narrow = value as f32;
    if f64::from(narrow) == value { narrow.to_string().parse().unwrap_or(value) } else { value }
}

/// Writes 8192.0 as 8192.
trait IntoWhole {
    fn into_whole(self) -> Value;
}

impl IntoWhole for Value {
    fn into_whole(self) -> Value {
        match self.as_f64() {
            Some(x) if x.fract() == 0.0 && x.abs() < 9e15 => (x as i64).into(),
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_come_out_as_they_were_written() {
        for text in ["1e-6", "1e-5", "10000", "0.0707", "2.5", "500000", "0.1"] {
            let narrow: f32 = text.parse().unwrap();
            assert_eq!(decimal(narrow.into()), text.parse::<f64>().unwrap(), "{text}");
        }
    }

    #[test]
    fn the_schedule_of_glm_5_2() {
        // indexer_types of GLM-5.2's config.json: full in layers 0, 1, 2, 6, 10, … of 78.
        let full: Vec<bool> = (0..78u64).map(|l| l < 2 || l % 4 == 2).collect();
        assert_eq!(full, (0..78).map(|l| indexer::follows(l, 4, 3)).collect::<Vec<_>>());
        assert_eq!(sharing(&full, "indexer.freq"), Some(4.into()));
        assert_eq!(sharing(&full, "indexer.offset"), Some(3.into()));
        assert_eq!(sharing(&full, "indexer.pattern"), None);
        assert_eq!(sharing(&full, "indexer.types").unwrap()[3], "shared");
    }

    #[test]
    fn types_without_a_schedule_become_a_pattern() {
        let odd = [true, false, true, true, false, false];
        assert_eq!(sharing(&odd, "indexer.freq"), None);
        assert_eq!(sharing(&odd, "indexer.pattern"), Some("FSFFSS".into()));
    }
}
