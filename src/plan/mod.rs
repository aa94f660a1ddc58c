//! The plan: every output byte's origin, fixed before anything is written.
//!
//! Pure and printable. GGUF tensors become Hugging Face tensors ([`tensors`]), those become the
//! engine's parameters ([`params`]), those are cut for each rank ([`shard`]).

mod latent;
pub mod params;
pub mod recode;
mod report;
mod rows;
pub mod shard;
pub mod symbols;
pub mod tensors;

use crate::cut::{self, MAX_PARTS};
use crate::error::{Error, Result};
use crate::forms::Form;
use crate::gguf::Gguf;
use crate::hf;
use crate::mapping::{Engine, Part, Tables};
use crate::policy::{self, Keep, Mtp, Policy, SharedExperts, Weights};
use params::{Form as Stored, Param};
use recode::Recoding;
use shard::ShardPlan;
use std::path::PathBuf;
use tensors::{Drop, Model};

/// What becomes of one GGUF tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// Its blocks are moved as they are.
    Packed,
    /// Its codes are moved to another form.
    Recoded(Form),
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
    pub policy: Policy,
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
    /// Every file, in rank order.
    pub shards: Vec<ShardPlan>,
    /// What is written in forms for tensor cores, under `--weights fast`.
    pub recoding: Option<Recoding>,
    /// What becomes of each GGUF tensor, and whether it belongs to the MTP block.
    pub fates: Vec<(Fate, Part)>,
    /// BLAKE3 of all that decides the shards; [`Plan::with_files`] adds the files beside them.
    pub hash: [u8; 32],
}

impl Plan {
    /// Plans a conversion, or lists everything that stands in its way.
    pub fn new(gguf: &Gguf, tables: &Tables, mut policy: Policy) -> Result<Plan> {
        for (option, n) in [("--tp", policy.tp), ("--pp", policy.pp)] {
            // They may come from a manifest.
            if !(1..=MAX_PARTS).contains(&n) {
                return Err(Error::request(option, format!("{n}, expected 1 to {MAX_PARTS}")));
            }
        }
        let architecture = gguf.metadata().text("general.architecture")?.unwrap_or_default().to_owned();
        let (arch, arch_text) = tables.arch(&architecture)?;
        let dropped: &[&str] = if policy.indexer == Keep::Drop { &["indexer"] } else { &[] };
        let named = |layout: &str| match arch.engines.get(layout) {
            Some(choice) => choice.table(dropped).to_owned(),
            // An engine that the architecture does not name, by its table's own name.
            None => layout.to_owned(),
        };
        let layout = named(&policy.layout);
        let (engine, engine_text) =
            tables.engine(&layout).map_err(|e| match arch.engines.get(&policy.layout) {
                Some(_) => e,
                None => {
                    let named = arch.engines.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    Error::request("--layout", format!("{e}; {architecture} names {named}"))
                }
            })?;
        if !engine.sharded() && (policy.tp, policy.pp, policy.ep) != (1, 1, false) {
            return Err(Error::request(
                format!("--layout {}", policy.layout),
                "an ordinary checkpoint is not cut for ranks; leave out --tp, --pp and --ep",
            ));
        }
        if let Some(files) = engine.files.as_ref().filter(|f| f.stage.is_none() && policy.pp > 1) {
            return Err(Error::request(
                "--pp",
                format!(
                    "{} has no file name for one of several pipeline stages (files.stage beside {:?}); leave out --pp",
                    engine.engine, files.rank
                ),
            ));
        }
        if engine.packed.is_none() && policy.weights == Weights::Keep {
            // Nothing stays packed, so that the same without a policy is the same plan.
            policy.weights = Weights::Bf16;
        }
        let mut model = tensors::resolve(gguf, &arch, &policy)?;
        // The default and the same stages spelled out are the same plan.
        policy.stages = stages(&policy, model.symbols.trunk)?;
        policy.shared_experts = shared_experts(&engine, &model, &policy)?;
        if policy.ep && model.symbols.experts > 0 && model.symbols.experts < policy.tp {
            let experts = model.symbols.experts;
            return Err(Error::request(
                "--ep",
                format!(
                    "{experts} experts over {} ranks leave a rank without one; use a smaller --tp",
                    policy.tp
                ),
            ));
        }
        if policy.ep && engine.even_experts && !model.symbols.experts.is_multiple_of(policy.tp) {
            let (experts, tp) = (model.symbols.experts, policy.tp);
            return Err(Error::request(
                "--ep",
                format!(
                    "{experts} experts over {tp} ranks, but {} holds as many on each; use a --tp that divides them",
                    engine.engine
                ),
            ));
        }
        let rows = model.index.get("model.embed_tokens.weight").map_or(0, |i| model.tensors[*i].rows());
        let padded = engine.padded_vocab(rows, policy.tp);
        let tied = !model.index.contains_key("lm_head.weight");
        let (recoding, merges) = match (&engine.method, policy.weights.recodes()) {
            (_, false) if policy.max_error.is_some() => {
                return Err(Error::request(
                    "--max-error",
                    "bounds what --weights fast loses; pass both, or neither",
                ));
            }
            (_, false) => (None, None),
            (None, true) => {
                return Err(Error::request(
                    format!("--layout {}", policy.layout),
                    "its engine table has no forms for --weights fast; pass --layout hf, or --weights keep",
                ));
            }
            (Some(method), true) => {
                policy.max_error.get_or_insert(policy::MAX_ERROR);
                let (merges, text) = tables.engine(&named(&method.merges))?;
                (Some(Recoding::choose(gguf, &model, method, &merges, &policy)?), Some(text))
            }
        };
        let params = params::resolve(&engine, &model, gguf, &policy, policy.tp, recoding.as_ref())?;
        if policy.mtp == Mtp::Only {
            draft_alone(&engine, gguf, &mut model, &params)?;
        }
        let fates = fates(gguf, &model, &params);
        let mut plan = Plan {
            hash: hash(gguf, &arch_text, &engine_text, merges.as_deref(), &policy),
            architecture,
            layout,
            engine,
            vocab: [rows, padded],
            tied,
            shards: Vec::new(),
            recoding,
            fates,
            model,
            policy,
        };
        plan.shards = shard::cut(&plan, gguf, &params)?;
        Ok(plan)
    }

