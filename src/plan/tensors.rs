//! GGUF tensors to Hugging Face tensors: where every row of each comes from.

use super::symbols::Symbols;
use super::{latent, rows};
use crate::error::{Error, Result};
use crate::gguf::{Gguf, Tensor};
use crate::indexer;
pub use crate::mapping::Values;
use crate::mapping::{Arch, TensorRule, Via};
use crate::policy::{Keep, Mtp, Policy};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// A run of rows of one matrix of a GGUF tensor, restricted to some columns, in Hugging Face order.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Index into [`Gguf::tensors`].
    pub tensor: usize,
    /// Which matrix of a 3-D tensor (expert, head); 0 otherwise.
    pub matrix: u64,
    /// How logical rows lie in the file.
    pub order: Order,
    /// First logical row and one past the last.
    pub rows: Range<u64>,
    /// First logical column and one past the last.
    pub cols: Range<u64>,
    /// How logical columns lie in the matrix; as stored when absent.
    pub columns: Option<Swap>,
    /// What is done to every value.
    pub values: Option<Values>,
}

impl View {
    /// Rows and columns of a matrix as they are stored.
    pub fn of(tensor: usize, matrix: u64, rows: Range<u64>, cols: Range<u64>) -> View {
        View { tensor, matrix, order: Order::Rows, rows, cols, columns: None, values: None }
    }
}

/// Blocks of `size` rows or columns: stored are `outer` times `inner` of them, logical are `inner` times `outer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Swap {
    pub outer: u64,
    pub inner: u64,
    pub size: u64,
}

impl Swap {
    /// Where logical row or column `at` is stored.
    pub fn stored(&self, at: u64) -> u64 {
        let (block, rest) = (at / self.size, at % self.size);
        let (inner, outer) = (block / self.outer, block % self.outer);
        (outer * self.inner + inner) * self.size + rest
    }
}

/// How the logical rows of a [`View`] lie in the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As stored.
    Rows,
    /// Interleaved by llama.cpp within each head of so many rows.
    Interleaved(u64),
    /// Logical rows are stored columns.
    Transposed,
}

/// One Hugging Face tensor.
#[derive(Debug)]
pub struct HfTensor {
    /// Its name.
    pub name: String,
    /// Its layer.
    pub layer: Option<u64>,
    /// Its shape, 1-D or 2-D.
    pub shape: Vec<u64>,
    /// It has a dimension of 1 between its rows and columns.
    pub unsqueeze: bool,
    /// Its rows in order; none for a tensor of zeros.
    pub views: Vec<View>,
}

impl HfTensor {
    /// Rows; the length of a 1-D tensor.
    pub fn rows(&self) -> u64 {
        self.shape[0]
    }
    /// Columns; 1 for a 1-D tensor.
    pub fn cols(&self) -> u64 {
        self.shape.get(1).copied().unwrap_or(1)
    }
}

/// What becomes of a GGUF tensor that reaches no Hugging Face tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Drop {
    /// Index into [`Gguf::tensors`].
    pub tensor: usize,
    /// Why.
    pub reason: String,
}

/// The model in Hugging Face terms.
pub struct Model {
    /// The numbers of the architecture.
    pub symbols: Symbols,
    /// All tensors.
    pub tensors: Vec<HfTensor>,
    /// Name to index.
    pub index: HashMap<String, usize>,
    /// GGUF tensors left out by a named rule or policy.
    pub dropped: Vec<Drop>,
    /// Layers that hold an indexer; empty when the model has none.
    pub indexer_layers: BTreeSet<u64>,
    /// Tensors that the file holds a second time, in another form.
    pub spares: Vec<HfTensor>,
    /// Every name that a rule of the architecture makes, with `{L}` and `{E}`.
    pub made: BTreeSet<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// A rule at one layer.
struct Use<'a> {
    rule: &'a TensorRule,
    layer: Option<u64>,
}

/// Works out every Hugging Face tensor of the model, or lists everything that stands in the way.
pub fn resolve(gguf: &Gguf, arch: &Arch, policy: &Policy) -> Result<Model> {
    let symbols = Symbols::read(arch, gguf)?;
    let mut r = Resolver {
        gguf,
        arch,
        by_name: gguf.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect(),
        known: vec![false; gguf.tensors().len()],
        problems: Vec::new(),
        model: Model {
            symbols,
            tensors: Vec::new(),
            index: HashMap::new(),
            dropped: Vec::new(),
            indexer_layers: BTreeSet::new(),
            spares: Vec::new(),
            made: arch.tensors.iter().flat_map(|rule| rule.to.iter().cloned()).collect(),
            notes: Vec::new(),
        },
    };
    r.run(policy)?;
    Error::all(r.problems)?;
    Ok(r.model)
}

