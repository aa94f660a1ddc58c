//! One rank's file: its tensors, their bytes' origins and the safetensors header.

use super::Plan;
use super::params::{Form, Param};
use super::recode::Recoding;
use super::tensors::View;
use crate::cut;
use crate::error::{Error, Result};
use crate::forms::{self, Piece};
use crate::gguf::Gguf;
use crate::manifest;
use crate::mapping::{Files, Packed, Part, Stage};
use crate::policy::Mtp;
use crate::quant::Float;
use serde_json::json;
use std::ops::Range;

/// Tensor data starts at a multiple of this, so that O_DIRECT reads and DMA fit.
const DATA_ALIGNMENT: usize = 4096;
/// The safetensors library refuses a longer header (`MAX_HEADER_SIZE`).
const MAX_HEADER: usize = 100_000_000;

/// The plan of one file.
pub struct ShardPlan {
    /// Its name, from the rank numbers alone.
    pub name: String,
    /// Trunk or draft.
    pub part: Part,
    /// Pipeline stage.
    pub pp: u64,
    /// Tensor-parallel rank.
    pub tp: u64,
    /// The safetensors header with its length prefix and padding: the file's first bytes.
    pub header: Vec<u8>,
    /// Length of the file.
    pub bytes: u64,
    /// Its tensors, in file order.
    pub tensors: Vec<TensorPlan>,
    /// Experts it holds.
    pub experts: Range<u64>,
    /// Real vocabulary rows it holds, when it holds any part of the vocabulary.
    pub vocab_rows: Option<Range<u64>>,
}

/// One tensor of a file.
pub struct TensorPlan {
    /// Its name.
    pub name: String,
    /// Its safetensors dtype.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where it starts in the file.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its bytes, in order and without gaps.
    pub bands: Vec<Band>,
    /// Shape in elements, of packed bytes.
    pub logical: Option<Vec<u64>>,
    /// What it joins.
    pub members: Vec<manifest::Member>,
    /// Why packed sources were decoded.
    pub decoded: Option<String>,
    /// The form that packed sources were recoded to, on the tensor of their codes.
    pub recoded: Option<manifest::Recoded>,
    /// Other names in the engine.
    pub aliases: Vec<String>,
}

/// A run of rows of one origin.
#[derive(PartialEq)]
pub struct Band {
    /// First byte in the tensor.
    pub start: u64,
    /// Rows.
    pub rows: u64,
    /// Bytes of one row here, padding included.
    pub width: u64,
    /// Where the rows come from.
    pub fill: Fill,
}

/// Where the bytes of a [`Band`] come from.
#[derive(PartialEq)]
pub enum Fill {
    /// Zeros: padding of the vocabulary.
    Zero,
    /// These bytes.
    Bytes(Vec<u8>),
    /// Blocks as they are, each row padded with zeros to the band's width.
    Packed(View),
    /// A part of the blocks' codes and scales in another form, its floats of this dtype.
    Recoded(View, forms::Form, Piece, Float),
    /// Decoded or cast elements.
    Float(View, Float),
}

impl Band {
    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.rows * self.width
    }
}

impl ShardPlan {
    /// What the manifest says of the file, but for hashes and counts of its bytes, which are empty.
    pub fn entry(&self) -> manifest::Shard {
        let tensor = |t: &TensorPlan| manifest::Tensor {
            name: t.name.clone(),
            dtype: t.dtype.into(),
            shape: t.shape.clone(),
            offset: t.offset,
            bytes: t.bytes,
            logical: t.logical.clone(),
            members: t.members.clone(),
            recoded: t.recoded.clone(),
            decoded: t.decoded.clone(),
            nonfinite: 0,
            aliases: t.aliases.clone(),
        };
        manifest::Shard {
            file: self.name.clone(),
            part: if self.part == Part::Mtp { "mtp" } else { "model" }.into(),
            pp: self.pp,
            tp: self.tp,
            bytes: self.bytes,
            data_start: self.header.len() as u64,
            blake3: String::new(),
            leaves: Vec::new(),
            experts: self.experts.clone().collect(),
            vocab_rows: self.vocab_rows.as_ref().map(|r| [r.start, r.end]),
            tensors: self.tensors.iter().map(tensor).collect(),
        }
    }
}

