//! One rank's file in one piece of memory, its tensors as views.

use crate::dlpack::{self, Device};
use crate::manifest::Manifest;
use crate::wait;
use preshard::error::Error;
use preshard::load::{Directory, LoadedHost, Method, Options};
use preshard::manifest;
use pyo3::exceptions::{PyBufferError, PyKeyError};
use pyo3::prelude::*;
use pyo3::{ffi, types::PyCapsule};
use std::collections::HashMap;
use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::Arc;

const CPU: Device = Device { kind: 1, number: 0 };
const CUDA: i32 = 2;

/// Whose memory the file lies in; dropping it frees the memory.
#[allow(dead_code)] // held, not read
enum Owner {
    Host(LoadedHost),
    #[cfg(feature = "cuda")]
    Device(preshard::load::Loaded),
    /// Memory of a Python object.
    Lent(Py<PyAny>),
}

/// One shard in memory.
#[pyclass(frozen, module = "preshard._native")]
pub struct Arena {
    owner: Arc<Owner>,
    /// Address of the file's first byte.
    base: u64,
    place: Device,
    entry: manifest::Shard,
    by_name: HashMap<String, usize>,
    manifest: Arc<manifest::Manifest>,
    #[pyo3(get)]
    stats: String,
}

/// One tensor of an [`Arena`]: speaks DLPack, and the buffer protocol when in host memory.
#[pyclass(frozen, module = "preshard._native")]
pub struct Tensor {
    owner: Arc<Owner>,
    #[pyo3(get)]
    address: u64,
    place: Device,
    entry: manifest::Tensor,
}

/// Memory that the caller lends: address, bytes, the object that owns it.
type Lent = (u64, u64, Py<PyAny>);

/// What to load, and how.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Request {
    dir: PathBuf,
    part: String,
    pp: u64,
    tp: u64,
    device: String,
    verify: bool,
    threads: Option<usize>,
    chunk: Option<usize>,
    method: String,
    memory: Option<Lent>,
}

/// `cpu`, `cuda`, `cuda:N`.
fn place(text: &str) -> preshard::Result<Device> {
    let number = match text.split_once(':') {
        None if text == "cpu" => return Ok(CPU),
        None if text == "cuda" => Some(0),
        Some(("cuda", number)) => number.parse().ok().filter(|n| *n >= 0),
        _ => None,
    };
    number.map(|number| Device { kind: CUDA, number }).ok_or_else(|| {
        Error::request("device", format!("{:?}, expected cpu, cuda or cuda:N", preshard::error::shown(text)))
    })
}

fn method(text: &str) -> preshard::Result<Method> {
    match text {
        "auto" => Ok(Method::Auto),
        "buffered" => Ok(Method::Buffered),
        "direct" => Ok(Method::Direct),
        _ => Err(Error::request(
            "method",
            format!("{:?}, expected auto, buffered or direct", preshard::error::shown(text)),
        )),
    }
}

/// Loads one shard.
#[pyfunction]
pub fn load(py: Python<'_>, request: Request) -> PyResult<Arena> {
    wait::run(py, None, |watch| {
        let place = place(&request.device)?;
        let defaults = Options::default();
        let options = Options {
            threads: request.threads,
            chunk: request.chunk.unwrap_or(defaults.chunk),
            method: method(&request.method)?,
            verify: request.verify,
            stop: Some(watch.stop.clone()),
        };
        let directory = Directory::open(&request.dir)?;
        let shard = directory.part(&request.part, request.pp, request.tp)?;
        let (owner, base, stats) = match (place.kind, request.memory) {
            (CUDA, memory) => on_gpu(&shard, place, &options, memory)?,
            (_, Some(_)) => {
                return Err(Error::request("memory", "can be lent for a GPU only; leave it out"));
            }
            (_, None) => {
                let mut loaded = shard.load_host(&options)?;
                let base = loaded.memory().as_mut_ptr() as u64;
                let stats = loaded.stats().clone();
                (Owner::Host(loaded), base, stats)
            }
        };
        let entry = shard.entry().clone();
        Ok(Arena {
            owner: Arc::new(owner),
            base,
            place,
            by_name: entry.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect(),
            entry,
            manifest: directory.manifest().clone(),
            stats: serde_json::to_string(&stats).unwrap_or_default(),
        })
    })
}

