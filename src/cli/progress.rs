//! The progress bar, on standard error and only when that is a terminal.

use crate::convert::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar of bytes with rate and time left; silent when standard error is no terminal or `quiet`.
pub fn bar(quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let style = "{bar:32} {percent:>3} %  {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left  {msg}";
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Moves the bar.
pub fn report(bar: &ProgressBar, progress: Progress) {
    match progress {
        Progress::Start { total, done } => {
            bar.set_length(total);
            bar.set_position(done);
            bar.reset_eta();
        }
        Progress::Wrote(bytes) => bar.inc(bytes),
        Progress::Syncing => bar.set_message("waiting for the disk"),
    }
}
