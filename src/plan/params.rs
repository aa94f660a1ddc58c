//! Engine parameters: which Hugging Face tensors each joins, how it is cut, whether it stays packed.
//!
//! Nothing here depends on a rank's number; [`super::shard`] cuts the result for each.

use super::recode::Recoding;
use super::rows::{lost, segment, taken};
use super::tensors::{HfTensor, Model, Order, Swap};
use crate::cut;
use crate::error::{Error, Result};
use crate::forms;
use crate::gguf::Gguf;
use crate::mapping::{Cut, Engine, ParamRule, Part, Stage};
use crate::policy::{self, Fit, Mtp, Policy, SharedExperts, Weights};
use crate::quant::{Float, GgmlType, TYPES};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// One parameter of the engine.
pub struct Param {
    /// Its name, for float tensors.
    pub to: String,
    /// The file it goes to.
    pub part: Part,
    /// Its layer, which decides the pipeline stage.
    pub layer: Option<u64>,
    /// Only on the first or last stage.
    pub stage: Option<Stage>,
    /// Left out of a stage that also holds the tied head.
    pub unless_tied: bool,
    /// What it joins, in order.
    pub members: Vec<Member>,
    /// Stacked over the experts, the first dimension.
    pub stacked: bool,
    /// How its elements are stored.
    pub form: Form,
    /// Why packed sources are decoded, when they are.
    pub decoded: Option<String>,
    /// Why the engine declares it without quantisation, when it does.
    pub unquantised: Option<String>,
    /// Parameters of a layer with the same word here stay packed together or not at all.
    pub pair: Option<String>,
    /// Other names of the same storage in the engine.
    pub aliases: Vec<String>,
}

/// One member of a joined parameter.
pub struct Member {
    /// Hugging Face name, with `{E}` when stacked.
    pub name: String,
    /// Indices into [`Model::tensors`]: one, or one per expert.
    pub tensors: Vec<usize>,
    /// How it is cut.
    pub cut: Cut,
    /// Heads the cut must respect, when it goes by heads.
    pub heads: u64,
    /// The first row of each tensor that it takes.
    pub first: u64,
    /// Rows that it takes of each tensor.
    pub rows: u64,
    /// Columns of each tensor.
    pub cols: u64,
    /// 1-D in Hugging Face terms.
    pub vector: bool,
    /// With a dimension of 1 between rows and columns.
    pub unsqueeze: bool,
    /// ggml type of the first tensor; f32 of a tensor of zeros.
    pub ty: &'static GgmlType,
}

/// How a parameter's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// ggml blocks, as they are.
    Packed,
    /// The same codes in a form for tensor cores, with scales of this dtype.
    Recoded(forms::Form, Float),
    /// Decoded, or cast from another float type.
    Float(Float),
}

/// Dtype for a parameter that policy forces us to decode under `--weights keep`.
const PACKED_BESIDE: Float = Float::Bf16;

/// What one rank holds of a member.
pub struct Slice {
    /// Rows.
    pub rows: Range<u64>,
    /// Columns.
    pub cols: Range<u64>,
    /// Zero rows after them.
    pub padding: u64,
}

impl Member {
    /// The slice of rank `part` of `parts`, or `None` when the cut does not come out even.
    pub fn slice(&self, padded_vocab: u64, parts: u64, part: u64) -> Option<Slice> {
        let (rows, cols) = (0..self.rows, 0..self.cols);
        let slice = |rows, cols| Some(Slice { rows, cols, padding: 0 });
        match self.cut {
            Cut::Whole => slice(rows, cols),
            Cut::Rows => slice(cut::share(self.rows, parts, part)?, cols),
            Cut::Cols => slice(rows, cut::share(self.cols, parts, part)?),
            Cut::Heads | Cut::HeadCols if !self.heads.is_multiple_of(parts) => None,
            Cut::Heads if !self.rows.is_multiple_of(self.heads) => None,
            Cut::HeadCols if !self.cols.is_multiple_of(self.heads) => None,
            Cut::Heads => slice(cut::share(self.rows, parts, part)?, cols),
            Cut::HeadCols => slice(rows, cut::share(self.cols, parts, part)?),
            Cut::KvHeads => slice(cut::kv_rows(self.rows, self.heads, parts, part)?, cols),
            Cut::Vocab => {
                let (rows, padding) = cut::vocab_rows(self.rows, padded_vocab, parts, part)?;
                Some(Slice { rows, cols, padding })
            }
        }
    }

