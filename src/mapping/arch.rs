//! Tables of `mappings/arch`: GGUF tensors to Hugging Face tensors.

use super::one_or_many;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Facts about one GGUF architecture.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arch {
    /// The file it was read from, for messages.
    #[serde(skip)]
    pub file: String,
    /// `general.architecture` of the GGUF.
    pub architecture: String,
    /// The engine table for each `--layout`.
    #[serde(default)]
    pub engines: BTreeMap<String, EngineChoice>,
    /// Numbers of the model: a name and the metadata key it comes from (see [`SymbolSource`]).
    pub symbols: BTreeMap<String, SymbolSource>,
    /// Tensors kept or dropped together by policy.
    #[serde(default)]
    pub groups: BTreeMap<String, Group>,
    /// GGUF tensors and what they become.
    #[serde(rename = "tensor")]
    pub tensors: Vec<TensorRule>,
    /// GGUF tensors that are left out.
    #[serde(rename = "drop", default)]
    pub drops: Vec<DropRule>,
}

impl Arch {
    pub(super) fn check(&self) -> Result<(), String> {
        for rule in &self.tensors {
            let wrong = |detail| format!("rule for {:?}: {detail}", rule.from);
            rule.check().map_err(wrong)?;
            // `when` is `symbol`, `!symbol` or `symbol=2`.
            let when = rule.when.as_deref().map(|when| when.trim_start_matches('!').split('=').next());
            for (key, symbol) in [("when", when.flatten()), ("heads", rule.heads.as_deref())] {
                if let Some(symbol) = symbol.filter(|s| *s != "trunk" && !self.symbols.contains_key(*s)) {
                    let known: Vec<_> = self.symbols.keys().map(String::as_str).collect();
                    return Err(wrong(format!(
                        "{key} names the symbol {symbol:?}; [symbols] has {}",
                        known.join(", ")
                    )));
                }
            }
        }
        for (layout, choice) in &self.engines {
            let EngineChoice::ByGroup { without, .. } = choice else { continue };
            let unknown =
                |group: &&String| self.tensors.iter().all(|rule| rule.group.as_ref() != Some(*group));
            if let Some(group) = without.keys().find(unknown) {
                return Err(format!("engines.{layout}.without names the group {group:?}, which no rule has"));
            }
        }
        Ok(())
    }
}

/// Tensors kept or dropped together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Why tensors of layers that share another layer's group are dropped.
    pub reason: String,
    /// The metadata key of an array that says of each layer whether it has the group; all have it when absent.
    pub owners: Option<String>,
    /// Which layers have it in a file without that key; all of them when absent.
    pub schedule: Option<Schedule>,
}

/// Layers that have a group, counted: `after`, and then every so many.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The metadata key by which the models that keep to the schedule are known.
    pub key: String,
    /// They have at least this value there.
    pub least: u64,
    /// One layer in so many has the group, at least 1.
    pub every: u64,
    /// The first layers of the model have it, the last of them is number `after - 1`.
    pub after: u64,
}

/// The engine table that serves a `--layout`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "the name of an engine table, or { table = NAME, without = { GROUP = NAME } }",
    deny_unknown_fields
)]
pub enum EngineChoice {
    /// This one always.
    Always(String),
    /// Another one where a group of tensors is dropped.
    ByGroup {
        /// The one with all groups.
        table: String,
        /// The one without a group, by the group's name.
        without: BTreeMap<String, String>,
    },
}

impl EngineChoice {
    /// The table's name, when the groups in `dropped` are left out.
    pub fn table(&self, dropped: &[&str]) -> &str {
        match self {
            EngineChoice::Always(table) => table,
            EngineChoice::ByGroup { table, without } => {
                dropped.iter().find_map(|group| without.get(*group)).unwrap_or(table)
            }
        }
    }

    /// All tables it names.
    pub fn tables(&self) -> impl Iterator<Item = &str> {
        let (table, without) = match self {
            EngineChoice::Always(table) => (table, None),
            EngineChoice::ByGroup { table, without } => (table, Some(without)),
        };
        std::iter::once(table).chain(without.into_iter().flat_map(BTreeMap::values)).map(String::as_str)
    }
}

/// Where a symbol's value comes from: `key` (required), `key?` (0 when absent), `key?other` (the
/// symbol `other` when absent) or a number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum SymbolSource {
    /// A metadata key, with the rules above.
    Key(String),
    /// A constant.
    Number(u64),
}