struct Resolver<'a> {
    gguf: &'a Gguf,
    arch: &'a Arch,
    by_name: HashMap<&'a str, usize>,
    /// GGUF tensors that a rule used or dropped.
    known: Vec<bool>,
    problems: Vec<Error>,
    model: Model,
}

impl<'a> Resolver<'a> {
    fn run(&mut self, policy: &Policy) -> Result<()> {
        let mtp_without_tensors = self.mtp_absent();
        let symbols = &self.model.symbols;
        let owners = match self.arch.groups.get("indexer") {
            None => Vec::new(),
            Some(group) => indexer::layers(self.gguf, group, symbols.trunk, symbols.blocks - symbols.trunk)?,
        };
        let (uses, spares) = self.uses()?;
        for use_ in uses {
            let in_mtp = use_.layer.is_some_and(|l| l >= self.model.symbols.trunk);
            if in_mtp && mtp_without_tensors {
                continue;
            }
            let names = self.names(&use_);
            let present = names.iter().filter(|n| self.by_name.contains_key(n.as_str())).count();
            if let Some(group) = &use_.rule.group {
                let shares = self.not_owner(group, use_.layer, &owners);
                if self.group_absent(group, use_.layer) {
                    let unwanted = shares.is_some()
                        || in_mtp && policy.mtp == Mtp::Drop
                        || group == "indexer" && policy.indexer == Keep::Drop;
                    if !unwanted && self.leads_group(use_.rule) && !self.group_nowhere(group) {
                        self.problems.push(Error::source(
                            &names[0],
                            format!(
                                "missing, like everything of the {group} in layer {}, which has its own by the \
                                 metadata; get a complete GGUF, or pass --{group} drop",
                                use_.layer.unwrap_or(0)
                            ),
                        ));
                    }
                    continue;
                }
                if let Some(reason) = shares {
                    self.drop(&names, &reason);
                    continue;
                }
            }
            if present == 0 && use_.rule.optional {
                continue;
            }
            if present < names.len() {
                let to = use_.rule.to[0].replace("{L}", &use_.layer.unwrap_or(0).to_string());
                for name in names.iter().filter(|n| !self.by_name.contains_key(n.as_str())) {
                    self.problems.push(Error::source(
                        name,
                        format!("missing; {to} is made of it; the GGUF is incomplete"),
                    ));
                }
                for name in &names {
                    self.mark(name);
                }
                continue;
            }
            let dropped = match (in_mtp && policy.mtp == Mtp::Drop, use_.rule.group.as_deref()) {
                (true, _) => Some("MTP block dropped (--mtp drop)"),
                (_, Some("indexer")) if policy.indexer == Keep::Drop => {
                    Some("indexer dropped (--indexer drop)")
                }
                _ => None,
            };
            if let Some(reason) = dropped {
                self.drop(&names, reason);
                continue;
            }
            if use_.rule.group.as_deref() == Some("indexer") {
                self.model.indexer_layers.extend(use_.layer);
            }
            match self.made(&use_, &names) {
                Ok(tensors) => tensors.into_iter().for_each(|tensor| self.add(tensor)),
                Err(problem) => self.problems.push(problem),
            }
            // A tensor of zeros takes nothing from the one whose rows it counts.
            if use_.rule.via != Via::Zeros {
                for name in &names {
                    self.mark(name);
                }
            }
        }
        for spare in spares {
            self.spare(&spare);
        }
        self.leftovers();
        if mtp_without_tensors && self.problems.is_empty() {
            match policy.mtp {
                Mtp::Drop => self
                    .model
                    .notes
                    .push("the metadata names an MTP block, but the file has no tensors of it".into()),
                Mtp::Keep | Mtp::Only => self.problems.push(Error::source(
                    format!("blk.{}.nextn.*", self.model.symbols.trunk),
                    format!(
                        "missing, though {} is not 0; pass --mtp drop to go on without the MTP block",
                        self.model.symbols.key("mtp")
                    ),
                )),
            }
        }
        let has_group = self.arch.tensors.iter().any(|t| t.group.as_deref() == Some("indexer"));
        if has_group
            && policy.indexer == Keep::Keep
            && self.model.indexer_layers.is_empty()
            && self.problems.is_empty()
        {
            self.problems.push(Error::source(
                "blk.*.indexer.*",
                "the file has no indexer tensors; pass --indexer drop to serve it with dense attention",
            ));
        }
        Ok(())
    }

