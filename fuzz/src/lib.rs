//! What the targets share: files in memory, what every message must be, and small random models.

#[path = "../../tests/common/mod.rs"]
pub mod gguf;
pub mod model;

use preshard::Error;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A directory in memory, one for each process, removed by nobody but the machine's restart.
pub fn scratch() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = Path::new("/dev/shm").join(format!("preshard-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("/dev/shm can be written");
        dir
    })
}

/// Holds an error to the promise of src/error.rs: one line for each problem, nothing in it that a
/// terminal would obey, and not the input printed back.
pub fn check_message(error: &Error) {
    let problems = match error {
        Error::Many(problems) => problems.iter().map(ToString::to_string).collect(),
        one => vec![one.to_string()],
    };
    for line in problems {
        assert!(!line.chars().any(char::is_control), "control bytes in {line:?}");
        assert!(line.len() < 20_000, "a message of {} bytes", line.len());
        assert!(!line.is_empty());
    }
}