type Placed = (Owner, u64, preshard::load::Stats);

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: &preshard::load::Shard,
    place: Device,
    _: &Options,
    _: Option<Lent>,
) -> preshard::Result<Placed> {
    let name = format!("cuda:{}", place.number);
    Err(Error::device(name, "this preshard was built without CUDA; load to the CPU"))
}

#[cfg(feature = "cuda")]
fn on_gpu(
    shard: &preshard::load::Shard,
    place: Device,
    options: &Options,
    lent: Option<Lent>,
) -> preshard::Result<Placed> {
    let device = preshard::gpu::Device::open(place.number as usize)?;
    let Some((base, bytes, owner)) = lent else {
        let loaded = shard.load(&device, options)?;
        let (base, stats) = (loaded.memory().ptr(), loaded.stats().clone());
        return Ok((Owner::Device(loaded), base, stats));
    };
    let needed = shard.entry().bytes;
    if bytes < needed {
        return Err(Error::request("memory", format!("{bytes} bytes, expected at least {needed}")));
    }
    // SAFETY: the caller vouches for memory of this device that nothing else uses meanwhile; `owner`
    // keeps it.
    let stats = unsafe { shard.load_into(&device, base, options)? };
    Ok((Owner::Lent(owner), base, stats))
}

#[pymethods]
impl Arena {
    /// The tensor of that name.
    fn tensor(&self, name: &str) -> PyResult<Tensor> {
        let Some(&index) = self.by_name.get(name) else { return Err(PyKeyError::new_err(name.to_owned())) };
        let entry = self.entry.tensors[index].clone();
        Ok(Tensor { owner: self.owner.clone(), address: self.base + entry.offset, place: self.place, entry })
    }

    /// The directory's manifest.
    #[getter]
    fn manifest(&self) -> Manifest {
        Manifest(self.manifest.clone())
    }

    /// The tensors' names, in file order.
    fn names(&self) -> Vec<&str> {
        self.entry.tensors.iter().map(|t| t.name.as_str()).collect()
    }

    /// The file's name in the directory.
    #[getter]
    fn file(&self) -> &str {
        &self.entry.file
    }

    /// Where the bytes are: DLPack's kind and number.
    #[getter]
    fn device(&self) -> (i32, i32) {
        (self.place.kind, self.place.number)
    }

    /// Address of the file's first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.base
    }
}

#[pymethods]
impl Tensor {
    /// Its name in the file.
    #[getter]
    fn name(&self) -> &str {
        &self.entry.name
    }

    /// safetensors dtype.
    #[getter]
    fn dtype(&self) -> &str {
        &self.entry.dtype
    }

    /// Shape as stored.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.entry.shape.clone()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.entry.bytes
    }

    fn __repr__(&self) -> String {
        format!("Tensor({:?}, {}, {:?})", self.entry.name, self.entry.dtype, self.entry.shape)
    }

    /// A DLPack capsule. The load had ended before the tensor was handed out, so no stream has to wait.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<Bound<'_, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyCapsule>> {
        let _ = (stream, max_version);
        if dl_device.is_some_and(|d| d != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err("the tensor is on another device, and is not copied"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the tensor is a view; copy it after taking it"));
        }
        dlpack::capsule(
            py,
            self.address,
            self.place,
            &self.entry.dtype,
            &self.entry.shape,
            self.owner.clone(),
        )
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.place.kind, self.place.number)
    }

    /// Its bytes, writable; host memory only.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if this.place != CPU {
            return Err(PyBufferError::new_err("the tensor is in GPU memory"));
        }
        // SAFETY: `view` is Python's; the memory lives as long as `slf`, of which the view takes a
        // reference.
        let result = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                this.address as *mut std::ffi::c_void,
                this.entry.bytes as ffi::Py_ssize_t,
                0,
                flags,
            )
        };
        if result == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
