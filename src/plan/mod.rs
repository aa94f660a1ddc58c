//! The plan: every output byte's origin, fixed before anything is written.
//!
//! Pure and printable. GGUF tensors become Hugging Face tensors ([`tensors`]), those become the
//! engine's parameters ([`params`]), those are cut for each rank ([`shard`]).

mod latent;
pub mod params;
mod report;
pub mod shard;
pub mod symbols;
pub mod tensors;

use crate::cut::{self, MAX_PARTS};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::hf;
use crate::manifest::Policy;
use crate::mapping::{Engine, Part, Tables};
use params::{Form, Param};
use shard::ShardPlan;
use std::path::PathBuf;
use tensors::{Drop, Model};

/// What to do with tensors that a policy decides about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Keep {
    Keep,
    Drop,
}

/// What to do with tensors that cannot stay packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fit {
    Refuse,
    Dequantise,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Packed where the engine computes with packed weights, bf16 elsewhere.
    Keep,
    /// All decoded to bf16.
    Bf16,
    /// All decoded to f16.
    F16,
    /// All decoded to f32.
    F32,
}

impl Weights {
    /// All of them.
    pub const ALL: [Weights; 4] = [Weights::Keep, Weights::Bf16, Weights::F16, Weights::F32];
    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            Weights::Keep => "keep",
            Weights::Bf16 => "bf16",
            Weights::F16 => "f16",
            Weights::F32 => "f32",
        }
    }
}

impl Keep {
    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        if self == Keep::Keep { "keep" } else { "drop" }
    }
}

impl Fit {
    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        if self == Fit::Refuse { "refuse" } else { "dequantise" }
    }
}

/// Everything that decides the output besides the source and the mapping tables.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tensor-parallel ranks.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Layers of each stage, when not the engine's default.
    pub stages: Option<Vec<u64>>,
    /// Whole experts per rank.
    pub ep: bool,
    /// How weights are stored.
    pub weights: Weights,
    /// The DSA indexer.
    pub indexer: Keep,
    /// The multi-token-prediction block.
    pub mtp: Keep,
    /// Cuts inside a block.
    pub misaligned: Fit,
    /// Joined members of unlike types.
    pub mixed: Fit,
    /// Whose layout: an engine of the architecture's `[engines]`, or the name of an engine table.
    pub layout: String,
    /// Largest file of a Hugging Face checkpoint, in bytes.
    pub max_file_size: u64,
}

impl Options {
    /// The options a manifest was made with; `None` when it says something this version does not know.
    pub fn of(policy: &Policy) -> Option<Options> {
        let keep = |t: &str| [Keep::Keep, Keep::Drop].into_iter().find(|k| k.name() == t);
        let fit = |t: &str| [Fit::Refuse, Fit::Dequantise].into_iter().find(|f| f.name() == t);
        Some(Options {
            tp: policy.tp,
            pp: policy.pp,
            stages: Some(policy.stages.windows(2).map(|s| s[1].saturating_sub(s[0])).collect()),
            ep: policy.ep,
            weights: Weights::ALL.into_iter().find(|w| w.name() == policy.weights)?,
            indexer: keep(&policy.indexer)?,
            mtp: keep(&policy.mtp)?,
            misaligned: fit(&policy.misaligned)?,
            mixed: fit(&policy.mixed)?,
            layout: policy.layout.clone(),
            max_file_size: policy.max_file_size,
        })
    }
}

impl Options {
    /// As the manifest has it; `stages`: first layer of each stage and the end.
    pub fn policy(&self, stages: &[u64]) -> Policy {
        Policy {
            tp: self.tp,
            pp: self.pp,
            ep: self.ep,
            stages: stages.to_vec(),
            layout: self.layout.clone(),
            max_file_size: self.max_file_size,
            weights: self.weights.name().into(),
            indexer: self.indexer.name().into(),
            mtp: self.mtp.name().into(),
            misaligned: self.misaligned.name().into(),
            mixed: self.mixed.name().into(),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            tp: 1,
            pp: 1,
            stages: None,
            ep: false,
            weights: Weights::Keep,
            indexer: Keep::Keep,
            mtp: Keep::Keep,
            misaligned: Fit::Refuse,
            mixed: Fit::Refuse,
            layout: "vllm".into(),
            // What transformers' save_pretrained uses.
            max_file_size: 50_000_000_000,
        }
    }
}

