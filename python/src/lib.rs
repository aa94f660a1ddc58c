//! The native half of the Python package `preshard`.
//!
//! Everything here is private to the package; the Python files beside it hold the documented names.

mod convert;
mod dlpack;
mod error;
mod load;
mod manifest;
mod wait;

use pyo3::prelude::*;

/// ggml's types: name to number.
#[pyfunction]
fn ggml_types() -> Vec<(&'static str, u32)> {
    preshard::quant::TYPES.iter().map(|t| (t.name, t.id)).collect()
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(manifest::read_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(ggml_types, module)?)?;
    module.add_function(wrap_pyfunction!(convert::plan, module)?)?;
    module.add_function(wrap_pyfunction!(convert::convert, module)?)?;
    module.add_function(wrap_pyfunction!(convert::verify, module)?)?;
    module.add_function(wrap_pyfunction!(load::load, module)?)?;
    module.add_class::<manifest::Manifest>()?;
    module.add_class::<load::Arena>()?;
    module.add_class::<load::Tensor>()
}
