//! Decoding gives ggml's bits.

use preshard::quant::{self, Float};
use std::path::Path;

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
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/zoo");
    let tensors: Vec<ZooTensor> =
        serde_json::from_slice(&std::fs::read(zoo.join("all-types.json")).unwrap()).unwrap();
    let gguf = std::fs::read(zoo.join("all-types.gguf")).unwrap();
    let expected = std::fs::read(zoo.join("all-types.expected.f32")).unwrap();

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