/// One rule of an architecture: GGUF tensors in, Hugging Face tensors out.
///
/// `{L}` runs over the layers of `in`, `{E}` over the experts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRule {
    /// GGUF names.
    pub from: Vec<String>,
    /// Hugging Face names.
    #[serde(deserialize_with = "one_or_many")]
    pub to: Vec<String>,
    /// How the values are moved.
    #[serde(default)]
    pub via: Via,
    /// Layers, `first..end` over symbols; all of them when absent.
    #[serde(rename = "in")]
    pub layers: Option<String>,
    /// A symbol that must not be 0 for the rule to apply (`!symbol`: must be 0; `symbol=2`: must be 2).
    pub when: Option<String>,
    /// GGUF names, `{L}` for any layer: the rule applies only where the file has one of them.
    #[serde(default, deserialize_with = "one_or_many")]
    pub with: Vec<String>,
    /// The file may lack it.
    #[serde(default)]
    pub optional: bool,
    /// `name:variant`: of all variants of a name, a layer has exactly one.
    pub variant: Option<String>,
    /// A layer may have this variant beside another. It is then compared with that one and dropped, for this
    /// reason.
    pub spare: Option<String>,
    /// Kept or dropped together, by policy: `indexer`.
    pub group: Option<String>,
    /// Symbol with the number of heads, for `unpermute` and `mla_kv_b`.
    pub heads: Option<String>,
    /// For `rows`: the runs of stored rows in the Hugging Face tensor's order; all of the first tensor's when empty.
    #[serde(default)]
    pub rows: Vec<Run>,
    /// For `rows`: each run is cut in so many equal parts, and the Hugging Face tensor has the first part of every
    /// run, then the second, and so on.
    pub groups: Option<String>,
    /// For `rows`: columns are swapped in blocks, as [`Run::swap`] says of rows.
    #[serde(default)]
    pub columns: Vec<String>,
    /// What is done to every value.
    pub values: Option<Values>,
    /// The Hugging Face tensor has a dimension of 1 between its rows and columns.
    #[serde(default)]
    pub unsqueeze: bool,
}

/// A run of stored rows.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Which of the rule's GGUF tensors.
    #[serde(default)]
    pub of: usize,
    /// `first..end`, expressions over symbols and `rows`, the tensor's own number; all rows when absent.
    pub take: Option<String>,
    /// Three numbers `[a, b, n]`: stored are `a` times `b` blocks of `n` rows, the Hugging Face tensor has `b` times `a`.
    #[serde(default)]
    pub swap: Vec<String>,
}

/// What is done to every value of a tensor, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// A constant is added.
    Add(f32),
    /// The logarithm of the negative: undoes `-exp(x)`.
    LogNegative,
}

/// How the values of GGUF tensors become those of Hugging Face tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Via {
    /// As they are.
    #[default]
    Copy,
    /// Rows of each head back from llama.cpp's interleaved order (`LlamaModel.permute`).
    Unpermute,
    /// `attn_k_b` (transposed per head) and `attn_v_b` joined into `kv_b_proj`.
    MlaKvB,
    /// One stacked tensor to one tensor per expert.
    Experts,
    /// One stacked tensor of gate and up rows to two tensors per expert.
    ExpertsGateUp,
    /// Runs of rows of one tensor or several in another order (`rows`, `groups`, `columns`).
    Rows,
    /// A vector of zeros, as long as the GGUF tensor has rows: a bias that the class declares and the
    /// file lacks, which computes the same.
    Zeros,
}

/// GGUF tensors that are left out, and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DropRule {
    /// GGUF name; `{L}` stands for any layer, a final `*` for any rest.
    pub name: String,
    /// Shown by `plan` and written to the manifest.
    pub reason: String,
}

impl TensorRule {
    fn check(&self) -> Result<(), String> {
        let counts = (self.from.len(), self.to.len());
        let expected = match self.via {
            Via::Copy | Via::Unpermute | Via::Experts | Via::Zeros => (1, 1),
            Via::MlaKvB => (2, 1),
            Via::ExpertsGateUp => (1, 2),
            Via::Rows => (self.from.len().max(1), 1),
        };
        if counts != expected {
            return Err(format!(
                "{} from and {} to names, expected {} and {}",
                counts.0, counts.1, expected.0, expected.1
            ));
        }
        if self.spare.is_some() && (self.variant().is_none() || self.via == Via::Zeros) {
            return Err("spare needs variant = \"name:variant\", and values to compare".into());
        }
        if matches!(self.via, Via::Unpermute | Via::MlaKvB) && self.heads.is_none() {
            return Err("via needs heads = \"symbol\"".into());
        }
        if self.via != Via::Rows
            && !(self.rows.is_empty() && self.columns.is_empty() && self.groups.is_none())
        {
            return Err("rows, groups and columns are for via = \"rows\"".into());
        }
        if (self.values.is_some() || self.unsqueeze) && !matches!(self.via, Via::Copy | Via::Rows) {
            return Err("values and unsqueeze are for via = \"copy\" and \"rows\"".into());
        }
        if !self.columns.is_empty() && self.from.len() > 1
            || self.rows.iter().any(|run| run.of >= self.from.len())
            || self.rows.iter().map(|run| &run.swap).chain([&self.columns]).any(|s| !matches!(s.len(), 0 | 3))
        {
            return Err(
                "a run is of one of the from names, a swap has three numbers, columns are of one tensor"
                    .into(),
            );
        }
        if matches!(self.values, Some(Values::Add(x)) if !x.is_finite()) {
            return Err("values = { add = … } is no number".into());
        }
        let layered = self.from.iter().chain(&self.to).map(|n| n.contains("{L}"));
        let stacked = matches!(self.via, Via::Experts | Via::ExpertsGateUp);
        // The MTP block is one, and its tensors may have no number.
        let one =
            self.layers.as_deref() == Some("trunk..blocks") && self.from.iter().all(|n| n.contains("{L}"));
        if !one && layered.clone().any(|l| l) != layered.clone().all(|l| l)
            || stacked && !self.to.iter().all(|t| t.contains("{E}"))
        {
            return Err("{L} and {E} must stand on both sides".into());
        }
        Ok(())
    }

    /// The name and the variant of `variant = "name:variant"`.
    pub fn variant(&self) -> Option<(&str, &str)> {
        self.variant.as_deref().and_then(|v| v.split_once(':'))
    }
}
