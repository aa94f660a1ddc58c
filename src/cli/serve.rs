//! The command that serves what was converted, from the engine's table.

use crate::manifest::Manifest;
use crate::mapping::Serve;
use crate::policy::{Mtp, SharedExperts};
use std::path::Path;

/// The command line for a converted directory, and the one with its MTP draft when it holds one; for a draft in a
/// directory of its own, the options that make it a model's. None when the engine's table says nothing of serving.
pub fn commands(dir: &Path, manifest: &Manifest, serve: Option<&Serve>) -> Vec<String> {
    let Some(serve) = serve else { return Vec::new() };
    let dir = crate::error::shown_path(dir);
    let packed = manifest.shards.iter().flat_map(|s| &s.tensors).any(|t| t.logical.is_some());
    let pick = |packed_one: &Option<String>| packed_one.clone().filter(|_| packed);
    let mut command = pick(&serve.packed).unwrap_or_else(|| serve.command.clone());
    let policy = &manifest.policy;
    let fused = policy.shared_experts == SharedExperts::Fused;
    for (option, wanted) in [
        (&serve.tp, policy.tp > 1),
        (&serve.pp, policy.pp > 1),
        (&serve.ep, policy.ep),
        (&serve.fused, fused),
        (&serve.separate, !fused),
    ] {
        if wanted && !option.is_empty() {
            command += &format!(" {option}");
        }
    }
    // The directory last: its name may hold anything.
    let filled = |text: &str| {
        text.replace("{tp}", &policy.tp.to_string())
            .replace("{pp}", &policy.pp.to_string())
            .replace("{dir}", &dir)
    };
    if policy.mtp == Mtp::Only {
        return serve.draft_alone.iter().map(|options| filled(options)).collect();
    }
    let command = filled(&command);
    let mut commands = vec![command.clone()];
    let draft = pick(&serve.packed_draft).or_else(|| serve.draft.clone());
    let there = |draft: &String| !draft.is_empty() && manifest.shards.iter().any(|s| s.part == "mtp");
    if let Some(draft) = draft.filter(there) {
        commands.push(format!("{command} {}", filled(&draft)));
    }
    commands
}