/// Cuts every parameter for every rank and lays out the files.
pub(super) fn cut(plan: &Plan, gguf: &Gguf, params: &[Param]) -> Result<Vec<ShardPlan>> {
    let Some(files) = &plan.engine.files else { return checkpoint(plan, gguf, params) };
    let policy = &plan.policy;
    let mut shards = Vec::new();
    for part in [Part::Model, Part::Mtp] {
        for pp in 0..policy.pp {
            let last = pp + 1 == policy.pp;
            let here: Vec<_> = params.iter().filter(|p| p.part == part && on_stage(plan, p, pp)).collect();
            if here.is_empty() || part == Part::Mtp && !last {
                continue;
            }
            for tp in 0..policy.tp {
                let name = file_name(plan, files, part, pp, tp)?;
                let mut tensors = Vec::new();
                for param in &here {
                    tensors.extend(Cutter { plan, gguf, param, tp }.tensors());
                }
                tensors.extend(constants(plan, part, pp));
                let mut shard = lay_out(name, part, pp, tp, tensors)?;
                shard.experts = match (plan.model.symbols.experts, policy.ep) {
                    (n, true) => cut::experts(n, policy.tp, tp),
                    (n, false) => 0..n,
                };
                shard.vocab_rows = (pp == 0 || last)
                    .then(|| {
                        cut::vocab_rows(plan.vocab[0], plan.vocab[1], policy.tp, tp).map(|(rows, _)| rows)
                    })
                    .flatten();
                shards.push(shard);
            }
        }
    }
    Ok(shards)
}

/// The name of a rank's file.
fn file_name(plan: &Plan, files: &Files, part: Part, pp: u64, tp: u64) -> Result<String> {
    let pattern = match (part, plan.policy.pp) {
        (Part::Model, 1) => Some(&files.rank),
        (Part::Model, _) => files.stage.as_ref(),
        (Part::Mtp, _) if plan.policy.mtp == Mtp::Only => Some(&files.rank),
        (Part::Mtp, _) => files.draft.as_ref(),
    };
    let pattern = pattern.ok_or_else(|| {
        Error::request(
            &plan.layout,
            format!(
                "{} has no file name for an MTP draft (files.draft); pass --mtp drop, or --mtp only for a directory of its own",
                plan.engine.engine
            ),
        )
    })?;
    Ok(pattern.replace("{tp}", &tp.to_string()).replace("{pp}", &pp.to_string()))
}

/// Whether a parameter belongs to a pipeline stage.
fn on_stage(plan: &Plan, param: &Param, pp: u64) -> bool {
    let last = pp + 1 == plan.policy.pp;
    if param.unless_tied && plan.tied && last && (pp == 0 || param.part == Part::Mtp) {
        return false;
    }
    match (param.stage, param.layer, param.part) {
        (_, _, Part::Mtp) => last,
        (Some(Stage::First), ..) => pp == 0,
        (Some(Stage::Last), ..) => last,
        (None, Some(layer), _) => {
            (plan.policy.stages[pp as usize]..plan.policy.stages[pp as usize + 1]).contains(&layer)
        }
        (None, None, _) => true,
    }
}

/// The scalars the engine expects for each layer of a file.
fn constants(plan: &Plan, part: Part, pp: u64) -> Vec<TensorPlan> {
    let engine = &plan.engine;
    let (block, layers) = match part {
        Part::Model => (&engine.block, plan.policy.stages[pp as usize]..plan.policy.stages[pp as usize + 1]),
        Part::Mtp => (&engine.mtp_block, plan.model.symbols.trunk..plan.model.symbols.blocks),
    };
    let mut tensors = Vec::new();
    for rule in &engine.constants {
        let has = |layer: &u64| {
            let with = rule.with.as_ref().map(|w| w.replace("{L}", &layer.to_string()));
            with.is_none_or(|with| with.split('|').any(|name| plan.model.index.contains_key(name)))
        };
        for (layer, to) in layers.clone().filter(has).flat_map(|l| rule.to.iter().map(move |to| (l, to))) {
            let fill = Fill::Bytes(rule.value.to_le_bytes().to_vec());
            tensors.push(TensorPlan {
                name: to
                    .replace("{B}", block)
                    .replace("{L}", &layer.to_string())
                    .replace("{M}", &layer.saturating_sub(plan.model.symbols.trunk).to_string()),
                dtype: "F32",
                shape: vec![],
                offset: 0,
                bytes: 4,
                bands: vec![Band { start: 0, rows: 1, width: 4, fill }],
                logical: None,
                members: vec![],
                decoded: None,
                recoded: None,
                aliases: vec![],
            });
        }
    }
    tensors
}

