//! Decoding gives ggml's bits.

use preshard::quant::{self, Float, GgmlType, TYPES};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The one NaN of decoded values; the expected values carry ggml's own.
fn canonical(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { 0x7fc0_0000 } else { bits }
}

#[derive(serde::Deserialize)]
struct ZooTensor {
    id: u32,
    name: String,
    rows: usize,
    cols: usize,
    block: u64,
    bytes: u64,
}

#[test]
fn every_type_decodes_as_ggml_does() {
    let tensors: Vec<ZooTensor> =
        serde_json::from_slice(&std::fs::read(fixture("zoo/all-types.json")).unwrap()).unwrap();
    let gguf = std::fs::read(fixture("zoo/all-types.gguf")).unwrap();
    let expected = std::fs::read(fixture("zoo/all-types.expected.f32")).unwrap();

    // The tensors fill the end of the file in this order, each padded to 32 bytes.
    let padded = |t: &ZooTensor| (t.rows * t.cols / t.block as usize * t.bytes as usize).next_multiple_of(32);
    let mut at = gguf.len() - tensors.iter().map(padded).sum::<usize>();
    let mut expected = &expected[..];
    for t in &tensors {
        let ggml = quant::by_id(t.id).unwrap();
        assert_eq!((ggml.name, ggml.block, ggml.bytes), (&*t.name, t.block, t.bytes));
        let data = &gguf[at..][..t.rows * ggml.row_bytes(t.cols as u64).unwrap() as usize];
        at += padded(t);
        let (want, rest) = expected.split_at(t.rows * t.cols * 4);
        expected = rest;
        if ggml.is_integer() {
            continue;
        }
        let mut got = vec![0; want.len()];
        ggml.decode(data, Float::F32, &mut got);
        for (i, (got, want)) in got.as_chunks::<4>().0.iter().zip(want.as_chunks::<4>().0).enumerate() {
            let (got, want) = (u32::from_le_bytes(*got), u32::from_le_bytes(*want));
            assert_eq!(got, canonical(want), "{} element {i}: {got:#010x} for {want:#010x}", t.name);
        }
    }
    assert!(expected.is_empty());
}

#[derive(serde::Deserialize)]
struct Vectors {
    id: u32,
    name: String,
    elements: usize,
}

/// Random blocks, some with zero, subnormal, infinite and NaN scales; see `scripts/ggml_vectors.py`.
#[test]
fn random_blocks_decode_as_ggml_does() {
    let rows: Vec<Vectors> =
        serde_json::from_slice(&std::fs::read(fixture("decode/vectors.json")).unwrap()).unwrap();
    let data = std::fs::read(fixture("decode/vectors.bin")).unwrap();
    let mut rest = &data[..];
    let mut take = |bytes: usize| rest.split_off(..bytes).unwrap();
    for row in &rows {
        let ggml = quant::by_id(row.id).unwrap();
        assert_eq!(ggml.name, row.name);
        let blocks = take(ggml.row_bytes(row.elements as u64).unwrap() as usize);
        for to in Float::ALL {
            let want = take(row.elements * to.size());
            let mut got = vec![0; want.len()];
            ggml.decode(blocks, to, &mut got);
            let pairs = got.chunks_exact(to.size()).zip(want.chunks_exact(to.size()));
            for (i, (got, want)) in pairs.enumerate() {
                assert_eq!(got, want, "{} to {to:?}, element {i}", row.name);
            }
        }
    }
    assert!(rest.is_empty());
    let decodable = TYPES.iter().filter(|t| t.is_float() || t.is_quantised()).count();
    assert_eq!(rows.len(), decodable);
}

/// Bytes of a fixed sequence (xorshift), every bit pattern among them.
fn random_bytes(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(len)
    .collect()
}

#[test]
fn vector_code_gives_the_same_bits_anywhere_in_memory() {
    let source = random_bytes(1 << 16);
    let mut out = vec![0; 1 << 18];
    for ggml in TYPES.iter().filter(|t| t.is_float() || t.is_quantised()) {
        for to in Float::ALL {
            for blocks in [0, 1, 2, 3, 7, 33, 100] {
                let (input, output) = (ggml.bytes as usize, ggml.block as usize * to.size());
                let mut want = vec![0; blocks * output];
                ggml.decode_portable(&source[..blocks * input], to, &mut want);
                for offset in [1, 2, 3, 5] {
                    // The same blocks, moved in memory.
                    let moved = [&vec![0; offset], &source[..blocks * input]].concat();
                    let out = &mut out[7 * offset..][..blocks * output + 1];
                    out.fill(0xa5);
                    ggml.decode(&moved[offset..], to, &mut out[..blocks * output]);
                    assert!(out[..blocks * output] == want, "{} to {to:?}, {blocks} blocks", ggml.name);
                    assert_eq!(out[blocks * output], 0xa5, "{} wrote past its output", ggml.name);
                }
            }
        }
    }
}

/// The blocks that decode to a NaN or an infinity, found by decoding.
fn nonfinite_blocks(ggml: &GgmlType, source: &[u8]) -> Vec<u64> {
    let mut y = vec![0; ggml.block as usize * 4];
    let blocks = source.chunks_exact(ggml.bytes as usize).enumerate();
    blocks
        .filter(|(_, b)| {
            // f64 beyond f32 is finite, though its f32 is not.
            if let ("f64", Ok(b)) = (ggml.name, <[u8; 8]>::try_from(*b)) {
                return !f64::from_le_bytes(b).is_finite();
            }
            ggml.decode(b, Float::F32, &mut y);
            y.as_chunks::<4>().0.iter().any(|y| !f32::from_le_bytes(*y).is_finite())
        })
        .map(|(i, _)| i as u64)
        .collect()
}

#[test]
fn nonfinite_blocks_are_found_without_decoding() {
    let source = random_bytes(400_000);
    for ggml in TYPES.iter().filter(|t| t.is_float() || t.is_quantised()) {
        let size = ggml.bytes as usize;
        let source = &source[..source.len() / size * size];
        let want = nonfinite_blocks(ggml, source);
        assert_eq!(ggml.count_nonfinite(source), want.len() as u64, "{}", ggml.name);
        // Random scales are rarely special, but often enough for this to mean something.
        assert_eq!(want.is_empty(), ggml.name == "nvfp4", "{}", ggml.name);
        let mut from = 0;
        for block in want.into_iter().take(50) {
            assert_eq!(
                ggml.first_nonfinite(&source[from..]),
                Some(block - (from / size) as u64),
                "{}",
                ggml.name
            );
            from = (block as usize + 1) * size;
            assert_eq!(ggml.first_nonfinite(&source[from - size..from]), Some(0), "{}", ggml.name);
        }
        assert_eq!(ggml.first_nonfinite(&[]), None);
    }
    let i32 = quant::by_id(26).unwrap();
    assert_eq!((i32.count_nonfinite(&[0xff; 64]), i32.first_nonfinite(&[0xff; 64])), (0, None));
}

#[test]
fn mxfp4_overflows_only_where_a_code_does() {
    let mxfp4 = quant::by_id(39).unwrap();
    // Scale 2^(e - 127), the largest code 6: 2^125 x 6 = 1.5 x 2^127 fits, 2^126 x 6 does not.
    for (e, code, overflows) in
        [(252, 7, false), (253, 7, true), (253, 5, false), (254, 5, true), (255, 1, false)]
    {
        let mut block = [0; 17];
        (block[0], block[9]) = (e, code);
        assert_eq!(mxfp4.count_nonfinite(&block), overflows as u64, "scale {e}, code {code}");
    }
}
