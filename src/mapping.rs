//! The tables under `mappings/`: facts about GGUF architectures and about engines.
//!
//! An architecture file undoes llama.cpp's converter (GGUF tensors to Hugging Face tensors). An
//! engine file says what an engine makes of Hugging Face tensors: which fuse, how each is cut, which
//! are never quantised. `docs/mappings.md` describes every key.

use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Facts about one GGUF architecture.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arch {
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

/// Tensors kept or dropped together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Why tensors of layers that share another layer's group are dropped.
    pub reason: String,
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
    /// Kept or dropped together, by policy: `indexer`.
    pub group: Option<String>,
    /// Symbol with the number of heads, for `unpermute` and `mla_kv_b`.
    pub heads: Option<String>,
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

/// What an engine does with Hugging Face tensors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// The engine and the version whose behaviour this file describes.
    pub engine: String,
    /// The files of ranks; an ordinary checkpoint when absent.
    pub files: Option<Files>,
    /// How packed weights are stored; when absent, nothing stays packed.
    pub packed: Option<Packed>,
    /// The command that serves what was converted.
    pub serve: Option<Serve>,
    /// Vocabulary rows are padded to a multiple of this.
    #[serde(default = "one")]
    pub vocab_multiple: u64,
    /// What `{B}` stands for in a layer of the trunk.
    #[serde(default)]
    pub block: String,
    /// What `{B}` stands for in the multi-token-prediction block.
    #[serde(default)]
    pub mtp_block: String,
    /// The parameters.
    #[serde(rename = "param", default)]
    pub params: Vec<ParamRule>,
    /// Scalars the engine expects in the file.
    #[serde(rename = "constant", default)]
    pub constants: Vec<ConstantRule>,
}

impl Engine {
    /// Whether it reads one file per rank; otherwise an ordinary checkpoint.
    pub fn sharded(&self) -> bool {
        self.files.is_some()
    }

    fn check(&self) -> std::result::Result<(), String> {
        if let Some(files) = &self.files {
            files.check()?;
        }
        for rule in &self.params {
            rule.check().map_err(|detail| format!("rule for {:?}: {detail}", rule.to))?;
        }
        Ok(())
    }
}

/// File names of ranks. `{tp}` is the tensor-parallel rank, `{pp}` the pipeline stage.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// A rank's file where there is one pipeline stage.
    pub rank: String,
    /// A rank's file of one of several stages.
    pub stage: Option<String>,
    /// The multi-token-prediction draft of a rank.
    pub draft: Option<String>,
}

impl Files {
    fn check(&self) -> std::result::Result<(), String> {
        let names = [
            ("rank", Some(&self.rank), &["{tp}"][..]),
            ("stage", self.stage.as_ref(), &["{pp}", "{tp}"]),
            ("draft", self.draft.as_ref(), &["{tp}"]),
        ];
        for (key, name, numbers) in names {
            let Some(name) = name else { continue };
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.{}".contains(&b));
            if !plain || name.starts_with('.') || !name.ends_with(".safetensors") {
                return Err(format!(
                    "files.{key} = {name:?}, expected a plain file name that ends in .safetensors"
                ));
            }
            if let Some(missing) = numbers.iter().find(|n| !name.contains(**n)) {
                return Err(format!("files.{key} = {name:?} lacks {missing}: two ranks would share a file"));
            }
        }
        if self.draft.as_ref().is_some_and(|draft| *draft == self.rank) {
            return Err(format!("files.draft = {:?}, which is also files.rank", self.rank));
        }
        Ok(())
    }
}

/// How an engine stores packed weights.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packed {
    /// ggml types that the engine computes with; all others are decoded.
    pub types: Vec<String>,
    /// What stands for `weight` at the end of the name of the tensor of blocks.
    pub blocks: String,
    /// The same for the tensor of ggml type ids.
    #[serde(rename = "type")]
    pub type_ids: String,
}

