//! What the class that config.json names declares, held against the tensors that a conversion writes. An engine
//! leaves a parameter that no file has as it was allocated, and drops a tensor that no parameter takes.

use super::Files;
use crate::error::{Error, Result};
use crate::mapping::Tables;
use crate::mapping::expr::{self, Names};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Problems listed one by one.
const LISTED: usize = 10;

/// One file of mappings/class: the parameters of a Hugging Face class.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    /// Routed experts, what `{E}` runs over: an expression over config.json.
    experts: Option<String>,
    /// Layers of the multi-token-prediction draft, after the others.
    drafts: Option<String>,
    /// What it declares.
    parameters: Vec<Group>,
}

/// Parameters that are there or not together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    /// An expression over config.json and the layer `L`; always, without.
    when: Option<String>,
    /// Only in layers of the draft.
    #[serde(default)]
    draft: bool,
    /// The files may lack them.
    #[serde(default)]
    optional: bool,
    /// As checkpoints have them.
    names: Vec<String>,
}

/// Values of config.json, at a layer.
struct AtLayer<'a>(&'a Map<String, Value>, Option<u64>);

impl Names for AtLayer<'_> {
    fn value(&self, name: &str) -> Result<Option<Value>> {
        Ok(match name {
            "L" => self.1.map(Value::from),
            _ => self.0.get(name).filter(|v| !v.is_null()).cloned(),
        })
    }

    fn has_tensor(&self, _: &str) -> bool {
        false
    }
}

