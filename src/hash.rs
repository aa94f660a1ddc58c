//! The BLAKE3 hash of a file from its leaves, hashed in any order.
//!
//! A file is cut in leaves of [`LEAF`] bytes, the last one shorter. Since a leaf is
//! a power of two, each is a whole subtree of BLAKE3's tree, and the leaves' chaining values fold to the
//! very hash that `b3sum` prints. The root of the tree is finalised otherwise than its inner nodes: in a
//! file of one leaf that leaf is the root, and its value is the file's hash.

use crate::error::{Error, Result, shown};
use blake3::hazmat::{HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};
use std::ops::Range;

/// Bytes of one leaf: the unit of work, hashing, resume and verification. A power of two.
pub const LEAF: u64 = 16 << 20;

/// Leaves of a file of `file_bytes` bytes; an empty file has none in the manifest.
pub fn leaves(file_bytes: u64) -> u64 {
    file_bytes.div_ceil(LEAF)
}

/// The byte range of a leaf in a file of `bytes` bytes.
pub fn leaf_range(leaf: u64, bytes: u64) -> Range<u64> {
    leaf * LEAF..((leaf + 1) * LEAF).min(bytes)
}

/// The value of leaf `index` of a file of `file_bytes` bytes: its chaining value, or the file's hash when
/// it is the only leaf. `bytes` are the whole leaf.
///
/// # Panics
///
/// When `bytes` has not the length of that leaf.
pub fn leaf(bytes: &[u8], index: u64, file_bytes: u64) -> [u8; 32] {
    leaf_of(LEAF, bytes, index, file_bytes)
}

/// The BLAKE3 hash of a file of `file_bytes` bytes from the values of its leaves, in order. An
/// empty slice means an empty file.
///
/// # Panics
///
/// When there are not as many leaves as the length asks for.
pub fn fold(leaves: &[[u8; 32]], file_bytes: u64) -> [u8; 32] {
    fold_of(LEAF, leaves, file_bytes)
}

/// A hash as 64 lower-case hex digits.
pub fn to_hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// The hash that 64 hex digits spell.
///
/// # Errors
///
/// [`Error::Shards`] when `hex` is anything else.
pub fn from_hex(hex: &str) -> Result<[u8; 32]> {
    match blake3::Hash::from_hex(hex) {
        Ok(hash) => Ok(*hash.as_bytes()),
        Err(_) => Err(Error::shards(
            format!("\"{}\"", shown(hex)),
            "no BLAKE3 hash, expected 64 hex digits: the manifest is damaged",
        )),
    }
}

fn leaf_of(size: u64, bytes: &[u8], index: u64, file_bytes: u64) -> [u8; 32] {
    let start = index * size;
    let expected = if start <= file_bytes { size.min(file_bytes - start) } else { 0 };
    assert_eq!(bytes.len() as u64, expected, "leaf {index} of a file of {file_bytes} bytes");
    if file_bytes <= size {
        return *blake3::hash(bytes).as_bytes();
    }
    blake3::Hasher::new().set_input_offset(start).update(bytes).finalize_non_root()
}

fn fold_of(size: u64, leaves: &[[u8; 32]], file_bytes: u64) -> [u8; 32] {
    assert_eq!(leaves.len() as u64, file_bytes.div_ceil(size), "leaves of a file of {file_bytes} bytes");
    match leaves {
        [] => *blake3::hash(b"").as_bytes(),
        [only] => *only,
        _ => {
            let left = left_subtree_len(file_bytes);
            let (a, b) = leaves.split_at((left / size) as usize);
            let (a, b) = (subtree(size, a, left), subtree(size, b, file_bytes - left));
            *merge_subtrees_root(&a, &b, Mode::Hash).as_bytes()
        }
    }
}

/// The chaining value of a subtree of `bytes` bytes below the root.
fn subtree(size: u64, leaves: &[[u8; 32]], bytes: u64) -> [u8; 32] {
    if let [only] = leaves {
        return *only;
    }
    let left = left_subtree_len(bytes);
    let (a, b) = leaves.split_at((left / size) as usize);
    merge_subtrees_non_root(&subtree(size, a, left), &subtree(size, b, bytes - left), Mode::Hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hashes `data` leaf by leaf, the last first, and compares with plain BLAKE3.
    fn same(size: u64, data: &[u8]) {
        let bytes = data.len() as u64;
        let count = bytes.div_ceil(size);
        let mut values = vec![[0; 32]; count as usize];
        // A stride with no common factor visits every leaf once, out of order.
        let stride = (1..).map(|n| 7 * n + 3).find(|s| gcd(*s, count.max(1)) == 1).unwrap_or(1);
        for step in 0..count {
            let index = (step * stride + 5) % count;
            let start = (index * size) as usize;
            let end = data.len().min(start + size as usize);
            values[index as usize] = leaf_of(size, &data[start..end], index, bytes);
        }
        let hash = fold_of(size, &values, bytes);
        assert_eq!(to_hex(&hash), blake3::hash(data).to_hex().as_str(), "{bytes} bytes, leaf {size}");
    }

    fn gcd(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { gcd(b, a % b) }
    }

    fn data(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn folds_to_the_plain_hash_at_every_boundary() {
        let data = data(17 * 4096 + 1);
        for size in [1024, 4096] {
            for leaves in 0..=17 {
                let edge = leaves * size as usize;
                for bytes in [edge.saturating_sub(1), edge, edge + 1, edge + 512] {
                    if bytes <= data.len() {
                        same(size, &data[..bytes]);
                    }
                }
            }
        }
    }

    #[test]
    fn folds_leaves_of_the_real_size() {
        let data = data(2 * LEAF as usize + 1);
        for bytes in [LEAF - 1, LEAF, LEAF + 1, 2 * LEAF, 2 * LEAF + 1] {
            let data = &data[..bytes as usize];
            let values: Vec<_> =
                data.chunks(LEAF as usize).zip(0..).map(|(l, i)| leaf(l, i, bytes)).collect();
            assert_eq!(leaves(bytes), values.len() as u64);
            assert_eq!(fold(&values, bytes), *blake3::hash(data).as_bytes(), "{bytes} bytes");
        }
    }

    #[test]
    fn a_changed_or_swapped_leaf_changes_the_hash() {
        let data = data(5 * 1024);
        let mut values: Vec<_> =
            data.chunks(1024).zip(0..).map(|(l, i)| leaf_of(1024, l, i, 5 * 1024)).collect();
        let hash = fold_of(1024, &values, 5 * 1024);
        values.swap(1, 2);
        assert_ne!(fold_of(1024, &values, 5 * 1024), hash);
        values.swap(1, 2);
        values[4][0] ^= 1;
        assert_ne!(fold_of(1024, &values, 5 * 1024), hash);
    }

    #[test]
    fn hex_goes_both_ways() {
        // The hash of no bytes, from BLAKE3's own test vectors.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(to_hex(&fold(&[], 0)), empty);
        assert_eq!(from_hex(empty).map(|h| to_hex(&h)).ok().as_deref(), Some(empty));
        for bad in ["", "af", &"g".repeat(64), &"a".repeat(63), &"é".repeat(32)] {
            assert!(from_hex(bad).is_err(), "{bad}");
        }
    }
}
