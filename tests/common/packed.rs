//! Fixtures that are kept packed.

use std::path::{Path, PathBuf};

/// A file of `tests/fixtures` that is kept packed by zlib, as `name.z`: unpacked, where builds keep such files.
pub fn unpacked(name: &str) -> PathBuf {
    let packed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(format!("{name}.z"));
    let bytes = std::fs::read(&packed).unwrap_or_else(|e| panic!("{}: {e}", packed.display()));
    let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(&bytes).expect(name);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let folder = path.parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    // Under its name at once, as tests run side by side.
    let mut file = tempfile::NamedTempFile::new_in(folder).unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    file.persist(&path).unwrap();
    path
}
