//! `plan`, `convert` and `verify`: the command line's options as keyword arguments.

use crate::wait;
use preshard::convert as run;
use preshard::device::{self, Chosen};
use preshard::error::Error;
use preshard::eval::Decoder;
use preshard::gguf::Gguf;
use preshard::hf;
use preshard::mapping::Tables;
use preshard::plan::{Fit, Keep, Options, Plan, Weights};
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
    weights: Option<String>,
    indexer: String,
    mtp: String,
    misaligned: String,
    mixed: String,
    layout: String,
    max_file_size: u64,
    hf_config: Option<PathBuf>,
    mappings: Option<PathBuf>,
    allow_unknown_keys: bool,
}

/// The value of `all` that is called `text`.
fn one_of<T: Copy>(
    option: &str,
    text: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> preshard::Result<T> {
    all.iter().copied().find(|v| name(*v) == text).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|v| name(*v)).collect();
        Error::request(option, format!("{:?}, expected {}", preshard::error::shown(text), names.join(" or ")))
    })
}

impl Choices {
    fn options(&self) -> preshard::Result<Options> {
        const KEEP: [Keep; 2] = [Keep::Keep, Keep::Drop];
        const FIT: [Fit; 2] = [Fit::Refuse, Fit::Dequantise];
        Ok(Options {
            tp: self.tp,
            pp: self.pp,
            stages: self.pp_layers.clone(),
            ep: self.ep,
            weights: match &self.weights {
                Some(text) => one_of("weights", text, &Weights::ALL, Weights::name)?,
                None => Weights::Keep,
            },
            indexer: one_of("indexer", &self.indexer, &KEEP, Keep::name)?,
            mtp: one_of("mtp", &self.mtp, &KEEP, Keep::name)?,
            misaligned: one_of("misaligned", &self.misaligned, &FIT, Fit::name)?,
            mixed: one_of("mixed", &self.mixed, &FIT, Fit::name)?,
            layout: self.layout.clone(),
            max_file_size: self.max_file_size,
        })
    }

    fn request(&self, plan: &Plan) -> hf::Request {
        hf::Request {
            allow_unknown_keys: self.allow_unknown_keys,
            ..plan.directory(self.hf_config.clone(), self.mappings.clone())
        }
    }

    fn plan(&self) -> preshard::Result<(Gguf, Plan)> {
        let options = self.options()?;
        let gguf = Gguf::open(&self.source)?;
        let plan = Plan::new(&gguf, &Tables { dir: self.mappings.as_deref() }, options)?;
        Ok((gguf, plan))
    }
}

fn notes(gguf: &Gguf, plan: &Plan) -> Vec<String> {
    gguf.notes().iter().chain(&plan.model.notes).map(ToString::to_string).collect()
}

/// Plans a conversion; gives the plan as JSON.
#[pyfunction]
pub fn plan(py: Python<'_>, choices: Choices) -> PyResult<String> {
    wait::run(py, None, |_| {
        let (gguf, plan) = choices.plan()?;
        let request = choices.request(&plan);
        let mut notes = notes(&gguf, &plan);
        notes.extend(hf::checked_files(&gguf, &request)?.notes);
        let mut json = plan.to_json(&gguf, None);
        json["notes"] = notes.into();
        Ok(json.to_string())
    })
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
        let (gguf, plan) = choices.plan()?;
        let request = choices.request(&plan);
        let class = hf::model(&gguf, &request)?.class;
        let directory = hf::checked_files(&gguf, &request)?;
        let device = device::parse(&running.device).map_err(|e| Error::request("device", e))?;
        let notes = RefCell::new(notes(&gguf, &plan));
        notes.borrow_mut().extend(directory.notes);
        let note = |text: &str| notes.borrow_mut().push(text.to_owned());
        let chosen = Chosen::new(device, running.device_memory, &plan, &gguf, &note)?;
        let outcome = chosen.run(|decoder| {
            let settings = run::Settings {
                ranks: running.ranks,
                threads: running.threads,
                memory: running.memory,
                force: running.force,
                allow_nonfinite: running.allow_nonfinite,
                decoder,
                files: directory.files,
                class,
                progress: &|p| watch.report(p),
                stop: &watch.stop,
            };
            run::run(&plan, &gguf, &out, &settings)
        })?;
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
                let tables = Tables { dir: mappings.as_deref() };
                let directory = |request| hf::Request {
                    hf_config: hf_config.clone(),
                    mappings: mappings.clone(),
                    allow_unknown_keys: true,
                    ..request
                };
                preshard::verify::source(&dir, &source, &tables, directory, &Decoder::CPU, &settings)
            }
        }?;
        Ok((outcome.files, outcome.bytes))
    })
}