    /// The metadata counts an MTP block of which the file has nothing.
    fn mtp_absent(&self) -> bool {
        let symbols = &self.model.symbols;
        symbols.trunk < symbols.blocks
            && (symbols.trunk..symbols.blocks)
                .all(|l| !self.gguf.tensors().iter().any(|t| t.name.starts_with(&format!("blk.{l}."))))
    }

    /// Every rule at every layer it applies to; of variants, the one the layer has, and those that it has to spare.
    fn uses(&self) -> Result<(Vec<Use<'a>>, Vec<Use<'a>>)> {
        let bad = |rule: &TensorRule, what: &str| {
            Error::mapping(&self.arch.file, format!("rule for {:?}: {what}", rule.from))
        };
        let symbols = &self.model.symbols;
        let mut uses = Vec::new();
        for rule in &self.arch.tensors {
            if let Some(when) = &rule.when {
                let holds = match (when.strip_prefix('!'), when.split_once('=')) {
                    (Some(name), _) => symbols.get(name, 0) == 0,
                    (None, Some((name, number))) => match number.parse::<u64>() {
                        Ok(number) => symbols.get(name, 0) == number,
                        Err(_) => {
                            return Err(bad(rule, &format!("when = {when:?}, expected a whole number")));
                        }
                    },
                    (None, None) => symbols.get(when, 0) != 0,
                };
                if !holds {
                    continue;
                }
            }
            let layers = 0..symbols.blocks;
            let there =
                |with: &String| self.gguf.tensors().iter().any(|t| matches_drop(with, &t.name, &layers));
            if !rule.with.is_empty() && !rule.with.iter().any(there) {
                continue;
            }
            if !rule.from[0].contains("{L}") {
                uses.push(Use { rule, layer: None });
                continue;
            }
            let range = match &rule.layers {
                None => 0..symbols.blocks,
                Some(text) => symbols
                    .range(text)
                    .ok_or_else(|| bad(rule, &format!("in = {text:?} is no range of symbols")))?,
            };
            uses.extend(range.map(|l| Use { rule, layer: Some(l) }));
        }
        // A variant applies where the layer has one of its tensors, a spare one where it has of no other; where
        // it has none of any variant, the first stands for all of them and is reported missing.
        let mut chosen: HashMap<(&str, Option<u64>), &str> = HashMap::new();
        let here = |use_: &Use| self.names(use_).iter().any(|n| self.by_name.contains_key(n.as_str()));
        let turns: [&dyn Fn(&Use) -> bool; 3] = [&|u| u.rule.spare.is_none() && here(u), &here, &|_| true];
        for turn in turns {
            for use_ in &uses {
                if let Some((name, variant)) = use_.rule.variant()
                    && turn(use_)
                {
                    chosen.entry((name, use_.layer)).or_insert(variant);
                }
            }
        }
        let (uses, others): (Vec<_>, Vec<_>) = uses.into_iter().partition(|u| {
            u.rule.variant().is_none_or(|(name, variant)| chosen[&(name, u.layer)] == variant)
        });
        let spares = others.into_iter().filter(|u| u.rule.spare.is_some() && here(u)).collect();
        Ok((uses, spares))
    }

    /// Drops what a layer has beside another variant; whole, it is kept to be compared.
    fn spare(&mut self, use_: &Use<'a>) {
        let names = self.names(use_);
        if names.iter().all(|n| self.by_name.contains_key(n.as_str())) {
            match self.made(use_, &names) {
                Ok(tensors) => self.model.spares.extend(tensors),
                Err(problem) => self.problems.push(problem),
            }
        }
        self.drop(&names, use_.rule.spare.as_deref().unwrap_or_default());
    }

    /// The GGUF names of a rule at a layer, one per expert where it names experts.
    fn names(&self, use_: &Use) -> Vec<String> {
        let layer = use_.layer.map(|l| l.to_string()).unwrap_or_default();
        let mut names = Vec::new();
        for from in &use_.rule.from {
            let name = from.replace("{L}", &layer);
            if name.contains("{E}") {
                // An expert count beyond the number of tensors is refused when the stack is checked;
                // here it must only not be followed.
                let experts = self.model.symbols.experts.min(self.gguf.tensors().len() as u64 + 1);
                names.extend((0..experts).map(|e| name.replace("{E}", &e.to_string())));
            } else {
                names.push(name);
            }
        }
        names
    }

