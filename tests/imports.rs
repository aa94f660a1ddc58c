//! The import table of docs/ARCHITECTURE.md against the code: a room imports what its row allows, and only from rows
//! below its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A row of the table: its place, and what its rooms may import.
struct Row {
    place: usize,
    allowed: Allowed,
}

enum Allowed {
    All,
    Rooms(BTreeSet<String>),
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// `src/gguf/` and `src/cut.rs` are the rooms `gguf` and `cut`.
fn room(path: &str) -> Option<String> {
    let name = path.trim().trim_matches('`').strip_prefix("src/")?;
    Some(name.trim_end_matches('/').trim_end_matches(".rs").to_owned())
}

/// The rows of the table whose rooms are Rust modules, by room.
fn table() -> BTreeMap<String, Row> {
    let text = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let mut rows = BTreeMap::new();
    for (place, line) in text.lines().filter(|line| line.starts_with('|')).enumerate() {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [rooms, _, allowed] = cells[..] else { continue };
        for room in rooms.split(',').filter_map(room) {
            let allowed = match allowed {
                "all" => Allowed::All,
                list => Allowed::Rooms(list.split(',').map(|n| n.trim().to_owned()).collect()),
            };
            assert!(rows.insert(room.clone(), Row { place, allowed }).is_none(), "{room} has two rows");
        }
    }
    rows
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The rooms that a file names after `crate::`, comments and tests left out.
fn imports(text: &str) -> BTreeSet<String> {
    let code: String = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap()
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect::<Vec<_>>()
        .join("\n");
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let names: Vec<&str> = match rest.strip_prefix('{') {
            // `crate::{a, b::{c, d}}`: only the names at the first level are rooms.
            Some(list) => {
                let (mut depth, mut start, mut names) = (0, 0, Vec::new());
                for (at, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => {
                            names.push(&list[start..at]);
                            break;
                        }
                        '}' => depth -= 1,
                        ',' if depth == 0 => {
                            names.push(&list[start..at]);
                            start = at + 1;
                        }
                        _ => {}
                    }
                }
                names
            }
            None => vec![rest],
        };
        for name in names {
            let end = name.trim_start();
            let end = &end[..end.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(end.len())];
            found.insert(end.to_owned());
        }
    }
    found
}

#[test]
fn every_room_imports_what_the_table_allows() {
    let table = table();
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let rooms: BTreeSet<String> = files
        .iter()
        .filter_map(|path| {
            let path = path.strip_prefix(root()).unwrap();
            let first = path.components().nth(1)?.as_os_str().to_str()?;
            Some(first.trim_end_matches(".rs").to_owned())
        })
        .filter(|room| room != "lib")
        .collect();
    assert_eq!(table.keys().cloned().collect::<BTreeSet<_>>(), rooms, "rooms of the table and of src");
    let mut wrong = Vec::new();
    let mut used: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for path in &files {
        let shown = path.strip_prefix(root()).unwrap();
        let own = shown.components().nth(1).unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs");
        let Some((own, row)) = table.get_key_value(own) else { continue };
        for import in imports(&std::fs::read_to_string(path).unwrap()) {
            // Names that are no room are items of lib.rs: `crate::Result`.
            let Some(other) = table.get(&import) else { continue };
            if import == *own {
                continue;
            }
            used.entry(own).or_default().insert(import.clone());
            let allowed = match &row.allowed {
                Allowed::All => true,
                Allowed::Rooms(rooms) => import == "error" || rooms.contains(&import),
            };
            if !allowed {
                wrong.push(format!("{} imports {import}, which its row does not allow", shown.display()));
            } else if other.place < row.place {
                wrong.push(format!("{} imports {import}, which stands above it", shown.display()));
            }
        }
    }
    for (own, row) in &table {
        let Allowed::Rooms(rooms) = &row.allowed else { continue };
        let none = BTreeSet::new();
        let together =
            table.iter().filter(|(_, other)| other.place == row.place).map(|(name, _)| name.as_str());
        let used: BTreeSet<&String> = together.flat_map(|name| used.get(name).unwrap_or(&none)).collect();
        for room in rooms.iter().filter(|room| *room != "–" && !used.contains(room)) {
            wrong.push(format!("the row of {own} allows {room}, which nothing there imports"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn imports_are_read_out_of_nested_lists() {
    let text = "use crate::{error::{Error, Result}, gguf, plan::Plan};\n// use crate::cli;\nfn f() { crate::hash::x() }\n";
    let found = imports(text);
    assert_eq!(found, ["error", "gguf", "hash", "plan"].map(str::to_owned).into());
}
