//! Decoding on the GPU gives the CPU's bits, which are ggml's. Without a GPU these tests check nothing and
//! say so.
#![cfg(all(feature = "convert", feature = "cuda"))]

use preshard::gpu::batch::Batch;
use preshard::gpu::decode::{Decoder, Part};
use preshard::gpu::{Device, DeviceBuffer, Stream};
use preshard::quant::{self, Float, GgmlType, TYPES};

fn gpu(test: &str) -> Option<Device> {
    Device::open(0).inspect_err(|e| println!("{test}: SKIPPED, nothing was checked: {e}")).ok()
}

fn decodable() -> impl Iterator<Item = &'static GgmlType> {
    TYPES.iter().filter(|t| t.is_float() || t.is_quantised())
}

/// Numbers without a pattern (the splitmix64 sequence).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Words that are special as an f16, as a bf16, or as the upper or lower part of an f32 or f64: zeros,
/// subnormals, extremes, infinities, NaNs of both kinds, ties.
#[rustfmt::skip]
const SPECIAL: [u16; 28] = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfd55,
    0x7e00, 0xfe01, 0x7f7f, 0x7f80, 0xff80, 0x7f81, 0xffc1, 0x7ff0, 0xfff8, 0x7ff4, 0x36a0, 0x47ef, 0x1000, 0x7fff,
];

/// Random blocks. Of four, one has a special word where most types keep a scale, one has one anywhere,
/// and of sixteen one is a special word over and over.
fn blocks(ty: &GgmlType, count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed ^ u64::from(ty.id) << 32);
    let size = ty.bytes as usize;
    let mut bytes: Vec<u8> = (0..count * size).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        let special = SPECIAL[random.below(SPECIAL.len())].to_le_bytes();
        let words = size / 2;
        let at = match random.below(16) {
            0 => {
                block.chunks_exact_mut(2).for_each(|word| word.copy_from_slice(&special));
                continue;
            }
            1..5 => [0, 1, words.saturating_sub(1), words.saturating_sub(2)][random.below(4)],
            5..9 => random.below(words.max(1)),
            _ => continue,
        };
        if let Some(word) = block.chunks_exact_mut(2).nth(at) {
            word.copy_from_slice(&special);
        }
    }
    bytes
}

fn on_cpu(ty: &GgmlType, packed: &[u8], to: Float) -> Vec<u8> {
    let mut out = vec![0; packed.len() / ty.bytes as usize * ty.block as usize * to.size()];
    ty.decode(packed, to, &mut out);
    out
}

#[track_caller]
fn assert_same(got: &[u8], want: &[u8], size: usize, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    if got != want {
        let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap() / size;
        let element = |bytes: &[u8]| format!("{:02x?}", &bytes[at * size..][..size]);
        panic!("{what}: element {at}: {} for {} (little-endian)", element(got), element(want));
    }
}

/// What nothing has written looks like.
const POISON: u8 = 0xa5;

struct Setup {
    decoder: Decoder,
    stream: Stream,
}

