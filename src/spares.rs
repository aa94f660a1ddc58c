//! Tensors that a file holds twice, in two forms (`attn_kv_b` beside `attn_k_b` and `attn_v_b`): whether they tell the
//! same.

use crate::error::{Error, Result};
use crate::eval::{Decoder, Evaluator};
use crate::gguf::{Gguf, Tensor};
use crate::plan::Plan;
use crate::plan::tensors::{HfTensor, View};
use crate::quant::Float;
use std::ops::Range;

/// Compares every spare tensor of the plan with the one that is converted.
///
/// The first, a middle and the last run of rows are decoded, which finds halves that were swapped, of another layer
/// or of another model, without reading the whole file.
///
/// # Errors
///
/// When the two differ in shape, or by more than their types explain.
pub fn check(gguf: &Gguf, plan: &Plan) -> Result<()> {
    let evaluator = Evaluator { plan, gguf, decoder: &Decoder::CPU, allow_nonfinite: true };
    let mut problems = Vec::new();
    for spare in &plan.model.spares {
        if let Some(&kept) = plan.model.index.get(&spare.name) {
            problems.extend(compare(&evaluator, &plan.model.tensors[kept], spare).err());
        }
    }
    Error::all(problems)
}

fn compare(evaluator: &Evaluator, kept: &HfTensor, spare: &HfTensor) -> Result<()> {
    let tensor = |view: &View| &evaluator.gguf.tensors()[view.tensor];
    let source = |t: &HfTensor| t.views.first().map_or(t.name.as_str(), |view| &tensor(view).name).to_owned();
    if kept.shape != spare.shape {
        return Err(Error::source(
            source(spare),
            format!(
                "makes {} of shape {:?}, {} one of {:?}; one of the two is damaged",
                spare.name,
                spare.shape,
                source(kept),
                kept.shape
            ),
        ));
    }
    let mut first = 0;
    let runs = spare.views.iter().map(|view| {
        let rows = first..first + view.rows.end - view.rows.start;
        first = rows.end;
        (view, rows)
    });
    let runs: Vec<_> = runs.collect();
    let n = runs.len();
    // Halves alternate: two neighbours show both.
    let shown = [0, 1, n / 2, n / 2 + 1, n.saturating_sub(2), n.saturating_sub(1)];
    for (_, (view, rows)) in runs.iter().enumerate().filter(|(i, _)| shown.contains(i)) {
        let ours = evaluator.values(view, Float::F32)?;
        let (mut theirs, mut bits) = (Vec::with_capacity(ours.len()), f64::MAX);
        for part in within(kept, rows) {
            theirs.extend(evaluator.values(&part, Float::F32)?);
            bits = bits.min(bits_per_weight(tensor(&part)));
        }
        let found = difference(&theirs, &ours);
        // NaN is more than any limit.
        if found <= noise(bits, bits_per_weight(tensor(view))) {
            continue;
        }
        return Err(Error::source(
            &tensor(view).name,
            format!(
                "differs from {} by {:.0} % in rows {} to {} of {}, more than their types explain; one of the two is \
                 damaged or of another model",
                source(kept),
                found * 100.0,
                rows.start,
                rows.end - 1,
                kept.name,
            ),
        ));
    }
    Ok(())
}

fn bits_per_weight(tensor: &Tensor) -> f64 {
    tensor.ty.bytes as f64 * 8.0 / tensor.ty.block as f64
}

/// The views of logical rows of a tensor.
fn within(tensor: &HfTensor, rows: &Range<u64>) -> Vec<View> {
    let mut first = 0;
    let mut parts = Vec::new();
    for view in &tensor.views {
        let end = first + view.rows.end - view.rows.start;
        let (a, b) = (rows.start.max(first), rows.end.min(end));
        if a < b {
            let start = view.rows.start + a - first;
            parts.push(View { rows: start..start + b - a, ..view.clone() });
        }
        first = end;
    }
    parts
}

/// The root mean square of the difference of two lists of f32, as a share of that of the first.
fn difference(kept: &[u8], spare: &[u8]) -> f64 {
    let values = |bytes: &[u8]| {
        bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect::<Vec<_>>()
    };
    let (kept, spare) = (values(kept), values(spare));
    let square: f64 = kept.iter().map(|v| v * v).sum();
    let off: f64 = kept.iter().zip(&spare).map(|(a, b)| (a - b) * (a - b)).sum();
    if off == 0.0 { 0.0 } else { (off / square).sqrt() }
}

/// What two quantisations of the same weights may differ by at most, for so many bits per weight each.
///
/// A scalar quantiser of b bits leaves an error of about 2 · 2^-b of the weights' size (ggml's q8_0 0.5 %, q4_K 8 %,
/// q2_K 30 %). Twice the sum of both is allowed: weights of another layer or head differ by 140 %.
fn noise(a: f64, b: f64) -> f64 {
    (4.0 * ((-a).exp2() + (-b).exp2())).clamp(0.01, 0.9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_lies_between_rounding_and_what_has_nothing_in_common() {
        assert_eq!(noise(32.0, 16.0), 0.01);
        assert!((0.01..0.05).contains(&noise(8.5, 8.5)));
        assert!((0.1..0.3).contains(&noise(4.5, 8.5)));
        assert_eq!(noise(1.56, 1.56), 0.9);
    }
}
