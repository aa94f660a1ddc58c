//! Random small models, planned and evaluated: no panic for any shape, type or cut, and every element
//! of every rank is the element that the Hugging Face tensor has there; together the ranks hold all.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use preshard::cut;
use preshard::eval::{Decoder, Evaluator};
use preshard::gguf::Gguf;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::plan::shard::{ShardPlan, TensorPlan};
use preshard::policy::{Fit, Policy, Weights};
use preshard::quant::Float;
use preshard_fuzz::model::{self, Model};
use preshard_fuzz::{check_message, scratch};
use std::collections::HashMap;
use std::ops::Range;

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let model = model::random(u)?;
    let path = scratch().join("model.gguf");
    model.gguf.write(&path);
    let gguf = Gguf::open(&[path]).expect("the model is sound");
    let fit = |u: &mut Unstructured| Ok(if u.ratio(1, 8)? { Fit::Refuse } else { Fit::Dequantise });
    let hf = u.ratio(1, 6)?;
    let options = Policy {
        tp: if hf { 1 } else { u.int_in_range(1..=8)? },
        pp: if hf { 1 } else { u.int_in_range(1..=model.layers + 1)? },
        ep: !hf && u.ratio(1, 3)?,
        weights: *u.choose(&[Weights::Keep, Weights::Bf16, Weights::F16, Weights::F32])?,
        misaligned: fit(u)?,
        mixed: fit(u)?,
        layout: if hf { "hf" } else { "vllm" }.into(),
        max_file_size: if hf { u.int_in_range(1..=1 << 20)? } else { 1 << 40 },
        ..Policy::default()
    };
    let plan = match Plan::new(&gguf, &Tables::default(), options) {
        Ok(plan) => plan,
        Err(error) => {
            check_message(&error);
            return Ok(());
        }
    };
    let evaluator = Evaluator { plan: &plan, gguf: &gguf, decoder: &Decoder::CPU, allow_nonfinite: true };
    let mut check = Check { model: &model, plan: &plan, values: HashMap::new(), seen: HashMap::new() };
    for shard in &plan.shards {
        let mut whole = Vec::new();
        let findings = evaluator.bytes(shard, 0..shard.bytes, &mut whole).expect("a sound model");
        assert_eq!(whole.len() as u64, shard.bytes);

        // Any way of cutting the file in pieces gives the same bytes and the same counts.
        let mut pieces = Vec::new();
        let mut counted_pieces = 0;
        let (mut at, mut piece, mut counted) = (0, Vec::new(), HashMap::new());
        while at < shard.bytes {
            // Few pieces, so that a run takes milliseconds also when the input has no more numbers.
            let left = (shard.bytes - at) / 4;
            let quads = if counted_pieces < 12 { u.int_in_range(1..=left.max(1))? } else { left + 1 };
            counted_pieces += 1;
            let end = (at + 4 * quads).min(shard.bytes);
            for (tensor, n) in evaluator.bytes(shard, at..end, &mut piece).expect("as before").nonfinite {
                *counted.entry(tensor).or_insert(0) += n;
            }
            pieces.extend_from_slice(&piece);
            at = end;
        }
        assert!(pieces == whole, "{}: pieces differ", shard.name);
        assert_eq!(counted, findings.nonfinite.into_iter().collect::<HashMap<_, u64>>(), "{}", shard.name);

        check.file(shard, &whole);
    }
    check.everything_seen();
    Ok(())
}

struct Check<'a> {
    model: &'a Model,
    plan: &'a Plan,
    values: HashMap<(String, Float), Vec<u8>>,
    /// Elements that some rank holds.
    seen: HashMap<String, Vec<bool>>,
}

