//! The loader against the link's own limit, in one run: `cargo bench --bench load -- [options]`.
//!
//!   --dir DIR     the converted directory; made of random bytes when it has no manifest
//!   --gib N       how large to make it, by default 12
//!   --runs N      timed runs of each configuration, by default 5
//!   --sweep       chunks and thread counts instead of the defaults
//!   --gpus N      also N shards to N GPUs at once, against one
//!   --cold        drop the file from the page cache before each run, against bare direct reads
//!
//! Prints GB/s (10^9 bytes per second), the median of the runs. A run counts from the call to its
//! return: device memory, streams, threads, copies, and the comparison of all hashes. The first
//! load of the process, which also locks the ring's host memory, is printed by itself.

#[path = "../tests/common/directory.rs"]
mod directory;

use preshard::gpu::Device;
use preshard::gpu::blake3::LeafHasher;
use preshard::hash::LEAF;
use preshard::load::{Directory, Method, Options, Shard, Stats, load_all};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

struct Args {
    dir: PathBuf,
    gib: u64,
    runs: usize,
    sweep: bool,
    cold: bool,
    gpus: usize,
}

fn args() -> Args {
    let dir = std::env::temp_dir().join("preshard-bench");
    let mut args = Args { dir, gib: 12, runs: 5, sweep: false, cold: false, gpus: 1 };
    let mut given = std::env::args().skip(1);
    while let Some(arg) = given.next() {
        let mut value = || given.next().unwrap_or_else(|| panic!("{arg}: a value is missing"));
        match arg.as_str() {
            "--dir" => args.dir = value().into(),
            "--gib" => args.gib = value().parse().expect("--gib: a whole number"),
            "--runs" => args.runs = value().parse().expect("--runs: a whole number"),
            "--gpus" => args.gpus = value().parse().expect("--gpus: a whole number"),
            "--sweep" => args.sweep = true,
            "--cold" => args.cold = true,
            "--bench" => {} // cargo bench adds it
            _ => panic!("{arg}: no such option"),
        }
    }
    args
}

/// One rank of a large mixture-of-experts model: stacked expert tensors and small ones between.
fn tensors(gib: u64) -> Vec<directory::Spec> {
    let shapes: [(&str, &'static str, &[u64]); 5] = [
        ("mlp.experts.w13", "U8", &[256, 512, 1728]),
        ("mlp.experts.w2", "U8", &[256, 6144, 144]),
        ("self_attn.q_b_proj.weight", "BF16", &[2048, 2048]),
        ("self_attn.o_proj.weight", "U8", &[6144, 1152]),
        ("input_layernorm.weight", "BF16", &[6144]),
    ];
    let mut out = Vec::new();
    let mut left = gib << 30;
    for layer in 0.. {
        for (name, dtype, shape) in shapes {
            let bytes = directory::bytes(dtype, shape);
            if bytes > left {
                return out;
            }
            left -= bytes;
            out.push((format!("model.layers.{layer}.{name}"), dtype, shape.to_vec()));
        }
    }
    out
}

fn main() {
    let args = args();
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(e) => return println!("skipped: {e}"),
    };
    if !args.dir.join(preshard::manifest::FILE_NAME).exists() {
        std::fs::create_dir_all(&args.dir).unwrap();
        for shard in directory::write(&args.dir, args.gpus as u64, &tensors(args.gib)).shards {
            // Two GPUs at once lost a third right after the files were written.
            std::fs::File::open(args.dir.join(shard.file)).unwrap().sync_all().unwrap();
        }
    }
    let shard = Directory::open(&args.dir).unwrap().shard(0).unwrap();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{}, {:.2} GB shard, {cores} cores", device.info().name, shard.entry().bytes as f64 / 1e9);
    match args.cold {
        true => cold(&args, &device, &shard),
        false => warm(&args, &device, &shard),
    }
    if args.gpus > 1 {
        several(&args);
    }
}