/// The command that serves a converted directory; `{dir}`, `{tp}` and `{pp}` are filled in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serve {
    /// The command where no weight is packed.
    pub command: String,
    /// The command where some are.
    pub packed: Option<String>,
    /// Added for more than one tensor-parallel rank.
    #[serde(default)]
    pub tp: String,
    /// Added for more than one pipeline stage.
    #[serde(default)]
    pub pp: String,
    /// Added where experts are placed whole.
    #[serde(default)]
    pub ep: String,
    /// Added to serve with the multi-token-prediction draft, where no weight is packed.
    pub draft: Option<String>,
    /// The same where some are.
    pub packed_draft: Option<String>,
}

/// One engine parameter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamRule {
    /// Its name. `{L}`: the layer; `{B}`: the block's prefix; `*` (alone): each tensor by its own name.
    pub to: String,
    /// Hugging Face tensors in order; `a|b` takes the first that exists; `{E}`: stacked over experts.
    #[serde(default)]
    pub join: Vec<String>,
    /// Not where this Hugging Face tensor exists.
    pub without: Option<String>,
    /// Only where this one does.
    pub with: Option<String>,
    /// How it is cut; one for all members, or one each.
    #[serde(default, deserialize_with = "one_or_many")]
    pub cut: Vec<Cut>,
    /// The engine declares it without quantisation; the text says why.
    pub float: Option<String>,
    /// `f32`: its dtype whatever the model's.
    pub dtype: Option<String>,
    /// Only on this pipeline stage: `first`, `last`.
    pub stage: Option<Stage>,
    /// Left out where the same stage holds the tied output head.
    #[serde(default)]
    pub unless_tied: bool,
    /// For each multi-token-prediction block, into the draft's file.
    pub part: Option<Part>,
    /// Parameters of a layer with the same word here stay packed together or not at all: the engine computes
    /// them in one kernel.
    pub pair: Option<String>,
    /// Other names of the same storage in the engine.
    #[serde(default)]
    pub aliases: Vec<String>,
}

/// How a tensor is divided over the tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Every rank holds all of it.
    Whole,
    /// Equal runs of rows.
    Rows,
    /// Equal runs of columns.
    Cols,
    /// Rows by attention heads.
    Heads,
    /// Rows by key/value heads, replicated when there are fewer than ranks.
    KvHeads,
    /// Columns by attention heads.
    HeadCols,
    /// Rows of the padded vocabulary.
    Vocab,
}

/// A pipeline stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The one with the embedding.
    First,
    /// The one with the output head.
    Last,
}

/// Which file of a rank a parameter goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The main model.
    Model,
    /// The multi-token-prediction draft.
    Mtp,
}

/// A scalar per layer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantRule {
    /// Its names, with `{B}`.
    pub to: Vec<String>,
    /// Its value, stored as f32.
    pub value: f32,
}

fn one() -> u64 {
    1
}

fn one_or_many<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    d: D,
) -> std::result::Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany<T> {
        One(T),
        Many(Vec<T>),
    }
    Ok(match OneOrMany::deserialize(d)? {
        OneOrMany::One(x) => vec![x],
        OneOrMany::Many(xs) => xs,
    })
}

/// The key of a table that names the one it builds on.
const EXTENDS: &str = "extends";
/// Tables that extend each other past which they are taken for a circle.
const MAX_EXTENDS: usize = 8;

/// Puts `over` on `table`: tables are joined key by key, lists end to end, of anything else the upper wins.
fn lay_over(table: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (table.get_mut(&key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(over)) => lay_over(below, over),
            (Some(toml::Value::Array(below)), toml::Value::Array(over)) => below.extend(over),
            (_, value) => drop(table.insert(key, value)),
        }
    }
}

// The tables compiled in (folder, name and text): `BUILTIN`, listed by build.rs, so that a new file in
// mappings/ needs no line of Rust.
include!(concat!(env!("OUT_DIR"), "/tables.rs"));

