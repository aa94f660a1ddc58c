//! Work in a thread of its own while the calling thread listens for Ctrl-C and reports progress.

use crate::error;
use preshard::convert::Progress;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Between two looks at signals and progress.
const INTERVAL: Duration = Duration::from_millis(100);

/// Set when the work has ended, also by a panic.
struct Ended<'a>(&'a (Mutex<bool>, Condvar));

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.0.1.notify_all();
    }
}

/// What working threads tell.
pub struct Watch {
    /// Set when the work is to stop.
    pub stop: Arc<AtomicBool>,
    done: AtomicU64,
    total: AtomicU64,
}

impl Watch {
    /// Takes note of progress.
    pub fn report(&self, progress: Progress) {
        match progress {
            Progress::Start { total, done } => {
                self.total.store(total, Ordering::Relaxed);
                self.done.store(done, Ordering::Relaxed);
            }
            Progress::Wrote(bytes) => _ = self.done.fetch_add(bytes, Ordering::Relaxed),
            Progress::Syncing => {}
        }
    }

    fn tell(&self, callback: Option<&Bound<'_, PyAny>>, told: &mut (u64, u64)) -> PyResult<()> {
        let now = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        let news = now.1 > 0 && now != *told;
        if let (Some(callback), true) = (callback, news) {
            *told = now;
            callback.call1(now)?;
        }
        Ok(())
    }
}

/// Runs `work` without the interpreter lock. `progress(done, total)`, in bytes, is called from the
/// calling thread, ten times a second at most. A signal handler or a callback that raises stops the
/// work; its exception is raised once the work has ended.
pub fn run<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Watch) -> preshard::Result<T> + Send,
) -> PyResult<T> {
    let watch = Watch { stop: Arc::default(), done: AtomicU64::new(0), total: AtomicU64::new(0) };
    let ended = (Mutex::new(false), Condvar::new());
    let mut told = (0, 0);
    let mut raised = None;
    let result = std::thread::scope(|scope| {
        let (watch, ended) = (&watch, &ended);
        let worker = scope.spawn(move || {
            let _ended = Ended(ended);
            work(watch)
        });
        loop {
            let over = py.detach(|| {
                let guard = ended.0.lock().unwrap_or_else(|e| e.into_inner());
                let (guard, _) = ended
                    .1
                    .wait_timeout_while(guard, INTERVAL, |over| !*over)
                    .unwrap_or_else(|e| e.into_inner());
                *guard
            });
            if over {
                break;
            }
            if raised.is_none()
                && let Err(e) = py.check_signals().and_then(|()| watch.tell(progress, &mut told))
            {
                watch.stop.store(true, Ordering::Relaxed);
                raised = Some(e);
            }
        }
        py.detach(|| worker.join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    match (raised, result) {
        (Some(exception), Err(_)) => Err(exception),
        // It ended before it saw the request to stop; what it did stays, the exception too.
        (Some(exception), Ok(_)) => Err(exception),
        (None, result) => {
            let value = result.map_err(|e| error::raise(py, e))?;
            watch.tell(progress, &mut told)?;
            Ok(value)
        }
    }
}
