//! The command that serves what was converted.

use crate::manifest::Manifest;
use std::path::Path;

/// The command line for a converted directory, and the one with its MTP draft when it holds one.
pub fn commands(dir: &Path, manifest: &Manifest) -> Vec<String> {
    let dir = crate::error::shown_path(dir);
    if manifest.policy.layout == "hf" {
        return vec![format!("vllm serve {dir}")];
    }
    let packed = manifest.shards.iter().flat_map(|s| &s.tensors).any(|t| t.logical.is_some());
    // vLLM's own sharded_state loader cannot restore packed layers.
    let format = if packed { "preshard" } else { "sharded_state" };
    let mut command = format!("vllm serve {dir} --load-format {format}");
    let policy = &manifest.policy;
    for (flag, n) in [("--tensor-parallel-size", policy.tp), ("--pipeline-parallel-size", policy.pp)] {
        if n > 1 {
            command += &format!(" {flag} {n}");
        }
    }
    if policy.ep {
        command += " --enable-expert-parallel";
    }
    let mut commands = vec![command.clone()];
    if manifest.shards.iter().any(|s| s.part == "mtp") {
        // The stock loader has to be told the draft's files; ours knows them from the manifest.
        let draft = match packed {
            true => r#"{"method":"mtp","num_speculative_tokens":1}"#,
            false => {
                r#"{"method":"mtp","num_speculative_tokens":1,"draft_load_config":{"load_format":"sharded_state","model_loader_extra_config":{"pattern":"mtp-rank-{rank}-part-{part}.safetensors"}}}"#
            }
        };
        commands.push(format!("{command} --speculative-config '{draft}'"));
    }
    commands
}
