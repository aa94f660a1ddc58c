//! Errors, grouped by who must act.
//!
//! Every message is one line: the file or tensor first, then what was found, what was expected
//! and what to do. Text that comes from a file is shown through [`shown`], and every detail is made one
//! printable line besides, so that no control byte of an input ever reaches a terminal.

use std::fmt;
use std::path::{Path, PathBuf};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, and whose turn it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The GGUF is damaged, of the wrong kind or not supported: get another file.
    #[error("{0}: {1}")]
    Source(String, String),
    /// The options do not fit this model: change an option.
    #[error("{0}: {1}")]
    Request(String, String),
    /// A mapping file is wrong: mend it.
    #[error("{0}: {1}")]
    Mapping(String, String),
    /// The output directory cannot be used: choose another, or make room.
    #[error("{0}: {1}")]
    Output(String, String),
    /// A converted directory is damaged, incomplete or does not fit the engine: convert again.
    #[error("{0}: {1}")]
    Shards(String, String),
    /// The GPU or its driver cannot do it: mend the driver or use the CPU.
    #[error("{0}: {1}")]
    Device(String, String),
    /// The operating system refused an operation on a file.
    #[error("{path}: cannot {1}: {2}", path = shown_path(.0))]
    Io(PathBuf, &'static str, std::io::Error),
    /// A signal asked the run to stop; the text says how to go on.
    #[error("{0}")]
    Interrupted(String),
    /// Several problems of one kind, each a line.
    #[error("{}", lines(.0))]
    Many(Vec<Error>),
}

fn lines(errors: &[Error]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl Error {
    /// An error of the source: `subject` is the file or tensor, shown safely.
    pub fn source(subject: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Error::Source(shown(&subject.to_string()), line(&detail.to_string()))
    }
    /// An error of the source file at `path`.
    pub fn source_file(path: &Path, detail: impl fmt::Display) -> Self {
        Error::Source(shown_path(path), line(&detail.to_string()))
    }
    /// An error of the options.
    pub fn request(subject: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Error::Request(shown(&subject.to_string()), line(&detail.to_string()))
    }
    /// An error of a mapping file.
    pub fn mapping(subject: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Error::Mapping(shown(&subject.to_string()), line(&detail.to_string()))
    }
    /// An error of the output directory or a file in it.
    pub fn output(path: &Path, detail: impl fmt::Display) -> Self {
        Error::Output(shown_path(path), line(&detail.to_string()))
    }
    /// An error of a converted directory: `subject` is the file or tensor.
    pub fn shards(subject: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Error::Shards(shown(&subject.to_string()), line(&detail.to_string()))
    }
    /// An error of the GPU or its driver.
    pub fn device(subject: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Error::Device(shown(&subject.to_string()), line(&detail.to_string()))
    }
    /// A failed operation on a file; `action` completes "cannot …".
    pub fn io(path: &Path, action: &'static str, error: impl Into<std::io::Error>) -> Self {
        Error::Io(path.to_owned(), action, error.into())
    }
    /// `Ok` when there are no problems, the problem itself when there is one, all of them otherwise.
    pub fn all(mut problems: Vec<Error>) -> Result<()> {
        match problems.len() {
            0 => Ok(()),
            1 => Err(problems.remove(0)),
            _ => Err(Error::Many(problems)),
        }
    }
}

/// `text` with control characters escaped, shortened past 200 characters.
pub fn shown(text: &str) -> String {
    printable(text, 200)
}

/// A path as [`shown`] shows it, not shortened.
pub fn shown_path(path: &Path) -> String {
    printable(&path.to_string_lossy(), usize::MAX)
}

/// A message as one line. Parsers quote their input and set out their messages in lines; neither may
/// pass for a line of ours.
pub fn line(text: &str) -> String {
    printable(&text.replace('\n', "; "), 4000)
}

fn printable(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for (i, c) in text.chars().enumerate() {
        if i == limit {
            out.push('…');
            break;
        }
        // Bidirectional controls and line separators change what a terminal shows; they are treated as
        // control characters.
        let reorders = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || reorders || matches!(c, '\u{2028}' | '\u{2029}') {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_of_an_input_is_printed() {
        let nasty = "a\u{1b}[2J\r\n\u{9b}31m\u{7f}\u{202e}\u{2028}b";
        for error in [
            Error::source(nasty, nasty),
            Error::mapping(nasty, nasty),
            Error::output(Path::new(nasty), nasty),
            Error::io(Path::new(nasty), "read", std::io::Error::other("x")),
        ] {
            let text = error.to_string();
            assert!(!text.chars().any(|c| c.is_control() || "\u{202e}\u{2028}".contains(c)), "{text:?}");
        }
        assert!(Error::source("x", "é".repeat(5000)).to_string().chars().count() < 4100);
        assert_eq!(shown("größe 模型 [1]"), "größe 模型 [1]");
    }
}