/// The built-in tables of a folder: name and text.
pub(crate) fn built_in(folder: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    BUILTIN.iter().filter(move |(f, ..)| *f == folder).map(|(_, name, text)| (*name, *text))
}

/// The built-in tables of a folder that stand for themselves; the others (`_common`) are extended.
pub(crate) fn built_in_names(folder: &str) -> impl Iterator<Item = &'static str> {
    built_in(folder).map(|(name, _)| name).filter(|name| !name.starts_with('_'))
}

/// Where mapping tables come from: the built-in ones, or a directory that overrides them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tables<'a> {
    /// A directory laid out as `mappings/`; a file there wins over the built-in one of its name.
    pub dir: Option<&'a Path>,
}

impl Tables<'_> {
    /// The table of an architecture and its text.
    pub fn arch(&self, name: &str) -> Result<(Arch, String)> {
        let (arch, text): (Arch, String) = self.read("arch", name)?;
        if arch.architecture != name {
            return Err(Error::mapping(
                format!("mappings/arch/{name}.toml"),
                format!("architecture = {:?}, expected {name:?}", arch.architecture),
            ));
        }
        for rule in &arch.tensors {
            rule.check().map_err(|detail| {
                Error::mapping(
                    format!("mappings/arch/{name}.toml"),
                    format!("rule for {:?}: {detail}", rule.from),
                )
            })?;
        }
        Ok((arch, text))
    }

    /// The table of an engine and its text.
    pub fn engine(&self, name: &str) -> Result<(Engine, String)> {
        let (engine, text): (Engine, String) = self.read("engine", name)?;
        engine.check().map_err(|detail| Error::mapping(format!("mappings/engine/{name}.toml"), detail))?;
        // The loader knows an ordinary checkpoint by its layout's name alone.
        if engine.sharded() == ordinary(name) {
            return Err(Error::mapping(
                format!("mappings/engine/{name}.toml"),
                "a table of an ordinary checkpoint is called hf or hf-NAME and has no [files]; any other has them",
            ));
        }
        Ok((engine, text))
    }

    /// The table `folder/name.toml`, with what it extends, and the texts of all of them.
    pub(crate) fn read<T: serde::de::DeserializeOwned>(
        &self,
        folder: &str,
        name: &str,
    ) -> Result<(T, String)> {
        let text = self.text(folder, name)?;
        let wrong = |e: toml::de::Error| {
            let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
            let place = line.map_or(String::new(), |line| format!("line {line}: "));
            Error::mapping(format!("mappings/{folder}/{name}.toml"), format!("{place}{}", e.message()))
        };
        let table: toml::Table = toml::from_str(&text).map_err(wrong)?;
        if !table.contains_key(EXTENDS) {
            // Read from the text once more: errors of the table's own keys then have lines.
            return Ok((toml::from_str(&text).map_err(wrong)?, text));
        }
        let mut texts = text.clone();
        let table = self.extended(folder, name, table, &mut texts, 0)?;
        Ok((table.try_into().map_err(wrong)?, texts))
    }

    /// `table` with what it extends put under it.
    fn extended(
        &self,
        folder: &str,
        name: &str,
        mut table: toml::Table,
        texts: &mut String,
        depth: usize,
    ) -> Result<toml::Table> {
        let file = format!("mappings/{folder}/{name}.toml");
        let Some(base) = table.remove(EXTENDS) else { return Ok(table) };
        let Some(base) = base.as_str().filter(|_| depth < MAX_EXTENDS) else {
            return Err(Error::mapping(
                file,
                format!(
                    "extends = {base:?}: expected the name of a table, and at most {MAX_EXTENDS} in a row"
                ),
            ));
        };
        let text =
            self.text(folder, base).map_err(|e| Error::mapping(&file, format!("extends {base:?}: {e}")))?;
        let below: toml::Table = toml::from_str(&text)
            .map_err(|e| Error::mapping(format!("mappings/{folder}/{base}.toml"), e.message()))?;
        texts.push_str(&text);
        let mut below = self.extended(folder, base, below, texts, depth + 1)?;
        lay_over(&mut below, table);
        Ok(below)
    }

    /// The text of `folder/name.toml`.
    pub(crate) fn text(&self, folder: &str, name: &str) -> Result<String> {
        // A name comes from the GGUF: it selects a table but never a path.
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if let (Some(dir), true) = (self.dir, plain) {
            let path = dir.join(folder).join(format!("{name}.toml"));
            match std::fs::read_to_string(&path) {
                Ok(text) => return Ok(text),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io(&path, "read", e)),
            }
        }
        match built_in(folder).find(|(n, _)| *n == name) {
            Some((_, text)) => Ok(text.to_owned()),
            None => {
                let known: Vec<_> = built_in_names(folder).collect();
                Err(Error::source(
                    name,
                    format!(
                        "no mapping for this {} in mappings/{folder}; known: {}; write one and pass --mappings DIR",
                        if folder == "engine" { folder } else { "architecture" },
                        known.join(", ")
                    ),
                ))
            }
        }
    }
}

