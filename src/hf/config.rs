//! config.json and generation_config.json, by the rules of mappings/config/ARCHITECTURE.toml.

use super::facts::Facts;
use super::keys::{Asked, Keys};
use super::vocab::{Texts, Vocab};
use super::{Model, Request};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::mapping::Tables;
use crate::mapping::expr::{self, Names, Outcome};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// One file of mappings/config.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Architecture {
    /// The file it was read from, for messages.
    #[serde(skip)]
    file: String,
    /// GGUF's name, `general.architecture`.
    architecture: String,
    /// Keys of config.json that the shapes of the weights depend on.
    pub(super) structure: Vec<String>,
    /// The shapes that config.json implies, dimensions in ggml's order, by tensor name without its
    /// `blk.N.`: an expression over keys of config.json for each; one with an absent key says nothing.
    #[serde(default)]
    shapes: BTreeMap<String, Vec<String>>,
    /// Other classes of the same weights, for a given config.json.
    #[serde(default)]
    kin: Vec<String>,
    /// Texts of tokens that end a reply, when the vocabulary has them.
    #[serde(default)]
    stop: Vec<String>,
    /// Texts of tokens that a reader of replies must see, whatever their type.
    #[serde(default)]
    visible: Vec<String>,
    /// What is known of keys that no expression reads.
    #[serde(default)]
    pub(super) keys: Keys,
    /// What no class can compute.
    #[serde(default)]
    pub(super) refuse: Vec<Refuse>,
    /// Names for expressions used more than once.
    #[serde(default)]
    symbols: toml::Table,
    /// config.json, for all models of the architecture.
    config: toml::Table,
    /// The Hugging Face models it may be; the first whose condition holds.
    model: Vec<Choice>,
}

/// Metadata or tensors that no class of the architecture can compute with.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Refuse {
    /// When it is so.
    pub when: String,
    /// The key or tensor to name.
    pub subject: String,
    /// What is wrong with it.
    pub reason: String,
}

/// What an expression of a config table decides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Use<'a> {
    /// A key of config.json, `rope_scaling.factor`.
    Config(String),
    /// A symbol, which other expressions use.
    Symbol(String),
    /// Which Hugging Face class it is.
    Class,
    /// Whether the model is refused, for this reason.
    Refusal(&'a str),
}

/// One Hugging Face model that an architecture may be.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Choice {
    /// When it is this one; always, without.
    when: Option<String>,
    /// Its class, `GlmMoeDsaForCausalLM`.
    class: String,
    /// Its `model_type`.
    model_type: String,
    /// What its config.json has besides.
    #[serde(default)]
    config: toml::Table,
}

impl Architecture {
    /// The rules for the architecture of `gguf`.
    pub(super) fn of(gguf: &Gguf, tables: &Tables) -> Result<Architecture> {
        let name = gguf.metadata().text("general.architecture")?.unwrap_or("");
        Self::named(name, tables)
    }

    pub(super) fn named(name: &str, tables: &Tables) -> Result<Architecture> {
        let (mut rules, _): (Architecture, String) = tables.read("config", name)?;
        rules.file = tables.file("config", name);
        if rules.architecture != name {
            let detail = format!("architecture {:?}, expected {name:?}", rules.architecture);
            return Err(Error::mapping(rules.file, detail));
        }
        rules.check()?;
        Ok(rules)
    }

    /// Refuses an expression that cannot be read, and a shape that speaks of a key which no config.json has: it
    /// would be absent from every one, and the shape never looked at.
    fn check(&self) -> Result<()> {
        let wrong = |place: String, detail: String| Error::mapping(&self.file, format!("{place}: {detail}"));
        let mut problems = Vec::new();
        for (decides, text) in self.expressions() {
            let place = match decides {
                Use::Config(key) => format!("config, {key}"),
                Use::Symbol(name) => format!("symbols, {name}"),
                Use::Class => "model, when".into(),
                Use::Refusal(_) => "refuse, when".into(),
            };
            problems
                .extend(expr::evaluate(text, &Asked::default()).err().map(|e| wrong(place, e.to_string())));
        }
        for (kind, sizes) in &self.shapes {
            for text in sizes {
                let asked = Asked::default();
                let place = format!("shapes, {kind}");
                match expr::evaluate(text, &asked) {
                    Err(e) => problems.push(wrong(place, e.to_string())),
                    Ok(_) => {
                        let there = |key: &String| {
                            self.config.contains_key(key)
                                || self.model.iter().any(|model| model.config.contains_key(key))
                        };
                        let strange = asked.0.take().into_iter().filter(|key| !there(key));
                        problems.extend(strange.map(|key| {
                            wrong(place.clone(), format!("{key} is no key of [config] or of a [[model]]"))
                        }));
                    }
                }
            }
        }
        Error::all(problems)
    }

    /// The expression that a symbol stands for.
    #[cfg(test)]
    pub(super) fn symbol(&self, name: &str) -> Option<&str> {
        self.symbols.get(name)?.as_str()
    }

