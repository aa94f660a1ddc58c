//! From a GGUF and a policy to all that a conversion writes: the one way that `plan`, `convert` and `verify` take,
//! from the command line and from Python.

use crate::computed::Computed;
use crate::convert::{self, Outcome, Progress, Settings};
use crate::device::{self, Chosen};
use crate::error::Result;
use crate::eval::Decoder;
use crate::gguf::Gguf;
use crate::hf;
use crate::manifest::Manifest;
use crate::mapping::Tables;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::spares;
use crate::verify;
use crate::workers;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// What is converted: the files that the user names.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// The GGUF: a file, any file of a split set, all of them, or the directory.
    pub gguf: Vec<PathBuf>,
    /// A directory with the model's own config.json and tokenizer, which win.
    pub hf_config: Option<PathBuf>,
    /// A directory of mapping tables that override the built-in ones.
    pub mappings: Option<PathBuf>,
    /// Go on when the metadata has keys of the architecture that are unknown here.
    pub allow_unknown_keys: bool,
}

/// A conversion ready to run: nothing stands in its way, and nothing is written yet.
pub struct Planned {
    /// The source.
    pub gguf: Gguf,
    /// What every file of a rank holds.
    pub plan: Plan,
    /// The files beside the ranks' (config.json, the tokenizer): name and bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// The class that the engine builds.
    pub class: String,
    /// What the user should know, one line each.
    pub notes: Vec<String>,
}

/// How a conversion runs; none of it changes the bytes.
pub struct How<'a> {
    /// Global ranks (`stage * tp + rank`) to write; all when absent.
    pub ranks: Option<Vec<u64>>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Host memory for buffers, in bytes.
    pub memory: u64,
    /// What decodes packed weights.
    pub device: device::Choice,
    /// Bytes of the GPU's memory for it.
    pub device_memory: u64,
    /// Bytes after which to sync and journal, so that a killed run goes on from there.
    pub checkpoint: u64,
    /// Replace an earlier conversion.
    pub force: bool,
    /// Go on when decoded values are NaN or infinite.
    pub allow_nonfinite: bool,
    /// Told what is worth a line while it runs.
    pub note: &'a dyn Fn(&str),
    /// Told the bytes finished.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Set when the run is to stop at the next leaf.
    pub stop: &'a AtomicBool,
}

/// All ranks on all cores, 1 GiB of buffers on either side, a GPU for the types that one decodes faster; tells
/// nothing and is not stopped.
impl Default for How<'_> {
    fn default() -> Self {
        How {
            ranks: None,
            threads: 0,
            memory: 1 << 30,
            device: device::Choice::Auto,
            device_memory: 1 << 30,
            checkpoint: convert::CHECKPOINT_BYTES,
            force: false,
            allow_nonfinite: false,
            note: &|_| {},
            progress: &|_| {},
            stop: &workers::NEVER,
        }
    }
}

impl Source {
    /// Opens the source, plans and makes the small files.
    ///
    /// # Errors
    ///
    /// Everything that stands in the way of a conversion.
    pub fn plan(&self, policy: Policy) -> Result<Planned> {
        let gguf = Gguf::open(&self.gguf)?;
        let tables = Tables { dir: self.mappings.as_deref() };
        let plan = Plan::new(&gguf, &tables, policy)?;
        spares::check(&gguf, &plan)?;
        let request = hf::Request {
            allow_unknown_keys: self.allow_unknown_keys,
            ..plan.directory(self.hf_config.clone(), self.mappings.clone())
        };
        let mut made = hf::checked_files(&gguf, &request)?;
        hf::check_parameters(&tables, &mut made, plan.model.index.keys().map(String::as_str))?;
        let mut notes: Vec<String> = gguf.notes().iter().map(ToString::to_string).collect();
        notes.extend(plan.model.notes.iter().cloned());
        notes.extend(made.notes);
        Ok(Planned { gguf, plan, files: made.files, class: made.model.class, notes })
    }

    /// Recomputes every byte of a converted directory and compares.
    ///
    /// # Errors
    ///
    /// When a byte differs, and when the directory was not made from this source.
    pub fn verify(&self, dir: &Path, settings: &verify::Settings) -> Result<verify::Outcome> {
        let manifest = Manifest::read(dir)?;
        // What the conversion went on with is not asked again.
        let source = Source { allow_unknown_keys: true, ..self.clone() };
        let made = source.plan(manifest.policy.clone())?;
        verify::source(dir, &manifest, (&made.gguf, &made.plan), made.files, &Decoder::CPU, settings)
    }
}

impl Planned {
    /// Converts into `out`.
    ///
    /// # Errors
    ///
    /// See [`convert::run`], and when a GPU was asked for and there is none.
    pub fn convert(&self, out: &Path, how: &How) -> Result<Outcome> {
        let chosen = Chosen::new(how.device, how.device_memory, &self.plan, &self.gguf, how.note)?;
        chosen.run(|decoder| {
            let settings = Settings {
                ranks: how.ranks.clone(),
                threads: how.threads,
                memory: how.memory,
                checkpoint: how.checkpoint,
                force: how.force,
                allow_nonfinite: how.allow_nonfinite,
                decoder,
                files: self.files.clone(),
                class: self.class.clone(),
                progress: how.progress,
                stop: how.stop,
            };
            convert::run(&self.plan, &self.gguf, out, &settings)
        })
    }

    /// One file of the plan as the GGUF gives it, to be loaded without being written.
    pub fn origin(&self, file: usize) -> Computed<'_> {
        Computed::new(&self.gguf, &self.plan, &self.plan.shards[file], &Decoder::CPU)
    }

    /// The plan as JSON, with its notes; `gpu_memory` says whether each rank fits.
    pub fn to_json(&self, gpu_memory: Option<u64>) -> Value {
        let mut json = self.plan.to_json(&self.gguf, gpu_memory);
        json["notes"] = self.notes.clone().into();
        json
    }
}
