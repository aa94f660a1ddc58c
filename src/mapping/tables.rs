//! Where the tables come from: those compiled in, those of a directory, and what one table takes from another.

use super::{Arch, Engine};
use crate::error::{Error, Result, shown_path};
use crate::policy::is_ordinary;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The key of a table that names the one it builds on.
const EXTENDS: &str = "extends";
/// Tables that extend each other past which they are taken for a circle.
const MAX_EXTENDS: usize = 8;

/// Puts `over` on `table`: tables are joined key by key, lists end to end, of anything else the upper wins.
fn lay_over(table: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (table.get_mut(&key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(over)) => lay_over(below, over),
            (Some(toml::Value::Array(below)), toml::Value::Array(over)) => below.extend(over),
            (_, value) => drop(table.insert(key, value)),
        }
    }
}

// The tables compiled in (folder, name and text): `BUILTIN`, listed by build.rs, so that a new file in
// mappings/ needs no line of Rust.
include!(concat!(env!("OUT_DIR"), "/tables.rs"));

/// The built-in tables of a folder: name and text.
fn built_in(folder: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    BUILTIN.iter().filter(move |(f, ..)| *f == folder).map(|(_, name, text)| (*name, *text))
}

/// The built-in tables of a folder that stand for themselves; the others (`_common`) are extended.
pub(crate) fn built_in_names(folder: &str) -> impl Iterator<Item = &'static str> {
    built_in(folder).map(|(name, _)| name).filter(|name| !name.starts_with('_'))
}

/// Where mapping tables come from: the built-in ones, or a directory that overrides them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tables<'a> {
    /// A directory laid out as `mappings/`; a file there wins over the built-in one of its name.
    pub dir: Option<&'a Path>,
}

impl Tables<'_> {
    /// The table of an architecture and its text.
    pub fn arch(&self, name: &str) -> Result<(Arch, String)> {
        let (mut arch, text): (Arch, String) = self.read("arch", name)?;
        arch.file = self.file("arch", name);
        if arch.architecture != name {
            let detail = format!("architecture = {:?}, expected {name:?}", arch.architecture);
            return Err(Error::mapping(arch.file, detail));
        }
        arch.check().map_err(|detail| Error::mapping(&arch.file, detail))?;
        Ok((arch, text))
    }

    /// The table of an engine and its text.
    pub fn engine(&self, name: &str) -> Result<(Engine, String)> {
        let (mut engine, text): (Engine, String) = self.read("engine", name)?;
        engine.file = self.file("engine", name);
        engine.check().map_err(|detail| Error::mapping(&engine.file, detail))?;
        // The loader knows an ordinary checkpoint by its layout's name alone.
        if engine.sharded() == is_ordinary(name) {
            return Err(Error::mapping(
                engine.file,
                "a table of an ordinary checkpoint is called hf or hf-NAME and has no [files]; any other has them",
            ));
        }
        Ok((engine, text))
    }

    /// The table `folder/name.toml`, with what it extends, and the texts of all of them.
    pub(crate) fn read<T: DeserializeOwned>(&self, folder: &str, name: &str) -> Result<(T, String)> {
        let mut texts = vec![(self.file(folder, name), self.text(folder, name)?)];
        let (file, text) = &texts[0];
        let table: toml::Table = toml::from_str(text).map_err(|e| wrong(file, text, &e))?;
        if !table.contains_key(EXTENDS) {
            // Read from the text once more: errors of the table's own keys then have lines.
            return Ok((toml::from_str(text).map_err(|e| wrong(file, text, &e))?, text.clone()));
        }
        let table = self.extended(folder, table, &mut texts)?;
        let whole = table.try_into().map_err(|e| located::<T>(&texts, &e))?;
        Ok((whole, texts.into_iter().map(|(_, text)| text).collect()))
    }

    /// `table`, that of the last of `texts`, with what it extends put under it.
    fn extended(
        &self,
        folder: &str,
        mut table: toml::Table,
        texts: &mut Vec<(String, String)>,
    ) -> Result<toml::Table> {
        let Some(base) = table.remove(EXTENDS) else { return Ok(table) };
        let file = texts.last().map_or("", |(file, _)| file);
        let Some(base) = base.as_str().filter(|_| texts.len() <= MAX_EXTENDS) else {
            return Err(Error::mapping(
                file,
                format!(
                    "extends = {base:?}: expected the name of a table, and at most {MAX_EXTENDS} in a row"
                ),
            ));
        };
        let text =
            self.text(folder, base).map_err(|e| Error::mapping(file, format!("extends {base:?}: {e}")))?;
        let file = self.file(folder, base);
        let below: toml::Table = toml::from_str(&text).map_err(|e| wrong(&file, &text, &e))?;
        texts.push((file, text));
        let mut below = self.extended(folder, below, texts)?;
        lay_over(&mut below, table);
        Ok(below)
    }

    /// The file of `folder/name.toml` in the directory, if it has one.
    fn own(&self, folder: &str, name: &str) -> Option<PathBuf> {
        // A name comes from the GGUF: it selects a table but never a path.
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        let path = self.dir.filter(|_| plain)?.join(folder).join(format!("{name}.toml"));
        path.try_exists().unwrap_or(true).then_some(path)
    }

    /// What messages call `folder/name.toml`: its path where it is the directory's own.
    pub(crate) fn file(&self, folder: &str, name: &str) -> String {
        self.own(folder, name)
            .map_or_else(|| format!("mappings/{folder}/{name}.toml"), |path| path.display().to_string())
    }

    /// Refuses a directory in which no table would be found.
    fn check_dir(&self) -> Result<()> {
        let folders: BTreeSet<&str> = BUILTIN.iter().map(|(folder, ..)| *folder).collect();
        let Some(dir) = self.dir.filter(|dir| !folders.iter().any(|f| dir.join(f).is_dir())) else {
            return Ok(());
        };
        let folders = folders.into_iter().collect::<Vec<_>>().join(", ");
        Err(Error::request("--mappings", format!("{} has none of the folders {folders}", shown_path(dir))))
    }

    /// The text of `folder/name.toml`.
    pub(crate) fn text(&self, folder: &str, name: &str) -> Result<String> {
        self.check_dir()?;
        if let Some(path) = self.own(folder, name) {
            return std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", e));
        }
        match built_in(folder).find(|(n, _)| *n == name) {
            Some((_, text)) => Ok(text.to_owned()),
            None => {
                let known: Vec<_> = built_in_names(folder).collect();
                Err(Error::source(
                    name,
                    format!(
                        "no mapping for this {} in mappings/{folder}; known: {}; write one and pass --mappings DIR",
                        if folder == "engine" { folder } else { "architecture" },
                        known.join(", ")
                    ),
                ))
            }
        }
    }
}

