//! The loader's promise: every byte as converted, or a refusal that names the file and the place.

#[path = "common/directory.rs"]
mod directory;

use directory::Spec;
use preshard::hash::LEAF;
use preshard::load::{Directory, Method, Options, Shard};
use preshard::manifest::{FILE_NAME, Manifest};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Sizes of every awkward kind: 1, 17, 4095 and 4097 bytes, none at all, two leaves and a bit.
fn tensors() -> Vec<Spec> {
    vec![
        ("big".into(), "U8", vec![3, 11 << 20]),
        ("row".into(), "BF16", vec![256, 24]),
        ("one".into(), "U8", vec![1]),
        ("odd".into(), "U8", vec![17]),
        ("below".into(), "U8", vec![4095]),
        ("none".into(), "U8", vec![0, 4]),
        ("above".into(), "U8", vec![4097]),
        ("scalar".into(), "F32", vec![]),
    ]
}

fn small() -> Vec<Spec> {
    vec![("a".into(), "F32", vec![8, 4]), ("b".into(), "U8", vec![5])]
}

fn converted(ranks: u64, tensors: &[Spec]) -> (TempDir, Manifest) {
    let dir = TempDir::new().unwrap();
    let manifest = directory::write(dir.path(), ranks, tensors);
    (dir, manifest)
}

fn file(dir: &TempDir, rank: u64) -> PathBuf {
    dir.path().join(format!("model-rank-{rank}-part-0.safetensors"))
}

fn options() -> Options {
    Options { threads: Some(3), ..Options::default() }
}