/// Shards to as many GPUs at once, against the first alone and against the links' own limits,
/// alternating.
fn several(args: &Args) {
    let directory = Directory::open(&args.dir).unwrap();
    let devices: Vec<Device> = (0..args.gpus).map(|i| Device::open(i).unwrap()).collect();
    let shards: Vec<Shard> = (0..args.gpus as u64).map(|r| directory.shard(r).unwrap()).collect();
    let loads: Vec<(&Shard, &Device)> = shards.iter().zip(&devices).collect();
    let limit = |devices: &[Device]| -> f64 {
        std::thread::scope(|scope| {
            let rates: Vec<_> =
                devices.iter().map(|d| scope.spawn(|| d.pinned_copy_rate().unwrap())).collect();
            rates.into_iter().map(|r| r.join().unwrap() / 1e9).sum()
        })
    };
    let total = |loads: &[(&Shard, &Device)], options: &Options| {
        let started = Instant::now();
        let loaded = load_all(loads, options).unwrap();
        let seconds = started.elapsed().as_secs_f64();
        loaded.iter().map(|l| l.stats().bytes).sum::<u64>() as f64 / seconds / 1e9
    };
    let mut threads = vec![None];
    if args.sweep {
        threads.extend([6, 8, 10, 12, 14, 16].map(Some));
    }
    for threads in threads {
        let options = Options { threads, ..Options::default() };
        // Fills the page cache and locks the rings.
        total(&loads, &Options { method: Method::Buffered, ..options.clone() });
        let mut rates = [const { Vec::new() }; 4];
        for _ in 0..args.runs {
            rates[0].push(limit(&devices[..1]));
            rates[1].push(total(&loads[..1], &options));
            rates[2].push(limit(&devices));
            rates[3].push(total(&loads, &options));
        }
        let [limit_one, one, limit_all, all] = rates.map(|mut r| median(&mut r));
        println!(
            "{} GPUs at once, {} threads each: {all:.1} GB/s of {limit_all:.1}, one alone {one:.1} of {limit_one:.1}: {:.2} times",
            args.gpus,
            threads.map_or("default".to_owned(), |n| n.to_string()),
            all / one
        );
    }
    for threads in [8, 16, 32] {
        println!(
            "page cache to memory, {threads} threads, no GPU: {:.1} GB/s",
            reads(&shards[0], threads, None)
        );
    }
}

fn warm(args: &Args, device: &Device, shard: &Shard) {
    let default = Options::default();
    let mut configurations = vec![
        ("default".to_owned(), default.clone()),
        ("not verified".to_owned(), Options { verify: false, ..default.clone() }),
        ("8 threads".to_owned(), Options { threads: Some(8), ..default.clone() }),
        (
            "8 threads, not verified".to_owned(),
            Options { threads: Some(8), verify: false, ..default.clone() },
        ),
        ("16 threads".to_owned(), Options { threads: Some(16), ..default.clone() }),
        ("4 threads".to_owned(), Options { threads: Some(4), ..default.clone() }),
    ];
    if args.sweep {
        configurations.clear();
        for threads in [8, 12, 16] {
            for chunk in [2 << 20, 4 << 20, 8 << 20, 16 << 20] {
                let name = format!("{threads} threads, {} MiB", chunk >> 20);
                configurations.push((name, Options { threads: Some(threads), chunk, ..default.clone() }));
            }
        }
    }
    let peak = Peak::watch();
    let first = shard.load(device, &default).unwrap().stats().clone();
    println!("first load of the process: {:.2} GB/s", rate(&first));
    let mut limits = Vec::new();
    let mut rates = vec![Vec::new(); configurations.len()];
    let mut last = Vec::new();
    for ((_, options), rates) in configurations.iter().zip(&mut rates) {
        // Another ring than the last configuration's is locked anew.
        drop(shard.load(device, options).unwrap());
        for _ in 0..args.runs {
            // Before each of them, so that none is alone in following a rest.
            limits.push(device.pinned_copy_rate().unwrap() / 1e9);
            let loaded = shard.load(device, options).unwrap();
            rates.push(rate(loaded.stats()));
            last.push(loaded.stats().clone());
        }
    }
    println!(
        "host memory: {} MiB anonymous at most, page-locked {} MiB",
        peak.stop() >> 20,
        last[0].pinned >> 20
    );
    for threads in [8, 16] {
        println!("page cache to memory, {threads} threads, no GPU: {:.1} GB/s", reads(shard, threads, None));
    }
    println!("BLAKE3 on the GPU: {:.0} GB/s", hash_rate(device, shard));
    let limit = median(&mut limits);
    println!(
        "pinned copy, the link's limit: {limit:.1} GB/s ({:.1}..{:.1})",
        limits[0],
        limits[limits.len() - 1]
    );
    for (((name, _), mut rates), stats) in configurations.into_iter().zip(rates).zip(last.chunks(args.runs)) {
        let stats = &stats[args.runs - 1];
        let rate = median(&mut rates);
        println!(
            "{name:28} {rate:6.2} GB/s, {:.3} of the limit  ({:.2}..{:.2}; first byte {:.1} ms, last {:.1}, all {:.1})",
            rate / limit,
            rates[0],
            rates[rates.len() - 1],
            stats.first_byte * 1e3,
            stats.last_byte * 1e3,
            stats.seconds * 1e3,
        );
    }
}