/// An ordinary checkpoint: tensors by name, in files of at most the size asked for.
fn checkpoint(plan: &Plan, gguf: &Gguf, params: &[Param]) -> Result<Vec<ShardPlan>> {
    let mut tensors: Vec<_> =
        params.iter().flat_map(|param| Cutter { plan, gguf, param, tp: 0 }.tensors()).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut files: Vec<Vec<TensorPlan>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        let full = size + tensor.bytes > plan.policy.max_file_size;
        if full && files.last().is_some_and(|f| !f.is_empty()) {
            files.push(Vec::new());
            size = 0;
        }
        size += tensor.bytes;
        if let Some(file) = files.last_mut() {
            file.push(tensor);
        }
    }
    let n = files.len();
    let name = |i: usize| {
        if n == 1 { "model.safetensors".into() } else { format!("model-{:05}-of-{n:05}.safetensors", i + 1) }
    };
    files.into_iter().enumerate().map(|(i, tensors)| lay_out(name(i), Part::Model, 0, 0, tensors)).collect()
}

/// Orders the tensors of a file and writes its header.
///
/// Ordered by the largest power of two that divides their size, then by name: then each is aligned
/// to that power with no holes, which the format forbids.
fn lay_out(name: String, part: Part, pp: u64, tp: u64, mut tensors: Vec<TensorPlan>) -> Result<ShardPlan> {
    tensors.sort_by(|a, b| {
        b.bytes.trailing_zeros().cmp(&a.bytes.trailing_zeros()).then_with(|| a.name.cmp(&b.name))
    });
    let mut map = serde_json::Map::new();
    map.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut end = 0;
    for t in &mut tensors {
        t.offset = end;
        end += t.bytes;
        let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [t.offset, end] });
        if map.insert(t.name.clone(), entry).is_some() {
            return Err(Error::mapping(
                &t.name,
                format!("two rules write it to {name}; the engine mapping is wrong"),
            ));
        }
    }
    let mut header = vec![0; 8];
    header.extend(serde_json::Value::Object(map).to_string().into_bytes());
    header.resize(header.len().next_multiple_of(DATA_ALIGNMENT), b' ');
    let length = header.len() - 8;
    if length > MAX_HEADER {
        return Err(Error::request(
            &name,
            format!(
                "its header is {length} bytes, more than the {MAX_HEADER} that safetensors reads; use --max-file-size"
            ),
        ));
    }
    header[..8].copy_from_slice(&(length as u64).to_le_bytes());
    for t in &mut tensors {
        t.offset += header.len() as u64;
    }
    let bytes = header.len() as u64 + end;
    Ok(ShardPlan { name, part, pp, tp, header, bytes, tensors, experts: 0..0, vocab_rows: None })
}

/// Cuts one parameter for one rank.
struct Cutter<'a> {
    plan: &'a Plan,
    gguf: &'a Gguf,
    param: &'a Param,
    tp: u64,
}

