#!/usr/bin/env bash
# Loads what preshard writes into SGLang 0.5.23 on a CPU, and compares what its ranks hold with the files, byte for byte.
#
#   scripts/interop_sglang.sh [WORK]      WORK (default target/interop-sglang) holds the Python environment and outputs
#
# Needs Rust, Python 3.11 or newer (PYTHON names one), 8 GB of disk and network access to PyPI. VENV names an environment
# that has SGLang already. What is checked:
#   1. SGLang's own loader on the ordinary checkpoint, and its sharded_state on ours: the same names, dtypes, shapes and
#      bytes as the files, and the same w_kc and w_vc. Dense models, experts cut and whole, shared experts and indexer in
#      either form, drafts.
#   2. Load format preshard: the same.
#   3. Refusals of load format preshard, one by one.
# No forward pass is run: SGLang's kernels for CPUs are a build of its own. Ends with "N passed, N failed" and status 1
# when any failed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=${1:-$root/target/interop-sglang}
mkdir -p "$work"
work=$(cd "$work" && pwd)
here=$root/scripts/interop
fixtures=$root/tests/fixtures
if [ -z "${VENV:-}" ]; then
    VENV=$work/venv
    [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/pip" install -q torch==2.14.1
    "$VENV/bin/pip" install -q --no-deps -r "$here/sglang/requirements.txt"
fi
"$VENV/bin/pip" install -q "maturin>=1.9.4,<2" blake3
(cd python && "$VENV/bin/maturin" build -q --profile dev -i "$VENV/bin/python" -o "$work/wheels")
"$VENV/bin/pip" install -q --no-deps --force-reinstall "$work"/wheels/preshard-*.whl
cargo build -q
preshard=${CARGO_TARGET_DIR:-$root/target}/debug/preshard
cd "$work"
passed=0
failed=0
jobs=()

# check TEXT COMMAND…
check() {
    local text=$1
    shift
    if "$@" > last 2>&1; then
        passed=$((passed + 1))
        echo "ok      $text: $(tail -1 last)"
    else
        failed=$((failed + 1))
        echo "FAILED  $text"
        tail -5 last
    fi
}
# convert DIR GGUF OPTIONS…
convert() {
    local dir=$1
    shift
    "$preshard" -q convert "$@" --force -o "$dir"
}
# model NAME GGUF ENGINE-OPTIONS -- CONVERT-OPTIONS…: all three ways to load it at TP 2.
model() {
    local name=$1 gguf=$2 engine=$3 draft=
    shift 4
    local plain=()
    case " $* " in *" --indexer drop "*) plain=(--indexer drop) ;; esac
    case " $* " in *" --mtp only "*) draft=--draft ;; esac
    local layout=(--layout sglang)
    case " $* " in *" --layout "*) layout=() ;; esac
    convert "$name" "$gguf" "${layout[@]}" --tp 2 --weights bf16 "$@"
    convert "$name-hf" "$gguf" --layout hf "${plain[@]}"
    jobs+=("$name.own $name-hf --tp 2 $draft $engine"
        "$name.stock $name --tp 2 $draft $engine --load-format sharded_state"
        "$name.plugin $name --tp 2 $draft $engine --load-format preshard")
    names+=("$name")
}
# refuse TEXT NAME DIR OPTIONS…
refuse() {
    jobs+=("refused.$2 $3 ${*:4} --load-format preshard")
    refusals+=("$2=$1")
}
names=()
refusals=()

dsv3=$fixtures/dsv3/tiny-dsv3-Q4_K_M.gguf
glm5=$fixtures/glm5
model llama "$fixtures/dense/tiny-llama-Q4_K_M.gguf" "" --
model qwen2 "$fixtures/dense/tiny-qwen2-Q4_K_M.gguf" "" --
model qwen3moe "$fixtures/dense/tiny-qwen3moe-Q4_K_M.gguf" "" --
model qwen3moe-ep "$fixtures/dense/tiny-qwen3moe-Q4_K_M.gguf" "--ep" -- --ep
model dsv3 "$dsv3" "" --
model dsv3-ep "$dsv3" "--ep" -- --ep
model dsv3-fused "$dsv3" "--shared-experts fused" -- --shared-experts fused
model glm5 "$glm5" "--indexer fused" -- --mtp drop
model glm5-separate "$glm5" "" -- --mtp drop --layout sglang-dsa-separate
model glm5-fused "$glm5" "--indexer fused --shared-experts fused" -- --mtp drop --shared-experts fused
model glm5-dense "$glm5" "" -- --mtp drop --indexer drop
model glm5-draft "$glm5" "--indexer fused" -- --mtp only
model glm5-fused-draft "$glm5" "--indexer fused --shared-experts fused" -- --mtp only --shared-experts fused
model glm5-dense-draft "$glm5" "" -- --mtp only --indexer drop
convert vllm "$fixtures/dense/tiny-llama-Q4_K_M.gguf" --weights bf16 --tp 2
convert packed "$fixtures/dense/tiny-llama-Q4_K_M.gguf"
refuse "tensor parallel size 2, the engine runs 1" tp llama --tp 1
refuse "expert parallel size 1, the engine runs 2" ep qwen3moe --tp 2 --ep
refuse "expert parallel size 2, the engine runs 1" no-ep qwen3moe-ep --tp 2
refuse "data-parallel attention over 2 ranks" dp llama --tp 2 --dp-attention
refuse "shared experts separate, the engine holds them fused" fused dsv3 --tp 2 --shared-experts fused
refuse "shared experts fused, the engine holds them separate" separate dsv3-fused --tp 2
refuse "weights_proj separate, the engine holds them fused" indexer-fused glm5-separate --tp 2 --indexer fused
refuse "weights_proj fused, the engine holds them separate" indexer-separate glm5 --tp 2
refuse "written for another engine" vllm vllm --tp 2
refuse "holds packed weights" packed packed --tp 1
refuse "an ordinary checkpoint" hf llama-hf --tp 1

printf '%s\n' "${jobs[@]}" | OMP_NUM_THREADS=1 "$VENV/bin/python" "$here/sglang/engine.py" 2> engine.log || true
compare() { "$VENV/bin/python" "$here/compare.py" "$@"; }
derived() {
    for file in "$1"/derived-rank-*; do cmp "$file" "$2/${file##*/}"; done && echo "w_kc and w_vc are the same"
}
for name in "${names[@]}"; do
    # A draft without embedding and head of its own in the ordinary checkpoint takes the model's once both are loaded:
    # until then SGLang leaves that memory as it is.
    but=()
    case $name in *-draft) but=(model lm_head model.embed_tokens) ;; esac
    check "$name, SGLang cuts the same" compare "$name" "$name.own" "${but[@]}"
    for how in stock plugin; do
        check "$name, $how: ranks hold the files" compare "$name" "$name.$how"
        case $name in dsv3* | glm5*) check "$name, $how: what it derives" derived "$name.own" "$name.$how" ;; esac
    done
done
for refusal in "${refusals[@]}"; do
    check "refused: ${refusal%%=*}" grep -ohm 1 "${refusal#*=}" "refused.${refusal%%=*}"/refused-0
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