    /// Whether the cut falls on block boundaries.
    fn aligned(&self, parts: u64) -> bool {
        match self.cut {
            Cut::Cols | Cut::HeadCols => {
                self.cols.is_multiple_of(parts) && (self.cols / parts).is_multiple_of(self.ty.block)
            }
            _ => true,
        }
    }
}

/// Finds every parameter, or lists everything that stands in the way. `recoding` says what is recoded.
pub fn resolve(
    engine: &Engine,
    model: &Model,
    gguf: &Gguf,
    policy: &Policy,
    parts: u64,
    recoding: Option<&Recoding>,
) -> Result<Vec<Param>> {
    let mut b = Builder {
        engine,
        model,
        gguf,
        policy,
        parts,
        layers: model.tensors.iter().filter_map(|t| t.layer).collect(),
        recoding,
        used: vec![false; model.tensors.len()],
        params: Vec::new(),
        problems: Vec::new(),
        mixed: Vec::new(),
        misaligned: Vec::new(),
    };
    let (rest, named): (Vec<_>, Vec<_>) = engine.params.iter().partition(|r| r.to == "*");
    for rule in named {
        b.rule(rule);
    }
    if let Some(rule) = rest.first() {
        b.rest(rule);
    }
    for (tensor, used) in model.tensors.iter().zip(&b.used) {
        if !used {
            b.problems.push(Error::mapping(
                &engine.file,
                format!(
                    "no rule takes {}: mend the one that should join it, or add one",
                    crate::error::shown(&tensor.name)
                ),
            ));
        }
    }
    b.cuts();
    b.refusals();
    b.pairs();
    Error::all(b.problems)?;
    Ok(b.params)
}

struct Builder<'a> {
    engine: &'a Engine,
    model: &'a Model,
    gguf: &'a Gguf,
    policy: &'a Policy,
    parts: u64,
    /// Layers of which the model has a tensor.
    layers: BTreeSet<u64>,
    recoding: Option<&'a Recoding>,
    used: Vec<bool>,
    params: Vec<Param>,
    problems: Vec<Error>,
    /// Parameters of packed and float members, or of a stack with several types.
    mixed: Vec<(String, String)>,
    /// Indices of parameters that a cut inside a block keeps from staying packed.
    misaligned: Vec<usize>,
}

