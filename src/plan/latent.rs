//! Multi-head latent attention: where the rows of `kv_b_proj` lie in the two halves that GGUF files hold.

use super::tensors::{Order, View};
use crate::error::{Error, Result};
use crate::gguf::Tensor;

/// The views of `kv_b_proj`, per head the rows of `k` (stored transposed) and those of `v`, and its shape.
///
/// A half is one matrix per head, `[nope, kv_lora, heads]` and `[kv_lora, v, heads]` in ggml's order, or (files
/// of ik_llama.cpp and of early llama.cpp) the same matrices one under the other: the same bytes.
///
/// # Errors
///
/// When the shapes fit neither each other nor the heads.
pub(super) fn kv_b(
    (k, tk): (usize, &Tensor),
    (v, tv): (usize, &Tensor),
    heads: u64,
) -> Result<(Vec<View>, Vec<u64>)> {
    let (Some([nope, lora]), Some([vl, vd])) = (matrices(&tk.ne, heads), matrices(&tv.ne, heads)) else {
        return Err(unfit(tk, tv, heads));
    };
    if lora != vl {
        return Err(unfit(tk, tv, heads));
    }
    // Which matrix of the tensor a head's rows are in, and the first of them.
    let place = |t: &Tensor, head: u64, rows: u64| if t.ne.len() == 2 { (0, head * rows) } else { (head, 0) };
    let views = (0..heads).flat_map(|head| {
        let ((matrix, first), (v_matrix, row)) = (place(tk, head, lora), place(tv, head, vd));
        [
            View { order: Order::Transposed, ..View::of(k, matrix, 0..nope, first..first + lora) },
            View::of(v, v_matrix, row..row + vd, 0..lora),
        ]
    });
    Ok((views.collect(), vec![heads * (nope + vd), lora]))
}

/// Columns and rows of each head's matrix.
fn matrices(ne: &[u64], heads: u64) -> Option<[u64; 2]> {
    match *ne {
        [cols, rows, n] if n == heads => Some([cols, rows]),
        [cols, rows] if heads > 0 && rows.is_multiple_of(heads) => Some([cols, rows / heads]),
        _ => None,
    }
}

fn unfit(k: &Tensor, v: &Tensor, heads: u64) -> Error {
    Error::source(
        &k.name,
        format!(
            "shape {:?} and {} {:?}, expected [nope, kv_lora, {heads}] and [kv_lora, v, {heads}], or the heads' \
             matrices one under the other",
            k.ne, v.name, v.ne
        ),
    )
}
