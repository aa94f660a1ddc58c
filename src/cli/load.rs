//! `preshard load`: what an engine would do, timed.

use super::options::{Ranks, parse_ranks};
use super::{Talk, print, print_json, text};
use crate::device::{self, Choice};
use crate::error::{Error, Result};
use crate::load::{Directory, Options, Shard, Stats};
use crate::manifest;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The converted directory.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Only these ranks (stage * tp + rank), such as 0-3.
    #[arg(long, value_name = "LIST", value_parser = parse_ranks)]
    ranks: Option<Ranks>,
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
    /// Bytes per second of a bare copy from page-locked memory, measured just before.
    limit: Option<f64>,
    read_back: bool,
}

pub fn run(args: Args, talk: Talk) -> Result<()> {
    let directory = Directory::open(&args.dir)?;
    let manifest = directory.manifest();
    let (tp, pp) = (manifest.policy.tp, manifest.policy.pp);
    let rank_of = |s: &manifest::Shard| s.pp.saturating_mul(tp).saturating_add(s.tp);
    if let Some(Ranks(ranks)) = &args.ranks {
        let world = tp.saturating_mul(pp);
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
    let shards = directory.select(|s| args.ranks.as_ref().is_none_or(|r| r.0.contains(&rank_of(s))))?;
    if shards.is_empty() {
        return Err(Error::shards(args.dir.display(), "its manifest names no shard: convert again"));
    }
    let options = Options { threads: args.threads, verify: !args.no_verify, ..Options::default() };
    let rows = match args.device {
        Choice::Cpu => to_host(&shards, &options)?,
        Choice::Auto => to_gpus(&shards, None, &options, args.read_back)?,
        Choice::Cuda(ordinal) => to_gpus(&shards, Some(ordinal), &options, args.read_back)?,
    };
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({ "file": r.file, "device": r.place, "load": r.stats, "gb_per_s": rate(&r.stats) / 1e9,
                        "pinned_copy_gb_per_s": r.limit.map(|l| l / 1e9), "read_back": r.read_back })
            })
            .collect();
        return print_json(&json!(rows));
    }
    for row in rows.iter().filter(|_| !talk.quiet) {
        print(&line(row))?;
    }
    Ok(())
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
            let stats = shard.load_host(options)?.stats().clone();
            Ok(Row {
                file: shard.entry().file.clone(),
                place: "host memory".into(),
                stats,
                limit: None,
                read_back: false,
            })
        })
        .collect()
}

#[cfg(not(feature = "cuda"))]
fn to_gpus(_: &[Shard], _: Option<usize>, _: &Options, _: bool) -> Result<Vec<Row>> {
    Err(Error::device("--device", "this preshard was built without CUDA: use --device cpu"))
}

/// Wave after wave, as many shards at once as there are GPUs; a wave's memory is freed before the next.
#[cfg(feature = "cuda")]
fn to_gpus(shards: &[Shard], ordinal: Option<usize>, options: &Options, read_back: bool) -> Result<Vec<Row>> {
    use crate::gpu::Device;
    let devices = match ordinal {
        Some(ordinal) => vec![Device::open(ordinal)?],
        None => Device::all()?,
    };
    let limits = devices.iter().map(Device::pinned_copy_rate).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for wave in shards.chunks(devices.len()) {
        let pairs: Vec<_> = wave.iter().zip(&devices).collect();
        let loaded = crate::load::load_all(&pairs, options)?;
        for (((shard, device), loaded), limit) in pairs.into_iter().zip(&loaded).zip(&limits) {
            if read_back {
                loaded.compare_with(shard)?;
            }
            rows.push(Row {
                file: shard.entry().file.clone(),
                place: format!("{device} ({})", device.info().name),
                stats: loaded.stats().clone(),
                limit: Some(*limit),
                read_back,
            });
        }
    }
    Ok(rows)
}
