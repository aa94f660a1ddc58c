#!/usr/bin/env bash
# Builds the Python package and runs its checks in a virtual environment under target/.
#
#   scripts/test_python.sh [--torch]      --torch installs PyTorch (2 GB); without it the tests of
#                                         what torch tensors look like are skipped
# Needs Rust and Python 3.11 or newer (PYTHON names one).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/target/python-venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q "maturin>=1.9.4,<2" pytest numpy "mypy==2.4.*" "ruff==0.17.*"
if [ "${1:-}" = --torch ]; then "$venv/bin/pip" install -q torch safetensors; fi
cd python
cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
"$venv/bin/ruff" check -q preshard tests ../scripts/interop
"$venv/bin/ruff" format -q --check preshard tests ../scripts/interop
"$venv/bin/mypy" preshard
rm -rf ../target/wheels
"$venv/bin/maturin" build -q --profile dev -i "$venv/bin/python" -o ../target/wheels
"$venv/bin/pip" install -q --force-reinstall --no-deps ../target/wheels/preshard-*.whl
exec "$venv/bin/pytest" -q -p no:cacheprovider
