#!/usr/bin/env python3
"""Runs packed weights of `--weights fast` through Humming's kernels: what they compute, and how fast.

    bench_humming.py DIR [--packed DIR] [--gguf-kernels _C_gguf.abi3.so]

DIR is `convert --layout hf-humming --weights fast` (or `--layout hf`); each module of its first layer is computed
from the files' bytes and compared with the product in f32 of the weights that the files' format describes, decoded
here: more than 1 % apart is a failure. PACKED is the same GGUF by `--layout vllm --weights keep` on one rank, to
time vllm-gguf-plugin's kernels beside them. Needs a GPU, torch, safetensors and humming-kernels; times are medians of
replayed graphs over copies of the weights that no cache holds.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from humming.forward import humming_forward
from humming.schema import HummingWeightSchema
from humming.transform import prepare_and_transform_humming_tensors
from humming.tune import get_heuristics_config
from safetensors import safe_open

TOKENS = (1, 8, 64, 512, 2048)
MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
MERGED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
DEVICE = torch.device("cuda:0")


def tensors(directory):
    """Every tensor of a directory, by name."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            found.update((name, file.get_tensor(name)) for name in names)
    return found


def decode(words, scales, zeros, bits, group):
    """The weights: each row a stream of codes from the lowest bits of its words on."""
    stream = words.view(torch.uint8).to(torch.int64)
    cols = stream.shape[-1] * 8 // bits
    at = torch.arange(cols, device=words.device) * bits
    padded = torch.nn.functional.pad(stream, (0, 1))
    pair = padded[..., at // 8] | padded[..., at // 8 + 1] << 8
    codes = (pair >> at % 8 & (1 << bits) - 1).float()
    zero = 1 << bits - 1 if zeros is None else zeros.float().repeat_interleave(group, -1)
    return (codes - zero) * scales.float().repeat_interleave(group, -1)


def modules(directory):
    """The first layer's modules as vLLM merges them: form and tensors; experts are stacked."""
    manifest = json.loads((directory / "preshard.json").read_text())
    stored = tensors(directory)
    parts = defaultdict(dict)
    for t in (t for s in manifest["shards"] for t in s["tensors"]):
        if "recoded" in t and ".layers.0." in t["members"][0]["hf"]:
            name = t["members"][0]["hf"].removesuffix(".weight")
            r = t["recoded"]
            parts[name][r["holds"]] = stored[t["name"]].to(DEVICE)
            parts[name]["form"] = (r["bits"], r["group"], r.get("zero_point", False))
    merged = defaultdict(lambda: defaultdict(list))
    for name, part in parts.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        parent, own = name.rsplit(".", 1)
        if expert:
            parent = parent[: expert.start()] + ".experts"
        order = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
        place = order.index(own) if own in order else 0
        merged[f"{parent}.{MERGED.get(own, own)}"][int(expert[1]) if expert else None].append((place, part))
    for name, experts in merged.items():
        stacks = defaultdict(list)
        for _, members in sorted(experts.items(), key=lambda e: e[0] or 0):
            members = [part for _, part in sorted(members, key=lambda m: m[0])]
            for holds in ("codes", "scales", "zero_points"):
                if holds in members[0]:
                    stacks[holds].append(torch.cat([m[holds] for m in members]))
            form = members[0]["form"]
        stacked = None not in experts
        yield name, form, {k: torch.stack(v) if stacked else v[0] for k, v in stacks.items()}


def timed(calls):
    """Microseconds of a call: the median over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for _ in range(11):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return statistics.median(took)


def copies(found):
    """Enough copies that a pass over them leaves nothing in the cache."""
    size = sum(t.numel() * t.element_size() for t in found.values())
    return [{k: t.clone() for k, t in found.items()} for _ in range(max(2, min(40, 150_000_000 // size)))]


def layer(form, found, dtype):
    """A module in the kernels' own arrangement."""
    bits, group, zero = form
    words = found["codes"]
    given = {"weight": words, "weight_scale": found["scales"]}
    if zero:
        given["zero_point"] = found["zero_points"]
    schema = HummingWeightSchema(
        b_dtype=f"uint{bits}", weight_scale_group_size=group, has_zero_point=zero, is_fp_zero_point=zero
    )
    return prepare_and_transform_humming_tensors(
        tensors=given,
        shape_n=words.shape[-2],
        shape_k=words.shape[-1] * 32 // bits,
        weight_schema=schema,
        num_experts=words.shape[0] if words.dim() == 3 else None,
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        torch_dtype=dtype,
        device=DEVICE,
    )


def main():
    """Compares and times every module of the first layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--gguf-kernels")
    args = parser.parse_args()
    packed = tensors(args.packed) if args.packed else {}
    if args.gguf_kernels:
        torch.ops.load_library(args.gguf_kernels)
    torch.manual_seed(0)
    locks = torch.zeros(132 * 8, dtype=torch.int32, device=DEVICE)
    failed = 0
    for name, form, found in modules(args.dir):
        weights = decode(found["codes"], found["scales"], found.get("zero_points"), form[0], form[1])
        dtype = found["scales"].dtype
        experts = weights.shape[0] if weights.dim() == 3 else 0
        gemm = "grouped_contiguous" if experts else "dense"
        config, made = layer(form, found, dtype)
        compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm})
        choices = get_heuristics_config(layer_config=config, gemm_type=gemm)
        choices[0][0] = 0  # the launcher asks for one row too
        tuning = json.dumps(choices)
        turns = copies(made)
        for tokens in TOKENS:
            x = torch.randn(tokens * max(experts, 1), weights.shape[-1], device=DEVICE).to(dtype)
            # Each expert computes as many rows as there are tokens, in their order.
            layout = torch.arange(0, x.shape[0] + 1, tokens, device=DEVICE) if experts else None
            rows = x.float().view(experts, tokens, -1) if experts else x.float()
            expected = (rows @ weights.transpose(-1, -2)).reshape(x.shape[0], -1)
            out = torch.full_like(expected, float("nan"), dtype=dtype)

            def call(t, x=x, out=out, layout=layout, config=config, compute=compute, tuning=tuning):
                humming_forward(
                    config, inputs=x, outputs=out, locks=locks, compute_config=compute, tuning_config=tuning,
                    expert_layout=layout, valid_shape_m=x.shape[0], **t,
                )  # fmt: skip

            call(made)
            torch.cuda.synchronize()
            error = ((out.float() - expected).norm() / expected.norm()).item()
            # NaN is no less than anything.
            bad = not error < 0.01
            failed += bad
            took = timed([lambda t=t: call(t) for t in turns])
            line = {"module": name, "form": form, "shape": list(weights.shape), "tokens": tokens}
            line |= {"error": round(error, 5), "us": round(took, 1)}
            raw = packed.get(f"{name}.qweight")
            kinds = packed.get(f"{name}.qweight_type")
            if args.gguf_kernels and raw is not None and len(set(kinds.tolist())) == 1 and not experts:
                raw, kind, n = raw.to(DEVICE), int(kinds[0]), weights.shape[0]
                vector = tokens <= (2 if n > 5120 else 6)  # as vllm-gguf-plugin chooses
                ops = torch.ops._C_gguf
                kernel = ops.ggml_mul_mat_vec_a8 if vector else ops.ggml_mul_mat_a8
                found_by_it = kernel(raw, x, kind, n).float()
                line["gguf_error"] = round(((found_by_it - expected).norm() / expected.norm()).item(), 5)
                turns_of_it = [partial(kernel, t["raw"], x, kind, n) for t in copies({"raw": raw})]
                line["gguf_us"] = round(timed(turns_of_it), 1)
            print(json.dumps(line) + (" FAILED" if bad else ""), flush=True)
        del weights, found, made, turns
        torch.cuda.empty_cache()
    print("FAILED" if failed else "all within 1 % of f32")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
