#!/usr/bin/env python3
"""The first load of a process, with and without CUDA's cache of compiled kernels, from `exec` on.

usage: scripts/bench_first_load.py DIR PRESHARD... [--runs N]

DIR is a converted directory of one rank that lies in the page cache (`cargo bench --bench load -- --dir
DIR --gib 7` makes one). Each PRESHARD is a binary of one build; they take turns, so that all meet the
same machine. A bare program that starts CUDA and makes a context says what is CUDA's own.

Prints medians; `wall` is from `exec` to the exit of the process. A build whose `load --json` has
`start` also says when its last byte was in its place and verified.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

BARE = """
import ctypes, time
start = time.perf_counter()
cuda = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
print(time.perf_counter() - start)
"""


def bare():
    """Seconds of CUDA's initialisation and one context, in a process of their own."""
    return float(subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True).stdout)


def load(binary, directory, env):
    """Seconds of one process that loads the directory to GPU 0, and what it says of itself."""
    start = time.perf_counter()
    run = subprocess.run(
        [binary, "load", "--json", "--device", "cuda:0", directory], env=env, capture_output=True, text=True
    )
    wall = time.perf_counter() - start
    if run.returncode != 0:
        sys.exit(f"{binary}: {run.stderr.strip()}")
    (row,) = json.loads(run.stdout)
    assert row["load"]["verified"]
    return {"wall": wall, **row}


def show(name, rows, cuda):
    middle = lambda values: statistics.median(values)
    stats = {key: middle(r["load"][key] for r in rows) for key in ("seconds", "first_byte", "last_byte")}
    link = middle(r["pinned_copy_gb_per_s"] for r in rows)
    rate = middle(r["gb_per_s"] for r in rows)
    print(
        f"{name}: load {stats['seconds'] * 1e3:.0f} ms, {rate:.1f} GB/s, {rate / link:.2f} of the link's {link:.1f};"
        f" first byte after {stats['first_byte'] * 1e3:.1f} ms, last {stats['last_byte'] * 1e3:.0f};"
        f" wall {middle(r['wall'] for r in rows) * 1e3:.0f} ms"
    )
    if "start" not in rows[0]:
        return
    of = lambda r: r["start"]["before_main"] + r["start"]["load"] + r["load"]["seconds"]
    bound = cuda + 1.15 * rows[0]["load"]["bytes"] / (link * 1e9)
    start = {key: middle(r["start"][key] for r in rows) * 1e3 for key in rows[0]["start"]}
    own = {key: middle(r["load"][key] for r in rows) * 1e3 for key in ("memory", "locking", "kernels")}
    print(f"    exec to the last verified byte {middle(of(r) for r in rows) * 1e3:.0f} ms; CUDA's own + 1.15 x the link {bound * 1e3:.0f}")
    print("    ms from main: " + ", ".join(f"{k} {v:.1f}" for k, v in start.items()))
    print("    ms of the load: " + ", ".join(f"{k} {v:.1f}" for k, v in own.items()))


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("dir")
    parser.add_argument("binaries", nargs="+")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    bare()
    cuda = statistics.median(bare() for _ in range(args.runs))
    print(f"CUDA's own start and context, bare: {cuda * 1e3:.0f} ms")
    with tempfile.TemporaryDirectory() as cache:
        cases = {
            "no cache": {**os.environ, "CUDA_CACHE_DISABLE": "1"},
            "cached": {**os.environ, "CUDA_CACHE_PATH": cache, "CUDA_CACHE_DISABLE": "0"},
        }
        rows = {}
        for name, env in cases.items():
            for run in range(args.runs + 1):
                for binary in args.binaries:
                    row = load(binary, args.dir, env)
                    if run > 0:  # the first one fills the page cache, and the kernels' where there is one
                        rows.setdefault((name, binary), []).append(row)
    for (name, binary), found in rows.items():
        show(f"{os.path.basename(binary)}, {name}", found, cuda)


main()
