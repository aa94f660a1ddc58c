//! Threads that take jobs in order until none is left, one fails or a stop is asked for.

use crate::error::{Error, Result};
use crate::hash::LEAF;
use crate::sync::{into_inner, lock};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Of a run that nobody stops.
pub static NEVER: AtomicBool = AtomicBool::new(false);

/// Threads to use: as many as asked for (0: one per core), but no more than `memory` bytes feed.
pub fn count(threads: usize, memory: u64) -> usize {
    let wanted = match threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        n => n,
    };
    // A worker holds one leaf, and at most about as much again beside it.
    wanted.min((memory / (2 * LEAF)).max(1) as usize)
}

/// Runs `work` on every job; each thread keeps one buffer. Returns the first error.
pub fn each<J: Sync>(
    threads: usize,
    jobs: &[J],
    stop: &AtomicBool,
    work: impl Fn(&J, &mut Vec<u8>) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let error = Mutex::new(None);
    let fail = |e| {
        failed.store(true, Ordering::Relaxed);
        lock(&error).get_or_insert(e);
    };
    std::thread::scope(|scope| {
        let run = || {
            let mut buffer = Vec::new();
            while !failed.load(Ordering::Relaxed) && !stop.load(Ordering::Relaxed) {
                let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                if let Err(e) = work(job, &mut buffer) {
                    fail(e);
                }
            }
        };
        for _ in 0..threads {
            if let Err(e) = std::thread::Builder::new().spawn_scoped(scope, run) {
                fail(Error::request("--threads", format!("cannot start {threads} threads: {e}")));
                break;
            }
        }
    });
    into_inner(error).map_or(Ok(()), Err)
}
