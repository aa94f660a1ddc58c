//! Tensors of matrices that were written in another form: codes, scales, perhaps zero points and a shape.

use super::{Checked, belongs, expect, layer, sources};
use crate::error::shown;
use crate::manifest::{Manifest, Recoded, Shard, Tensor};
use crate::policy::{Weights, is_ordinary, spelled};
use std::collections::{BTreeMap, HashSet};

/// One of the tensors of a matrix.
pub(super) fn tensor(m: &Manifest, s: &Shard, t: &Tensor, r: &Recoded, dropped: &HashSet<&str>) -> Checked {
    let (weights, limit) = (m.policy.weights, m.policy.max_error);
    let sound = (2..=8).contains(&r.bits) && matches!(r.group, 16 | 32 | 64 | 128);
    expect(sound && limit.is_some() && is_ordinary(&m.policy.layout), || {
        format!("{} bits in groups of {} with --weights {}", r.bits, r.group, spelled(weights))
    })?;
    expect(limit.is_some_and(|limit| r.error <= limit), || {
        format!("an error of {} millionths, but the policy's max_error is {limit:?}", r.error)
    })?;
    let scales = if weights == Weights::Fast { "BF16" } else { "F16" };
    let (dtype, element) = match r.holds.as_str() {
        "codes" => ("I32", 4),
        "scales" => (scales, 2),
        "zero_points" if r.zero_point => (scales, 2),
        "shape" => ("I64", 8),
        other => return Err(format!("holds {:?}, expected what its form has", shown(other))),
    };
    let elements = t.shape.iter().try_fold(element, |n: u64, d| n.checked_mul(*d));
    expect(t.dtype == dtype && elements == Some(t.bytes), || {
        format!("{} {:?} in {} bytes, expected {dtype}", shown(&t.dtype), t.shape, t.bytes)
    })?;
    let [member] = t.members.as_slice() else {
        return Err(format!("{} members, expected one matrix", t.members.len()));
    };
    let types = sources(member, dropped)?;
    let base = member.hf.strip_suffix("weight");
    let whole = member.rows[0] == 0 && member.row_bytes.is_none() && t.decoded.is_none();
    expect(whole && t.aliases.is_empty() && types.iter().all(|ty| ty.is_quantised()), || {
        format!("not the whole of {}, packed in the source", shown(&member.hf))
    })?;
    expect(base.is_some_and(|base| t.name.starts_with(base)), || {
        format!("made of {}, whose name it does not have", shown(&member.hf))
    })?;
    let codes = r.holds == "codes";
    let fits = match (t.shape.as_slice(), t.logical.as_deref()) {
        ([rows, words], Some([logical_rows, cols])) => {
            let bits = cols.checked_mul(u64::from(r.bits));
            codes && rows == logical_rows && cols.is_multiple_of(r.group) && bits == words.checked_mul(32)
        }
        ([_, _], None) => matches!(r.holds.as_str(), "scales" | "zero_points"),
        ([2], None) => r.holds == "shape",
        _ => false,
    };
    let rows = r.holds == "shape" || t.shape.first() == Some(&member.rows[1]);
    expect(fits && rows, || {
        format!(
            "{} of shape {:?} for {:?}, {} bits in groups of {}",
            r.holds, t.shape, t.logical, r.bits, r.group
        )
    })?;
    expect(t.nonfinite <= t.bytes && (t.nonfinite == 0 || codes), || {
        format!("{} NaN or infinities among {}", t.nonfinite, r.holds)
    })?;
    let names = [&t.name, &member.hf].into_iter().chain(&member.from);
    belongs(m, s, &names.filter_map(|name| layer(name)).collect::<Vec<_>>())
}

/// Every matrix has its codes, its scales and its zero points or none, once and of one form.
pub(super) fn matrices(m: &Manifest) -> Checked {
    let mut found: BTreeMap<&str, BTreeMap<&str, &Tensor>> = BTreeMap::new();
    for t in m.shards.iter().flat_map(|s| &s.tensors) {
        if let (Some(r), [member]) = (&t.recoded, t.members.as_slice()) {
            let twice = found.entry(&member.hf).or_default().insert(&r.holds, t);
            expect(twice.is_none(), || format!("{} of {} twice", r.holds, shown(&member.hf)))?;
        }
    }
    for (matrix, tensors) in found {
        let form = |t: &Tensor| t.recoded.as_ref().map(|r| (r.bits, r.group, r.zero_point, r.error));
        let (Some(codes), Some(scales)) = (tensors.get("codes"), tensors.get("scales")) else {
            let held: Vec<_> = tensors.into_keys().collect();
            return Err(format!("{} is {}, expected codes and scales", shown(matrix), held.join(", ")));
        };
        let Some((r, logical)) = codes.recoded.as_ref().zip(codes.logical.as_ref()) else { continue };
        let zero_points = tensors.get("zero_points");
        let groups = [logical[0], logical[1] / r.group];
        let same = tensors.values().all(|t| form(t) == form(codes) && t.members == codes.members)
            && scales.shape == groups
            && zero_points.is_some() == r.zero_point
            && zero_points.is_none_or(|t| t.shape == groups);
        expect(same, || format!("{}: codes, scales and the rest of unlike forms", shown(matrix)))?;
    }
    Ok(())
}
