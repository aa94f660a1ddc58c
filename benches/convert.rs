//! Packed conversion against `cp` of the same file, alternating in one run.
//!
//! ```console
//! cargo bench --bench convert -- MODEL.gguf [--tp 8] [--rounds 3] [--dir SCRATCH]
//! ```
//!
//! The file should be larger than the page cache holds, or the disk is not measured. Prints wall time of
//! both, of `cp` followed by `sync` too, since a conversion is on disk when it returns and a copy is not,
//! the ratios of the medians, and the largest anonymous memory of the conversion.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn main() {
    let mut source = None;
    let (mut tp, mut rounds, mut dir) = ("8".to_owned(), 3usize, std::env::temp_dir());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match arg.as_str() {
            "--bench" => {}
            "--tp" => tp = value(),
            "--rounds" => rounds = value().parse().expect("--rounds N"),
            "--dir" => dir = PathBuf::from(value()),
            _ => source = Some(PathBuf::from(arg)),
        }
    }
    let Some(source) = source else {
        println!("usage: cargo bench --bench convert -- MODEL.gguf [--tp N] [--rounds N] [--dir SCRATCH]");
        return;
    };
    let bytes = std::fs::metadata(&source).expect("the model exists").len();
    let (copy, out) = (dir.join("preshard-bench-copy"), dir.join("preshard-bench-out"));
    let (mut cp, mut cp_sync, mut convert) = (Vec::new(), Vec::new(), Vec::new());
    let mut peak = 0;
    for round in 0..rounds {
        clean(&copy, &out);
        let started = Instant::now();
        run(Command::new("cp").arg(&source).arg(&copy));
        cp.push(started.elapsed());
        run(Command::new("sync").arg(&copy));
        cp_sync.push(started.elapsed());
        clean(&copy, &out);
        let started = Instant::now();
        let child = Command::new(env!("CARGO_BIN_EXE_preshard"))
            .args(["convert", "--tp", &tp, "-q", "-o"])
            .arg(&out)
            .arg(&source)
            .stdout(Stdio::null())
            .spawn()
            .expect("preshard starts");
        peak = peak.max(watch(child));
        convert.push(started.elapsed());
        let last = |times: &[Duration]| times.last().map_or(0.0, Duration::as_secs_f64);
        println!(
            "round {round}: cp {:.1} s, cp and sync {:.1} s, convert {:.1} s",
            last(&cp),
            last(&cp_sync),
            last(&convert)
        );
    }
    clean(&copy, &out);
    let (cp, cp_sync, convert) = (median(cp), median(cp_sync), median(convert));
    println!("{:.2} GB at TP {tp}: convert {:.2} GB/s", bytes as f64 / 1e9, bytes as f64 / 1e9 / convert);
    println!("convert / cp          {:.2}", convert / cp);
    println!("convert / cp and sync {:.2}", convert / cp_sync);
    println!("peak anonymous memory {} MiB", peak >> 20);
}

fn clean(copy: &Path, out: &Path) {
    let _ = std::fs::remove_file(copy);
    let _ = std::fs::remove_dir_all(out);
    // What the one left unwritten must not burden the other.
    run(&mut Command::new("sync"));
}

fn run(command: &mut Command) {
    let status = command.status().expect("the command starts");
    assert!(status.success(), "{command:?}: {status}");
}

/// Waits for the child; returns the largest anonymous memory seen, in bytes.
fn watch(mut child: Child) -> u64 {
    let mut peak = 0;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let anon = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let kib = anon.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0);
        peak = peak.max(kib << 10);
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            assert!(status.success(), "preshard convert: {status}");
            return peak;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64)
}
