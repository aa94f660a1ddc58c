#!/usr/bin/env python3
"""Writes tests/fixtures/expected/*.json: what every tensor of a conversion must be, worked out by
programs that share nothing with preshard.

  cargo test --test fidelity -- --ignored write_models        # models made in code, to target/models
  python scripts/make_expected.py --ref-convert ref_convert.py --shards expected_shards.py \\
      --packed expected_packed.py --fixtures DIR --models target/models

ref_convert.py GGUF HFDIR OUT bf16|f32     GGUF back to a Hugging Face checkpoint, with numpy and gguf-py
expected_shards.py HFDIR OUT --tp N ...    what each rank of vLLM holds, checked against a running vLLM
expected_packed.py GGUF HFDIR OUT --tp N   the same with weights kept packed

DIR holds the fixtures as tests/fixtures does, with hf/MODEL/config.json of each. Needs numpy, gguf
and blake3.

One file per model: the source and the BLAKE3 of its files, and for each command line the files it
writes: tensor name to "DTYPE shape hash", the hash being the first 20 hex digits of BLAKE3.
"""
import argparse, json, os, struct, subprocess, sys, tempfile
from blake3 import blake3

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("ref-convert", "shards", "packed", "fixtures", "models"):
    ap.add_argument("--" + name, required=True)
ap.add_argument("--only", help="this model alone")
ap.add_argument("--large", nargs=3, metavar=("GGUF", "CONFIGDIR", "OUTDIR"), help="only this dense model, over 3 ranks, to OUTDIR")
a = ap.parse_args()
out = a.large[2] if a.large else os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/fixtures/expected")

FIXED = ["--tp 1", "--tp 2", "--tp 4"]
EP = ["--tp 2 --ep"]
GLM = [("dsa-cuda", ""), ("generic", " --indexer drop")]
# name: (first GGUF file, config directory, [(class, options)], bf16 runs, f32 runs, packed runs)
MODELS = {
    "tiny-llama": ("dense/tiny-llama-Q4_K_M.gguf", "tiny-llama", [("generic", "")], FIXED, ["--tp 2"], ["--tp 1"]),
    "tiny-qwen2": ("dense/tiny-qwen2-Q4_K_M.gguf", "tiny-qwen2", [("generic", "")], FIXED, [], []),
    "tiny-qwen3moe": ("dense/tiny-qwen3moe-Q4_K_M.gguf", "tiny-qwen3moe", [("generic", "")], FIXED + EP, [], []),
    "tiny-dsv3": ("dsv3/tiny-dsv3-Q4_K_M.gguf", "tiny-dsv3", [("dsv3", "")], FIXED + EP, [], []),
    "tiny-glm5": ("glm5/tiny-glm5-UD-Q4_K_XL-00001-of-00003.gguf", "tiny-glm5", GLM, FIXED + EP, ["--tp 2"], ["--tp 1"]),
    # Made in code: cuts over 2 ranks (llama: 4) fall on blocks, so that everything stays packed.
    "made-llama": ("made-llama.gguf", None, [("generic", "")], ["--tp 4"], [], ["--tp 1", "--tp 2", "--tp 4"]),
    "made-qwen2": ("made-qwen2.gguf", None, [("generic", "")], ["--tp 2"], [], ["--tp 1", "--tp 2"]),
    "made-qwen3moe": ("made-qwen3moe.gguf", None, [("generic", "")], EP, [], ["--tp 1", "--tp 2"]),
    "made-deepseek-legacy": ("made-deepseek-legacy.gguf", None, [("dsv3", "")], ["--tp 2"] + EP, [], ["--tp 1", "--tp 2"]),
    "made-glm": ("made-glm.gguf", None, GLM, ["--tp 2"] + EP, [], ["--tp 1", "--tp 2"]),
}
if a.large:
    # For models too large to keep here, such as SmolLM2 (scripts/check_smollm2.sh).
    MODELS = {"large": (os.path.abspath(a.large[0]), os.path.abspath(a.large[1]), [("generic", "")], ["--tp 3"], [], ["--tp 1", "--tp 3"])}


def run(program, *args):
    subprocess.run([sys.executable, program, *map(str, args)], check=True, stdout=subprocess.DEVNULL)


def listing(directory):
    """Every tensor of every safetensors file."""
    files = {}
    for name in sorted(f for f in os.listdir(directory) if f.endswith(".safetensors")):
        with open(f"{directory}/{name}", "rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for tensor, v in sorted(header.items()):
                begin, end = v["data_offsets"]
                f.seek(8 + length + begin)
                shape = "x".join(map(str, v["shape"]))
                tensors[tensor] = f"{v['dtype']} [{shape}] {blake3(f.read(end - begin)).hexdigest()[:20]}"
            files[name] = tensors
    return files


def splits(path):
    if "-00001-of-" not in path:
        return [path]
    head, count = path[: -len(".gguf")].split("-00001-of-")
    return [f"{head}-{i + 1:05}-of-{count}.gguf" for i in range(int(count))]


for model, (gguf, config, classes, bf16, f32, packed) in MODELS.items():
    if a.only not in (None, model):
        continue
    source = os.path.join(a.fixtures if config else a.models, gguf)
    config = os.path.join(a.fixtures, "hf", config) if config else source[: -len(".gguf")]
    cases = {}
    with tempfile.TemporaryDirectory() as work:
        for dtype, runs in (("bf16", bf16), ("f32", f32)):
            hf = f"{work}/{dtype}"
            run(a.ref_convert, source, config, hf, dtype)
            cases[f"--layout hf --weights {dtype}"] = listing(hf)
            for cls, options in classes:
                for tp in runs:
                    run(a.shards, hf, f"{work}/out", *f"{tp} --cls {cls}{options}".split())
                    cases[f"{tp} --weights {dtype}{options}"] = listing(f"{work}/out")
                    subprocess.run(["rm", "-r", f"{work}/out"], check=True)
        for cls, options in classes:
            for tp in packed:
                run(a.packed, source, f"{work}/bf16", f"{work}/out", *f"{tp} --cls {cls}{options}".split())
                cases[f"{tp}{options}"] = listing(f"{work}/out")
                subprocess.run(["rm", "-r", f"{work}/out", f"{work}/out.float"], check=True)
    files = {os.path.basename(s): blake3(open(s, "rb").read()).hexdigest() for s in splits(source)}
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/{model}.json", "w") as f:
        json.dump({"source": gguf, "files": files, "cases": cases}, f, indent=0, separators=(",", ":"))
        f.write("\n")
    print(model, len(cases), "cases,", sum(len(t) for c in cases.values() for t in c.values()), "tensors")
