//! What the operating system may tell a running command.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Set once Ctrl-C or a termination request came in.
pub fn stop() -> &'static AtomicBool {
    STOP.get_or_init(Default::default)
}

/// Installs the handlers: the first Ctrl-C asks to stop, the second stops at once.
pub fn install() {
    use signal_hook::consts::{SIGBUS, SIGINT, SIGTERM, SIGXFSZ};
    stop();
    let Some(flag) = STOP.get() else { return };
    for signal in [SIGINT, SIGTERM] {
        // Registered first, so that it sees the flag as the signal before this one left it.
        let _ = signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(flag));
        let _ = signal_hook::flag::register(signal, Arc::clone(flag));
    }
    // Caught, so that a write past the limit on file sizes fails with an error instead.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let lost = || {
        // Only async-signal-safe calls here. A mapped file that shrinks, or a disk that fails, shows
        // as SIGBUS at the access.
        let text = b"error: the source cannot be read any more: it was truncated or its disk failed; get it whole and run the command again\n";
        let _ = rustix::io::write(std::io::stderr(), text);
        signal_hook::low_level::exit(1);
    };
    // SAFETY: the handler calls write(2) and _exit(2) alone, both async-signal-safe.
    let _ = unsafe { signal_hook::low_level::register(SIGBUS, lost) };
}