/// What becomes of one GGUF tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// Its blocks are moved as they are.
    Packed,
    /// Its blocks are decoded, for this reason.
    Decoded(String),
    /// A float tensor, copied or cast.
    Float,
    /// Left out, for this reason.
    Dropped(String),
}

/// The plan of a conversion.
pub struct Plan {
    /// What was asked for.
    pub options: Options,
    /// `general.architecture`.
    pub architecture: String,
    /// Name of the engine's table.
    pub layout: String,
    /// The engine.
    pub engine: Engine,
    /// The model in Hugging Face terms.
    pub model: Model,
    /// Rows of the vocabulary, and padded.
    pub vocab: [u64; 2],
    /// The output head is the embedding.
    pub tied: bool,
    /// First layer of each stage and the end.
    pub stages: Vec<u64>,
    /// Every file, in rank order.
    pub shards: Vec<ShardPlan>,
    /// What becomes of each GGUF tensor, and whether it belongs to the MTP block.
    pub fates: Vec<(Fate, Part)>,
    /// BLAKE3 of all that decides the shards; [`Plan::with_files`] adds the files beside them.
    pub hash: [u8; 32],
}

impl Plan {
    /// Plans a conversion, or lists everything that stands in its way.
    pub fn new(gguf: &Gguf, tables: &Tables, mut options: Options) -> Result<Plan> {
        for (option, n) in [("--tp", options.tp), ("--pp", options.pp)] {
            // They may come from a manifest.
            if !(1..=MAX_PARTS).contains(&n) {
                return Err(Error::request(option, format!("{n}, expected 1 to {MAX_PARTS}")));
            }
        }
        let architecture = gguf.metadata().text("general.architecture")?.unwrap_or_default().to_owned();
        let (arch, arch_text) = tables.arch(&architecture)?;
        let dropped: &[&str] = if options.indexer == Keep::Drop { &["indexer"] } else { &[] };
        let layout = match arch.engines.get(&options.layout) {
            Some(choice) => choice.table(dropped),
            // An engine that the architecture does not name, by its table's own name.
            None => options.layout.as_str(),
        }
        .to_owned();
        let (engine, engine_text) = tables.engine(&layout)?;
        if !engine.sharded() && (options.tp, options.pp, options.ep) != (1, 1, false) {
            return Err(Error::request(
                format!("--layout {}", options.layout),
                "an ordinary checkpoint is not cut for ranks; leave out --tp, --pp and --ep",
            ));
        }
        if let Some(files) = engine.files.as_ref().filter(|f| f.stage.is_none() && options.pp > 1) {
            return Err(Error::request(
                "--pp",
                format!(
                    "{} has no file name for one of several pipeline stages (files.stage beside {:?}); leave out --pp",
                    engine.engine, files.rank
                ),
            ));
        }
        if engine.packed.is_none() && options.weights == Weights::Keep {
            // Nothing stays packed, so that the same without a policy is the same plan.
            options.weights = Weights::Bf16;
        }
        let model = tensors::resolve(gguf, &arch, &options)?;
        let stages = stages(&options, model.symbols.trunk)?;
        // The default and the same stages spelled out are the same plan.
        options.stages = Some(stages.windows(2).map(|s| s[1] - s[0]).collect());
        if options.ep && model.symbols.experts > 0 && model.symbols.experts < options.tp {
            let experts = model.symbols.experts;
            return Err(Error::request(
                "--ep",
                format!(
                    "{experts} experts over {} ranks leave a rank without one; use a smaller --tp",
                    options.tp
                ),
            ));
        }
        let rows = model.index.get("model.embed_tokens.weight").map_or(0, |i| model.tensors[*i].rows());
        let padded = rows.next_multiple_of(engine.vocab_multiple.max(1));
        let tied = !model.index.contains_key("lm_head.weight");
        let params = params::resolve(&engine, &model, gguf, &options, options.tp)?;
        let fates = fates(gguf, &model, &params);
        let mut plan = Plan {
            hash: hash(gguf, &arch_text, &engine_text, &options.policy(&stages)),
            architecture,
            layout,
            engine,
            vocab: [rows, padded],
            tied,
            stages,
            shards: Vec::new(),
            fates,
            model,
            options,
        };
        plan.shards = shard::cut(&plan, gguf, &params)?;
        Ok(plan)
    }

