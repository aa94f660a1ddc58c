#!/usr/bin/env bash
# Fuzzes: scripts/fuzz.sh [SECONDS [TARGET…]], each target for so long (20 s by default), one after
# the other. Needs `cargo install cargo-fuzz --locked`; without a nightly compiler the stable one is told to
# take its options. Corpora grow in fuzz/corpus; a crash is left in fuzz/artifacts with the command that
# repeats it.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-20}
shift || true
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then targets=(gguf plan_eval header manifest mapping hf); fi
command -v cargo-fuzz >/dev/null || { echo "cargo-fuzz not found: cargo install cargo-fuzz --locked" >&2; exit 1; }
fuzz=(cargo +nightly fuzz)
if ! cargo +nightly --version >/dev/null 2>&1; then
  export RUSTC_BOOTSTRAP=1
  fuzz=(cargo fuzz)
fi
[ -d corpus ] || cargo run --quiet --release --bin seeds -- corpus
for target in "${targets[@]}"; do
  case $target in
    gguf) options=(-max_len=32768) ;;
    plan_eval | hf) options=(-max_len=4096) ;;
    *) options=(-max_len=65536) ;;
  esac
  printf '\n== %s, %s s\n' "$target" "$seconds"
  # No search for leaks: a thread that is just ending looks like one.
  "${fuzz[@]}" run --fuzz-dir . "$target" -- "${options[@]}" -max_total_time="$seconds" \
    -rss_limit_mb=2048 -timeout=60 -detect_leaks=0 -print_final_stats=1 -verbosity=0
done