fn rate(stats: &Stats) -> f64 {
    stats.bytes as f64 / stats.seconds / 1e9
}

/// GB/s of the hashing kernels alone, on a loaded shard.
fn hash_rate(device: &Device, shard: &Shard) -> f64 {
    let loaded = shard.load(device, &Options { verify: false, ..Options::default() }).unwrap();
    let bytes = loaded.stats().bytes;
    let leaves = bytes.div_ceil(LEAF);
    let hasher = LeafHasher::new(device).unwrap();
    let stream = device.stream().unwrap();
    let values = device.alloc(leaves as usize * 32).unwrap();
    let (start, end) = (device.event(true).unwrap(), device.event(true).unwrap());
    for event in [&start, &end] {
        // SAFETY: the shard and a place for each leaf's value lie on the device until the end.
        unsafe { hasher.queue(&stream, loaded.memory().ptr(), bytes, 0, leaves, values.ptr()).unwrap() };
        stream.record(event).unwrap(); // the first pass warms up
    }
    stream.synchronize().unwrap();
    bytes as f64 / end.seconds_since(&start).unwrap() / 1e9
}

fn cold(args: &Args, device: &Device, shard: &Shard) {
    let file = std::fs::File::open(shard.path()).unwrap();
    file.sync_all().unwrap();
    let evict = || rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut rates = [const { Vec::new() }; 3];
    for run in 0..args.runs {
        // Forwards and backwards in turn: a virtual disk may remember what was just read.
        for what in (0..3).map(|i| if run % 2 == 0 { i } else { 2 - i }) {
            evict();
            let method = match what {
                0 => {
                    rates[what].push(reads(shard, 16, Some(device)));
                    continue;
                }
                1 => Method::Auto,
                _ => Method::Buffered,
            };
            let loaded = shard.load(device, &Options { method, ..Options::default() }).unwrap();
            rates[what].push(rate(loaded.stats()));
            let past = if method == Method::Auto { shard.entry().bytes } else { 0 };
            assert_eq!(loaded.stats().direct, past, "bytes read past the page cache");
        }
    }
    let [bare, ours, buffered] = rates.map(|mut r| (median(&mut r), r[0], r[r.len() - 1]));
    println!(
        "cold: bare direct reads {:.2} GB/s ({:.2}..{:.2}), loader {:.2} ({:.2}..{:.2}): {:.3} times, buffered {:.2}",
        bare.0,
        bare.1,
        bare.2,
        ours.0,
        ours.1,
        ours.2,
        ours.0 / bare.0,
        buffered.0
    );
}

/// GB/s of reads alone, into buffers that nobody looks at: from the page cache, or past it into
/// memory that `device` locked, which a disk fills fastest.
fn reads(shard: &Shard, threads: usize, device: Option<&Device>) -> f64 {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    const CHUNK: usize = 2 << 20;
    let flags = if device.is_some() { rustix::fs::OFlags::DIRECT.bits() as i32 } else { 0 };
    let file = std::fs::File::options().read(true).custom_flags(flags).open(shard.path()).unwrap();
    let bytes = shard.entry().bytes;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    let run = |memory: &mut [u8]| {
        loop {
            let at = next.fetch_add(CHUNK as u64, Ordering::Relaxed);
            if at >= bytes || file.read_at(memory, at).unwrap() == 0 {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| match device {
                Some(device) => {
                    let mut memory = device.take_pinned(CHUNK).unwrap();
                    run(&mut memory);
                    device.give_pinned(memory);
                }
                None => run(&mut memmap2::MmapMut::map_anon(CHUNK).unwrap()),
            });
        }
    });
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The largest RssAnon of this process, looked at every few milliseconds.
struct Peak {
    done: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Peak {
    fn watch() -> Peak {
        let done = Arc::new(AtomicBool::new(false));
        let stop = done.clone();
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            while !stop.load(Ordering::Relaxed) {
                let status = std::fs::read_to_string("/proc/self/status").unwrap();
                let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
                let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
                peak = peak.max(kib << 10);
                std::thread::sleep(Duration::from_millis(5));
            }
            peak
        });
        Peak { done, thread }
    }
    fn stop(self) -> u64 {
        self.done.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