    /// What the small files of the directory (config.json, the tokenizer) are made from; the files of
    /// `hf_config` win. `mappings`: as in [`Tables`].
    pub fn directory(&self, hf_config: Option<PathBuf>, mappings: Option<PathBuf>) -> hf::Request {
        hf::Request {
            indexer: self.policy.indexer == Keep::Keep,
            mtp: self.policy.mtp != Mtp::Drop && self.model.symbols.trunk < self.model.symbols.blocks,
            dtype: match self.policy.weights {
                Weights::Keep | Weights::Bf16 | Weights::Fast => "bfloat16",
                Weights::F16 | Weights::FastF16 => "float16",
                Weights::F32 => "float32",
            }
            .into(),
            tied: self.tied,
            vocab_rows: self.vocab[0],
            hf_config,
            mappings,
            allow_unknown_keys: false,
            quantization: self.recoding.as_ref().map(Recoding::config),
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
fn stages(policy: &Policy, layers: u64) -> Result<Vec<u64>> {
    if policy.pp > layers {
        return Err(Error::request(
            "--pp",
            format!("{} stages for {layers} layers; use at most {layers}", policy.pp),
        ));
    }
    let bounds = &policy.stages;
    if bounds.is_empty() {
        return Ok(cut::stages(layers, policy.pp));
    }
    let rising = bounds.windows(2).all(|s| s[0] < s[1]);
    let ends = (bounds.first(), bounds.last()) == (Some(&0), Some(&layers));
    if bounds.len() as u64 != policy.pp + 1 || !rising || !ends {
        let each = bounds.windows(2).map(|s| s[1].saturating_sub(s[0]).to_string()).collect::<Vec<_>>();
        return Err(Error::request(
            "--pp-layers",
            format!(
                "{} does not cut {layers} layers into {} stages of at least one",
                each.join(","),
                policy.pp
            ),
        ));
    }
    Ok(bounds.clone())
}

/// Whether shared experts are fused into the routed ones: as asked for, or as the engine does by itself.
fn shared_experts(engine: &Engine, model: &Model, policy: &Policy) -> Result<SharedExperts> {
    let shown = |why: &str| Error::request("--shared-experts fused", format!("{} {why}", engine.engine));
    match (policy.shared_experts, &engine.shared_experts) {
        (SharedExperts::Separate, _) | (SharedExperts::Auto, None) => Ok(SharedExperts::Separate),
        (SharedExperts::Fused, None) => {
            Err(shown("holds shared experts of this model apart, or it has none; leave it out"))
        }
        (SharedExperts::Fused, Some(_)) if policy.ep => {
            Err(shown("does not fuse shared experts where experts are placed whole; leave out --ep"))
        }
        (SharedExperts::Fused, Some(_)) => Ok(SharedExperts::Fused),
        (SharedExperts::Auto, Some(form)) => {
            let fits = !policy.ep && form.experts.contains(&model.symbols.experts);
            // One shared expert alone has the shape of a routed one.
            let one = engine.params.iter().filter(|rule| !rule.fused.is_empty()).all(|rule| {
                (0..model.symbols.blocks).all(|layer| {
                    let shape = |name: &str| {
                        let name = name.replace("{L}", &layer.to_string()).replace("{E}", "0");
                        model.index.get(&name).map(|i| &model.tensors[*i].shape)
                    };
                    rule.join.iter().zip(&rule.fused).all(|(join, fused)| shape(join) == shape(fused))
                })
            });
            Ok(if fits && one { SharedExperts::Fused } else { SharedExperts::Separate })
        }
    }
}

/// Everything that the draft does not hold is left out.
fn draft_alone(engine: &Engine, gguf: &Gguf, model: &mut Model, params: &[Param]) -> Result<()> {
    if params.is_empty() {
        let detail = if engine.sharded() {
            "the model has no multi-token-prediction block; leave it out"
        } else {
            "an ordinary checkpoint holds the draft among the model's layers; leave it out"
        };
        return Err(Error::request("--mtp only", detail));
    }
    let views = params.iter().flat_map(|p| &p.members).flat_map(|m| &m.tensors);
    let mut out = vec![true; gguf.tensors().len()];
    for view in views.flat_map(|t| &model.tensors[*t].views) {
        out[view.tensor] = false;
    }
    for drop in &model.dropped {
        out[drop.tensor] = false;
    }
    let reason = "no part of the draft (--mtp only)";
    let out = (0..out.len()).filter(|tensor| out[*tensor]);
    model.dropped.extend(out.map(|tensor| Drop { tensor, reason: reason.into() }));
    Ok(())
}

/// What becomes of each GGUF tensor.
fn fates(gguf: &Gguf, model: &Model, params: &[Param]) -> Vec<(Fate, Part)> {
    let mut fates: Vec<Option<Fate>> = vec![None; gguf.tensors().len()];
    for param in params {
        let fate = match (param.form, &param.decoded) {
            (Stored::Packed, _) => Fate::Packed,
            (Stored::Recoded(form, _), _) => Fate::Recoded(form),
            (Stored::Float(_), Some(why)) => Fate::Decoded(why.clone()),
            (Stored::Float(_), None) => Fate::Float,
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
fn hash(gguf: &Gguf, arch: &str, engine: &str, merges: Option<&str>, policy: &Policy) -> [u8; 32] {
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
    if let Some(merges) = merges {
        field(merges.as_bytes());
    }
    // As the manifest has it: one text for one policy.
    field(serde_json::json!(policy).to_string().as_bytes());
    *hasher.finalize().as_bytes()
}
