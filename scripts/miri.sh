#!/usr/bin/env bash
# Runs Miri over the parts it can run: no mapping, no threads, no vector instructions. Needs
# `rustup +nightly component add miri rust-src`. Takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export MIRIFLAGS="-Zmiri-disable-isolation"
miri=(cargo +nightly miri test --no-default-features --features convert)
"${miri[@]}" --lib -- journal:: cut:: load::header:: quant:: plan:: "$@"
# Every type's portable decoder, over blocks with every kind of scale.
"${miri[@]}" --test decode -- every_type_decodes random_blocks_decode
