//! Locks and threads of work in which a panic is nobody's to handle.
//!
//! What our locks guard is whole at every moment, so a thread that panicked while it held one has
//! harmed nothing: the lock is taken all the same, and the panic itself goes on where the thread is
//! joined.

#[cfg(any(feature = "cuda", feature = "convert"))]
use std::sync::Condvar;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

/// Takes a lock, also after a panic of another thread that held it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `change`, as [`Condvar::wait`] does.
#[cfg(feature = "cuda")]
pub fn wait<'a, T>(change: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    change.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `change` while `waiting` holds, but no longer than `time`.
#[cfg(feature = "convert")]
pub fn wait_while<'a, T>(
    change: &Condvar,
    guard: MutexGuard<'a, T>,
    time: std::time::Duration,
    waiting: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    change.wait_timeout_while(guard, time, waiting).unwrap_or_else(PoisonError::into_inner).0
}

/// What the lock guarded, when nobody can hold it any more.
#[cfg(feature = "convert")]
pub fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread returned; its panic, if it had one, goes on in this thread.
pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