/// Whether an engine table of this name makes an ordinary checkpoint.
fn ordinary(name: &str) -> bool {
    name == "hf" || name.starts_with("hf-")
}

impl TensorRule {
    fn check(&self) -> std::result::Result<(), String> {
        let counts = (self.from.len(), self.to.len());
        let expected = match self.via {
            Via::Copy | Via::Unpermute | Via::Experts | Via::Zeros => (1, 1),
            Via::MlaKvB => (2, 1),
            Via::ExpertsGateUp => (1, 2),
        };
        if counts != expected {
            return Err(format!(
                "{} from and {} to names, expected {} and {}",
                counts.0, counts.1, expected.0, expected.1
            ));
        }
        if matches!(self.via, Via::Unpermute | Via::MlaKvB) && self.heads.is_none() {
            return Err("via needs heads = \"symbol\"".into());
        }
        let layered = self.from.iter().chain(&self.to).map(|n| n.contains("{L}"));
        let stacked = matches!(self.via, Via::Experts | Via::ExpertsGateUp);
        if layered.clone().any(|l| l) != layered.clone().all(|l| l)
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

impl ParamRule {
    fn check(&self) -> std::result::Result<(), String> {
        if self.to != "*" && self.join.is_empty() {
            return Err("join is empty".into());
        }
        if self.cut.len() > 1 && self.cut.len() != self.join.len() {
            return Err(format!("{} cuts for {} members", self.cut.len(), self.join.len()));
        }
        let stacked = self.join.iter().filter(|j| j.contains("{E}")).count();
        if stacked != 0 && stacked != self.join.len() {
            return Err("some members are stacked over experts, some are not".into());
        }
        if !matches!(self.dtype.as_deref(), None | Some("f32")) {
            return Err(format!("dtype {:?}, expected \"f32\"", self.dtype));
        }
        Ok(())
    }

    /// How member `i` is cut.
    pub fn cut_of(&self, i: usize) -> Cut {
        self.cut.get(i).or(self.cut.first()).copied().unwrap_or(Cut::Whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_table_is_sound() {
        let tables = Tables::default();
        for (folder, name, _) in BUILTIN.iter().filter(|(_, name, _)| !name.starts_with('_')) {
            match *folder {
                "arch" => {
                    let (arch, _) = tables.arch(name).unwrap();
                    for engine in arch.engines.values().flat_map(EngineChoice::tables) {
                        tables.engine(engine).unwrap();
                    }
                }
                "engine" => drop(tables.engine(name).unwrap()),
                // Read by `hf`, whose tests hold them to real models.
                _ => assert!(name.starts_with('_') || tables.arch(name).is_ok(), "{folder}/{name}"),
            }
        }
    }

    #[test]
    fn an_architecture_name_never_becomes_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let tables = Tables { dir: Some(dir.path()) };
        let error = tables.arch("../arch/llama").unwrap_err().to_string();
        assert!(error.contains("no mapping for this architecture"), "{error}");
    }
}
