//! `preshard load`: what an engine would do, timed.

use super::{Talk, print, print_json, ranks, text};
use crate::device::{self, Choice};
use crate::error::{Error, Result};
use crate::load::{Directory, Options, Shard, Stats};
use crate::manifest;
use crate::sync;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// The converted directory.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Only these ranks (stage * tp + rank), such as 0-3; env: the one that the scheduler's variable
    /// names, as with convert.
    #[arg(long, value_name = "LIST", value_parser = ranks::parse)]
    ranks: Option<ranks::Ranks>,
    /// auto: rank after rank to the GPUs there are, as many at once; cuda:N: all to that one, one
    /// after another; cpu: into host memory.
    #[arg(long, value_name = "WHERE", default_value = "auto", value_parser = device::parse)]
    device: Choice,
    /// Do not compare the hashes of what arrived with the manifest.
    #[arg(long)]
    no_verify: bool,
    /// Read the device memory back and compare it with the file, byte by byte.
    #[arg(long)]
    read_back: bool,
    /// Reader threads per GPU, by default by the cores there are.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// One shard's result.
struct Row {
    file: String,
    place: String,
    stats: Stats,
    /// When the load was called.
    called: Instant,
    /// Seconds in which the driver was started and the GPU's context made.
    opening: Option<(f64, f64)>,
    /// Bytes per second of a bare copy from page-locked memory, measured just after.
    limit: Option<f64>,
    read_back: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let before_main = (cpu_seconds() - talk.started.elapsed().as_secs_f64()).max(0.0);
    // The GPU comes up while the directory is opened. Its error counts after the directory's.
    let (shards, opened, device) = std::thread::scope(|scope| {
        let device = scope.spawn(|| first_device(args.device));
        let shards = selected(&args, talk);
        (shards, Instant::now(), sync::join(device))
    });
    let (shards, device) = (shards?, device?);
    let options = Options { threads: args.threads, verify: !args.no_verify, ..Options::default() };
    let rows = match device {
        None => to_host(&shards, &options)?,
        Some(device) => to_gpus(&shards, device, args.device == Choice::Auto, &options, args.read_back)?,
    };
    let since = |at: Instant| (at - talk.started).as_secs_f64();
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({ "file": r.file, "device": r.place, "load": r.stats, "gb_per_s": rate(&r.stats) / 1e9,
                        "pinned_copy_gb_per_s": r.limit.map(|l| l / 1e9), "read_back": r.read_back,
                        "start": { "before_main": before_main, "directory": since(opened),
                                   "driver": r.opening.map(|o| o.0), "context": r.opening.map(|o| o.1),
                                   "load": since(r.called) } })
            })
            .collect();
        return print_json(&json!(rows));
    }
    for row in rows.iter().filter(|_| !talk.quiet) {
        print(&line(row))?;
        if talk.verbose {
            print(&timeline(row, before_main, since(opened), since(row.called)))?;
        }
    }
    Ok(())
}

/// Processor time of this process so far. Until `main` that is nearly all the time since `exec`, which
/// the system tells to 10 ms only.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The shards to load.
fn selected(args: &Args, talk: Talk) -> Result<Vec<Shard>> {
    let directory = Directory::open(&args.dir)?;
    let manifest = directory.manifest();
    let (tp, pp) = (manifest.policy.tp, manifest.policy.pp);
    let rank_of = |s: &manifest::Shard| s.pp.saturating_mul(tp).saturating_add(s.tp);
    let world = tp.saturating_mul(pp);
    let ranks = args.ranks.as_ref().map(|r| r.resolve(world, talk)).transpose()?;
    if let Some(ranks) = &ranks {
        if let Some(rank) = ranks.iter().find(|r| **r >= world) {
            return Err(Error::request(
                "--ranks",
                format!("rank {rank} of {world}; the last is {}", world.saturating_sub(1)),
            ));
        }
        if let Some(rank) = ranks.iter().find(|r| !manifest.shards.iter().any(|s| rank_of(s) == **r)) {
            return Err(Error::request(
                "--ranks",
                format!("rank {rank} is not in this directory: convert it, or leave it out"),
            ));
        }
    }
    let shards = directory.select(|s| ranks.as_ref().is_none_or(|r| r.contains(&rank_of(s))))?;
    if shards.is_empty() {
        return Err(Error::shards(args.dir.display(), "its manifest names no shard: convert again"));
    }
    Ok(shards)
}

