#!/usr/bin/env bash
# Builds preshard and converts a small GLM-5-shaped model (three GGUF splits, in tests/fixtures) for
# two ranks, checks the result and shows it. Needs Rust 1.89 or newer (https://rustup.rs) and a C
# compiler; no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo >/dev/null || { echo "cargo not found: install Rust from https://rustup.rs" >&2; exit 1; }

cargo build --release
preshard=target/release/preshard
model=tests/fixtures/glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf
out=target/demo

echo "== the plan"
# The model is so small that a cut for two ranks falls inside its blocks; real models need no --misaligned.
"$preshard" plan "$model" --tp 2 --misaligned dequantise
echo "== convert to $out"
rm -rf "$out"
"$preshard" convert "$model" --tp 2 --misaligned dequantise -o "$out"
echo "== verify"
"$preshard" verify "$out"
"$preshard" verify "$out" --source "$model"
echo "== the result"
ls -l "$out"
