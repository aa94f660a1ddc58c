//! Writes converted directories of random bytes, for tests and benches of the loader.

use preshard::hash;
use preshard::hash::LEAF;
use preshard::manifest::{FILE_NAME, Manifest, Member, Model, SCHEMA, Shard, Source, Tensor};
use preshard::policy::{Policy, SharedExperts};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Name, safetensors dtype, shape.
pub type Spec = (String, &'static str, Vec<u64>);

/// Writes one shard of `tensors` per rank and the manifest into `dir`.
pub fn write(dir: &Path, ranks: u64, tensors: &[Spec]) -> Manifest {
    let layers = tensors.iter().filter_map(|(name, ..)| layer(name)).max().map_or(1, |last| last + 1);
    let manifest = Manifest {
        schema: SCHEMA,
        tool: "preshard test".into(),
        plan: "0".repeat(64),
        sources: vec![Source { file: "test.gguf".into(), bytes: 1, header_blake3: "0".repeat(64) }],
        model: Model {
            architecture: "test".into(),
            class: "Test".into(),
            layout: "vllm-dsa".into(),
            layers,
            vocab: 0,
            vocab_padded: 0,
            experts: 0,
        },
        policy: Policy {
            tp: ranks,
            stages: vec![0, layers],
            shared_experts: SharedExperts::Separate,
            ..Policy::default()
        },
        shards: (0..ranks).map(|tp| write_shard(dir, tp, tensors)).collect(),
        files: Vec::new(),
        dropped: Vec::new(),
    };
    std::fs::write(dir.join(FILE_NAME), manifest.to_bytes()).unwrap();
    manifest
}

/// The layer in a name such as `model.layers.3.norm.weight`.
fn layer(name: &str) -> Option<u64> {
    name.split('.').nth(2).and_then(|part| part.parse().ok())
}

/// A float tensor is made of one GGUF tensor of its own dtype; bytes are constants.
fn members(name: &str, dtype: &str, shape: &[u64]) -> Vec<Member> {
    let Some(&rows) = shape.first().filter(|_| dtype != "U8") else { return Vec::new() };
    let hf = if layer(name).is_some() { name.to_owned() } else { format!("model.layers.0.{name}") };
    vec![Member {
        hf,
        from: vec![name.to_owned()],
        types: vec![dtype.to_lowercase()],
        rows: [0, rows],
        row_bytes: None,
    }]
}

/// Bytes of one tensor.
pub fn bytes(dtype: &str, shape: &[u64]) -> u64 {
    let element = match dtype {
        "U8" => 1,
        "BF16" | "F16" => 2,
        "F32" => 4,
        _ => panic!("{dtype}"),
    };
    shape.iter().product::<u64>() * element
}

/// The safetensors header of `tensors`, 8 length bytes included, padded so that data starts at a
/// multiple of 4096.
pub fn header(tensors: &[Spec]) -> Vec<u8> {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let begin = at;
            at += bytes(dtype, shape);
            format!(r#"{name:?}:{{"dtype":{dtype:?},"shape":{shape:?},"data_offsets":[{begin},{at}]}}"#)
        })
        .collect();
    let mut json = format!("{{{}}}", entries.join(",")).into_bytes();
    json.resize((json.len() + 8).next_multiple_of(4096) - 8, b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    out
}

fn write_shard(dir: &Path, tp: u64, tensors: &[Spec]) -> Shard {
    let file = format!("model-rank-{tp}-part-0.safetensors");
    let header = header(tensors);
    let data_start = header.len() as u64;
    let mut offset = data_start;
    let tensors: Vec<Tensor> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let bytes = bytes(dtype, shape);
            offset += bytes;
            Tensor {
                name: name.clone(),
                dtype: (*dtype).into(),
                shape: shape.clone(),
                offset: offset - bytes,
                bytes,
                logical: None,
                members: members(name, dtype, shape),
                recoded: None,
                decoded: None,
                nonfinite: 0,
                aliases: Vec::new(),
            }
        })
        .collect();
    let total = offset;
    let out = File::create(dir.join(&file)).unwrap();
    out.set_len(total).unwrap();
    let next = AtomicU64::new(0);
    let leaves = total.div_ceil(LEAF);
    let write_leaves = || {
        let mut done = Vec::new();
        loop {
            let leaf = next.fetch_add(1, Ordering::Relaxed);
            if leaf >= leaves {
                return done;
            }
            let begin = leaf * LEAF;
            let mut data = random(tp << 32 | leaf, LEAF.min(total - begin) as usize);
            if begin < data_start {
                let n = data.len().min((data_start - begin) as usize);
                data[..n].copy_from_slice(&header[begin as usize..begin as usize + n]);
            }
            out.write_all_at(&data, begin).unwrap();
            done.push((leaf, hash::leaf(&data, leaf, total)));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut values: Vec<(u64, [u8; 32])> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(write_leaves)).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    values.sort_unstable();
    let values: Vec<[u8; 32]> = values.into_iter().map(|(_, v)| v).collect();
    Shard {
        file,
        part: "model".into(),
        pp: 0,
        tp,
        bytes: total,
        data_start,
        blake3: hash::to_hex(&hash::fold(&values, total)),
        leaves: values.iter().map(hash::to_hex).collect(),
        experts: Vec::new(),
        vocab_rows: Some([0, 0]),
        tensors,
    }
}

/// `len` bytes of SplitMix64 (Steele, Lea, Flood, 2014) from `seed`.
fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len.next_multiple_of(8)];
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    for word in out.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    out.truncate(len);
    out
}