    /// Every class that a config.json of the architecture may name.
    #[cfg(test)]
    pub(super) fn classes(&self) -> impl Iterator<Item = &str> {
        self.model.iter().map(|choice| &choice.class).chain(&self.kin).map(String::as_str)
    }

    /// GGUF's name of it.
    pub(super) fn name(&self) -> &str {
        &self.architecture
    }

    /// Its texts that are read as tokens: those that end a reply, and those that must stay visible.
    pub(super) fn texts(&self) -> Texts<'_> {
        Texts { stop: &self.stop, visible: &self.visible }
    }

    /// Every expression over metadata, with what it decides.
    pub(super) fn expressions(&self) -> Vec<(Use<'_>, &str)> {
        let mut all = Vec::new();
        for table in std::iter::once(&self.config).chain(self.model.iter().map(|choice| &choice.config)) {
            texts(table, "", &mut |key, text| all.push((Use::Config(key), text)));
        }
        texts(&self.symbols, "", &mut |name, text| all.push((Use::Symbol(name), text)));
        all.extend(self.model.iter().filter_map(|choice| Some((Use::Class, choice.when.as_deref()?))));
        all.extend(self.refuse.iter().map(|rule| (Use::Refusal(&rule.reason), rule.when.as_str())));
        all
    }

    pub(super) fn facts<'a>(
        &'a self,
        gguf: &'a Gguf,
        request: &'a Request,
        vocab: Option<&'a Vocab>,
    ) -> Facts<'a> {
        Facts::new(gguf, &self.architecture, &self.symbols, request, vocab)
    }

    /// Which Hugging Face model it is.
    pub(super) fn model(&self, gguf: &Gguf, request: &Request) -> Result<Model> {
        let choice = self.choice(&self.facts(gguf, request, None))?;
        Ok(Model { class: choice.class.clone(), model_type: choice.model_type.clone() })
    }

    fn choice(&self, facts: &Facts) -> Result<&Choice> {
        for choice in &self.model {
            let holds = match &choice.when {
                None => true,
                Some(when) => expr::holds(&facts.evaluate(when)?.0),
            };
            if holds {
                return Ok(choice);
            }
        }
        Err(Error::mapping(&self.file, "no [[model]] holds; the last should have no condition"))
    }

    /// Other classes that a given config.json of this architecture may name.
    pub(super) fn kin(&self) -> &[String] {
        &self.kin
    }

    /// config.json of the model, and the required keys that have no value.
    pub(super) fn config(
        &self,
        gguf: &Gguf,
        request: &Request,
        vocab: Option<&Vocab>,
    ) -> Result<(Map<String, Value>, Vec<Error>)> {
        let facts = self.facts(gguf, request, vocab);
        let choice = self.choice(&facts)?;
        let mut config = Map::new();
        let mut problems = Vec::new();
        config.insert("architectures".into(), vec![choice.class.clone()].into());
        config.insert("model_type".into(), choice.model_type.clone().into());
        for table in [&self.config, &choice.config] {
            fill(&mut config, table, &facts, &mut problems)?;
        }
        Ok((config, problems))
    }

    /// Refuses a config.json that contradicts the tensors: an engine would build another model. The
    /// first tensor of each kind is named.
    pub(super) fn check_shapes(&self, gguf: &Gguf, config: &Map<String, Value>) -> Result<()> {
        let mut problems = Vec::new();
        for (kind, sizes) in &self.shapes {
            let sizes: Vec<Option<f64>> = sizes
                .iter()
                .map(|text| match expr::evaluate(text, &Written(config))? {
                    Outcome::Is(value) => Ok(value.as_f64()),
                    Outcome::Absent | Outcome::Omit => Ok(None),
                })
                .collect::<Result<_>>()?;
            let differs = |ne: &[u64], sizes: &[Option<f64>]| {
                ne.len() != sizes.len()
                    || ne.iter().zip(sizes).any(|(n, size)| size.is_some_and(|size| size != *n as f64))
            };
            let wrong = |ne: &[u64]| match sizes[..] {
                // The matrices of a stack one under the other: the same numbers in the same order.
                [cols, rows, stack] if ne.len() == 2 => {
                    differs(ne, &[cols, rows.zip(stack).map(|(rows, stack)| rows * stack)])
                }
                _ => differs(ne, &sizes),
            };
            let of_kind = |name: &str| {
                name == kind
                    || name
                        .strip_prefix("blk.")
                        .and_then(|rest| rest.split_once('.'))
                        .is_some_and(|(_, rest)| rest == kind)
            };
            if let Some(t) = gguf.tensors().iter().find(|t| of_kind(&t.name) && wrong(&t.ne)) {
                let shown: Vec<String> =
                    sizes.iter().map(|s| s.map_or("any".into(), |s| s.to_string())).collect();
                problems.push(Error::source(
                    &t.name,
                    format!(
                        "shape {:?}, but config.json implies [{}] ({}): the metadata is wrong, or --hf-config is of \
                         another model",
                        t.ne,
                        shown.join(", "),
                        self.shapes[kind].join(", ")
                    ),
                ));
            }
        }
        Error::all(problems)
    }

    /// generation_config.json: where a reply ends, and the sampling that the GGUF recommends.
    pub(super) fn generation(
        &self,
        gguf: &Gguf,
        request: &Request,
        vocab: &Vocab,
    ) -> Result<Map<String, Value>> {
        let facts = self.facts(gguf, request, Some(vocab));
        let mut generation = Map::new();
        let mut put = |key: &str, name: &str| -> Result<bool> {
            let (outcome, _) = facts.evaluate(name)?;
            let Outcome::Is(value) = outcome else { return Ok(false) };
            generation.insert(key.into(), value);
            Ok(true)
        };
        put("bos_token_id", "bos")?;
        put("eos_token_id", "eos")?;
        put("pad_token_id", "pad")?;
        let mut sampled = false;
        for (key, name) in [
            ("temperature", "general.sampling.temp"),
            ("top_k", "general.sampling.top_k"),
            ("top_p", "general.sampling.top_p"),
            ("min_p", "general.sampling.min_p"),
            ("repetition_penalty", "general.sampling.penalty_repeat"),
        ] {
            sampled |= put(key, name)?;
        }
        if sampled {
            generation.insert("do_sample".into(), true.into());
        }
        // Tokens that are never chosen; as llama.cpp, without those that the vocabulary does not have.
        const SUPPRESSED: &str = "tokenizer.ggml.suppress_tokens";
        if let Some(ids) = gguf.metadata().numbers(SUPPRESSED)? {
            let known = |id: &f64| *id >= 0.0 && *id < vocab.tokens.len() as f64;
            let ids: Vec<Value> = ids.into_iter().filter(known).map(|id| (id as u64).into()).collect();
            if !ids.is_empty() {
                generation.insert("suppress_tokens".into(), ids.into());
            }
        }
        Ok(generation)
    }
}

