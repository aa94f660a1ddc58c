//! `--weights fast`: which packed matrices are written in which form that tensor cores take.
//!
//! The engine decides what must share a form: the members of a merged layer, and the two matrices of its
//! experts. Of the forms that lose no more than the limit on any of them, the one of fewest bits is taken, so
//! that unlike types meet in a common form; where there is none, all of them are decoded.

use super::params::{self, Param};
use super::tensors::{Model, Order};
use crate::error::Result;
use crate::forms::Form;
use crate::gguf::{Gguf, Tensor};
use crate::mapping::{Cut, Engine, Method, MethodName};
use crate::policy::{Fit, Policy, Weights};
use crate::quant::Float;
use crate::{sync, workers};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;

/// Blocks of a tensor that its error is measured on: so many runs, evenly spaced, of so many. Few and long runs, because
/// each is a read of its own from a source that is not in memory.
const RUNS: u64 = 32;
const RUN: u64 = 128;
/// Blocks after which a form that loses more than twice the limit is given up.
const LOOK: u64 = 256;

/// What is written in which form.
pub struct Recoding {
    /// How config.json and the tensors name it.
    pub method: Method,
    /// The dtype of scales.
    pub float: Float,
    /// The form of Hugging Face tensors, by index, and their error.
    forms: HashMap<usize, (Form, u64)>,
    /// Why other packed ones are decoded.
    decoded: HashMap<usize, String>,
    /// The modules of each form, `None` for those without one.
    modules: BTreeMap<Option<Form>, Vec<Module>>,
}

/// A module as config.json names it.
struct Module {
    /// Its name in the engine that merges layers.
    merged: String,
    /// Names in the checkpoint.
    members: Vec<String>,
}

/// What becomes of the tensors of one type that are written in one form.
#[derive(Debug, PartialEq)]
pub struct Recoded {
    /// The ggml type.
    pub ty: &'static str,
    /// The form.
    pub form: Form,
    /// GGUF tensors.
    pub tensors: u64,
    /// Their elements.
    pub elements: u64,
    /// Bits of a weight in the GGUF and in the form.
    pub bits: [f64; 2],
    /// The least and the largest error of a tensor, in millionths: the root of the mean square of what weights
    /// differ by from ggml's, over that of ggml's.
    pub errors: [u64; 2],
}

/// What must share a form.
struct Group<'a> {
    params: Vec<&'a Param>,
    /// Indices of Hugging Face tensors.
    tensors: Vec<usize>,
}

impl Recoding {
    /// Chooses among the forms of a method; `merges` is the table of the engine that merges layers.
    pub fn choose(
        gguf: &Gguf,
        model: &Model,
        method: &Method,
        merges: &Engine,
        policy: &Policy,
    ) -> Result<Recoding> {
        // What is merged does not depend on ranks or on what may stay packed.
        let merging = Policy {
            weights: Weights::Keep,
            misaligned: Fit::Dequantise,
            mixed: Fit::Dequantise,
            tp: 1,
            ep: false,
            max_error: None,
            ..policy.clone()
        };
        let params = params::resolve(merges, model, gguf, &merging, 1, None)?;
        let mut recoding = Recoding {
            method: method.clone(),
            float: if policy.weights == Weights::FastF16 { Float::F16 } else { Float::Bf16 },
            forms: HashMap::new(),
            decoded: HashMap::new(),
            modules: BTreeMap::new(),
        };
        let limit = policy.max_error.unwrap_or(0);
        let float = recoding.float;
        let groups = groups(&params);
        let chosen: Vec<Mutex<Option<_>>> = groups.iter().map(|_| Mutex::default()).collect();
        let jobs: Vec<_> = groups.iter().zip(&chosen).collect();
        // Each group by itself, so that the choice does not depend on the threads.
        workers::each(workers::count(0, u64::MAX), &jobs, &workers::NEVER, |(group, chosen), _| {
            let mut errors = Errors { gguf, float, limit, measured: HashMap::new() };
            *sync::lock(chosen) = Some(group.form(method, model, &mut errors));
            Ok(())
        })?;
        for (group, chosen) in groups.iter().zip(chosen) {
            let form = match sync::into_inner(chosen) {
                Some(Ok((form, errors))) => {
                    let tensors = group.tensors.iter().zip(errors);
                    recoding.forms.extend(tensors.map(|(tensor, error)| (*tensor, (form, error))));
                    Some(form)
                }
                Some(Err(why)) => {
                    recoding.decoded.extend(group.tensors.iter().map(|tensor| (*tensor, why.clone())));
                    None
                }
                None => None,
            };
            let modules = group.params.iter().filter_map(|p| Module::of(p));
            recoding.modules.entry(form).or_default().extend(modules);
        }
        Ok(recoding)
    }