/// Where every millisecond went, CUDA's own apart.
fn timeline(row: &Row, before_main: f64, directory: f64, called: f64) -> String {
    let ms = |seconds: f64| format!("{:8.1} ms", seconds * 1e3);
    let stats = &row.stats;
    let mut out = format!(
        "  {} processor time before main\n  {} directory open (from here on: time since main began)\n",
        ms(before_main),
        ms(directory)
    );
    if let Some((driver, context)) = row.opening {
        out += &format!(
            "  {} GPU open, the directory meanwhile; CUDA's own: driver {}, context {}\n",
            ms(called),
            ms(driver).trim_start(),
            ms(context).trim_start()
        );
    }
    let mut at = |seconds: f64, what: &str| out += &format!("  {} {what}\n", ms(called + seconds));
    at(stats.memory, "memory allocated");
    if row.opening.is_some() {
        at(stats.first_byte, "first chunk on the GPU");
    }
    at(stats.last_byte, "last byte in its place");
    at(stats.seconds, if stats.verified { "all of it verified" } else { "done" });
    if let Some((driver, context)) = row.opening {
        out += &format!(
            "  {} CUDA's own before the first byte: driver, context, device memory\n  {} the slowest reader's wait for \
             page-locked memory, while others read\n  {} loading the hash kernels, meanwhile\n",
            ms(driver + context + stats.memory),
            ms(stats.locking),
            ms(stats.kernels)
        );
    }
    out
}

fn rate(stats: &Stats) -> f64 {
    stats.bytes as f64 / stats.seconds.max(1e-9)
}

fn line(row: &Row) -> String {
    let stats = &row.stats;
    let rate = rate(stats);
    let limit = row.limit.map_or(String::new(), |limit| {
        format!(", {:.0} % of the link's {}/s", 100.0 * rate / limit, text::bytes(limit as u64))
    });
    let checked = match (stats.verified, row.read_back) {
        (true, true) => "verified, read back",
        (true, false) => "verified",
        (false, true) => "read back",
        (false, false) => "not verified",
    };
    format!(
        "{} -> {}: {} in {:.3} s, {}/s{limit}; first chunk after {:.0} ms, last after {:.0} ms; {checked}\n",
        row.file,
        row.place,
        text::bytes(stats.bytes),
        stats.seconds,
        text::bytes(rate as u64),
        stats.first_byte * 1e3,
        stats.last_byte * 1e3,
    )
}

fn to_host(shards: &[Shard], options: &Options) -> Result<Vec<Row>> {
    shards
        .iter()
        .map(|shard| {
            let called = Instant::now();
            let stats = shard.load_host(options)?.stats().clone();
            Ok(Row {
                file: shard.entry().file.clone(),
                place: "host memory".into(),
                stats,
                called,
                opening: None,
                limit: None,
                read_back: false,
            })
        })
        .collect()
}

#[cfg(not(feature = "cuda"))]
type Device = std::convert::Infallible;
#[cfg(feature = "cuda")]
use crate::gpu::Device;

/// The GPU asked for, or the first; none when the CPU was asked for.
#[cfg(not(feature = "cuda"))]
fn first_device(choice: Choice) -> Result<Option<Device>> {
    match choice {
        Choice::Cpu => Ok(None),
        _ => Err(Error::device("--device", "this preshard was built without CUDA: use --device cpu")),
    }
}

#[cfg(not(feature = "cuda"))]
fn to_gpus(_: &[Shard], device: Device, _: bool, _: &Options, _: bool) -> Result<Vec<Row>> {
    match device {}
}

/// The GPU asked for, or the first; none when the CPU was asked for.
#[cfg(feature = "cuda")]
fn first_device(choice: Choice) -> Result<Option<Device>> {
    match choice {
        Choice::Cpu => Ok(None),
        Choice::Auto => Device::open(0).map(Some),
        Choice::Cuda(ordinal) => Device::open(ordinal).map(Some),
    }
}

/// Wave after wave, as many shards at once as there are GPUs; a wave's memory is freed before the next.
/// Unless `all` GPUs are wanted, `device` takes every shard.
#[cfg(feature = "cuda")]
fn to_gpus(
    shards: &[Shard],
    device: Device,
    all: bool,
    options: &Options,
    read_back: bool,
) -> Result<Vec<Row>> {
    let mut devices = vec![device];
    if all && shards.len() > 1 {
        // A context takes tens of milliseconds: none is made for a GPU that gets no shard.
        devices.extend(Device::open_all(1..shards.len())?);
    }
    let mut rows = Vec::new();
    for wave in shards.chunks(devices.len()) {
        let pairs: Vec<_> = wave.iter().zip(&devices).collect();
        let called = Instant::now();
        let loaded = crate::load::load_all(&pairs, options)?;
        for ((shard, device), loaded) in pairs.into_iter().zip(&loaded) {
            if read_back {
                loaded.compare_with(shard)?;
            }
            let info = device.info();
            rows.push(Row {
                file: shard.entry().file.clone(),
                place: format!("{device} ({})", info.name),
                stats: loaded.stats().clone(),
                called,
                opening: Some((info.driver_seconds, info.context_seconds)),
                // Measured while the shard lies there, so there may be no room for it.
                limit: device.pinned_copy_rate().ok(),
                read_back,
            });
        }
    }
    Ok(rows)
}
