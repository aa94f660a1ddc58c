//! Shard rules as index arithmetic: which rows, columns, experts and layers a rank holds.

use std::ops::Range;

/// More ranks or pipeline stages are a mistake.
pub const MAX_PARTS: u64 = 4096;

/// An equal share of `n` items, or `None` when `parts` does not divide `n`.
pub fn share(n: u64, parts: u64, part: u64) -> Option<Range<u64>> {
    n.is_multiple_of(parts).then(|| n / parts * part..n / parts * (part + 1))
}

/// Rows of the key/value heads of a rank. Fewer heads than ranks: `parts / heads` ranks in a row
/// share one. `None` when neither number divides the other, or heads do not divide `rows`.
pub fn kv_rows(rows: u64, heads: u64, parts: u64, part: u64) -> Option<Range<u64>> {
    if heads == 0 || !rows.is_multiple_of(heads) {
        None
    } else if heads.is_multiple_of(parts) {
        share(rows, parts, part)
    } else if parts.is_multiple_of(heads) {
        share(rows, heads, part / (parts / heads))
    } else {
        None
    }
}

/// A rank's rows of the vocabulary padded to `padded` rows: the real ones, and how many are padding.
pub fn vocab_rows(rows: u64, padded: u64, parts: u64, part: u64) -> Option<(Range<u64>, u64)> {
    let held = share(padded, parts, part)?;
    let real = held.start.min(rows)..held.end.min(rows);
    let padding = (held.end - held.start) - (real.end - real.start);
    Some((real, padding))
}

/// The experts of a rank when they are placed whole, in order; the first ranks take one more when
/// they do not divide evenly (vLLM's `linear` placement, `determine_expert_map`).
pub fn experts(n: u64, parts: u64, part: u64) -> Range<u64> {
    let (base, rest) = (n / parts, n % parts);
    let start = part * base + part.min(rest);
    start..start + base + u64::from(part < rest)
}

/// First layer of each pipeline stage and the end, as vLLM's `get_pp_indices` has them: layers that
/// do not divide evenly go to the stages before the last, from the back.
pub fn stages(layers: u64, parts: u64) -> Vec<u64> {
    let (base, rest) = (layers / parts, layers % parts);
    let mut starts = vec![0];
    for part in 0..parts {
        // vLLM adds one to stage `parts - 2`, `parts - 3`, …, one for each layer left over.
        let extra = part + 2 <= parts && parts - 2 - part < rest;
        starts.push(starts[part as usize] + base + u64::from(extra));
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_heads_fewer_than_ranks_are_replicated_whole() {
        // 2 heads of 64 rows over 4 ranks: ranks 0, 1 hold head 0, ranks 2, 3 head 1.
        let rows: Vec<_> = (0..4).map(|r| kv_rows(128, 2, 4, r).unwrap()).collect();
        assert_eq!(rows, [0..64, 0..64, 64..128, 64..128]);
        assert_eq!(kv_rows(256, 4, 6, 0), None);
        assert_eq!(kv_rows(256, 4, 2, 1), Some(128..256));
        assert_eq!(kv_rows(8, 0, 2, 0), None);
    }

    #[test]
    fn vocabulary_padding_sits_at_the_end() {
        // vLLM: 32008 rows padded to 32064; rank 1 of 2 has 15976 real rows and 56 of padding.
        assert_eq!(vocab_rows(32008, 32064, 2, 0), Some((0..16032, 0)));
        assert_eq!(vocab_rows(32008, 32064, 2, 1), Some((16032..32008, 56)));
        assert_eq!(vocab_rows(10, 64, 4, 3), Some((10..10, 16)));
        assert_eq!(vocab_rows(151552, 151552, 6, 0), None);
    }

    #[test]
    fn experts_and_stages_are_placed_as_vllm_does() {
        assert_eq!((0..3).map(|r| experts(8, 3, r)).collect::<Vec<_>>(), [0..3, 3..6, 6..8]);
        assert_eq!(stages(61, 3), [0, 20, 41, 61]);
        assert_eq!(stages(45, 2), [0, 23, 45]);
        assert_eq!(stages(11, 3), [0, 4, 8, 11]);
        assert_eq!(stages(8, 1), [0, 8]);
    }
}
