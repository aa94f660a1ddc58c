//! Loads from elsewhere than a shard file: the GGUF itself, and ranges over HTTP.
#![cfg(feature = "convert")]

mod common;
mod support;

use preshard::conversion::{Planned, Source};
use preshard::load::{Directory, LoadedHost, Options, Origin, load_host};
use preshard::policy::{Fit, Policy, Weights};
use preshard::{Error, Result, hash, manifest};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A conversion of GLM-5's shape, and the plan it was made by.
fn converted() -> (tempfile::TempDir, Planned, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let model = support::models::GLM.build(&support::models::q4_k);
    let source = model.write(dir.path().join("model.gguf"));
    let out = dir.path().join("out");
    let policy = Policy { tp: 2, misaligned: Fit::Dequantise, ..Policy::default() };
    let planned = Source { gguf: vec![source], ..Source::default() }.plan(policy).unwrap();
    planned.convert(&out, &preshard::conversion::How::default()).unwrap();
    (dir, planned, out)
}

fn same(a: &LoadedHost, b: &LoadedHost) {
    let tensors = |loaded: &LoadedHost| {
        loaded.tensors().map(|(bytes, t)| (t.name.clone(), bytes.to_vec())).collect::<Vec<_>>()
    };
    assert!(tensors(a) == tensors(b) && a.tensors().count() > 10);
}

#[test]
fn a_rank_is_loaded_from_the_gguf_without_being_written() {
    let (_dir, planned, out) = converted();
    let written = Directory::open(&out).unwrap();
    for (file, shard) in written.all().unwrap().iter().enumerate() {
        let origin = planned.origin(file);
        let loaded =
            load_host(&origin, origin.entry(), &Options { chunk: 64 << 10, ..Options::default() }).unwrap();
        assert!(!loaded.stats().verified, "there is nothing to compare with");
        same(&loaded, &shard.load_host(&Options::default()).unwrap());
    }
}

#[test]
fn a_source_that_changes_under_the_load_fails_it() {
    let (dir, planned, _out) = converted();
    let file = std::fs::OpenOptions::new().append(true).open(dir.path().join("model.gguf")).unwrap();
    (&file).write_all(b"more").unwrap();
    let origin = planned.origin(0);
    let error = load_host(&origin, origin.entry(), &Options::default()).err().unwrap().to_string();
    assert!(error.contains("model.gguf") && error.contains("bytes when it was opened"), "{error}");
}

/// Byte ranges of a file over HTTP.
struct Http {
    address: String,
    leaves: Vec<[u8; 32]>,
    asked: AtomicUsize,
}

impl Origin for Http {
    fn name(&self) -> String {
        format!("http://{}/", self.address)
    }

    fn fill(&self, buffer: &mut [u8], offset: u64, len: usize) -> Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let fail = |detail: String| Error::shards(self.name(), detail);
        let get = || -> std::io::Result<Vec<u8>> {
            let mut stream = TcpStream::connect(&self.address)?;
            write!(stream, "GET / HTTP/1.0\r\nRange: bytes={offset}-{}\r\n\r\n", offset + len as u64 - 1)?;
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            while line != "\r\n" {
                line.clear();
                stream.read_line(&mut line)?;
            }
            let mut body = Vec::new();
            stream.read_to_end(&mut body)?;
            Ok(body)
        };
        let body = get().map_err(|e| fail(e.to_string()))?;
        if body.len() != len {
            return Err(fail(format!("{} bytes of a range of {len}", body.len())));
        }
        buffer[..len].copy_from_slice(&body);
        Ok(())
    }

    fn leaves(&self) -> Option<&[[u8; 32]]> {
        Some(&self.leaves)
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

/// Serves ranges of `bytes` to the end of the test, each answer as `change` makes it.
fn serve(bytes: Vec<u8>, change: impl Fn(u64, &mut Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut range = None;
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let line = line.unwrap();
                if let Some(text) = line.strip_prefix("Range: bytes=") {
                    let (first, last) = text.split_once('-').unwrap();
                    range = Some((first.parse::<usize>().unwrap(), last.parse::<usize>().unwrap()));
                }
                if line.is_empty() {
                    break;
                }
            }
            let (first, last) = range.unwrap();
            let mut body = bytes[first..=last].to_vec();
            change(first as u64, &mut body);
            write!(stream, "HTTP/1.0 206 Partial Content\r\n\r\n").unwrap();
            let _ = stream.write_all(&body);
        }
    });
    address
}

#[test]
fn a_rank_is_loaded_by_ranges_over_http_and_verified() {
    let (_dir, _planned, out) = converted();
    let shard = Directory::open(&out).unwrap().shard(1).unwrap();
    let bytes = std::fs::read(shard.path()).unwrap();
    let entry: manifest::Shard = shard.entry().clone();
    let leaves: Vec<[u8; 32]> = entry.leaves.iter().map(|l| hash::from_hex(l).unwrap()).collect();
    let options = Options { chunk: 64 << 10, threads: Some(3), ..Options::default() };
    let load = |change: fn(u64, &mut Vec<u8>)| {
        let address = serve(bytes.clone(), change);
        let origin = Http { address, leaves: leaves.clone(), asked: AtomicUsize::new(0) };
        let loaded = load_host(&origin, &entry, &options);
        (loaded, origin.asked.into_inner())
    };
    let (loaded, asked) = load(|_, _| ());
    let loaded = loaded.unwrap();
    assert!(loaded.stats().verified);
    assert_eq!(asked as u64, entry.bytes.div_ceil(64 << 10), "every byte once");
    same(&loaded, &shard.load_host(&Options::default()).unwrap());

    let (damaged, _) = load(|first, body| {
        if first == 65536 {
            body[7] ^= 1;
        }
    });
    let error = damaged.err().unwrap().to_string();
    assert!(
        error.starts_with("http://127.0.0.1") && error.contains("leaf 0") && error.contains("damaged"),
        "{error}"
    );
    let (short, _) = load(|_, body| body.truncate(body.len() - 1));
    let error = short.err().unwrap().to_string();
    assert!(error.contains("65535 bytes of a range of 65536"), "{error}");
}

#[test]
fn bf16_from_the_gguf_is_bf16_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = support::models::LLAMA.build(&support::models::q4_k);
    let source = Source { gguf: vec![model.write(dir.path().join("model.gguf"))], ..Source::default() };
    let planned = source.plan(Policy { weights: Weights::Bf16, ..Policy::default() }).unwrap();
    let out = dir.path().join("out");
    planned.convert(&out, &preshard::conversion::How::default()).unwrap();
    let origin = planned.origin(0);
    let loaded = load_host(&origin, origin.entry(), &Options::default()).unwrap();
    same(&loaded, &Directory::open(&out).unwrap().shard(0).unwrap().load_host(&Options::default()).unwrap());
}
