//! DLPack: tensors handed to another library without a copy.
//!
//! The structures are those of `dlpack.h` (version 0.8, the unversioned form that every consumer
//! reads); the field order and the codes are that header's.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::{ffi, types::PyCapsule};
use std::ffi::{CStr, c_void};

/// The name of a capsule that nobody has taken yet.
const NAME: &CStr = c"dltensor";

/// `DLDevice`: kind (1 CPU, 2 CUDA) and number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub kind: i32,
    pub number: i32,
}

/// `DLDataType`: code, bits, lanes.
#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// Everything that a handed-out tensor needs to stay where it is.
struct Held<O> {
    managed: Managed,
    _shape: Vec<i64>,
    _strides: Vec<i64>,
    _owner: O,
}

/// DLPack's code and bits of a safetensors dtype.
fn data_type(dtype: &str) -> Option<DataType> {
    let (code, bits) = match dtype {
        "I8" => (0, 8),
        "I16" => (0, 16),
        "I32" => (0, 32),
        "I64" => (0, 64),
        "U8" => (1, 8),
        "U16" => (1, 16),
        "U32" => (1, 32),
        "U64" => (1, 64),
        "F16" => (2, 16),
        "F32" => (2, 32),
        "F64" => (2, 64),
        "BF16" => (4, 16),
        "BOOL" => (6, 8),
        _ => return None,
    };
    Some(DataType { code, bits, lanes: 1 })
}

/// A capsule for a dense row-major tensor at `address`, kept alive by `owner`.
///
/// `address` must be memory of `device` for `shape` elements of `dtype` for as long as `owner` lives.
pub fn capsule<O: Send>(
    py: Python<'_>,
    address: u64,
    device: Device,
    dtype: &str,
    shape: &[u64],
    owner: O,
) -> PyResult<Py<PyCapsule>> {
    let Some(dtype) = data_type(dtype) else {
        return Err(PyBufferError::new_err(format!("DLPack has no code for dtype {dtype}")));
    };
    let mut shape: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i].max(1));
    }
    let tensor = DlTensor {
        data: address as *mut c_void,
        device,
        ndim: shape.len() as i32,
        dtype,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: std::ptr::null_mut(), deleter: Some(delete::<O>) };
    let held = Box::into_raw(Box::new(Held { managed, _shape: shape, _strides: strides, _owner: owner }));
    // SAFETY: `held` is a live box; its address is also the context from which `delete` frees it.
    let managed = unsafe {
        (*held).managed.context = held.cast();
        &raw mut (*held).managed
    };
    // SAFETY: a non-null pointer and a static name; the result is a new reference or null.
    let object = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    if object.is_null() {
        // SAFETY: the capsule was not made, so nobody else will free it.
        unsafe { delete::<O>(managed) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference to a capsule.
    let object = unsafe { Bound::from_owned_ptr(py, object) };
    Ok(object.cast_into::<PyCapsule>()?.unbind())
}

/// Called once by whoever took the tensor, from any thread.
///
/// # Safety
/// `managed` must come from [`capsule`] and not be used again.
unsafe extern "C" fn delete<O>(managed: *mut Managed) {
    // SAFETY: the context is the box that `capsule` leaked.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Held<O>>()) });
}

/// Frees a tensor whose capsule nobody took; one that was taken has another name.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule, with the interpreter lock held.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed: *mut Managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}