/// A finished config.json, by its keys.
struct Written<'a>(&'a Map<String, Value>);

impl Names for Written<'_> {
    fn value(&self, name: &str) -> Result<Option<Value>> {
        Ok(self.0.get(name).filter(|v| !v.is_null()).cloned())
    }

    fn has_tensor(&self, _: &str) -> bool {
        false
    }
}

/// Adds what `table` says to `object`; a required key without a value becomes a problem.
fn fill(
    object: &mut Map<String, Value>,
    table: &toml::Table,
    facts: &Facts,
    problems: &mut Vec<Error>,
) -> Result<()> {
    for (key, rule) in table {
        let value = match rule {
            toml::Value::String(text) => {
                let (outcome, absent) = facts.evaluate(text)?;
                match outcome {
                    Outcome::Is(value) => value,
                    Outcome::Omit => continue,
                    Outcome::Absent => {
                        problems.push(Error::source(
                            absent.join(", "),
                            format!(
                                "not in the metadata, needed for {key} of config.json: convert to GGUF again, or give \
                                 the model's own config.json with --hf-config DIR"
                            ),
                        ));
                        continue;
                    }
                }
            }
            toml::Value::Table(inner) => {
                if let Some(toml::Value::String(when)) = inner.get("when")
                    && !expr::holds(&facts.evaluate(when)?.0)
                {
                    continue;
                }
                let mut nested = Map::new();
                let rest =
                    inner.iter().filter(|(k, _)| *k != "when").map(|(k, v)| (k.clone(), v.clone())).collect();
                fill(&mut nested, &rest, facts, problems)?;
                Value::Object(nested)
            }
            constant => json(constant),
        };
        object.insert(key.clone(), value);
    }
    Ok(())
}

/// Visits the expressions of a table and of the tables in it; a condition (`when`) decides its whole table.
fn texts<'t>(table: &'t toml::Table, under: &str, visit: &mut dyn FnMut(String, &'t str)) {
    for (key, value) in table {
        let name = match (under, key.as_str()) {
            ("", key) => key.to_owned(),
            (under, "when") => under.to_owned(),
            (under, key) => format!("{under}.{key}"),
        };
        match value {
            toml::Value::String(text) => visit(name, text),
            toml::Value::Table(inner) => texts(inner, &name, visit),
            _ => {}
        }
    }
}

pub(super) fn json(constant: &toml::Value) -> Value {
    match constant {
        toml::Value::Boolean(b) => (*b).into(),
        toml::Value::Integer(n) => (*n).into(),
        toml::Value::Float(x) => expr::number(*x),
        toml::Value::Array(all) => all.iter().map(json).collect::<Vec<_>>().into(),
        toml::Value::String(s) => s.clone().into(),
        toml::Value::Datetime(d) => d.to_string().into(),
        toml::Value::Table(t) => Value::Object(t.iter().map(|(k, v)| (k.clone(), json(v))).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = (&'static str, Architecture)> {
        let named = |name| (name, Architecture::named(name, &Tables::default()).unwrap());
        crate::mapping::tables::built_in_names("config").map(named)
    }

    #[test]
    fn every_rules_file_is_sound() {
        for (name, rules) in all() {
            let last = rules.model.last();
            assert!(last.is_some_and(|m| m.when.is_none()), "{name}: the last model has a condition");
            assert!(!rules.structure.is_empty() && !rules.shapes.is_empty(), "{name}");
        }
    }
}
