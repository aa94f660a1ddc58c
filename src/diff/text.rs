//! A diff in lines.

use super::{Change, Diff};
use crate::error::shown;
use std::collections::BTreeSet;

impl Diff {
    /// Whether the two are one conversion, made in the same way.
    pub fn equal(&self) -> bool {
        self.causes.is_empty() && self.same_content()
    }

    /// Whether what an engine reads is the same: every tensor and every file.
    pub fn same_content(&self) -> bool {
        self.shards.is_empty() && self.tensors.is_empty() && self.files.is_empty() && self.unknown == 0
    }

    /// What differs, one line each: the tensor or file, and why.
    pub(super) fn content(&self) -> Vec<(String, String)> {
        let mut lines = Vec::new();
        for shard in &self.shards {
            lines.push((shown(&shard.file), format!("only in {}, {} tensors", shard.only, shard.tensors)));
        }
        for tensor in &self.tensors {
            let place = place_text(&tensor.part, &tensor.ranks);
            lines.push((format!("{}{place}", shown(&tensor.name)), tensor.why.join("; ")));
        }
        for file in &self.files {
            let why = file.only.as_ref().map_or("differs".into(), |side| format!("only in {side}"));
            lines.push((shown(&file.file), why));
        }
        lines
    }

    /// Every difference in a line: first what the runs were given, then tensors, then files.
    pub fn lines(&self) -> Vec<String> {
        let causes = self.causes.iter().map(Change::text);
        causes.chain(self.content().into_iter().map(|(what, why)| format!("{what}: {why}"))).collect()
    }

    /// The whole in a line.
    pub fn summary(&self) -> String {
        let [a, b] = &self.sides;
        let mut text = format!("{} tensors compared", self.compared);
        if self.same_content() {
            text += ": all are equal, and so are the other files";
            return if self.causes.is_empty() { text } else { text + "; the runs were not" };
        }
        let names = |certain| {
            let names = self.tensors.iter().filter(|t| t.certain == certain);
            names.map(|t| (&t.part, &t.name)).collect::<BTreeSet<_>>().len()
        };
        text += &format!(" on {a} and {b}: {} differ", names(true));
        for (n, what) in [
            (names(false), "may differ (with both directories at hand, bytes are compared)"),
            (self.unknown, "lie elsewhere in their file (with both directories at hand, bytes are compared)"),
        ] {
            if n > 0 {
                text += &format!(", {n} {what}");
            }
        }
        for (n, what) in [(self.shards.len(), "shards on one side alone"), (self.files.len(), "other files")]
        {
            if n > 0 {
                text += &format!(", {n} {what}");
            }
        }
        if self.causes.is_empty() && !self.tensors.is_empty() {
            text +=
                "; version, options and GGUF headers are the same, so the data of the GGUF's tensors changed";
        }
        text
    }
}

impl Change {
    /// `version: preshard 0.1.0 -> preshard 0.2.0`.
    pub(super) fn text(&self) -> String {
        format!("{}: {} -> {}", self.what, self.a, self.b)
    }
}

/// ` (rank 0, 1)`, with the stage where there are several; nothing for the only rank.
fn place_text(part: &str, ranks: &[[u64; 2]]) -> String {
    let ranks: BTreeSet<_> = ranks.iter().collect();
    let staged = ranks.iter().any(|[pp, _]| *pp > 0);
    let text = |[pp, tp]: &[u64; 2]| if staged { format!("{pp}.{tp}") } else { tp.to_string() };
    let list = ranks.into_iter().map(text).collect::<Vec<_>>().join(", ");
    let draft = if part == "model" { "" } else { "draft, " };
    format!(" ({draft}{} {list})", if staged { "stage.rank" } else { "rank" })
}
