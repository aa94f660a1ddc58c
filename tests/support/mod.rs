//! Converting in tests, and looking at what came out.
#![allow(dead_code)]

pub mod models;
pub mod union;

use preshard::convert::{self, Outcome, Progress, Settings};
use preshard::eval::Decoder;
use preshard::gguf::Gguf;
use preshard::manifest::Manifest;
use preshard::mapping::Tables;
use preshard::plan::Plan;
use preshard::policy::Policy;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// A file under `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// How to run, where a test cares.
#[derive(Clone, Default)]
pub struct How {
    pub ranks: Option<Vec<u64>>,
    pub threads: usize,
    pub force: bool,
    pub allow_nonfinite: bool,
}

/// One thread, the CPU, shards alone.
pub fn settings<'a>(stop: &'a AtomicBool, progress: &'a (dyn Fn(Progress) + Sync)) -> Settings<'a> {
    Settings {
        ranks: None,
        threads: 1,
        memory: 1 << 30,
        checkpoint: convert::CHECKPOINT_BYTES,
        force: false,
        allow_nonfinite: false,
        decoder: &Decoder::CPU,
        files: Vec::new(),
        class: String::new(),
        progress,
        stop,
    }
}

/// Converts; an error comes back as its message.
pub fn convert(source: &Path, options: Policy, out: &Path) -> Result<Outcome, String> {
    convert_how(&[source.to_owned()], options, out, How::default())
}

/// Converts with everything said.
pub fn convert_how(source: &[PathBuf], options: Policy, out: &Path, how: How) -> Result<Outcome, String> {
    let gguf = Gguf::open(source).map_err(|e| e.to_string())?;
    let plan = Plan::new(&gguf, &Tables::default(), options).map_err(|e| e.to_string())?;
    let stop = AtomicBool::new(false);
    let settings = Settings {
        ranks: how.ranks,
        threads: how.threads,
        force: how.force,
        allow_nonfinite: how.allow_nonfinite,
        ..settings(&stop, &|_| {})
    };
    convert::run(&plan, &gguf, out, &settings).map_err(|e| e.to_string())
}

/// A tensor as the safetensors library reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// `BF16`, `U8`, …
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// Every tensor of a safetensors file, by name.
pub type Tensors = BTreeMap<String, Stored>;

/// Reads a file with the safetensors library.
#[track_caller]
pub fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let stored = |t: &safetensors::tensor::TensorView| Stored {
        dtype: format!("{:?}", t.dtype()),
        shape: t.shape().iter().map(|n| *n as u64).collect(),
        bytes: t.data().to_vec(),
    };
    file.iter().map(|(name, t)| (name.to_owned(), stored(&t))).collect()
}

/// Every file of a directory, hidden ones too, with its bytes: what "unchanged" means.
pub fn snapshot(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return all };
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            all.insert(format!("{name}/"), Vec::new());
            all.extend(snapshot(&path).into_iter().map(|(n, b)| (format!("{name}/{n}"), b)));
        } else {
            all.insert(name, std::fs::read(&path).unwrap());
        }
    }
    all
}

/// A model converted in a directory of its own.
pub struct Converted {
    pub dir: TempDir,
    pub manifest: Manifest,
}

impl Converted {
    pub fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }
    /// The tensors of a rank of a conversion without pipeline stages.
    #[track_caller]
    pub fn rank(&self, rank: u64) -> Tensors {
        self.file(&format!("model-rank-{rank}-part-0.safetensors"))
    }
    #[track_caller]
    pub fn file(&self, name: &str) -> Tensors {
        read(&self.out().join(name))
    }
    /// The manifest's entry of a tensor of the first shard that has it.
    #[track_caller]
    pub fn entry(&self, tensor: &str) -> &preshard::manifest::Tensor {
        let mut all = self.manifest.shards.iter().flat_map(|s| &s.tensors);
        all.find(|t| t.name == tensor).unwrap_or_else(|| panic!("{tensor} is not in the manifest"))
    }
    /// Why a GGUF tensor was dropped, if it was.
    pub fn dropped(&self, tensor: &str) -> Option<&str> {
        self.manifest.dropped.iter().find(|d| d.tensor == tensor).map(|d| d.reason.as_str())
    }
}

/// Converts a model made in code, and reads the manifest back.
#[track_caller]
pub fn converted(model: &crate::common::Builder, options: Policy) -> Converted {
    converted_how(model, options, How::default())
}

#[track_caller]
pub fn converted_how(model: &crate::common::Builder, options: Policy, how: How) -> Converted {
    let dir = tempfile::tempdir().unwrap();
    let source = model.write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    convert_how(&[source], options, &out, how).unwrap_or_else(|e| panic!("{e}"));
    let manifest = Manifest::read(&out).unwrap();
    Converted { dir, manifest }
}

/// The tensor `name`, or what there is instead.
#[track_caller]
pub fn get<'t>(tensors: &'t Tensors, name: &str) -> &'t Stored {
    tensors.get(name).unwrap_or_else(|| panic!("no {name} among {:?}", tensors.keys().collect::<Vec<_>>()))
}

/// Checks that the model is refused with every one of `words`, through the command itself: status 1,
/// one line for each problem, no output directory.
#[track_caller]
pub fn refused(model: &crate::common::Builder, args: &[&str], words: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let source = model.write(dir.path().join("model.gguf"));
    refused_in(dir.path(), &source, args, words)
}

#[track_caller]
pub fn refused_in(dir: &Path, source: &Path, args: &[&str], words: &[&str]) -> String {
    let before = snapshot(dir);
    let out = dir.join("out");
    let output = preshard().arg("convert").arg(source).arg("-o").arg(&out).args(args).output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    assert!(message.lines().all(|l| l.starts_with("error: ") || l.starts_with("note: ")), "{message}");
    assert!(!message.chars().any(|c| c.is_control() && c != '\n'), "control character in {message:?}");
    assert!(before == snapshot(dir), "a refused conversion changed the directory");
    message
}

/// The program under test.
pub fn preshard() -> Command {
    Command::new(env!("CARGO_BIN_EXE_preshard"))
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
