//! The plan as JSON, for programs, and what it recodes.

use super::recode::{Recoded, percent};
use super::shard::{ShardPlan, TensorPlan};
use super::{Fate, Plan};
use crate::gguf::Gguf;
use crate::mapping::Part;
use serde_json::{Value, json};
use std::collections::BTreeMap;

impl Plan {
    /// Bytes each rank (stage, tensor-parallel rank) holds, its draft included.
    pub fn rank_bytes(&self) -> BTreeMap<(u64, u64), u64> {
        let mut ranks = BTreeMap::new();
        for shard in &self.shards {
            *ranks.entry((shard.pp, shard.tp)).or_default() += shard.bytes;
        }
        ranks
    }

    /// All of the plan: every GGUF tensor with its fate, every rank, every file with its tensors.
    /// `gpu_memory`, in bytes, says whether each rank fits.
    pub fn to_json(&self, gguf: &Gguf, gpu_memory: Option<u64>) -> Value {
        let ranks = self.rank_bytes().into_iter().map(|((pp, tp), bytes)| {
            let fits = gpu_memory.map(|memory| bytes <= memory);
            json!({ "rank": pp * self.policy.tp + tp, "pp": pp, "tp": tp, "bytes": bytes, "fits": fits })
        });
        json!({
            "architecture": self.architecture,
            "layout": self.layout,
            "layers": self.model.symbols.trunk,
            "experts": self.model.symbols.experts,
            "stages": self.policy.stages,
            "tensors": self.tensors(gguf),
            "recoded": self.recoded_json(gguf),
            "ranks": ranks.collect::<Value>(),
            "files": self.shards.iter().map(file).collect::<Value>(),
        })
    }

    /// What becomes of each type under `--weights fast`.
    pub fn recoded(&self, gguf: &Gguf) -> Vec<Recoded> {
        self.recoding.as_ref().map_or(Vec::new(), |recoding| recoding.summary(gguf, &self.model))
    }

    /// The same for programs; errors as fractions.
    pub fn recoded_json(&self, gguf: &Gguf) -> Value {
        let entry = |r: &Recoded| {
            json!({
                "type": r.ty, "bits": r.form.bits, "group": r.form.group,
                "zero_point": r.form.zero_point, "tensors": r.tensors,
                "elements": r.elements, "bits_per_weight": r.bits,
                "errors": r.errors.map(|millionths| millionths as f64 / 1e6),
            })
        };
        self.recoded(gguf).iter().map(entry).collect()
    }

    /// The same for people, a line for each type.
    pub fn recoded_text(&self, gguf: &Gguf) -> String {
        let line = |r: &Recoded| {
            let loses = match r.errors {
                [0, 0] => "exact".to_owned(),
                [least, most] if least == most => format!("loses {}", percent(most)),
                [least, most] => format!("loses {} to {}", percent(least), percent(most)),
            };
            let (n, form, [before, after]) = (r.tensors, r.form, r.bits);
            format!("  {n:>6}  {} as {form}: {before:.2} to {after:.2} bits a weight, {loses}\n", r.ty)
        };
        self.recoded(gguf).iter().map(line).collect()
    }

    /// Every GGUF tensor with what becomes of it.
    fn tensors(&self, gguf: &Gguf) -> Value {
        let named = self.fates.iter().zip(gguf.tensors());
        let tensors = named.map(|((fate, part), t)| {
            let (fate, why) = match fate {
                Fate::Packed => ("packed", None),
                Fate::Recoded(form) => ("recoded", Some(form.to_string())),
                Fate::Float => ("float", None),
                Fate::Decoded(why) => ("decoded", Some(why.clone())),
                Fate::Dropped(why) => ("dropped", Some(why.clone())),
            };
            let part = if *part == Part::Mtp { "mtp" } else { "model" };
            json!({ "name": t.name, "type": t.ty.name, "bytes": t.bytes, "part": part, "fate": fate, "why": why })
        });
        tensors.collect()
    }
}

fn file(shard: &ShardPlan) -> Value {
    let tensor = |t: &TensorPlan| json!({ "name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes, "decoded": t.decoded });
    let tensors: Value = shard.tensors.iter().map(tensor).collect();
    json!({ "file": shard.name, "pp": shard.pp, "tp": shard.tp, "bytes": shard.bytes, "tensors": tensors })
}