impl Cutter<'_> {
    /// The parameter's tensors on this rank: one, and its types when packed.
    fn tensors(&self) -> Vec<TensorPlan> {
        let (param, policy) = (self.param, &self.plan.policy);
        if let (Form::Recoded(form, float), Some(recoding)) = (param.form, &self.plan.recoding) {
            return self.recoded(form, float, recoding);
        }
        let slices: Vec<_> = param
            .members
            .iter()
            .filter_map(|m| m.slice(self.plan.vocab[1].max(m.rows), policy.tp, self.tp).map(|s| (m, s)))
            .collect();
        let row_bytes = |m: &super::params::Member, cols: u64| match param.form {
            // The cut was checked to fall on blocks.
            Form::Packed => cols / m.ty.block * m.ty.bytes,
            Form::Recoded(_, float) | Form::Float(float) => cols * float.size() as u64,
        };
        let width = slices.iter().map(|(m, s)| row_bytes(m, s.cols.end - s.cols.start)).max().unwrap_or(0);
        let experts = match (param.stacked, policy.ep) {
            (false, _) => 0..1,
            // A fused shared expert is the last of the stack.
            (true, false) => 0..slices.first().map_or(0, |(m, _)| m.tensors.len() as u64),
            (true, true) => cut::experts(self.plan.model.symbols.experts, policy.tp, self.tp),
        };
        let mut bands = Vec::new();
        let mut start = 0;
        for e in experts.clone() {
            for (m, s) in &slices {
                let tensor = &self.plan.model.tensors[m.tensors[e as usize]];
                let rows = m.first + s.rows.start..m.first + s.rows.end;
                for view in restrict(&tensor.views, &rows, &s.cols) {
                    let rows = view.rows.end - view.rows.start;
                    let fill = match param.form {
                        Form::Packed => Fill::Packed(view),
                        Form::Recoded(_, float) | Form::Float(float) => Fill::Float(view, float),
                    };
                    bands.push(Band { start, rows, width, fill });
                    start += rows * width;
                }
                // Rows of padding, or of a tensor that is all zeros.
                let zeros = s.padding + if tensor.views.is_empty() { s.rows.end - s.rows.start } else { 0 };
                if zeros > 0 {
                    bands.push(Band { start, rows: zeros, width, fill: Fill::Zero });
                    start += zeros * width;
                }
            }
        }
        let mut rows = 0;
        let mut members = Vec::new();
        for (m, s) in &slices {
            let n = s.rows.end - s.rows.start + s.padding;
            let packed = param.form == Form::Packed;
            members.push(self.record(
                m,
                rows..rows + n,
                packed.then(|| row_bytes(m, s.cols.end - s.cols.start)),
            ));
            rows += n;
        }
        let cols = slices.first().map_or(0, |(_, s)| s.cols.end - s.cols.start);
        let all = |what: fn(&super::params::Member) -> bool| slices.iter().all(|(m, _)| what(m));
        let shape = |last: u64| match (param.stacked, all(|m| m.vector)) {
            (true, _) => vec![experts.end - experts.start, rows, last],
            (false, true) => vec![rows],
            (false, false) if all(|m| m.unsqueeze) => vec![rows, 1, last],
            (false, false) => vec![rows, last],
        };
        let mut tensor = TensorPlan {
            name: param.to.clone(),
            dtype: "U8",
            shape: shape(cols),
            offset: 0,
            bytes: start,
            bands,
            logical: None,
            members,
            decoded: param.decoded.clone(),
            recoded: None,
            aliases: param.aliases.clone(),
        };
        match param.form {
            Form::Recoded(_, float) | Form::Float(float) => {
                tensor.dtype = float.name();
                vec![tensor]
            }
            Form::Packed => {
                let names = |pick: fn(&Packed) -> &str| {
                    let suffix = self.plan.engine.packed.as_ref().map_or("", pick);
                    let aliases = param.aliases.iter().map(|a| packed_name(a, suffix)).collect();
                    (packed_name(&param.to, suffix), aliases)
                };
                (tensor.name, tensor.aliases) = names(|packed| &packed.blocks);
                tensor.logical = Some(std::mem::replace(&mut tensor.shape, shape(width)));
                // A stack of experts has one type, a joined matrix one per member.
                let types: Vec<u8> = match param.stacked {
                    true => vec![param.members[0].ty.id as u8],
                    false => param.members.iter().map(|m| m.ty.id as u8).collect(),
                };
                let bytes = types.len() as u64;
                let (name, aliases) = names(|packed| &packed.type_ids);
                let types = TensorPlan {
                    name,
                    dtype: "U8",
                    shape: vec![bytes],
                    offset: 0,
                    bytes,
                    bands: vec![Band { start: 0, rows: 1, width: bytes, fill: Fill::Bytes(types) }],
                    logical: None,
                    members: vec![],
                    decoded: None,
                    recoded: None,
                    aliases,
                };
                vec![tensor, types]
            }
        }
    }

    /// The tensors of a matrix in another form, as the method has them.
    fn recoded(&self, form: forms::Form, float: Float, recoding: &Recoding) -> Vec<TensorPlan> {
        let member = &self.param.members[0];
        let (rows, cols) = (member.rows, member.cols);
        let error = recoding.of(member.tensors[0]).map_or(0, |(_, error)| error);
        let base = self.param.to.strip_suffix("weight").unwrap_or(&self.param.to);
        let tensor = |holds: &str, name: &str, dtype, shape, bands: Vec<Band>| TensorPlan {
            name: format!("{base}{name}"),
            dtype,
            shape,
            offset: 0,
            bytes: bands.iter().map(Band::bytes).sum(),
            bands,
            logical: None,
            members: vec![self.record(member, 0..rows, None)],
            decoded: None,
            recoded: Some(manifest::Recoded {
                holds: holds.into(),
                bits: form.bits,
                group: form.group,
                zero_point: form.zero_point,
                error,
            }),
            aliases: vec![],
        };
        let bands = |piece: Piece| {
            let mut start = 0;
            let views = self.plan.model.tensors[member.tensors[0]].views.iter();
            let band = |view: &View| {
                let ty = self.gguf.tensors()[view.tensor].ty;
                let width = cols / ty.block * form.block_bytes(piece, ty);
                let rows = view.rows.end - view.rows.start;
                let fill = Fill::Recoded(view.clone(), form, piece, float);
                let band = Band { start, rows, width, fill };
                start += band.bytes();
                band
            };
            views.map(band).collect::<Vec<_>>()
        };
        let method = &recoding.method;
        let words = cols * u64::from(form.bits) / 32;
        let mut codes = tensor("codes", &method.codes, "I32", vec![rows, words], bands(Piece::Codes));
        codes.logical = Some(vec![rows, cols]);
        let groups = vec![rows, cols / form.group];
        let scales = tensor("scales", &method.scales, float.name(), groups.clone(), bands(Piece::Scales));
        let mut all = vec![codes, scales];
        if let Some(name) = method.zero_points.as_ref().filter(|_| form.zero_point) {
            all.push(tensor("zero_points", name, float.name(), groups, bands(Piece::ZeroPoints)));
        }
        if let Some(name) = &method.shape {
            let fill = Fill::Bytes([rows, cols].map(u64::to_le_bytes).concat());
            all.push(tensor(
                "shape",
                name,
                "I64",
                vec![2],
                vec![Band { start: 0, rows: 1, width: 16, fill }],
            ));
        }
        all
    }

    /// A member as the manifest lists it.
    fn record(
        &self,
        m: &super::params::Member,
        rows: Range<u64>,
        row_bytes: Option<u64>,
    ) -> manifest::Member {
        let mut from: Vec<usize> = Vec::new();
        for view in m.tensors.iter().flat_map(|t| &self.plan.model.tensors[*t].views) {
            if !from.contains(&view.tensor) {
                from.push(view.tensor);
            }
        }
        let sources: Vec<_> = from.iter().map(|i| &self.gguf.tensors()[*i]).collect();
        manifest::Member {
            hf: m.name.clone(),
            from: sources.iter().map(|t| t.name.clone()).collect(),
            types: sources.iter().map(|t| t.ty.name.to_owned()).collect(),
            rows: [rows.start, rows.end],
            row_bytes,
        }
    }
}

/// `X.weight` to `X.qweight`, `X.w13_weight` to `X.w13_qweight`.
fn packed_name(name: &str, suffix: &str) -> String {
    format!("{}{suffix}", name.strip_suffix("weight").unwrap_or(name))
}

/// The parts of consecutive views that hold these rows and columns of the whole.
fn restrict(views: &[View], rows: &Range<u64>, cols: &Range<u64>) -> Vec<View> {
    let mut out = Vec::new();
    let mut first = 0;
    for view in views {
        let end = first + (view.rows.end - view.rows.start);
        let (a, b) = (rows.start.max(first), rows.end.min(end));
        if a < b {
            let (rows, cols) = (
                view.rows.start + a - first..view.rows.start + b - first,
                view.cols.start + cols.start..view.cols.start + cols.end,
            );
            out.push(View { rows, cols, ..view.clone() });
        }
        first = end;
    }
    out
}
