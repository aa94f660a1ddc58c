//! One test for each fault that users of such tools have reported, named after the report: quant
//! types and values (TYP), mapping and completeness (MAP, VAL, SEC-07), latent attention, indexer and draft
//! (MLA, DSA, MTP), cuts (SHD), output (OUT). The container's (PAR, SEC, SPL) are in container.rs and
//! splits.rs, the loader's (LOD) in load.rs. tests/reports/README.md says which are left out, and why.
#![cfg(feature = "cli")]

mod common;
mod support;

#[path = "reports/latent.rs"]
mod latent;
#[path = "reports/mapping.rs"]
mod mapping;
#[path = "reports/metadata.rs"]
mod metadata;
#[path = "reports/output.rs"]
mod output;
#[path = "reports/parameters.rs"]
mod parameters;
#[path = "reports/shards.rs"]
mod shards;
#[path = "reports/types.rs"]
mod types;

use preshard::policy::{Policy, Weights};
use preshard::quant::{Float, by_id};
use support::models::blocks;

fn tp(tp: u64) -> Policy {
    Policy { tp, ..Policy::default() }
}

fn bf16(tp: u64) -> Policy {
    Policy { tp, weights: Weights::Bf16, ..Policy::default() }
}

/// The elements of these blocks as bf16, decoded at once and by no plan.
fn decoded(ty: u32, bytes: &[u8]) -> Vec<u8> {
    let ty = by_id(ty).unwrap();
    let mut out = vec![0; bytes.len() / ty.bytes as usize * ty.block as usize * 2];
    ty.decode(bytes, Float::Bf16, &mut out);
    out
}

/// The rows of a matrix of `rows` rows.
fn rows(bytes: &[u8], rows: usize) -> Vec<&[u8]> {
    assert_eq!(bytes.len() % rows, 0);
    bytes.chunks_exact(bytes.len() / rows).collect()
}

/// A column range of every row, in bytes of a row.
fn columns(bytes: &[u8], count: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    rows(bytes, count).into_iter().flat_map(|r| r[range.clone()].to_vec()).collect()
}

/// The blocks that a model made in code holds under that name.
fn source(name: &str, ty: u32, ne: &[u64]) -> Vec<u8> {
    blocks(name, ty, ne.iter().product())
}

/// HF order from llama.cpp's: `LlamaModel.permute` makes each head's rows [2][half] into [half][2].
fn unpermuted(bytes: &[u8], heads: usize, head: usize) -> Vec<u8> {
    let all = rows(bytes, heads * head);
    let mut out = Vec::new();
    for h in 0..heads {
        for two in 0..2 {
            for half in 0..head / 2 {
                out.extend_from_slice(all[h * head + half * 2 + two]);
            }
        }
    }
    out
}