    /// The form of a Hugging Face tensor and the error it brings, or why it has none.
    pub fn of(&self, tensor: usize) -> std::result::Result<(Form, u64), String> {
        let why = || match self.decoded.get(&tensor) {
            Some(why) => why.clone(),
            None => "embeddings and output heads stay floats".into(),
        };
        self.forms.get(&tensor).copied().ok_or_else(why)
    }

    /// What becomes of each type in each form.
    pub fn summary(&self, gguf: &Gguf, model: &Model) -> Vec<Recoded> {
        let mut sources: BTreeMap<usize, (Form, u64)> = BTreeMap::new();
        for (tensor, found) in &self.forms {
            sources.extend(model.tensors[*tensor].views.iter().map(|v| (v.tensor, *found)));
        }
        let mut summed: BTreeMap<(u32, Form), Recoded> = BTreeMap::new();
        for (source, (form, error)) in sources {
            let tensor = &gguf.tensors()[source];
            let ty = tensor.ty;
            let sum = summed.entry((ty.id, form)).or_insert(Recoded {
                ty: ty.name,
                form,
                tensors: 0,
                elements: 0,
                bits: [ty.bytes as f64 * 8.0 / ty.block as f64, form.bits_per_weight()],
                errors: [error, error],
            });
            (sum.tensors, sum.elements) =
                (sum.tensors + 1, sum.elements + tensor.bytes / ty.bytes * ty.block);
            sum.errors = [sum.errors[0].min(error), sum.errors[1].max(error)];
        }
        summed.into_values().collect()
    }

    /// `quantization_config` of config.json.
    pub fn config(&self) -> Value {
        match self.method.name {
            MethodName::CompressedTensors => self.compressed_tensors(),
            MethodName::Humming => self.humming(),
        }
    }

    fn compressed_tensors(&self) -> Value {
        let format = "pack-quantized";
        let targets = |modules: &[Module]| -> Vec<String> {
            let names = modules.iter().flat_map(|m| &m.members);
            patterns(names).into_iter().map(|pattern| format!("re:{pattern}")).collect()
        };
        let mut groups = Map::new();
        let mut ignore = vec!["lm_head".to_owned()];
        for (form, modules) in &self.modules {
            let Some(form) = form else {
                ignore.extend(targets(modules));
                continue;
            };
            let weights = json!({
                "num_bits": form.bits, "type": "int", "symmetric": true, "strategy": "group",
                "group_size": form.group, "dynamic": false,
            });
            groups.insert(
                format!("group_{}", groups.len()),
                json!({ "targets": targets(modules), "weights": weights, "format": format }),
            );
        }
        json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": groups, "ignore": ignore,
        })
    }

    /// vLLM looks for a layer's own settings by its merged name, from the start of each pattern.
    fn humming(&self) -> Value {
        let settings = |form: &Form| {
            json!({
                "dtype": format!("int{}", form.bits), "group_size": form.group,
                "has_zero_point": form.zero_point, "is_fp_zero_point": form.zero_point,
            })
        };
        let mut config = Map::from_iter([("quant_method".to_owned(), "humming".into())]);
        let (mut dynamic, mut ignore) = (Map::new(), Vec::new());
        for (form, modules) in &self.modules {
            let found = patterns(modules.iter().map(|m| &m.merged));
            let Some(form) = form else {
                ignore.extend(found.iter().map(|pattern| format!("re:{pattern}")));
                continue;
            };
            if config.len() == 1 {
                // Of layers that no pattern names, which there are none of.
                config.extend(settings(form).as_object().cloned().unwrap_or_default());
            }
            dynamic.extend(found.iter().map(|pattern| (format!("+:{pattern}"), settings(form))));
        }
        config.extend([("dynamic".to_owned(), dynamic.into()), ("ignore".to_owned(), ignore.into())]);
        config.into()
    }
}

