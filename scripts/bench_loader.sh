#!/usr/bin/env bash
# The loader, the link's limit and public loaders on one shard in one run, on a machine with an
# NVIDIA GPU. Hosts differ: compare only within a run.
#   scripts/bench_loader.sh [DIR [GIB]]     DIR for the shard, by default under the temporary folder
# The public loaders need a python3 with PyTorch; `pip install --pre safetensors instanttensor`
# adds the fastest of them.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-${TMPDIR:-/tmp}/preshard-bench}
gib=${2:-12}
if [ -z "${PRESHARD_BENCH:-}" ]; then
  command -v cargo >/dev/null || { echo "cargo not found: install Rust from https://rustup.rs" >&2; exit 1; }
  cargo build --release --bench load --no-default-features --features cuda
  PRESHARD_BENCH=$(ls -t target/release/deps/load-* | grep -v '\.d$' | head -n 1)
fi
"$PRESHARD_BENCH" --dir "$dir" --gib "$gib"
shard=$dir/model-rank-0-part-0.safetensors
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  python3 scripts/bench_public_loaders.py "$shard"
else
  echo "public loaders: skipped, no python3 with PyTorch and CUDA"
fi
sync "$shard"
"$PRESHARD_BENCH" --dir "$dir" --cold --runs 3
