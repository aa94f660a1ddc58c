//! Where the tables come from: those compiled in, those of a directory, and what one table takes from another.

use super::{Arch, Engine};
use crate::error::{Error, Result};
use std::path::Path;

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
        let (arch, text): (Arch, String) = self.read("arch", name)?;
        if arch.architecture != name {
            return Err(Error::mapping(
                format!("mappings/arch/{name}.toml"),
                format!("architecture = {:?}, expected {name:?}", arch.architecture),
            ));
        }
        for rule in &arch.tensors {
            rule.check().map_err(|detail| {
                Error::mapping(
                    format!("mappings/arch/{name}.toml"),
                    format!("rule for {:?}: {detail}", rule.from),
                )
            })?;
        }
        Ok((arch, text))
    }

    /// The table of an engine and its text.
    pub fn engine(&self, name: &str) -> Result<(Engine, String)> {
        let (engine, text): (Engine, String) = self.read("engine", name)?;
        engine.check().map_err(|detail| Error::mapping(format!("mappings/engine/{name}.toml"), detail))?;
        // The loader knows an ordinary checkpoint by its layout's name alone.
        if engine.sharded() == ordinary(name) {
            return Err(Error::mapping(
                format!("mappings/engine/{name}.toml"),
                "a table of an ordinary checkpoint is called hf or hf-NAME and has no [files]; any other has them",
            ));
        }
        Ok((engine, text))
    }

    /// The table `folder/name.toml`, with what it extends, and the texts of all of them.
    pub(crate) fn read<T: serde::de::DeserializeOwned>(
        &self,
        folder: &str,
        name: &str,
    ) -> Result<(T, String)> {
        let text = self.text(folder, name)?;
        let wrong = |e: toml::de::Error| {
            let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
            let place = line.map_or(String::new(), |line| format!("line {line}: "));
            Error::mapping(format!("mappings/{folder}/{name}.toml"), format!("{place}{}", e.message()))
        };
        let table: toml::Table = toml::from_str(&text).map_err(wrong)?;
        if !table.contains_key(EXTENDS) {
            // Read from the text once more: errors of the table's own keys then have lines.
            return Ok((toml::from_str(&text).map_err(wrong)?, text));
        }
        let mut texts = text.clone();
        let table = self.extended(folder, name, table, &mut texts, 0)?;
        Ok((table.try_into().map_err(wrong)?, texts))
    }

    /// `table` with what it extends put under it.
    fn extended(
        &self,
        folder: &str,
        name: &str,
        mut table: toml::Table,
        texts: &mut String,
        depth: usize,
    ) -> Result<toml::Table> {
        let file = format!("mappings/{folder}/{name}.toml");
        let Some(base) = table.remove(EXTENDS) else { return Ok(table) };
        let Some(base) = base.as_str().filter(|_| depth < MAX_EXTENDS) else {
            return Err(Error::mapping(
                file,
                format!(
                    "extends = {base:?}: expected the name of a table, and at most {MAX_EXTENDS} in a row"
                ),
            ));
        };
        let text =
            self.text(folder, base).map_err(|e| Error::mapping(&file, format!("extends {base:?}: {e}")))?;
        let below: toml::Table = toml::from_str(&text)
            .map_err(|e| Error::mapping(format!("mappings/{folder}/{base}.toml"), e.message()))?;
        texts.push_str(&text);
        let mut below = self.extended(folder, base, below, texts, depth + 1)?;
        lay_over(&mut below, table);
        Ok(below)
    }

    /// The text of `folder/name.toml`.
    pub(crate) fn text(&self, folder: &str, name: &str) -> Result<String> {
        // A name comes from the GGUF: it selects a table but never a path.
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if let (Some(dir), true) = (self.dir, plain) {
            let path = dir.join(folder).join(format!("{name}.toml"));
            match std::fs::read_to_string(&path) {
                Ok(text) => return Ok(text),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io(&path, "read", e)),
            }
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

/// Whether an engine table of this name makes an ordinary checkpoint.
fn ordinary(name: &str) -> bool {
    name == "hf" || name.starts_with("hf-")
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
        let tables = Tables { dir: Some(dir.path()) };
        let error = tables.arch("../arch/llama").unwrap_err().to_string();
        assert!(error.contains("no mapping for this architecture"), "{error}");
    }
}
