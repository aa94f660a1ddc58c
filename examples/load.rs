//! Loads one rank of a converted directory to a GPU: `cargo run --release --example load -- DIR [RANK] [GPU]`.

use preshard::gpu::Device;
use preshard::load::{Directory, Options};
use std::path::Path;

fn main() -> preshard::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(0);
    let Some(dir) = args.get(1) else {
        eprintln!("usage: load DIR [RANK] [GPU]");
        std::process::exit(2);
    };
    let directory = Directory::open(Path::new(dir))?;
    let shard = directory.shard(number(2))?;
    let device = Device::open(number(3) as usize)?;
    let loaded = shard.load(&device, &Options::default())?;
    for (address, tensor) in loaded.tensors() {
        println!("{address:#x} {} {:?} {}", tensor.dtype, tensor.shape, tensor.name);
    }
    let stats = loaded.stats();
    println!("{} bytes verified, {:.1} GB/s", stats.bytes, stats.bytes as f64 / stats.seconds / 1e9);
    Ok(())
}
