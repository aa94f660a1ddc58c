//! The manifest, of which Python takes what it asks for: a large one has tens of thousands of entries.

use crate::error;
use preshard::error::Error;
use preshard::manifest;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use serde::Serialize;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

/// A manifest, checked.
#[pyclass(frozen, module = "preshard._native")]
pub struct Manifest(pub Arc<manifest::Manifest>);

/// The manifest of `dir`.
#[pyfunction]
pub fn read_manifest(py: Python<'_>, dir: PathBuf) -> PyResult<Manifest> {
    let manifest = py.detach(|| manifest::Manifest::read(&dir)).map_err(|e| error::raise(py, e))?;
    Ok(Manifest(Arc::new(manifest)))
}

#[pymethods]
impl Manifest {
    /// Everything but the shards' own entries, as JSON; of each shard its key.
    fn head(&self, py: Python<'_>) -> PyResult<String> {
        let m = &self.0;
        let shards: Vec<_> = m.shards.iter().map(|s| json!([s.file, s.part, s.pp, s.tp])).collect();
        let packed = m.shards.iter().flat_map(|s| &s.tensors).any(|t| t.logical.is_some());
        let head = json!({
            "tool": m.tool, "plan": m.plan, "sources": m.sources, "model": m.model, "policy": m.policy,
            "files": m.files, "dropped": m.dropped, "packed": packed, "shards": shards,
        });
        text(py, &head)
    }

    /// The entry of one shard, as JSON.
    fn shard(&self, py: Python<'_>, index: usize) -> PyResult<String> {
        match self.0.shards.get(index) {
            Some(shard) => text(py, shard),
            None => Err(PyIndexError::new_err(index)),
        }
    }
}

fn text(py: Python<'_>, value: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| {
        error::raise(py, Error::shards(manifest::FILE_NAME, format!("cannot be written as JSON: {e}")))
    })
}
