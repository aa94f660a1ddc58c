//! Errors of the crate as exceptions of `preshard.errors`, with the same texts.

use preshard::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The exception class of one error.
fn class(error: &Error) -> &'static str {
    match error {
        Error::Source(..) => "SourceError",
        Error::Request(..) => "RequestError",
        Error::Mapping(..) => "MappingError",
        Error::Output(..) => "OutputError",
        Error::Shards(..) => "ShardsError",
        Error::Device(..) => "DeviceError",
        Error::Io(..) => "FileError",
        Error::Interrupted(_) => "Interrupted",
        Error::Many(errors) => match errors.split_first() {
            Some((first, rest)) if rest.iter().all(|e| class(e) == class(first)) => class(first),
            _ => "Error",
        },
        _ => "Error",
    }
}

fn problems(error: &Error) -> Vec<String> {
    match error {
        Error::Many(errors) => errors.iter().flat_map(problems).collect(),
        error => vec![error.to_string()],
    }
}

/// `error` as a Python exception.
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let exception = || -> PyResult<PyErr> {
        let module = MODULE.get_or_try_init(py, || py.import("preshard.errors").map(Bound::unbind))?;
        let value = module.bind(py).getattr(class(&error))?.call1((error.to_string(), problems(&error)))?;
        if let Error::Io(path, _, source) = &error {
            value.setattr("errno", source.raw_os_error())?;
            value.setattr("filename", path)?;
        }
        Ok(PyErr::from_value(value))
    };
    exception().unwrap_or_else(|e| e)
}
