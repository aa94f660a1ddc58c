//! Every metadata key accounted for: read by a table, without effect for a stated reason, or refused
//! unless its value is the one that changes nothing.
//!
//! A key that nobody reads may change what the model computes (a window, a scale, a cap on logits), and
//! then the engine would serve another function without a word.

use super::config::{Architecture, Use, json};
use super::facts::{Facts, single};
use crate::error::{Error, Result, shown};
use crate::gguf::{Gguf, Value as Stored};
use crate::mapping::expr::{self, Names, Outcome};
use serde::Deserialize;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// What a config table says of keys besides those that its expressions read. Names are without the
/// architecture's prefix (`tokenizer.` and `general.` stay); a final `*` stands for any rest.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    /// The value, or the list of values, that changes nothing; a text is an expression. With a reason of
    /// its own: `{ is = …, why = … }`.
    #[serde(default)]
    pub(super) neutral: BTreeMap<String, Neutral>,
    /// Why the key has no effect.
    #[serde(default)]
    pub(super) ignored: BTreeMap<String, String>,
    /// What becomes of keys that are read by code and by no expression.
    #[serde(default)]
    pub(super) read: BTreeMap<String, String>,
}

/// What a key must be to change nothing.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Neutral {
    Reason { is: toml::Value, why: String },
    Plain(toml::Value),
}

impl Neutral {
    /// The rules for its values, and why another is refused.
    pub(super) fn rules(&self) -> (&[toml::Value], &str) {
        let (is, why) = match self {
            Neutral::Reason { is, why } => (is, why.as_str()),
            Neutral::Plain(is) => (is, "no class of the architecture computes with another value"),
        };
        match is {
            toml::Value::Array(all) => (all, why),
            one => (std::slice::from_ref(one), why),
        }
    }
}

/// Knows no value, and keeps the names it was asked for.
#[derive(Default)]
pub(super) struct Asked(pub RefCell<BTreeSet<String>>);

impl Names for Asked {
    fn value(&self, name: &str) -> Result<Option<Value>> {
        self.0.borrow_mut().insert(name.to_owned());
        Ok(None)
    }
    fn has_tensor(&self, _: &str) -> bool {
        false
    }
}

/// What is to be made of keys that could change the function: an error, or a note where a config.json
/// was given, which says itself what the model computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    Refuse,
    Note,
}

/// What becomes of a metadata key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate<'a> {
    /// Refused unless its value is one of this rule's.
    Neutral(&'a Neutral),
    /// By expressions, or by code.
    Read,
    /// Without effect.
    Ignored,
    /// Of no known meaning.
    Unknown,
}

/// Keys that expressions read, and what they decide.
pub(super) type Reads<'a> = BTreeMap<String, BTreeSet<Use<'a>>>;

impl Architecture {
    /// Refuses metadata that says something which no table reads.
    ///
    /// # Errors
    /// All keys with another value than the neutral one, and all unknown keys of the architecture unless
    /// they are `allowed`; what a `[[refuse]]` of the table says.
    pub(super) fn check_keys(
        &self,
        gguf: &Gguf,
        facts: &Facts,
        doubt: Doubt,
        allowed: bool,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        let reads = self.reads()?;
        let mut doubts: Vec<(String, String, &str)> = Vec::new();
        const ADVICE: &str =
            "give the model's own config.json with --hf-config DIR, if its class can compute this";
        for (key, value) in gguf.metadata().iter() {
            let Some(name) = self.short(key) else { continue };
            match self.fate(name, &reads) {
                Fate::Read | Fate::Ignored => {}
                Fate::Neutral(rule) => {
                    let (rules, why) = rule.rules();
                    let neutral = neutral(rules, facts)?;
                    if !all_are(value, &neutral) {
                        let expected: Vec<String> = neutral.iter().map(Value::to_string).collect();
                        doubts.push((
                            key.to_owned(),
                            format!("{}, expected {}: {why}", described(value), expected.join(" or ")),
                            ADVICE,
                        ));
                    }
                }
                Fate::Unknown if key.starts_with("tokenizer.") => notes.push(format!(
                    "{}: read by nothing here; it may change how text becomes tokens",
                    shown(key)
                )),
                Fate::Unknown if !allowed => doubts.push((
                    key.to_owned(),
                    format!(
                        "{}, a key unknown here: it may change what the model computes",
                        described(value)
                    ),
                    "pass --allow-unknown-keys if it does not",
                )),
                Fate::Unknown => {
                    notes.push(format!("{}: {}, a key unknown here", shown(key), described(value)))
                }
            }
        }
        for rule in &self.refuse {
            if expr::holds(&facts.evaluate(&rule.when)?.0) {
                doubts.push((format!("{}.{}", self.name(), rule.subject), rule.reason.clone(), ADVICE));
            }
        }
        if doubt == Doubt::Note {
            notes.extend(doubts.iter().map(|(key, detail, _)| {
                format!("{}: {detail}; config.json is the one given with --hf-config", shown(key))
            }));
            return Ok(());
        }
        let refused = |(key, detail, advice): &(String, String, &str)| {
            Error::source(key, format!("{detail}; {advice}"))
        };
        Error::all(doubts.iter().map(refused).collect())
    }

