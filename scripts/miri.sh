#!/usr/bin/env bash
# Runs Miri over the parts it can run: no mapping, no threads, no vector instructions, and not the test
# that goes through every f16, which would take hours. Needs
# `rustup +nightly component add miri rust-src`. Takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export MIRIFLAGS="-Zmiri-disable-isolation"
exec cargo +nightly miri test --no-default-features --features convert --lib -- \
  journal:: cut:: load::header:: quant:: plan:: --skip f16_agrees "$@"
