//! Tables of `mappings/engine`: Hugging Face tensors to the parameters of an engine.

use super::one_or_many;
use crate::forms::Form;
use serde::Deserialize;

/// What an engine does with Hugging Face tensors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// The file it was read from, for messages.
    #[serde(skip)]
    pub file: String,
    /// The engine and the version whose behaviour this file describes.
    pub engine: String,
    /// The files of ranks; an ordinary checkpoint when absent.
    pub files: Option<Files>,
    /// How packed weights are stored; when absent, nothing stays packed.
    pub packed: Option<Packed>,
    /// How packed weights are written for tensor cores, under `--weights fast`.
    pub method: Option<Method>,
    /// The command that serves what was converted.
    pub serve: Option<Serve>,
    /// Shared experts as one more of the routed ones; when absent, the engine has them apart.
    pub shared_experts: Option<FusedShared>,
    /// Vocabulary rows are padded to a multiple of this.
    #[serde(default = "one")]
    pub vocab_multiple: u64,
    /// Where that cannot be divided over the ranks, to the multiple times the ranks.
    #[serde(default)]
    pub vocab_widens: bool,
    /// With whole experts on each rank, every rank must hold as many.
    #[serde(default)]
    pub even_experts: bool,
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

    /// Rows of a vocabulary of `rows`, padded for `tp` ranks.
    pub fn padded_vocab(&self, rows: u64, tp: u64) -> u64 {
        let multiple = self.vocab_multiple.max(1);
        let padded = rows.next_multiple_of(multiple);
        if self.vocab_widens && !padded.is_multiple_of(tp) {
            rows.next_multiple_of(multiple.saturating_mul(tp))
        } else {
            padded
        }
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        if let Some(files) = &self.files {
            files.check()?;
        }
        if let Some(form) = self.method.iter().flat_map(|m| &m.forms).find(|form| !form.is_sound()) {
            return Err(format!("method.form: {form}, expected 2 to 8 bits in groups of 16, 32, 64 or 128"));
        }
        let constants = self.constants.iter().flat_map(|rule| &rule.to);
        let mut names = self.params.iter().map(|rule| &rule.to).chain(constants);
        if let Some(to) = names.find(|to| self.block.is_empty() && to.contains("{B}")) {
            return Err(format!("block is missing, which {{B}} of {to:?} stands for"));
        }
        let unnamed = |m: &Method| m.zero_points.is_none() && m.forms.iter().any(|form| form.zero_point);
        if self.method.as_ref().is_some_and(unnamed) {
            return Err("method.form has zero points, but method.zero_points is no name for them".into());
        }
        for rule in &self.params {
            let stacked = rule.join.iter().any(|j| j.contains("{E}"));
            if self.shared_experts.is_some() && stacked && rule.fused.len() != rule.join.len() {
                return Err(format!("rule for {:?}: fused names no shared expert for each member", rule.to));
            }
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

/// An engine that can hold a shared expert as one more of the routed ones.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FusedShared {
    /// Numbers of routed experts with which it does so by itself, where there is one shared expert.
    pub experts: Vec<u64>,
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

/// A way to write packed weights for tensor cores: a `quant_method` of config.json.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    /// Its name in config.json, which also says how its settings are written there.
    pub name: MethodName,
    /// What stands for `weight` at the end of the name of the tensor of codes.
    pub codes: String,
    /// The same for the tensor of scales.
    pub scales: String,
    /// The same for the tensor of zero points, where a form has them.
    pub zero_points: Option<String>,
    /// Whether the engine takes zero points of experts.
    #[serde(default)]
    pub zero_points_of_experts: bool,
    /// What stands for `weight` in the name of the matrix's shape, two i64, where the engine reads one.
    pub shape: Option<String>,
    /// The engine, by its name in `[engines]` of an architecture, that merges layers: what it merges shares a form.
    pub merges: String,
    /// The forms that the engine takes.
    #[serde(rename = "form")]
    pub forms: Vec<Form>,
}

/// The methods whose settings in config.json are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum MethodName {
    CompressedTensors,
    Humming,
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
    /// Added where shared experts are fused.
    #[serde(default)]
    pub fused: String,
    /// Added where they are not, if the engine could.
    #[serde(default)]
    pub separate: String,
    /// Added to serve with the multi-token-prediction draft, where no weight is packed; an empty text: the engine cannot.
    pub draft: Option<String>,
    /// Added to the model's command to serve it with a draft that has this directory to itself.
    pub draft_alone: Option<String>,
    /// The same where some are.
    pub packed_draft: Option<String>,
}

/// One engine parameter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamRule {
    /// Its name. `{L}`: the layer; `{B}`: the block's prefix; `*` (alone): each tensor by its own name.
    pub to: String,
    /// Hugging Face tensors in order; `a|b` takes the first that exists; `{E}`: stacked over experts; `a[first..end]`:
    /// some rows of it, expressions over the architecture's symbols and `rows`, the tensor's own number.
    #[serde(default)]
    pub join: Vec<String>,
    /// With shared experts fused, what follows the last expert of each member's stack.
    #[serde(default)]
    pub fused: Vec<String>,
    /// Only with shared experts apart.
    #[serde(default)]
    pub unless_fused: bool,
    /// Not where this Hugging Face tensor exists.
    pub without: Option<String>,
    /// Only where this one does.
    pub with: Option<String>,
    /// How it is cut; one for all members, or one each.
    #[serde(default, deserialize_with = "one_or_many")]
    pub cut: Vec<Cut>,
    /// The symbol with the number of heads, where a cut goes by other heads than `heads` and `kv_heads`; one for all
    /// members, or one each.
    #[serde(default, deserialize_with = "one_or_many")]
    pub heads: Vec<String>,
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
    /// Only in layers that have this Hugging Face tensor.
    pub with: Option<String>,
    /// Its value, stored as f32.
    pub value: f32,
}

fn one() -> u64 {
    1
}

impl ParamRule {
    fn check(&self) -> std::result::Result<(), String> {
        if self.to != "*" && self.join.is_empty() {
            return Err("join is empty".into());
        }
        for (what, n) in [("cuts", self.cut.len()), ("heads", self.heads.len())] {
            if n > 1 && n != self.join.len() {
                return Err(format!("{n} {what} for {} members", self.join.len()));
            }
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