impl Module {
    /// Of a matrix in a layer.
    fn of(param: &Param) -> Option<Module> {
        let bare = |name: &str| name.strip_suffix(".weight").map(str::to_owned);
        let members: Vec<String> = param.members.iter().filter_map(|m| bare(&m.name)).collect();
        let merged = match members.first()?.split_once(".{E}") {
            Some((experts, _)) => experts.to_owned(),
            // Merged layers lie where their members would.
            None => {
                let (parent, own) = (members[0].rsplit_once('.')?.0, bare(&param.to)?);
                format!("{parent}.{}", own.rsplit('.').next()?)
            }
        };
        Some(Module { merged, members })
    }
}

/// What the engine merges, or computes in one kernel.
fn groups(params: &[Param]) -> Vec<Group<'_>> {
    let mut paired: BTreeMap<(&str, Option<u64>), usize> = BTreeMap::new();
    let mut groups: Vec<Group> = Vec::new();
    for param in params {
        // Embeddings and heads are cut by the vocabulary. A vector is no matrix.
        if param.members.iter().any(|m| m.cut == Cut::Vocab || m.vector) {
            continue;
        }
        let new = groups.len();
        let at = match &param.pair {
            Some(pair) => *paired.entry((pair, param.layer)).or_insert(new),
            None => new,
        };
        if at == new {
            groups.push(Group { params: Vec::new(), tensors: Vec::new() });
        }
        groups[at].params.push(param);
        groups[at].tensors.extend(param.members.iter().flat_map(|m| &m.tensors));
    }
    groups
}

impl Group<'_> {
    /// The form of fewest bits that holds all of it within the limit, with each tensor's error; or why none does.
    fn form(
        &self,
        method: &Method,
        model: &Model,
        errors: &mut Errors,
    ) -> std::result::Result<(Form, Vec<u64>), String> {
        if let Some(why) = self.params.iter().find_map(|p| p.unquantised.as_ref()) {
            return Err(why.clone());
        }
        let views = || self.tensors.iter().flat_map(|t| &model.tensors[*t].views);
        if views().any(|v| v.order == Order::Transposed) {
            return Err("it is stored transposed".into());
        }
        if views().any(|v| v.columns.is_some() || v.values.is_some()) {
            return Err("its columns are moved, or its values changed".into());
        }
        let types = views().map(|v| errors.gguf.tensors()[v.tensor].ty);
        let types: BTreeMap<u32, _> = types.map(|ty| (ty.id, ty)).collect();
        let stacked = self.params.iter().any(|p| p.stacked) && !method.zero_points_of_experts;
        let holds = |form: &Form| !(form.zero_point && stacked) && types.values().all(|ty| form.takes(ty));
        let mut forms: Vec<Form> = method.forms.iter().copied().filter(holds).collect();
        if forms.is_empty() {
            let names: Vec<_> = types.values().map(|t| t.name).collect();
            return Err(format!("no form of the engine holds {}", names.join(", ")));
        }
        forms.sort_by(|a, b| a.bits_per_weight().total_cmp(&b.bits_per_weight()));
        let mut least = u64::MAX;
        for form in forms {
            let of = |tensor: &usize| {
                let sources = model.tensors[*tensor].views.iter().map(|v| v.tensor);
                sources.map(|source| errors.of(source, form)).max().unwrap_or(0)
            };
            let found: Vec<u64> = self.tensors.iter().map(of).collect();
            let worst = found.iter().copied().max().unwrap_or(0);
            if worst <= errors.limit {
                return Ok((form, found));
            }
            least = least.min(worst);
        }
        Err(format!(
            "every form of the engine loses {} or more, the limit is {} (--max-error)",
            percent(least),
            percent(errors.limit)
        ))
    }
}

