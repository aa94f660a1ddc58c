#!/usr/bin/env bash
# Builds the Python package and runs its tests in a virtual environment under target/. Tests that need
# PyTorch or vLLM are skipped where those are not installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=target/venv-python
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.9,<2' pytest numpy safetensors
# A debug build: the tests are about behaviour, and a release build takes minutes.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
(cd python && "../$venv/bin/maturin" build --quiet --locked --out "$wheels" --interpreter "../$venv/bin/python")
"$venv/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheels"/*.whl
exec "$venv/bin/python" -m pytest -q python/tests "$@"