    fn mark(&mut self, name: &str) {
        if let Some(&i) = self.by_name.get(name) {
            self.known[i] = true;
        }
    }

    fn drop(&mut self, names: &[String], reason: &str) {
        for name in names {
            if let Some(&tensor) = self.by_name.get(name.as_str())
                && !self.known[tensor]
            {
                self.known[tensor] = true;
                self.model.dropped.push(Drop { tensor, reason: reason.to_owned() });
            }
        }
    }

    /// Whether a layer has nothing of a group.
    fn group_absent(&self, group: &str, layer: Option<u64>) -> bool {
        let layer = layer.map(|l| l.to_string()).unwrap_or_default();
        let mut rules = self.arch.tensors.iter().filter(|t| t.group.as_deref() == Some(group));
        !rules.any(|t| t.from.iter().any(|f| self.by_name.contains_key(f.replace("{L}", &layer).as_str())))
    }

    /// Whether the file has nothing of a group in any layer.
    fn group_nowhere(&self, group: &str) -> bool {
        (0..self.model.symbols.blocks).all(|layer| self.group_absent(group, Some(layer)))
    }

    /// Whether a rule is the first of its group, which speaks for all of it.
    fn leads_group(&self, rule: &TensorRule) -> bool {
        let first = self.arch.tensors.iter().find(|other| other.group == rule.group);
        first.is_some_and(|first| std::ptr::eq(first, rule))
    }

    /// Why a layer must not have a group: it shares that of a layer before it.
    fn not_owner(&self, group: &str, layer: Option<u64>, owners: &[bool]) -> Option<String> {
        let owner = *owners.get(layer? as usize)?;
        (!owner).then(|| self.arch.groups.get(group).map_or_else(String::new, |g| g.reason.clone()))
    }

    /// Drops what the mapping names; everything else left over is unknown.
    fn leftovers(&mut self) {
        let layers = 0..self.model.symbols.blocks;
        for i in 0..self.known.len() {
            if self.known[i] {
                continue;
            }
            let name = &self.gguf.tensors()[i].name;
            let rule = self.arch.drops.iter().find(|d| matches_drop(&d.name, name, &layers));
            match rule {
                Some(rule) => self.model.dropped.push(Drop { tensor: i, reason: rule.reason.clone() }),
                None => self.problems.push(Error::source(
                    name,
                    format!(
                        "unknown tensor ({} {:?}) for architecture {}: no rule of its mapping uses or drops it",
                        self.gguf.tensors()[i].ty.name, self.gguf.tensors()[i].ne, self.arch.architecture
                    ),
                )),
            }
        }
    }

    /// The Hugging Face tensors of a rule whose GGUF tensors are all there.
    fn made(&self, use_: &Use, names: &[String]) -> Result<Vec<HfTensor>> {
        let sources: Vec<usize> = names.iter().map(|n| self.by_name[n.as_str()]).collect();
        for &i in &sources {
            let t = &self.gguf.tensors()[i];
            if t.ne.contains(&0) {
                return Err(Error::source(
                    &t.name,
                    format!("shape {:?} has no elements; the GGUF is damaged", t.ne),
                ));
            }
        }
        let rule = use_.rule;
        let to: Vec<String> = rule
            .to
            .iter()
            .map(|t| t.replace("{L}", &use_.layer.map(|l| l.to_string()).unwrap_or_default()))
            .collect();
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: Vec<u64>, views: Vec<View>| {
            let views = views.into_iter().map(|view| View { values: rule.values, ..view }).collect();
            tensors.push(HfTensor { name, layer: use_.layer, shape, unsqueeze: rule.unsqueeze, views });
        };
        match rule.via {
            Via::Copy | Via::Unpermute => {
                for (e, &tensor) in sources.iter().enumerate() {
                    let t = &self.gguf.tensors()[tensor];
                    let shape = matrix_shape(t)?;
                    let order = match &rule.heads {
                        Some(heads) if rule.via == Via::Unpermute => {
                            self.head_order(t, &shape, heads, use_.layer)?
                        }
                        _ => Order::Rows,
                    };
                    let cols = shape.get(1).copied().unwrap_or(1);
                    let view = View { order, ..View::of(tensor, 0, 0..shape[0], 0..cols) };
                    add(to[0].replace("{E}", &e.to_string()), shape, vec![view]);
                }
            }
            Via::Experts | Via::ExpertsGateUp => {
                let tensor = sources[0];
                let t = &self.gguf.tensors()[tensor];
                let experts = self.model.symbols.experts;
                let parts = to.len() as u64;
                let [cols, rows, stack] = t.ne[..] else {
                    return Err(Error::source(
                        &t.name,
                        format!("shape {:?}, expected 3 dimensions: one matrix per expert", t.ne),
                    ));
                };
                if stack != experts || rows % parts != 0 {
                    return Err(Error::source(
                        &t.name,
                        format!(
                            "shape {:?}, expected {experts} experts ({})",
                            t.ne,
                            self.model.symbols.key("experts")
                        ),
                    ));
                }
                let rows = rows / parts;
                for e in 0..experts {
                    for (part, to) in to.iter().enumerate() {
                        let first = part as u64 * rows;
                        let view = View::of(tensor, e, first..first + rows, 0..cols);
                        add(to.replace("{E}", &e.to_string()), vec![rows, cols], vec![view]);
                    }
                }
            }
            Via::Rows => {
                let (views, shape) = rows::rows(self.gguf, &self.model.symbols, rule, &sources, use_.layer)?;
                add(to[0].clone(), shape, views);
            }
            Via::Zeros => {
                let shape = matrix_shape(&self.gguf.tensors()[sources[0]])?;
                add(to[0].clone(), vec![shape[0]], Vec::new());
            }
            Via::MlaKvB => {
                let (k, v) = (sources[0], sources[1]);
                let (tk, tv) = (&self.gguf.tensors()[k], &self.gguf.tensors()[v]);
                let heads = self
                    .model
                    .symbols
                    .get(rule.heads.as_deref().unwrap_or_default(), use_.layer.unwrap_or(0));
                let (views, shape) = latent::kv_b((k, tk), (v, tv), heads)?;
                add(to[0].clone(), shape, views);
            }
        }
        Ok(tensors)
    }