/// Refuses tensors that are not what the class of config.json declares. `written`: the Hugging Face names of all
/// tensors.
///
/// # Errors
///
/// Each parameter in no file, and each tensor that is no parameter; a layer's experts as one.
pub fn check_parameters<'a>(
    tables: &Tables,
    files: &mut Files,
    written: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let class = &files.model.class;
    let known = match tables.read::<Class>("class", class) {
        Ok((known, _)) => known,
        Err(_) if tables.text("class", class).is_err() => {
            files.notes.push(format!(
                "config.json names {class}, whose parameters are not known here (mappings/class): nobody compared them \
                 with the tensors"
            ));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let written: BTreeSet<&str> = written.collect();
    let (declared, optional) = known.declared(&files.config, written.len() as u64)?;
    let missing =
        declared.iter().filter(|name| !written.contains(name.as_str()) && !optional.contains(*name));
    let extra = written.iter().filter(|name| !declared.contains(**name)).map(|name| (*name).to_owned());
    let mut problems = Vec::new();
    for (kind, what) in [
        (
            kinds(missing.cloned()),
            format!("declared by {class}, and no tensor of the GGUF gives it: {INCOMPLETE}"),
        ),
        (kinds(extra), format!("comes of the GGUF, and {class} declares no such parameter: {OTHER}")),
    ] {
        let more = kind.len().saturating_sub(LISTED);
        for (first, n) in kind.into_values().take(LISTED) {
            let others = if n > 1 { format!("; so {} more like it", n - 1) } else { String::new() };
            problems.push(Error::source(first, format!("{what}{others}")));
        }
        if more > 0 {
            problems.push(Error::source("config.json", format!("{more} more kinds of parameters: {what}")));
        }
    }
    Error::all(problems)
}

const INCOMPLETE: &str = "get a complete GGUF, or its config.json by --hf-config if the class has none";
const OTHER: &str =
    "give the model's own config.json by --hf-config; if it is the same, a mapping table is wrong";

/// Names that differ in numbers alone: the first of each kind, and how many there are.
fn kinds(names: impl Iterator<Item = String>) -> BTreeMap<String, (String, usize)> {
    let mut kinds: BTreeMap<String, (String, usize)> = BTreeMap::new();
    for name in names {
        let kind = name.split('.').map(|part| if part.parse::<u64>().is_ok() { "N" } else { part });
        kinds.entry(kind.collect::<Vec<_>>().join(".")).or_insert((name, 0)).1 += 1;
    }
    kinds
}

impl Class {
    /// All names for a config.json, and those that may be missing. `tensors` bounds what config.json may count.
    fn declared(
        &self,
        config: &Map<String, Value>,
        tensors: u64,
    ) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
        let count = |text: Option<&String>| -> Result<u64> {
            let Some(text) = text else { return Ok(0) };
            let expr::Outcome::Is(value) = expr::evaluate(text, &AtLayer(config, None))? else {
                return Ok(0);
            };
            let n = value.as_u64().unwrap_or(0);
            if n > tensors {
                return Err(Error::source(
                    "config.json",
                    format!("{text} {n}, but there are {tensors} tensors"),
                ));
            }
            Ok(n)
        };
        let layers = count(Some(&"num_hidden_layers".to_owned()))?;
        let (experts, drafts) = (count(self.experts.as_ref())?, count(self.drafts.as_ref())?);
        let (mut declared, mut optional) = (BTreeSet::new(), BTreeSet::new());
        for group in &self.parameters {
            let layered = group.names.iter().any(|name| name.contains("{L}"));
            let first = if group.draft { layers } else { 0 };
            let places: Vec<Option<u64>> =
                if layered { (first..layers + drafts).map(Some).collect() } else { vec![None] };
            for layer in places {
                if let Some(when) = &group.when
                    && !expr::holds(&expr::evaluate(when, &AtLayer(config, layer))?)
                {
                    continue;
                }
                let layer = layer.map(|l| l.to_string()).unwrap_or_default();
                for name in &group.names {
                    let name = name.replace("{L}", &layer);
                    let each: Vec<String> = match name.contains("{E}") {
                        true => (0..experts).map(|e| name.replace("{E}", &e.to_string())).collect(),
                        false => vec![name],
                    };
                    if group.optional {
                        optional.extend(each.iter().cloned());
                    }
                    declared.extend(each);
                }
            }
        }
        Ok((declared, optional))
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Architecture;
    use super::*;
    use crate::mapping::tables::built_in_names;
    use std::path::Path;

    /// What transformers saves, by class: the configs tried and the tensors of each. Written by
    /// scripts/class_parameters.py.
    #[derive(Deserialize)]
    struct Saved {
        cases: Vec<Case>,
    }
    #[derive(Deserialize)]
    struct Case {
        config: Map<String, Value>,
        tensors: BTreeSet<String>,
    }

    fn class(name: &str) -> Class {
        Tables::default().read("class", name).unwrap().0
    }

    #[test]
    fn every_class_declares_what_transformers_saves_of_it() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parameters");
        for name in built_in_names("class") {
            let text = std::fs::read(dir.join(format!("{name}.json"))).expect(name);
            let saved: Saved = serde_json::from_slice(&text).unwrap();
            assert!(saved.cases.len() > 1, "{name}: one config shows no flag");
            for case in &saved.cases {
                let (declared, _) = class(name).declared(&case.config, 1000).unwrap();
                assert_eq!(declared, case.tensors, "{name} {:?}", case.config);
            }
        }
    }

    #[test]
    fn every_class_that_a_config_may_name_is_known() {
        let tables = Tables::default();
        for architecture in built_in_names("config") {
            for class in Architecture::named(architecture, &tables).unwrap().classes() {
                assert!(tables.text("class", class).is_ok(), "{architecture}: {class} has no mappings/class");
            }
        }
    }

    /// transformers saves no draft; the original checkpoint of GLM-5.2 has one, in layer 78.
    #[test]
    fn a_draft_is_a_layer_and_what_joins_it_to_the_trunk() {
        let config = serde_json::json!({
            "num_hidden_layers": 78, "num_nextn_predict_layers": 1, "n_routed_experts": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "q_lora_rank": 2048,
            "indexer_types": (0..78).map(|l| if l % 4 == 0 { "full" } else { "shared" }).collect::<Vec<_>>(),
        });
        let (declared, optional) =
            class("GlmMoeDsaForCausalLM").declared(config.as_object().unwrap(), 100).unwrap();
        let own: Vec<_> = declared
            .iter()
            .filter(|name| !optional.contains(*name))
            .filter_map(|name| name.strip_prefix("model.layers.78."))
            .collect();
        assert_eq!(
            own,
            [
                "eh_proj.weight",
                "enorm.weight",
                "hnorm.weight",
                "input_layernorm.weight",
                "mlp.experts.0.down_proj.weight",
                "mlp.experts.0.gate_proj.weight",
                "mlp.experts.0.up_proj.weight",
                "mlp.experts.1.down_proj.weight",
                "mlp.experts.1.gate_proj.weight",
                "mlp.experts.1.up_proj.weight",
                "mlp.gate.e_score_correction_bias",
                "mlp.gate.weight",
                "mlp.shared_experts.down_proj.weight",
                "mlp.shared_experts.gate_proj.weight",
                "mlp.shared_experts.up_proj.weight",
                "post_attention_layernorm.weight",
                "self_attn.indexer.k_norm.bias",
                "self_attn.indexer.k_norm.weight",
                "self_attn.indexer.weights_proj.weight",
                "self_attn.indexer.wk.weight",
                "self_attn.indexer.wq_b.weight",
                "self_attn.kv_a_layernorm.weight",
                "self_attn.kv_a_proj_with_mqa.weight",
                "self_attn.kv_b_proj.weight",
                "self_attn.o_proj.weight",
                "self_attn.q_a_layernorm.weight",
                "self_attn.q_a_proj.weight",
                "self_attn.q_b_proj.weight",
                "shared_head.norm.weight",
            ]
        );
    }
}