impl Check<'_> {
    fn file(&mut self, shard: &ShardPlan, bytes: &[u8]) {
        let read = safetensors::SafeTensors::deserialize(bytes).expect("a safetensors file");
        assert_eq!(read.len(), shard.tensors.len());
        for t in &shard.tensors {
            let view = read.tensor(&t.name).expect("the tensor is in the file");
            assert_eq!(view.data().len() as u64, t.bytes);
            assert_eq!(view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>(), t.shape);
            assert_eq!(format!("{:?}", view.dtype()), t.dtype);
            let power = 1u64 << t.bytes.trailing_zeros().min(12);
            assert_eq!(t.offset % power, 0, "{} of {} bytes at {}", t.name, t.bytes, t.offset);
            if t.recoded.is_some() {
                // What a form holds of the values is tests/recoded.rs's to say.
                let name = &t.members[0].hf;
                let hf = &self.model.tensors[name];
                self.seen.insert(name.clone(), vec![true; (hf.rows * hf.cols) as usize]);
            } else if t.name.ends_with("_scale") {
                assert_eq!(view.data(), 1f32.to_le_bytes());
            } else if let Some(of) = t.name.strip_suffix("qweight_type") {
                let weight = format!("{of}qweight");
                let weight =
                    shard.tensors.iter().find(|t| t.name == weight).expect("qweight beside its type");
                let stacked = weight.shape.len() == 3;
                let types: Vec<u8> = weight
                    .members
                    .iter()
                    .map(|m| self.model.ty(&m.hf.replace("{E}", "0")).id as u8)
                    .take(if stacked { 1 } else { usize::MAX })
                    .collect();
                assert_eq!(view.data(), types);
            } else {
                self.tensor(shard, t, view.data());
            }
        }
    }

    fn tensor(&mut self, shard: &ShardPlan, t: &TensorPlan, data: &[u8]) {
        let stacked = t.members[0].hf.contains("{E}");
        let experts: Vec<u64> = if stacked { shard.experts.clone().collect() } else { vec![0] };
        let rows = t.members.last().map_or(0, |m| m.rows[1]);
        let width = data.len() / (rows as usize * experts.len());
        assert_eq!(data.len(), width * rows as usize * experts.len(), "{}", t.name);
        for (i, e) in experts.iter().enumerate() {
            for m in &t.members {
                let name = m.hf.replace("{E}", &e.to_string());
                let hf = &self.model.tensors[&name];
                let (real, cols) = self.slice(shard, &name, stacked);
                assert!(m.rows[1] - m.rows[0] >= real.end - real.start, "{name}");
                let float = match t.dtype {
                    "BF16" => Float::Bf16,
                    "F16" => Float::F16,
                    _ => Float::F32,
                };
                let values = self
                    .values
                    .entry((name.clone(), float))
                    .or_insert_with(|| self.model.values(&name, float));
                let seen = self
                    .seen
                    .entry(name.clone())
                    .or_insert_with(|| vec![false; (hf.rows * hf.cols) as usize]);
                for row in m.rows[0]..m.rows[1] {
                    let at = (i as u64 * rows + row) as usize * width;
                    let stored = &data[at..at + width];
                    let source = real.start + row - m.rows[0];
                    if source >= real.end {
                        assert!(stored.iter().all(|b| *b == 0), "{name}: padding row {row} is not zero");
                        continue;
                    }
                    let size = float.size();
                    let first = (source * hf.cols + cols.start) as usize;
                    let n = (cols.end - cols.start) as usize;
                    let expected = &values[first * size..(first + n) * size];
                    if t.dtype == "U8" {
                        let ty = self.model.ty(&name);
                        let held = n / ty.block as usize * ty.bytes as usize;
                        assert_eq!(m.row_bytes, Some(held as u64), "{name}");
                        assert!(
                            stored[held..].iter().all(|b| *b == 0),
                            "{name}: row {row} is not padded with zeros"
                        );
                        let mut decoded = vec![0; n * 4];
                        ty.decode(&stored[..held], Float::F32, &mut decoded);
                        assert!(decoded == expected, "{name}: row {source} differs in {}", shard.name);
                    } else {
                        assert!(stored == expected, "{name}: row {source} differs in {}", shard.name);
                    }
                    seen[first..first + n].fill(true);
                }
            }
        }
    }

    /// What a rank holds of a tensor, as vLLM's layers cut it: rows and columns.
    fn slice(&self, shard: &ShardPlan, name: &str, stacked: bool) -> (Range<u64>, Range<u64>) {
        let hf = &self.model.tensors[name];
        let (tp, rank, options) = (self.plan.policy.tp, shard.tp, &self.plan.policy);
        let whole = (0..hf.rows, 0..hf.cols);
        let share = |n: u64| {
            assert_eq!(n % tp, 0, "{name}: {n} over {tp}");
            n / tp * rank..n / tp * (rank + 1)
        };
        if options.layout == "hf" || stacked && options.ep {
            return whole;
        }
        let parts: Vec<&str> = name.split('.').collect();
        match parts[parts.len() - 2] {
            "embed_tokens" | "lm_head" => {
                let each = hf.rows.div_ceil(64) * 64 / tp;
                ((each * rank).min(hf.rows)..(each * (rank + 1)).min(hf.rows), whole.1)
            }
            "k_proj" | "v_proj" => {
                let (kv, head) = (self.model.kv_heads, hf.rows / self.model.kv_heads);
                // vLLM: each rank one head at least, neighbours share one when there are too few.
                let (heads, first) = if kv >= tp { (kv / tp, kv / tp * rank) } else { (1, rank / (tp / kv)) };
                (first * head..(first + heads) * head, whole.1)
            }
            "q_proj" | "q_b_proj" | "kv_b_proj" | "gate_proj" | "up_proj" | "w1" | "w3" => {
                (share(hf.rows), whole.1)
            }
            "o_proj" if parts.last() == Some(&"bias") => whole,
            "o_proj" | "down_proj" | "w2" => (whole.0, share(hf.cols)),
            _ => whole,
        }
    }

    fn everything_seen(&self) {
        for (name, hf) in &self.model.tensors {
            let seen = self.seen.get(name).map_or(0, |s| s.iter().filter(|b| **b).count() as u64);
            assert_eq!(seen, hf.rows * hf.cols, "{name}: elements that no rank holds");
        }
        // The planner's own arithmetic, once more from outside.
        let stages = &self.plan.policy.stages;
        assert_eq!(*stages, cut::stages(self.model.layers, self.plan.policy.pp));
    }
}