    /// A key as tables name it; `None` where it is none of this model's: another architecture's, or one
    /// of a tool's own.
    fn short<'k>(&self, key: &'k str) -> Option<&'k str> {
        match key.split_once('.') {
            Some(("tokenizer" | "general", _)) => Some(key),
            Some((prefix, rest)) if prefix == self.name() => Some(rest),
            _ => None,
        }
    }

    /// What becomes of the key `name`; `reads` is [`Architecture::reads`].
    pub(super) fn fate(&self, name: &str, reads: &Reads) -> Fate<'_> {
        let declared = |rules: &'_ BTreeMap<String, String>| {
            let fits = |rule: &str| match rule.strip_suffix('*') {
                Some(begin) => name.starts_with(begin),
                None => name == rule,
            };
            rules.keys().any(|rule| fits(rule))
        };
        if let Some(rule) = self.keys.neutral.get(name) {
            Fate::Neutral(rule)
        } else if reads.contains_key(name) || declared(&self.keys.read) {
            Fate::Read
        } else if declared(&self.keys.ignored) {
            Fate::Ignored
        } else {
            Fate::Unknown
        }
    }

    /// The keys that expressions read, and what each decides: a symbol stands for what the expressions with it
    /// decide, so that one which nothing uses reads nothing.
    pub(super) fn reads(&self) -> Result<Reads<'_>> {
        let mut symbols = BTreeMap::new();
        let mut rest = Vec::new();
        for (decides, text) in self.expressions() {
            let asked = Asked::default();
            expr::evaluate(text, &asked)?;
            let names = asked.0.take();
            match decides {
                Use::Symbol(name) => drop(symbols.insert(name, names)),
                other => rest.push((other, names)),
            }
        }
        let mut reads = Reads::new();
        for (decides, names) in rest {
            let mut seen = BTreeSet::new();
            let mut open: Vec<&String> = names.iter().collect();
            while let Some(name) = open.pop() {
                if !seen.insert(name) {
                    continue;
                }
                match symbols.get(name) {
                    Some(names) => open.extend(names),
                    None => drop(reads.entry(name.clone()).or_default().insert(decides.clone())),
                }
            }
        }
        Ok(reads)
    }
}

/// The values of a neutral rule for this model.
fn neutral(rules: &[toml::Value], facts: &Facts) -> Result<Vec<Value>> {
    let mut values = Vec::new();
    for rule in rules {
        match rule {
            toml::Value::String(text) => {
                if let Outcome::Is(value) = facts.evaluate(text)?.0 {
                    values.push(value);
                }
            }
            constant => values.push(json(constant)),
        }
    }
    Ok(values)
}

/// Whether a value, or each value of an array, is one of `allowed`.
fn all_are(value: &Stored, allowed: &[Value]) -> bool {
    match value {
        Stored::Array(array) => array.iter().all(|v| all_are(&v, allowed)),
        one => single(one).is_some_and(|one| {
            allowed.iter().any(|a| *a == one || a.as_f64().is_some_and(|a| one.as_f64() == Some(a)))
        }),
    }
}

/// A metadata value for a message.
fn described(value: &Stored) -> String {
    match value {
        Stored::Array(array) => match array.iter().find_map(|v| single(&v)) {
            Some(first) => format!("{} values, the first {first}", array.len()),
            None => "an empty or nested array".into(),
        },
        one => single(one).map_or("nothing".into(), |v| shown(&v.to_string())),
    }
}
