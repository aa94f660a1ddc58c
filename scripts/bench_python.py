#!/usr/bin/env python3
"""What loading from Python costs over the command, and that what arrives is what safetensors reads.

usage: bench_python.py DIR [--preshard BINARY] [--runs N]

DIR is a converted directory (or scripts/bench_loader.sh's), its rank 0 is loaded to cuda:0. Runs of
`preshard load --json` and of a fresh Python process that imports torch and calls `preshard.load`
alternate; each is its process's first load, with the CUDA context there. Needs PyTorch with CUDA,
safetensors and the preshard package.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def resident() -> int:
    """Bytes of anonymous host memory of this process."""
    line = next(
        x
        for x in Path("/proc/self/status").read_text().splitlines()
        if x.startswith("RssAnon:")
    )
    return int(line.split()[1]) << 10


def load(directory: str) -> None:
    """One timed load, with what it took of both memories."""
    import preshard
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    free, before = torch.cuda.mem_get_info()[0], resident()
    start = time.perf_counter()
    shard = preshard.load(directory, 0, "cuda:0")
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": seconds,
                "inside": shard.stats.seconds,
                "bytes": shard.stats.bytes,
                "device": free - torch.cuda.mem_get_info()[0],
                "host": resident() - before,
            }
        )
    )


def compare(directory: str) -> int:
    """Every tensor against safetensors' own, on the GPU; the number compared."""
    import preshard
    import torch
    from safetensors.torch import load_file

    shard = preshard.load(directory, 0, "cuda:0")
    reference = load_file(Path(directory) / shard.entry.file, device="cuda:0")
    assert set(reference) == set(shard), "other names"
    for name, tensor in reference.items():
        assert (shard[name].dtype, shard[name].shape) == (tensor.dtype, tensor.shape), (
            name
        )
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (shard[name], tensor))
        assert torch.equal(ours, theirs), name
    return len(reference)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--preshard", default="preshard")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--once", choices=["load", "compare"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once == "load":
        return load(args.directory)
    if args.once == "compare":
        return print(compare(args.directory))

    def run(*command: str) -> str:
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    me = (sys.executable, __file__, args.directory, "--once")
    print(f"{run(*me, 'compare').strip()} tensors equal safetensors.torch.load_file's")
    rust, python = [], []
    for _ in range(args.runs):
        command = (
            args.preshard,
            "load",
            args.directory,
            "--ranks",
            "0",
            "--device",
            "cuda:0",
            "--json",
        )
        rust.append(json.loads(run(*command))[0]["load"]["seconds"])
        python.append(json.loads(run(*me, "load")))
    size = python[0]["bytes"]
    for name, seconds in (
        ("preshard load", rust),
        ("preshard.load", [p["seconds"] for p in python]),
        ("  of it in the loader", [p["inside"] for p in python]),
    ):
        print(
            f"{name:22} {statistics.median(seconds):.4f} s, {size / statistics.median(seconds) / 1e9:.2f} GB/s"
        )
    ratio = statistics.median(p["seconds"] for p in python) / statistics.median(rust)
    print(f"from Python {ratio:.3f} times the command's time")
    print(
        f"device memory grew by {max(p['device'] for p in python) / size:.3f} of the file, "
        f"host memory by {max(p['host'] for p in python) / size:.3f}"
    )


main()
