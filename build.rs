//! Lists the mapping tables to compile in: every `mappings/FOLDER/NAME.toml`.

use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?).join("mappings");
    let mut list = String::from("/// The tables compiled in: folder, name and text.\n");
    list += "const BUILTIN: &[(&str, &str, &str)] = &[\n";
    for folder in ["arch", "class", "config", "engine"] {
        let dir = root.join(folder);
        println!("cargo::rerun-if-changed={}", dir.display());
        let mut paths = Vec::new();
        for entry in fs::read_dir(&dir)? {
            paths.push(entry?.path());
        }
        // In the order of names, so that the same sources give the same program everywhere.
        paths.sort();
        for path in paths.iter().filter(|p| p.extension().is_some_and(|e| e == "toml")) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            list += &format!("    ({folder:?}, {name:?}, include_str!({:?})),\n", path.display().to_string());
        }
    }
    list += "];\n";
    fs::write(Path::new(&env::var("OUT_DIR").map_err(io::Error::other)?).join("tables.rs"), list)
}
