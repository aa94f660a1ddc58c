#!/usr/bin/env bash
# Runs what scripts/release.sh built into dist/, on a host that can run it.
#
#   scripts/check_release.sh x86_64|aarch64     RUN=qemu-aarch64-static runs the binary of another processor,
#                                               and leaves out the wheel
#
# The binary is static and converts; the wheel installs and converts; both give the same bytes, also as an
# earlier conversion named by EXPECT (a preshard.json) has them.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=${1:?usage: scripts/check_release.sh x86_64|aarch64}
model=tests/fixtures/dense/tiny-qwen3moe-Q4_K_M.gguf
work=target/check-release
mkdir -p "$work"
if [ -n "${EXPECT:-}" ]; then cp "$EXPECT" "$work.json"; EXPECT=$work.json; fi
rm -rf "$work"
mkdir "$work"

tar -C "$work" -xzf dist/preshard-*-"$arch"-linux.tar.gz
preshard=$(echo "$work"/preshard-*/preshard)
file "$preshard" | grep -q "statically linked" || { echo "$preshard is not static"; exit 1; }
${RUN:-} "$preshard" --version
${RUN:-} "$preshard" -q convert "$model" --tp 2 --misaligned dequantise -o "$work/binary"
${RUN:-} "$preshard" verify "$work/binary" --source "$model" ${EXPECT:+--expect "$EXPECT"}
if [ -n "${RUN:-}" ]; then exit; fi

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-index dist/preshard-*-abi3-manylinux_2_28_"$arch".whl
"$work/venv/bin/python" - "$model" "$work/wheel" <<'PYTHON'
import sys
import preshard

preshard.convert(sys.argv[1], sys.argv[2], tp=2, misaligned="dequantise")
PYTHON
${RUN:-} "$preshard" diff "$work/binary" "$work/wheel"