    /// The order of llama.cpp's permuted heads.
    fn head_order(&self, t: &Tensor, shape: &[u64], heads: &str, layer: Option<u64>) -> Result<Order> {
        let n = self.model.symbols.get(heads, layer.unwrap_or(0));
        if n == 0 || !shape[0].is_multiple_of(n) || !(shape[0] / n).is_multiple_of(2) {
            return Err(Error::source(
                &t.name,
                format!(
                    "{} rows, expected an even number for each of {n} heads ({})",
                    shape[0],
                    self.model.symbols.key(heads)
                ),
            ));
        }
        Ok(Order::Interleaved(shape[0] / n))
    }

    fn add(&mut self, tensor: HfTensor) {
        self.model.index.insert(tensor.name.clone(), self.model.tensors.len());
        self.model.tensors.push(tensor);
    }
}

/// The Hugging Face shape of a GGUF vector or matrix (trailing dimensions of 1 are llama.cpp's padding).
pub(super) fn matrix_shape(t: &Tensor) -> Result<Vec<u64>> {
    let mut ne = t.ne.clone();
    while ne.len() > 2 && ne.last() == Some(&1) {
        ne.pop();
    }
    match ne[..] {
        [n] if t.ty.is_quantised() => Err(Error::source(
            &t.name,
            format!("a vector of {n} elements packed as {}, expected f32, f16 or bf16", t.ty.name),
        )),
        [n] => Ok(vec![n]),
        [cols, rows] => Ok(vec![rows, cols]),
        _ => Err(Error::source(&t.name, format!("shape {:?}, expected a vector or a matrix", t.ne))),
    }
}

/// Whether a pattern names a tensor: `{L}` stands for any layer, a final `*` for any rest.
fn matches_drop(pattern: &str, name: &str, layers: &Range<u64>) -> bool {
    let (pattern, open) = pattern.strip_suffix('*').map_or((pattern, false), |p| (p, true));
    let same = |head: &str, name: &str| if open { name.starts_with(head) } else { name == head };
    match pattern.split_once("{L}") {
        None => same(pattern, name),
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            rest[..digits].parse().is_ok_and(|l: u64| layers.contains(&l)) && same(after, &rest[digits..])
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_patterns_name_layers_and_prefixes() {
        assert!(matches_drop("rope_freqs.weight", "rope_freqs.weight", &(0..2)));
        assert!(matches_drop("blk.{L}.attn_rot_embd", "blk.1.attn_rot_embd", &(0..2)));
        assert!(!matches_drop("blk.{L}.attn_rot_embd", "blk.2.attn_rot_embd", &(0..2)));
        assert!(!matches_drop("blk.{L}.attn_rot_embd", "blk.1.attn_rot_embd.x", &(0..2)));
        assert!(matches_drop("v.*", "v.blk.0.x", &(0..2)));
    }
}
