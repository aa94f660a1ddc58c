//! `plan`, `convert` and `verify`: the command line's options as keyword arguments.

use crate::wait;
use preshard::conversion::{How, Planned, Source};
use preshard::device;
use preshard::error::Error;
use preshard::policy::{self, Policy};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::path::PathBuf;

/// What decides the output, by the names of the command line's options.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Choices {
    source: Vec<PathBuf>,
    tp: u64,
    pp: u64,
    pp_layers: Option<Vec<u64>>,
    ep: bool,
    weights: String,
    indexer: String,
    mtp: String,
    shared_experts: String,
    misaligned: String,
    mixed: String,
    layout: String,
    max_file_size: u64,
    max_error: Option<f64>,
    hf_config: Option<PathBuf>,
    mappings: Option<PathBuf>,
    allow_unknown_keys: bool,
}

/// The value of an option that is spelled `text`.
fn word<T: serde::de::DeserializeOwned>(option: &str, text: &str) -> preshard::Result<T> {
    policy::word(text).map_err(|e| Error::request(option, e))
}

impl Choices {
    fn plan(&self) -> preshard::Result<Planned> {
        let policy = Policy {
            tp: self.tp,
            pp: self.pp,
            ep: self.ep,
            stages: self.pp_layers.as_deref().map(policy::bounds).unwrap_or_default(),
            layout: self.layout.clone(),
            max_file_size: self.max_file_size,
            weights: word("weights", &self.weights)?,
            indexer: word("indexer", &self.indexer)?,
            mtp: word("mtp", &self.mtp)?,
            shared_experts: word("shared_experts", &self.shared_experts)?,
            misaligned: word("misaligned", &self.misaligned)?,
            mixed: word("mixed", &self.mixed)?,
            max_error: match self.max_error {
                None => None,
                // In millionths.
                Some(percent) if (0.0..=100.0).contains(&percent) => Some((percent * 1e4).round() as u64),
                Some(percent) => {
                    return Err(Error::request("max_error", format!("{percent}, expected a percentage")));
                }
            },
        };
        let source = Source {
            gguf: self.source.clone(),
            hf_config: self.hf_config.clone(),
            mappings: self.mappings.clone(),
            allow_unknown_keys: self.allow_unknown_keys,
        };
        source.plan(policy)
    }
}

/// Plans a conversion; gives the plan as JSON.
#[pyfunction]
pub fn plan(py: Python<'_>, choices: Choices) -> PyResult<String> {
    wait::run(py, None, |_| Ok(choices.plan()?.to_json(None).to_string()))
}

/// How to run a conversion; none of it changes the bytes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Running {
    ranks: Option<Vec<u64>>,
    threads: usize,
    memory: u64,
    device: String,
    device_memory: u64,
    force: bool,
    allow_nonfinite: bool,
}

/// Converts; gives bytes written, bytes found written, and the notes.
#[pyfunction]
pub fn convert(
    py: Python<'_>,
    choices: Choices,
    out: PathBuf,
    running: Running,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<(u64, u64, Vec<String>)> {
    wait::run(py, progress.as_ref(), |watch| {
        let made = choices.plan()?;
        let notes = RefCell::new(made.notes.clone());
        let how = How {
            ranks: running.ranks,
            threads: running.threads,
            memory: running.memory,
            device: device::parse(&running.device).map_err(|e| Error::request("device", e))?,
            device_memory: running.device_memory,
            force: running.force,
            allow_nonfinite: running.allow_nonfinite,
            note: &|text| notes.borrow_mut().push(text.to_owned()),
            progress: &|p| watch.report(p),
            stop: &watch.stop,
            ..How::default()
        };
        let outcome = made.convert(&out, &how)?;
        Ok((outcome.written, outcome.resumed, notes.into_inner()))
    })
}

/// Verifies; gives files and bytes checked.
#[pyfunction]
pub fn verify(
    py: Python<'_>,
    dir: PathBuf,
    source: Vec<PathBuf>,
    mappings: Option<PathBuf>,
    hf_config: Option<PathBuf>,
    threads: usize,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<(usize, u64)> {
    wait::run(py, progress.as_ref(), |watch| {
        let settings =
            preshard::verify::Settings { threads, progress: &|p| watch.report(p), stop: &watch.stop };
        let outcome = match source.is_empty() {
            true => preshard::verify::hashes(&dir, &settings),
            false => {
                let source = Source { gguf: source, hf_config, mappings, ..Source::default() };
                source.verify(&dir, &settings)
            }
        }?;
        Ok((outcome.files, outcome.bytes))
    })
}