/// Millionths as people read them.
pub fn percent(millionths: u64) -> String {
    format!("{:.2} %", millionths as f64 / 1e4)
}

/// Measured errors of GGUF tensors.
struct Errors<'a> {
    gguf: &'a Gguf,
    float: Float,
    /// The limit, in millionths.
    limit: u64,
    measured: HashMap<(usize, Form), u64>,
}

impl Errors<'_> {
    /// The relative error of a tensor in a form, in millionths.
    fn of(&mut self, source: usize, form: Form) -> u64 {
        if let Some(error) = self.measured.get(&(source, form)) {
            return *error;
        }
        let tensor = &self.gguf.tensors()[source];
        let error = self.measure(tensor, form);
        // A sample of each of thousands of tensors would otherwise stay mapped.
        self.gguf.files()[tensor.file].unmap(tensor.offset..tensor.offset + tensor.bytes);
        self.measured.insert((source, form), error);
        error
    }

    /// The same, measured on a sample of the blocks; rounded up, so that 0 is exact.
    fn measure(&self, tensor: &Tensor, form: Form) -> u64 {
        let (data, size) = (self.gguf.data(tensor), tensor.ty.bytes as usize);
        let blocks = (data.len() / size) as u64;
        let starts: BTreeSet<u64> = (0..RUNS).map(|i| blocks.saturating_sub(RUN) * i / (RUNS - 1)).collect();
        let (mut wrong, mut all, mut end, mut seen) = (0.0, 0.0, 0, 0);
        let error =
            |wrong: f64, all: f64| if all > 0.0 { ((wrong / all).sqrt() * 1e6).ceil() as u64 } else { 0 };
        for start in starts {
            // Runs meet in a small tensor; no block counts twice.
            let run = start.max(end)..(start + RUN).min(blocks);
            end = run.end.max(end);
            for block in run {
                let block = &data[block as usize * size..][..size];
                if tensor.ty.count_nonfinite(block) == 0 {
                    let (w, a) = form.error(tensor.ty, block, self.float);
                    (wrong, all, seen) = (wrong + w, all + a, seen + 1);
                }
            }
            if seen >= LOOK && error(wrong, all) > 2 * self.limit {
                break;
            }
        }
        error(wrong, all)
    }
}

/// Regular expressions, anchored, for names: one for each that differs in more than its layer.
fn patterns<'n>(names: impl Iterator<Item = &'n String>) -> Vec<String> {
    let mut layers: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for name in names {
        let mut number = None;
        let parts: Vec<String> = name
            .split('.')
            .map(|part| match part.parse::<u64>() {
                Ok(n) if number.is_none() => {
                    number = Some(n);
                    "{L}".to_owned()
                }
                _ if part == "{E}" => r"\d+".to_owned(),
                _ => part.to_owned(),
            })
            .collect();
        layers.entry(parts.join(r"\.")).or_default().extend(number);
    }
    let pattern = |(name, layers): (String, BTreeSet<u64>)| {
        let numbers: Vec<String> = layers.iter().map(u64::to_string).collect();
        format!("^{}$", name.replace("{L}", &format!("(?:{})", numbers.join("|"))))
    };
    layers.into_iter().map(pattern).collect()
}
