#!/usr/bin/env bash
# Runs every test that needs no GPU, no engine and no network beyond Cargo's registry.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo >/dev/null || { echo "cargo not found: install Rust from https://rustup.rs" >&2; exit 1; }
exec cargo test --locked "$@"