/// Opening or loading fails with one line that holds all of `parts`.
fn refused(dir: &Path, rank: u64, parts: &[&str]) {
    let result = Shard::open(dir, rank).and_then(|s| s.load_host(&options()));
    let text = result.err().expect("refused").to_string();
    assert!(parts.iter().all(|p| text.contains(p)), "{text}\nexpected {parts:?}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Rewrites the manifest, its hashes made to fit: an attacker who recomputed the checksums.
fn rewrite(dir: &TempDir, manifest: &Manifest) {
    fs::write(dir.path().join(FILE_NAME), manifest.to_bytes()).unwrap();
}

/// Replaces the header of rank 0's file, padding kept, and makes the manifest's hashes fit.
fn rewrite_header(dir: &TempDir, manifest: &Manifest, edit: impl Fn(String) -> String) {
    let mut data = fs::read(file(dir, 0)).unwrap();
    let start = manifest.shards[0].data_start as usize;
    let mut json =
        edit(String::from_utf8(data[8..start].to_vec()).unwrap().trim_end().to_owned()).into_bytes();
    json.resize(start - 8, b' ');
    data[8..start].copy_from_slice(&json);
    fs::write(file(dir, 0), &data).unwrap();
    let mut manifest = manifest.clone();
    let hash = blake3::hash(&data).to_hex().to_string();
    manifest.shards[0].blake3 = hash.clone();
    manifest.shards[0].leaves = vec![hash];
    rewrite(dir, &manifest);
}

#[test]
fn lod_04_every_byte_arrives_by_every_method() {
    let (dir, manifest) = converted(2, &tensors());
    let shards = Directory::open(dir.path()).unwrap().all().unwrap();
    for (rank, shard) in shards.iter().enumerate() {
        let data = fs::read(file(&dir, rank as u64)).unwrap();
        assert_eq!(blake3::hash(&data).to_hex().as_str(), manifest.shards[rank].blake3);
        for method in [Method::Auto, Method::Buffered, Method::Direct] {
            for chunk in [64 << 10, 1 << 20, 16 << 20] {
                let loaded = shard.load_host(&Options { method, chunk, ..options() }).unwrap();
                assert_eq!(loaded.tensors().count(), 8);
                for (bytes, t) in loaded.tensors() {
                    assert!(bytes == &data[t.offset as usize..(t.offset + t.bytes) as usize], "{}", t.name);
                }
                assert!(loaded.tensor("odd").is_some_and(|(b, _)| b.len() == 17));
                assert!(loaded.tensor("nobody").is_none());
                assert!(loaded.stats().verified);
            }
        }
    }
}

/// Looking whether a file is in the page cache does not bring it there, not even page by page over
/// several loads.
#[test]
fn a_cold_file_stays_cold() {
    let (dir, _) = converted(1, &tensors());
    let shard = Shard::open(dir.path(), 0).unwrap();
    let file = OpenOptions::new().read(true).open(file(&dir, 0)).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let direct = || shard.load_host(&options()).unwrap().stats().direct;
    let bytes = shard.entry().bytes;
    for load in 0..5 {
        match direct() {
            0 if load == 0 => {
                return println!("SKIPPED: {} cannot be read past the page cache", dir.path().display());
            }
            read => assert_eq!(read, bytes, "load {load}"),
        }
    }
    // A part that someone else reads is taken from where it is; the kernel may have read on.
    file.read_exact_at(&mut vec![0; 16 << 20], 0).unwrap();
    let rest = direct();
    assert!(rest <= bytes - (8 << 20), "{rest} of {bytes}");
}

#[test]
fn safetensors_reads_the_same() {
    let (dir, _) = converted(1, &tensors());
    let data = fs::read(file(&dir, 0)).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&data).unwrap();
    let ours = Shard::open(dir.path(), 0).unwrap().load_host(&options()).unwrap();
    for (bytes, t) in ours.tensors() {
        assert!(theirs.tensor(&t.name).unwrap().data() == bytes, "{}", t.name);
    }
}

#[test]
fn lod_05_a_flipped_bit_is_found_and_named() {
    let (dir, manifest) = converted(1, &tensors());
    let odd = manifest.shards[0].tensors.iter().find(|t| t.name == "odd").unwrap();
    let out = OpenOptions::new().write(true).read(true).open(file(&dir, 0)).unwrap();
    let mut byte = [0];
    out.read_exact_at(&mut byte, odd.offset).unwrap();
    out.write_all_at(&[byte[0] ^ 0x10], odd.offset).unwrap();
    let leaf = format!("leaf {}", odd.offset / LEAF);
    refused(dir.path(), 0, &["model-rank-0-part-0.safetensors", "1 of 3 leaves damaged", &leaf, "odd"]);
    let unverified = Options { verify: false, ..options() };
    assert!(Shard::open(dir.path(), 0).unwrap().load_host(&unverified).is_ok());
}

#[test]
fn lod_05_swapped_ranks_are_found() {
    let (dir, _) = converted(2, &tensors());
    let aside = dir.path().join("aside");
    fs::rename(file(&dir, 0), &aside).unwrap();
    fs::rename(file(&dir, 1), file(&dir, 0)).unwrap();
    fs::rename(&aside, file(&dir, 1)).unwrap();
    refused(dir.path(), 0, &["rank-0", "leaves damaged"]);
    refused(dir.path(), 1, &["rank-1", "leaves damaged"]);
}

#[test]
fn lod_05_wrong_sizes_are_refused() {
    let (dir, manifest) = converted(1, &small());
    let bytes = manifest.shards[0].bytes;
    for size in [0, 7, bytes - 1, bytes + 1] {
        OpenOptions::new().write(true).open(file(&dir, 0)).unwrap().set_len(size).unwrap();
        refused(
            dir.path(),
            0,
            &["model-rank-0-part-0.safetensors", &format!("{size} bytes, expected {bytes}")],
        );
    }
}

#[test]
fn a_directory_without_its_manifest_is_incomplete() {
    let (dir, _) = converted(1, &small());
    fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    refused(dir.path(), 0, &["preshard.json: not found", "incomplete"]);
    fs::write(dir.path().join(FILE_NAME), "{").unwrap();
    refused(dir.path(), 0, &["preshard.json: not a manifest"]);
}

#[test]
fn sec_08_names_never_leave_the_directory() {
    let (dir, manifest) = converted(1, &small());
    // Beside the directory, named after it: tests run at the same time.
    let outside = dir.path().with_extension("safetensors");
    fs::copy(file(&dir, 0), &outside).unwrap();
    let sibling = format!("../{}", outside.file_name().unwrap().to_str().unwrap());
    for name in [&sibling, "/etc/hostname", "a/../../x", "C:\\x", "", ".", "..", "a\0b"] {
        let mut evil = manifest.clone();
        evil.shards[0].file = name.into();
        rewrite(&dir, &evil);
        refused(dir.path(), 0, &["preshard.json", "leaves the directory"]);
    }
    fs::remove_file(outside).unwrap();
}

#[test]
fn sec_08_links_inside_are_followed_and_links_outside_are_not() {
    let (dir, _) = converted(1, &small());
    let outside = TempDir::new().unwrap();
    let inner = dir.path().join("blob");
    fs::rename(file(&dir, 0), &inner).unwrap();
    symlink("blob", file(&dir, 0)).unwrap();
    assert!(Shard::open(dir.path(), 0).is_ok());
    let far = outside.path().join("blob");
    fs::rename(&inner, &far).unwrap();
    fs::remove_file(file(&dir, 0)).unwrap();
    symlink(&far, file(&dir, 0)).unwrap();
    refused(dir.path(), 0, &["model-rank-0-part-0.safetensors", "a link that leaves the directory"]);
}

#[test]
fn lod_05_what_is_no_regular_file_is_refused() {
    let (dir, _) = converted(1, &small());
    fs::remove_file(file(&dir, 0)).unwrap();
    refused(dir.path(), 0, &["model-rank-0-part-0.safetensors", "missing"]);
    fs::create_dir(file(&dir, 0)).unwrap();
    refused(dir.path(), 0, &["no regular file"]);
    fs::remove_dir(file(&dir, 0)).unwrap();
    // A FIFO must not hold the loader.
    rustix::fs::mknodat(rustix::fs::CWD, file(&dir, 0), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused(dir.path(), 0, &["no regular file"]);
}

#[test]
fn lod_05_stale_parts_are_refused() {
    let (dir, _) = converted(1, &small());
    for name in ["model-rank-0-part-1.safetensors", "model-rank-1-part-0.safetensors", "model.safetensors"] {
        fs::write(dir.path().join(name), "").unwrap();
        refused(dir.path(), 0, &[name, "not in the manifest"]);
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    assert!(Shard::open(dir.path(), 0).is_ok());
}

#[test]
fn ranks_that_are_not_there_are_refused() {
    let (dir, _) = converted(2, &small());
    refused(dir.path(), 2, &["preshard.json", "no part model of stage 0, rank 2", "2 ranks"]);
    fs::remove_file(file(&dir, 1)).unwrap();
    assert!(Shard::open(dir.path(), 0).is_ok(), "a host may hold its own ranks only");
    let all = Directory::open(dir.path()).unwrap().all().err().unwrap().to_string();
    assert!(all.contains("rank-1") && all.contains("missing"), "{all}");
}

#[test]
fn an_engine_of_another_shape_is_refused() {
    let (_dir, manifest) = converted(2, &small());
    assert!(manifest.expect_world(2, 1, false).is_ok());
    for (tp, pp, ep) in [(4, 1, false), (2, 2, false), (2, 1, true)] {
        let text = manifest.expect_world(tp, pp, ep).unwrap_err().to_string();
        assert!(text.contains("converted for tensor parallel 2"), "{text}");
    }
}

#[test]
fn sec_09_headers_that_disagree_with_the_manifest_are_refused() {
    let (dir, manifest) = converted(1, &small());
    let original = fs::read(file(&dir, 0)).unwrap();
    let edits: [(&str, &str, &str); 7] = [
        (r#""dtype":"F32""#, r#""dtype":"I32""#, "tensor a: dtype I32 in the file, F32 in the manifest"),
        ("[8, 4]", "[4, 8]", "tensor a: shape [4, 8] in the file, [8, 4] in the manifest"),
        ("[8, 4]", "[32]", "tensor a: shape"),
        (r#""b":"#, r#""c":"#, "tensor c: in the file, not in the manifest"),
        ("[128,133]", "[128,132]", "offsets cover 4"),
        (r#""b":"#, r#""a":"#, "tensor a twice"),
        (r#"{"a""#, r#"{"__metadata__":{"x":1},"a""#, "the header is damaged"),
    ];
    for (from, to, why) in edits {
        rewrite_header(&dir, &manifest, |json| {
            assert!(json.contains(from), "{json}");
            json.replacen(from, to, 1)
        });
        refused(dir.path(), 0, &["model-rank-0-part-0.safetensors", why]);
        fs::write(file(&dir, 0), &original).unwrap();
    }
    // Metadata of texts is fine, and no secret is in the order of keys.
    rewrite_header(&dir, &manifest, |json| json.replacen(r#"{"a""#, r#"{"__metadata__":{"x":"1"},"a""#, 1));
    assert!(Shard::open(dir.path(), 0).unwrap().load_host(&options()).is_ok());
}

#[test]
fn sec_09_header_lengths_are_checked_before_they_are_believed() {
    let (dir, manifest) = converted(1, &small());
    let bytes = manifest.shards[0].bytes;
    let out = OpenOptions::new().write(true).open(file(&dir, 0)).unwrap();
    for (length, why) in [
        (1u64 << 63, "100000000 is the most"),
        (100_000_001, "100000000 is the most"),
        (u64::MAX, "100000000 is the most"),
        (bytes, "claims a header"),
        (bytes - 8, "data starts at byte"),
        (0, "data starts at byte 8"),
    ] {
        out.write_all_at(&length.to_le_bytes(), 0).unwrap();
        refused(dir.path(), 0, &["model-rank-0-part-0.safetensors", why]);
    }
}

#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let (dir, manifest) = converted(1, &small());
    type Edit<'a> = &'a dyn Fn(&mut Manifest);
    let cases: [(Edit, &str); 8] = [
        (&|m| m.schema = 2, "schema 2"),
        (&|m| m.shards[0].leaves.clear(), "leaf hashes"),
        (&|m| m.shards[0].leaves[0] = "00".repeat(32), "do not fold"),
        (&|m| m.shards[0].leaves[0] = "zz".repeat(32), "a leaf hash that is none"),
        (&|m| m.shards[0].blake3 = "0".repeat(63), "do not fold"),
        (&|m| m.shards[0].tensors[1].name = "a".into(), "a tensor twice"),
        (&|m| m.shards[0].tensors[1].bytes = u64::MAX, "ends past the file"),
        (&|m| m.shards.push(m.shards[0].clone()), "twice"),
    ];
    for (edit, why) in cases {
        let mut wrong = manifest.clone();
        edit(&mut wrong);
        rewrite(&dir, &wrong);
        refused(dir.path(), 0, &["preshard.json", why]);
    }
    rewrite(&dir, &manifest);
    assert!(Shard::open(dir.path(), 0).is_ok());
}

#[test]
fn lod_05_a_file_that_changes_after_it_was_opened_is_refused() {
    let unverified = Options { verify: false, ..options() };
    // Written to, with the same size and even the same bytes.
    let (dir, _) = converted(1, &small());
    let shard = Shard::open(dir.path(), 0).unwrap();
    let data = fs::read(file(&dir, 0)).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20)); // past the clock tick of file times
    fs::write(file(&dir, 0), &data).unwrap();
    let text = shard.load_host(&unverified).err().unwrap().to_string();
    assert!(text.contains("changed while it was loaded"), "{text}");
    // Replaced by a file of the same bytes.
    let shard = Shard::open(dir.path(), 0).unwrap();
    fs::write(dir.path().join("new"), &data).unwrap();
    fs::rename(dir.path().join("new"), file(&dir, 0)).unwrap();
    assert!(shard.load_host(&unverified).err().unwrap().to_string().contains("changed"));
    // Cut short.
    let shard = Shard::open(dir.path(), 0).unwrap();
    OpenOptions::new().write(true).open(file(&dir, 0)).unwrap().set_len(4096).unwrap();
    for method in [Method::Auto, Method::Direct, Method::Buffered] {
        let text = shard.load_host(&Options { method, ..unverified.clone() }).err().unwrap().to_string();
        assert!(text.contains("ends at byte 4096 while it is loaded"), "{text}");
    }
}

#[test]
fn options_are_checked() {
    let (dir, _) = converted(1, &small());
    let shard = Shard::open(dir.path(), 0).unwrap();
    for options in [
        Options { chunk: 0, ..Options::default() },
        Options { chunk: 3 << 20, ..Options::default() },
        Options { chunk: 32 << 20, ..Options::default() },
        Options { threads: Some(0), ..Options::default() },
        Options { threads: Some(100_000), ..Options::default() },
    ] {
        assert!(shard.load_host(&options).is_err(), "{options:?}");
    }
}

#[cfg(feature = "cuda")]
fn gpu(test: &str) -> Option<preshard::gpu::Device> {
    preshard::gpu::Device::open(0).inspect_err(|e| println!("{test}: SKIPPED, nothing was checked: {e}")).ok()
}

/// On the GPU: the same bytes, the same refusals. Without one this says so and passes.
#[cfg(feature = "cuda")]
#[test]
fn lod_04_the_gpu_gets_every_byte_and_finds_a_flipped_bit() {
    let Some(device) = gpu("lod_04_the_gpu_gets_every_byte_and_finds_a_flipped_bit") else { return };
    let (dir, manifest) = converted(1, &tensors());
    let data = fs::read(file(&dir, 0)).unwrap();
    for method in [Method::Auto, Method::Buffered, Method::Direct] {
        for chunk in [64 << 10, 2 << 20, 16 << 20] {
            let shard = Shard::open(dir.path(), 0).unwrap();
            let loaded = shard.load(&device, &Options { method, chunk, ..options() }).unwrap();
            let mut back = vec![0; data.len()];
            loaded.memory().read(0, &mut back).unwrap();
            assert!(back == data, "{method:?} {chunk}");
            assert_eq!(
                loaded.tensor("row").unwrap().0 - loaded.memory().ptr(),
                manifest.shards[0].tensors[1].offset
            );
        }
    }
    let out = OpenOptions::new().write(true).open(file(&dir, 0)).unwrap();
    let row = manifest.shards[0].tensors[1].offset as usize;
    out.write_all_at(&[data[row] ^ 1], row as u64).unwrap();
    let text = Shard::open(dir.path(), 0).unwrap().load(&device, &options()).err().unwrap().to_string();
    assert!(text.contains("1 of 3 leaves damaged") && text.contains("row"), "{text}");
}

/// A file larger than the ring, so that readers wait for slots: whole, cut short, and given up.
#[cfg(feature = "cuda")]
#[test]
fn lod_05_the_gpu_gets_no_part_of_a_file() {
    let Some(device) = gpu("lod_05_the_gpu_gets_no_part_of_a_file") else { return };
    let specs = [
        ("big".into(), "U8", vec![200 << 20]),
        ("odd".into(), "U8", vec![17]),
        ("model.layers.0.input_layernorm.weight".into(), "F32", vec![3]),
    ];
    let (dir, _) = converted(1, &specs);
    for (threads, chunk) in [(1, 16 << 20), (7, 4 << 20), (64, 64 << 10)] {
        let options = Options { threads: Some(threads), chunk, ..Options::default() };
        let shard = Shard::open(dir.path(), 0).unwrap();
        let loaded = shard.load(&device, &options).unwrap();
        loaded.compare_with(&shard).unwrap();
        let stats = loaded.stats();
        assert!(stats.pinned < 64 << 20 && stats.last_byte <= stats.seconds, "{stats:?}");
        let stopped = Options { stop: Some(std::sync::Arc::new(true.into())), ..options };
        assert!(matches!(shard.load(&device, &stopped), Err(preshard::Error::Interrupted(_))));
    }
    for left in [150 << 20, 4096] {
        let shard = Shard::open(dir.path(), 0).unwrap();
        let whole = shard.entry().bytes;
        let out = OpenOptions::new().write(true).open(file(&dir, 0)).unwrap();
        out.set_len(left).unwrap();
        let text = shard.load(&device, &Options::default()).err().unwrap().to_string();
        assert!(text.contains(&format!("ends at byte {left} while it is loaded")), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        out.set_len(whole).unwrap();
    }
}

/// The kernel against the blake3 crate at every boundary of the tree, one less and one more.
#[cfg(feature = "cuda")]
#[test]
fn the_gpu_hashes_as_the_cpu_does() {
    use preshard::gpu::blake3::LeafHasher;
    let Some(device) = gpu("the_gpu_hashes_as_the_cpu_does") else { return };
    let leaf = LEAF as usize;
    let mut sizes = vec![];
    for boundary in [
        1,
        4,
        16,
        64,
        128,
        960,
        1024,
        2048,
        3072,
        1 << 17,
        3 << 17,
        1 << 20,
        leaf / 2,
        leaf,
        2 * leaf,
        3 * leaf,
        5 * leaf,
    ] {
        sizes.extend([boundary - 1, boundary, boundary + 1]);
    }
    sizes.extend([leaf + 1024, leaf + (1 << 17) + 5, 67 * leaf + 12345]);
    sizes.retain(|&n| n > 0);
    let mut data = vec![0; 68 * leaf];
    blake3::Hasher::new().finalize_xof().fill(&mut data);
    let hasher = LeafHasher::new(&device).unwrap();
    let stream = device.stream().unwrap();
    // Bytes past each size are not zero: the kernel must not read them.
    let mut memory = device.alloc(data.len()).unwrap();
    memory.write(0, &data).unwrap();
    for bytes in sizes {
        let leaves = bytes.div_ceil(leaf);
        let mut values = device.alloc(leaves * 32).unwrap();
        values.fill(0xee).unwrap();
        // SAFETY: `memory` holds more than `bytes` bytes, `values` a place for each leaf.
        unsafe { hasher.queue(&stream, memory.ptr(), bytes as u64, 0, leaves as u64, values.ptr()).unwrap() };
        stream.synchronize().unwrap();
        let mut found = vec![[0; 32]; leaves];
        values.read(0, found.as_flattened_mut()).unwrap();
        let expected: Vec<[u8; 32]> = data[..bytes]
            .chunks(leaf)
            .enumerate()
            .map(|(i, l)| preshard::hash::leaf(l, i as u64, bytes as u64))
            .collect();
        assert_eq!(found, expected, "{bytes} bytes");
        assert_eq!(
            preshard::hash::fold(&found, bytes as u64),
            *blake3::hash(&data[..bytes]).as_bytes(),
            "{bytes}"
        );
    }
}