/// An error in the text of a file, with its line.
fn wrong(file: &str, text: &str, e: &toml::de::Error) -> Error {
    let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
    let place = line.map_or(String::new(), |line| format!("line {line}: "));
    Error::mapping(file, format!("{place}{}", e.message()))
}

/// The error of a table that several texts make up, in the text where it stands.
fn located<T: DeserializeOwned>(texts: &[(String, String)], e: &toml::de::Error) -> Error {
    for (file, text) in texts {
        // The line stays, but not the key, which is no longer in the table.
        let key = format!("\n{EXTENDS}");
        let alone = format!("\n{text}").replacen(&key, "\n#", 1);
        let alone = &alone[1..];
        // What one text lacks, another may have.
        if let Err(own) = toml::from_str::<T>(alone)
            && (!own.message().starts_with("missing field") || own.message() == e.message())
        {
            return wrong(file, alone, &own);
        }
    }
    let files: Vec<_> = texts.iter().map(|(file, _)| file.as_str()).collect();
    Error::mapping(files[0], format!("{} (with all that it extends: {})", e.message(), files.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::EngineChoice;
    use super::*;

    #[test]
    fn every_built_in_table_is_sound() {
        let tables = Tables::default();
        for (folder, name, _) in BUILTIN.iter().filter(|(_, name, _)| !name.starts_with('_')) {
            match *folder {
                "arch" => {
                    let (arch, _) = tables.arch(name).unwrap();
                    for engine in arch.engines.values().flat_map(EngineChoice::tables) {
                        tables.engine(engine).unwrap();
                    }
                }
                "engine" => drop(tables.engine(name).unwrap()),
                // Read by `hf`, whose tests hold them to real models.
                "class" => {}
                _ => assert!(name.starts_with('_') || tables.arch(name).is_ok(), "{folder}/{name}"),
            }
        }
    }

    #[test]
    fn an_architecture_name_never_becomes_a_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("arch")).unwrap();
        let tables = Tables { dir: Some(dir.path()) };
        let error = tables.arch("../arch/llama").unwrap_err().to_string();
        assert!(error.contains("no mapping for this architecture"), "{error}");
    }
}