impl Setup {
    fn new(device: &Device) -> Setup {
        Setup { decoder: Decoder::new(device), stream: device.stream().unwrap() }
    }
    fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        let mut buffer = self.decoder.device().alloc(bytes.len()).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer
    }
    /// Decodes to byte `at` of `length` poisoned bytes and gives all of them.
    fn decode(
        &self,
        ty: &GgmlType,
        to: Float,
        src: &DeviceBuffer,
        part: &Part,
        at: usize,
        length: usize,
    ) -> Vec<u8> {
        let mut out = self.decoder.device().alloc(length).unwrap();
        out.fill(POISON).unwrap();
        // SAFETY: the tests give parts that lie inside both buffers, which outlive the work.
        unsafe { self.decoder.decode(ty, to, src.ptr(), out.ptr() + at as u64, part, &self.stream).unwrap() };
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0; length];
        out.read(0, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn the_gpu_decodes_as_ggml_does() {
    let Some(device) = gpu("the_gpu_decodes_as_ggml_does") else { return };
    let setup = Setup::new(&device);
    let gguf = include_bytes!("fixtures/zoo/all-types.gguf");
    let mut expected = &include_bytes!("fixtures/zoo/all-types.expected.f32")[..];
    let tensors: serde_json::Value =
        serde_json::from_slice(include_bytes!("fixtures/zoo/all-types.json")).unwrap();
    let number = |t: &serde_json::Value, key: &str| t[key].as_u64().unwrap();
    let tensors: Vec<_> = (tensors.as_array().unwrap().iter())
        .map(|t| (quant::by_id(number(t, "id") as u32).unwrap(), number(t, "rows") * number(t, "cols")))
        .collect();
    // The tensors fill the end of the file in this order, each padded to 32 bytes.
    let bytes = |ty: &GgmlType, n: u64| ty.row_bytes(n).unwrap() as usize;
    let mut at = gguf.len() - tensors.iter().map(|(ty, n)| bytes(ty, *n).next_multiple_of(32)).sum::<usize>();
    for (ty, n) in tensors {
        let packed = &gguf[at..][..bytes(ty, n)];
        at += packed.len().next_multiple_of(32);
        let want = expected.split_off(..n as usize * 4).unwrap();
        if ty.is_integer() {
            continue;
        }
        let part = Part::whole(ty, n / ty.block);
        let got = setup.decode(ty, Float::F32, &setup.upload(packed), &part, 0, want.len());
        let canonical = |b: &[u8; 4]| match f32::from_le_bytes(*b) {
            x if x.is_nan() => 0x7fc0_0000u32.to_le_bytes(),
            _ => *b,
        };
        let want: Vec<u8> = want.as_chunks::<4>().0.iter().flat_map(canonical).collect();
        assert_same(&got, &want, 4, ty.name);
    }
}

#[test]
fn every_type_and_dtype_equals_the_cpu() {
    let Some(device) = gpu("every_type_and_dtype_equals_the_cpu") else { return };
    let setup = Setup::new(&device);
    for ty in decodable() {
        // One block, a few, and enough for several tiles and thread blocks with a part of one left.
        for count in [1, 3, 20_011] {
            let packed = blocks(ty, count, 1);
            let src = setup.upload(&packed);
            for to in Float::ALL {
                let want = on_cpu(ty, &packed, to);
                let part = Part::whole(ty, count as u64);
                let got = setup.decode(ty, to, &src, &part, 0, want.len());
                assert_same(&got, &want, to.size(), &format!("{} to {to:?}, {count} blocks", ty.name));
            }
        }
    }
}

#[test]
fn parts_of_rows_equal_the_cpu_and_nothing_else_is_written() {
    let Some(device) = gpu("parts_of_rows_equal_the_cpu_and_nothing_else_is_written") else { return };
    let setup = Setup::new(&device);
    for ty in decodable() {
        let row_blocks = 4096 / ty.block + 3;
        let (row, rows) = (row_blocks * ty.block, 5);
        let row_bytes = row_blocks * ty.bytes;
        let packed = blocks(ty, (rows * row_blocks) as usize, 2);
        let src = setup.upload(&packed);
        // (first, count, stride - count, element of the result to start at): whole rows with a gap, aligned
        // cuts inside a block, cuts at odd elements, one element.
        let half = row / 2;
        let cases = [
            (0, row, 0, 0),
            (0, row, 8, 0),
            (half / 8 * 8, half / 8 * 8, 0, 8),
            (8, row - 16, 16, 16),
            (half + 1, half / 2, 3, 1),
            (1, row - 2, 1, 3),
            (row - 1, 1, 0, 0),
        ];
        for to in Float::ALL {
            let whole = on_cpu(ty, &packed, to);
            for (first, count, gap, start) in cases {
                let part = Part { rows, row_bytes, first, count, stride: count + gap };
                let size = to.size() as u64;
                let mut want = vec![POISON; ((start + rows * part.stride + 8) * size) as usize];
                for r in 0..rows {
                    let from = &whole[((r * row + first) * size) as usize..][..(count * size) as usize];
                    want[((start + r * part.stride) * size) as usize..][..from.len()].copy_from_slice(from);
                }
                let got = setup.decode(ty, to, &src, &part, (start * size) as usize, want.len());
                assert_same(&got, &want, to.size(), &format!("{} to {to:?}, {part:?}", ty.name));
            }
        }
    }
}

#[test]
fn host_memory_goes_through_in_pieces() {
    let Some(device) = gpu("host_memory_goes_through_in_pieces") else { return };
    // Room for one worker: the threads take turns.
    let batch = Batch::new(Decoder::new(&device), 0);
    let threads = ["q4_K", "q6_K", "q8_0", "iq1_m", "mxfp4", "f32", "f64"];
    std::thread::scope(|scope| {
        for name in threads {
            let batch = &batch;
            scope.spawn(move || {
                let ty = decodable().find(|t| t.name == name).unwrap();
                for to in Float::ALL {
                    // About five pieces, the last one not full.
                    let count = 10_000_000 / (ty.bytes.max(ty.block * to.size() as u64)) as usize + 1;
                    let packed = blocks(ty, count, 3);
                    let want = on_cpu(ty, &packed, to);
                    let what = format!("{name} to {to:?}");
                    let mut plain = vec![POISON; want.len()];
                    batch.decode_host(ty, &packed, to, &mut plain).unwrap();
                    assert_same(&plain, &want, to.size(), &what);
                    batch.decode_host(ty, &[], to, &mut []).unwrap();
                }
            });
        }
    });
}

#[test]
fn the_benefit_is_measured() {
    let Some(device) = gpu("the_benefit_is_measured") else { return };
    let batch = Batch::new(Decoder::new(&device), 256 << 20);
    let types = [quant::by_id(8).unwrap(), quant::by_id(19).unwrap()];
    let benefits = batch.benefit(&types, Float::Bf16, 2).unwrap();
    assert_eq!(benefits.iter().map(|b| b.ty.name).collect::<Vec<_>>(), ["q8_0", "iq1_s"]);
    for b in benefits {
        assert!(b.gpu > 0.0 && b.cpu > 0.0 && b.gpu_wins() == (b.gpu > 1.1 * b.cpu), "{b:?}");
    }
}