    /// What the small files of the directory (config.json, the tokenizer) are made from; the files of
    /// `hf_config` win. `mappings`: as in [`Tables`].
    pub fn directory(&self, hf_config: Option<PathBuf>, mappings: Option<PathBuf>) -> hf::Request {
        hf::Request {
            indexer: self.options.indexer == Keep::Keep,
            mtp: self.options.mtp == Keep::Keep && self.model.symbols.trunk < self.model.symbols.blocks,
            dtype: match self.options.weights {
                Weights::Keep | Weights::Bf16 => "bfloat16",
                Weights::F16 => "float16",
                Weights::F32 => "float32",
            }
            .into(),
            tied: self.tied,
            vocab_rows: self.vocab[0],
            hf_config,
            mappings,
            allow_unknown_keys: false,
            quantization: None,
        }
    }

    /// BLAKE3 of all that decides the directory: the plan, and the files beside the shards, sorted by name.
    pub fn with_files(&self, files: &[(String, Vec<u8>)]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("preshard directory 1");
        hasher.update(&self.hash);
        for (name, bytes) in files {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(blake3::hash(bytes).as_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// GGUF tensors left out, in file order.
    pub fn dropped(&self) -> Vec<&Drop> {
        let mut dropped: Vec<_> = self.model.dropped.iter().collect();
        dropped.sort_by_key(|d| d.tensor);
        dropped
    }
}

/// First layer of each stage and the end.
fn stages(options: &Options, layers: u64) -> Result<Vec<u64>> {
    let bad = |list: &[u64]| {
        let text = list.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        Err(Error::request(
            "--pp-layers",
            format!("{text} does not cut {layers} layers into {} stages of at least one", options.pp),
        ))
    };
    if options.pp > layers {
        return Err(Error::request(
            "--pp",
            format!("{} stages for {layers} layers; use at most {layers}", options.pp),
        ));
    }
    let Some(list) = &options.stages else { return Ok(cut::stages(layers, options.pp)) };
    let sum = list.iter().try_fold(0u64, |a, b| a.checked_add(*b));
    if list.len() as u64 != options.pp || list.contains(&0) || sum != Some(layers) {
        return bad(list);
    }
    let mut end = 0;
    Ok(std::iter::once(0)
        .chain(list.iter().map(|n| {
            end += n;
            end
        }))
        .collect())
}

/// What becomes of each GGUF tensor.
fn fates(gguf: &Gguf, model: &Model, params: &[Param]) -> Vec<(Fate, Part)> {
    let mut fates: Vec<Option<Fate>> = vec![None; gguf.tensors().len()];
    for param in params {
        let fate = match (param.form, &param.decoded) {
            (Form::Packed, _) => Fate::Packed,
            (Form::Float(_), Some(why)) => Fate::Decoded(why.clone()),
            (Form::Float(_), None) => Fate::Float,
        };
        for view in param.members.iter().flat_map(|m| &m.tensors).flat_map(|t| &model.tensors[*t].views) {
            let quantised = gguf.tensors()[view.tensor].ty.is_quantised();
            fates[view.tensor].get_or_insert_with(|| if quantised { fate.clone() } else { Fate::Float });
        }
    }
    for drop in &model.dropped {
        fates[drop.tensor] = Some(Fate::Dropped(drop.reason.clone()));
    }
    let part = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|r| r.split('.').next()).and_then(|l| l.parse().ok());
        if layer.is_some_and(|l: u64| l >= model.symbols.trunk) { Part::Mtp } else { Part::Model }
    };
    let named = gguf.tensors().iter().zip(fates);
    named
        .map(|(t, f)| (f.unwrap_or_else(|| Fate::Dropped("no parameter takes it".into())), part(&t.name)))
        .collect()
}

/// BLAKE3 of the sources' headers, the mapping tables, the policy and the tool's version.
fn hash(gguf: &Gguf, arch: &str, engine: &str, policy: &Policy) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("preshard plan 2");
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(env!("CARGO_PKG_VERSION").as_bytes());
    for file in gguf.files() {
        field(&file.size.to_le_bytes());
        field(&file.header_hash);
    }
    field(arch.as_bytes());
    field(engine.as_bytes());
    // As the manifest has it: one text for one policy.
    field(serde_json::json!(policy).to_string().as_bytes());
    *hasher.finalize().as_bytes()
}