impl Builder<'_> {
    /// The parameters of one rule, at every layer where it applies.
    fn rule(&mut self, rule: &ParamRule) {
        let symbols = &self.model.symbols;
        let layers: Vec<Option<u64>> = match rule.join.iter().any(|j| j.contains("{L}")) {
            _ if rule.part == Some(Part::Mtp) => (symbols.trunk..symbols.blocks).map(Some).collect(),
            false => vec![None],
            true => (0..symbols.blocks).map(Some).collect(),
        };
        for layer in layers {
            let at = |name: &str| name.replace("{L}", &layer.map(|l| l.to_string()).unwrap_or_default());
            let exists = |name: &str| self.model.index.contains_key(name);
            // A dropped MTP block leaves nothing behind that its draft would need.
            let block_gone = layer.is_some_and(|l| l >= symbols.trunk && !self.layers.contains(&l));
            let fused = self.policy.shared_experts == SharedExperts::Fused;
            let unwanted = rule.unless_fused && fused
                || rule.without.as_ref().is_some_and(|w| exists(&at(w)))
                || rule.with.as_ref().is_some_and(|w| !exists(&at(w)));
            if block_gone || unwanted {
                continue;
            }
            let names: Vec<Option<String>> = rule
                .join
                .iter()
                .map(|j| {
                    let there = |n: &&str| exists(&segment(n).0.replace("{E}", "0"));
                    at(j).split('|').find(there).map(str::to_owned)
                })
                .collect();
            if names[0].is_none() {
                continue;
            }
            let missing: Vec<_> =
                rule.join.iter().zip(&names).filter(|(_, n)| n.is_none()).map(|(j, _)| at(j)).collect();
            if !missing.is_empty() {
                let to = at(&rule.to).replace("{B}", &at(&self.engine.block));
                let made = |name: &str| name.split('|').any(|n| self.model.made.contains(segment(n).0));
                let strange: Vec<&str> = rule.join.iter().map(String::as_str).filter(|j| !made(j)).collect();
                self.problems.push(if strange.is_empty() {
                    let missing = missing.join(", ");
                    Error::source(to, format!("{missing} missing, which it joins; the GGUF is incomplete"))
                } else {
                    Error::mapping(
                        &self.engine.file,
                        format!(
                            "rule for {:?} joins {}, which no rule of the architecture makes",
                            rule.to,
                            strange.join(", ")
                        ),
                    )
                });
                self.use_names(names.iter().flatten());
                continue;
            }
            let names: Vec<String> = names.into_iter().flatten().collect();
            let shared: Vec<String> = rule.fused.iter().filter(|_| fused).map(|f| at(f)).collect();
            self.use_names(names.iter().chain(&shared));
            self.param(rule, layer, &names);
        }
    }

    /// Every tensor no rule has used, under its own name.
    fn rest(&mut self, rule: &ParamRule) {
        for i in 0..self.used.len() {
            if !self.used[i] {
                self.used[i] = true;
                let tensor = &self.model.tensors[i];
                self.param(rule, tensor.layer, std::slice::from_ref(&tensor.name));
            }
        }
    }

    fn use_names<'n>(&mut self, names: impl Iterator<Item = &'n String>) {
        for name in names.map(|name| segment(name).0) {
            for e in 0..if name.contains("{E}") { self.model.symbols.experts } else { 1 } {
                if let Some(&i) = self.model.index.get(&name.replace("{E}", &e.to_string())) {
                    self.used[i] = true;
                }
            }
        }
    }

    fn param(&mut self, rule: &ParamRule, layer: Option<u64>, names: &[String]) {
        let symbols = &self.model.symbols;
        let mtp = layer.is_some_and(|l| l >= symbols.trunk);
        if self.policy.mtp == Mtp::Only && !(mtp && self.engine.sharded()) {
            return;
        }
        if mtp && self.engine.mtp_block.is_empty() && rule.to.contains("{B}") {
            return self.problems.push(Error::mapping(
                &self.engine.file,
                format!(
                    "rule for {:?}: the model has an MTP block, for which the table names no mtp_block; name it, or pass \
                     --mtp drop",
                    rule.to
                ),
            ));
        }
        let block = if mtp { &self.engine.mtp_block } else { &self.engine.block };
        let at = |name: &str| {
            let name = name.replace("{B}", block);
            let name = name.replace("{L}", &layer.map(|l| l.to_string()).unwrap_or_default());
            name.replace("{M}", &layer.and_then(|l| l.checked_sub(symbols.trunk)).unwrap_or(0).to_string())
        };
        let to = match (rule.to.as_str(), layer) {
            // An ordinary checkpoint may call the layers of the MTP block otherwise.
            ("*", Some(layer)) if mtp && !self.engine.mtp_block.is_empty() => {
                match names[0].strip_prefix(&format!("model.layers.{layer}.")) {
                    Some(rest) => format!("{}.{rest}", at("{B}")),
                    None => names[0].clone(),
                }
            }
            ("*", _) => names[0].clone(),
            (to, _) => at(to),
        };
        let stacked = names[0].contains("{E}");
        let mut members = Vec::new();
        for (i, name) in names.iter().enumerate() {
            match self.member(rule, i, name, layer, stacked) {
                Ok(member) => members.push(member),
                Err(problem) => return self.problems.push(problem),
            }
        }
        if rule.to == "*" {
            // In the checkpoint that is its name.
            members.iter_mut().for_each(|m| m.name.clone_from(&to));
        }
        if let Some(detail) = lost(self.model, &members) {
            return self.problems.push(Error::mapping(to, detail));
        }
        let widths: Vec<_> = members.iter().map(|m| m.cols).collect();
        if widths.iter().any(|w| *w != widths[0])
            || stacked && members.iter().any(|m| m.rows != members[0].rows)
        {
            let shapes: Vec<_> =
                members.iter().map(|m| format!("{} [{}, {}]", m.name, m.rows, m.cols)).collect();
            return self
                .problems
                .push(Error::source(to, format!("its members' shapes do not fit: {}", shapes.join(", "))));
        }
        let mut param = Param {
            to,
            part: if mtp && self.engine.sharded() { Part::Mtp } else { Part::Model },
            layer,
            stage: rule.stage,
            unless_tied: rule.unless_tied,
            members,
            stacked,
            form: Form::Packed,
            decoded: None,
            unquantised: rule.float.clone(),
            pair: rule.pair.clone(),
            aliases: rule.aliases.iter().map(|a| at(a)).collect(),
        };
        match self.form(rule, &param) {
            Ok((form, decoded)) => (param.form, param.decoded) = (form, decoded),
            Err(problem) => return self.problems.push(problem),
        }
        if param.form == Form::Packed && !param.members.iter().all(|m| m.aligned(self.cut_parts(&param))) {
            self.misaligned.push(self.params.len());
        }
        self.params.push(param);
    }

    /// Ranks a parameter is cut for: whole experts are not cut.
    fn cut_parts(&self, param: &Param) -> u64 {
        if param.stacked && self.policy.ep { 1 } else { self.parts }
    }

    fn member(
        &self,
        rule: &ParamRule,
        i: usize,
        name: &str,
        layer: Option<u64>,
        stacked: bool,
    ) -> Result<Member> {
        let symbols = &self.model.symbols;
        let count = if stacked { symbols.experts } else { 1 };
        let (name, rows) = segment(name);
        let mut tensors = Vec::new();
        for e in 0..count {
            let name = name.replace("{E}", &e.to_string());
            match self.model.index.get(&name) {
                Some(&t) => tensors.push(t),
                None => {
                    return Err(Error::source(
                        name,
                        format!("missing expert {e} of {count}; the GGUF is incomplete"),
                    ));
                }
            }
        }
        let first: &HfTensor = &self.model.tensors[tensors[0]];
        if let (SharedExperts::Fused, Some(shared)) = (self.policy.shared_experts, rule.fused.get(i)) {
            let shared = shared.replace("{L}", &layer.map(|l| l.to_string()).unwrap_or_default());
            let found = self.model.index.get(&shared).map(|t| (*t, &self.model.tensors[*t].shape));
            match found {
                Some((t, shape)) if *shape == first.shape => tensors.push(t),
                _ => {
                    let shape = found.map_or("missing".into(), |(_, shape)| format!("shape {shape:?}"));
                    return Err(Error::source(
                        shared,
                        format!(
                            "{shape}, expected {:?} as a routed expert; pass --shared-experts separate",
                            first.shape
                        ),
                    ));
                }
            }
        }
        if let Some(&other) = tensors.iter().find(|t| self.model.tensors[**t].shape != first.shape) {
            let other = &self.model.tensors[other];
            return Err(Error::source(
                &other.name,
                format!("shape {:?}, expected {:?} as {}", other.shape, first.shape, first.name),
            ));
        }
        let rows = taken(symbols, layer, &first.name, rows, first.rows())?;
        let cut = rule.cut_of(i);
        // Whole experts per rank: the cut inside an expert falls away.
        let cut = if stacked && self.policy.ep { Cut::Whole } else { cut };
        let usual = if cut == Cut::KvHeads { "kv_heads" } else { "heads" };
        let symbol = rule.heads.get(i).or(rule.heads.first()).map_or(usual, String::as_str);
        Ok(Member {
            name: name.to_owned(),
            cut,
            heads: symbols.get(symbol, layer.unwrap_or(0)),
            first: rows.start,
            rows: rows.end - rows.start,
            cols: first.cols(),
            vector: first.shape.len() == 1,
            unsqueeze: first.unsqueeze,
            ty: first.views.first().map_or(&TYPES[0], |v| self.gguf.tensors()[v.tensor].ty),
            tensors,
        })
    }

    /// Whether a parameter stays packed; if not, its dtype and why packed sources are decoded.
    fn form(&mut self, rule: &ParamRule, param: &Param) -> Result<(Form, Option<String>)> {
        let wanted = self.policy;
        let float = match (rule.dtype.as_deref(), wanted.weights) {
            (Some(_), _) | (None, Weights::F32) => Float::F32,
            (None, Weights::F16 | Weights::FastF16) => Float::F16,
            (None, Weights::Keep | Weights::Bf16 | Weights::Fast) => Float::Bf16,
        };
        let mut types: BTreeMap<u32, &'static GgmlType> = BTreeMap::new();
        let mut moved = None;
        for view in param.members.iter().flat_map(|m| &m.tensors).flat_map(|t| &self.model.tensors[*t].views)
        {
            let tensor = &self.gguf.tensors()[view.tensor];
            if tensor.ty.is_integer() || tensor.ty.is_activation() {
                return Err(Error::source(
                    &tensor.name,
                    format!("type {}, expected a float or quantised type for {}", tensor.ty.name, param.to),
                ));
            }
            types.insert(tensor.ty.id, tensor.ty);
            let inside = |swap: &Swap| !swap.size.is_multiple_of(tensor.ty.block);
            moved = moved.or(match () {
                () if view.order == Order::Transposed => Some("it is stored transposed"),
                () if view.values.is_some() => Some("its values are changed"),
                () if view.columns.as_ref().is_some_and(inside) => {
                    Some("its columns are swapped inside a block")
                }
                () => None,
            });
        }
        let quantised = types.values().filter(|t| t.is_quantised()).count();
        if quantised == 0 {
            return Ok((Form::Float(float), None));
        }
        let decode = |why: String| Ok((Form::Float(float), Some(why)));
        let names = || types.values().map(|t| t.name).collect::<Vec<_>>().join(", ");
        let kernels = self.engine.packed.as_ref().map_or(&[][..], |packed| &packed.types);
        let unknown: Vec<_> = types
            .values()
            .filter(|t| t.is_quantised() && !kernels.iter().any(|p| p == t.name))
            .map(|t| t.name)
            .collect();
        if let Some(recoding) = self.recoding {
            // An ordinary checkpoint: every parameter is one tensor.
            return match recoding.of(param.members[0].tensors[0]) {
                Ok((form, _)) => Ok((Form::Recoded(form, recoding.float), None)),
                Err(why) => decode(why),
            };
        }
        if wanted.weights != Weights::Keep {
            return decode(format!("--weights {}", policy::spelled(wanted.weights)));
        }
        if let Some(why) = &rule.float {
            return decode(why.clone());
        }
        if let Some(why) = moved {
            return decode(why.into());
        }
        if !unknown.is_empty() {
            return decode(format!("{} has no kernel for {}", self.engine.engine, unknown.join(", ")));
        }
        if quantised < types.len() || param.stacked && types.len() > 1 {
            if wanted.mixed == Fit::Dequantise {
                return decode(format!("members of unlike types {} (--mixed dequantise)", names()));
            }
            self.mixed.push((param.to.clone(), names()));
        }
        Ok((Form::Packed, None))
    }

    /// Cuts that do not come out even, one line for each kind.
    fn cuts(&mut self) {
        let mut seen = BTreeMap::new();
        for param in &self.params {
            for member in &param.members {
                if member.slice(self.engine.padded_vocab(member.rows, self.parts), self.parts, 0).is_some() {
                    continue;
                }
                let (what, n) = match member.cut {
                    Cut::Heads | Cut::HeadCols => ("attention heads", member.heads),
                    Cut::KvHeads => ("key/value heads", member.heads),
                    Cut::Vocab => {
                        ("rows of the padded vocabulary", self.engine.padded_vocab(member.rows, self.parts))
                    }
                    Cut::Cols => ("columns", member.cols),
                    Cut::Rows | Cut::Whole => ("rows", member.rows),
                };
                seen.entry((what, n)).or_insert_with(|| member.name.clone());
            }
        }
        let works = if !seen.is_empty() { self.largest() } else { Default::default() };
        let tp = self.parts;
        self.problems.extend(seen.into_iter().map(|((what, n), name)| {
            Error::request(
                &name,
                format!(
                    "its {n} {what} cannot be divided over --tp {tp}; the largest --tp that works is {works}"
                ),
            )
        }));
    }

    /// The largest number of ranks below the requested one that every cut allows.
    fn largest(&self) -> u64 {
        let fits = |parts: u64| {
            self.params.iter().all(|p| {
                let parts = if p.stacked && self.policy.ep { 1 } else { parts };
                p.members.iter().all(|m| {
                    m.slice(self.engine.padded_vocab(m.rows, parts), parts, 0).is_some()
                        && (p.form != Form::Packed || m.aligned(parts))
                })
            })
        };
        (1..self.parts).rev().find(|p| fits(*p)).unwrap_or(1)
    }

    /// What the policies refuse, or decode.
    fn refusals(&mut self) {
        for (name, types) in &self.mixed {
            self.problems.push(Error::request(
                name,
                format!("its members are of unlike types ({types}); pass --mixed dequantise to decode them"),
            ));
        }
        if self.policy.misaligned == Fit::Dequantise {
            for &i in &self.misaligned {
                self.params[i].form = Form::Float(PACKED_BESIDE);
                self.params[i].decoded =
                    Some("the cut falls inside a block (--misaligned dequantise)".into());
            }
            return;
        }
        let works = if self.misaligned.is_empty() { 0 } else { self.largest() };
        for &i in &self.misaligned {
            let param = &self.params[i];
            let parts = self.cut_parts(param);
            for m in param.members.iter().filter(|m| !m.aligned(parts)) {
                let tensor = &self.gguf.tensors()[self.model.tensors[m.tensors[0]].views[0].tensor];
                self.problems.push(Error::request(
                    &tensor.name,
                    format!(
                        "{} packs {} columns in a block, but each of {parts} ranks gets {} of {} columns; \
                         pass --misaligned dequantise to decode it, or --tp {works}, the largest that works",
                        m.ty.name,
                        m.ty.block,
                        m.cols / parts,
                        m.cols
                    ),
                ));
            }
        }
    }

    /// Decodes packed parameters whose pair is not packed.
    fn pairs(&mut self) {
        let mut floats: BTreeMap<(String, Option<u64>), String> = BTreeMap::new();
        for p in self.params.iter().filter(|p| p.form != Form::Packed) {
            if let Some(pair) = &p.pair {
                floats.insert((pair.clone(), p.layer), p.to.clone());
            }
        }
        for p in self.params.iter_mut().filter(|p| p.form == Form::Packed) {
            if let Some(other) = p.pair.clone().and_then(|pair| floats.get(&(pair, p.layer))) {
                p.form = Form::Float(PACKED_BESIDE);
                p.decoded =
                    Some(format!("the engine computes it together with {other}, which is not packed"));
            }
        }
    }
}
