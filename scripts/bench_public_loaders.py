#!/usr/bin/env python3
"""Times public loaders on one safetensors file, page cache to GPU. Needs PyTorch with CUDA.

usage: bench_public_loaders.py FILE [--runs N] [--only NAME,...]

Each loader puts every tensor on cuda:0; a run counts from opening the file to the device's
synchronisation, the CUDA context being there. Loaders that are not installed are skipped. The file
is read once before each run, so that the page cache holds it.
"""

import argparse
import gc
import os
import time

import torch


def prefetch(threads):
    def load(path):
        from safetensors import safe_open

        f = safe_open(path, framework="pt", device="cuda:0", backend="pread")
        return dict(f.prefetch(threads=threads))

    return load


def load_file(path):
    from safetensors.torch import load_file

    return load_file(path, device="cuda:0")


def sharded_state(path):
    """vLLM's sharded_state loader: tensors on the CPU, copied into ready parameters."""
    from safetensors import safe_open

    out = {}
    with safe_open(path, framework="pt") as f:
        for name in f.keys():
            tensor = f.get_tensor(name)
            out[name] = torch.empty_like(tensor, device="cuda:0").copy_(tensor)
    return out


def instanttensor(path):
    from instanttensor import BackendPolicy, safe_open

    with safe_open(path, framework="pt", device=0, backend=BackendPolicy.BUFFERED) as f:
        return dict(f.tensors())


def runai(path):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}


LOADERS = {
    "safetensors prefetch, 8 threads": prefetch(8),
    "safetensors prefetch, 16 threads": prefetch(16),
    "instanttensor, buffered": instanttensor,
    "runai streamer": runai,
    "safetensors load_file": load_file,
    "vLLM sharded_state": sharded_state,
}


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only")
    args = parser.parse_args()
    size = os.path.getsize(args.file)
    torch.zeros(1, device="cuda:0")
    for name, load in LOADERS.items():
        if args.only and not any(part in name for part in args.only.split(",")):
            continue
        rates = []
        try:
            for _ in range(args.runs):
                with open(args.file, "rb", buffering=0) as f:
                    while f.read(64 << 20):
                        pass
                gc.collect()
                torch.cuda.empty_cache()
                start = time.perf_counter()
                tensors = load(args.file)
                torch.cuda.synchronize()
                rates.append(size / (time.perf_counter() - start) / 1e9)
                del tensors
        except Exception as error:  # each fails in its own way; the others still run
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        print(f"{name:34} {sorted(rates)[len(rates) // 2]:6.2f} GB/s  {[round(r, 2) for r in rates]}", flush=True)


main()
