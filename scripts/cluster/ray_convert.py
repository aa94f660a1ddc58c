#!/usr/bin/env python3
"""Ray: one task for each rank, then the merge.

    scripts/cluster/ray_convert.py GGUF OUT --ranks N [--cpus N] [--retries N] [--preshard PATH] [-- OPTION…]

OPTIONs go to `preshard convert`. Runs on the cluster that RAY_ADDRESS names, or on this machine. GGUF and OUT
are on a file system that all nodes see; each rank has a directory of its own under OUT.ranks. A task whose
worker or node died is started again, there or elsewhere, and goes on where it was.
"""

import argparse
import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import ray


def end_with_parent():
    """Between fork and exec: the kernel ends the converter with its worker, or the next attempt finds the
    directory taken. What it has written and synced by then is kept."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def convert(command, rank, out):
    """Converts one rank; runs on a worker."""
    # Ended by a signal or refused: Ray tells the two apart by the exception, and starts again after the first.
    done = subprocess.run([*command, "--ranks", str(rank), "-o", f"{out}.ranks/{rank}"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
    if done.returncode < 0:
        raise ConnectionAbortedError(f"rank {rank}: ended by signal {-done.returncode}")
    if done.returncode > 0:
        raise RuntimeError(f"rank {rank}: {done.stderr.strip()}")
    return rank


def main():
    parser = argparse.ArgumentParser(usage=__doc__.splitlines()[2].strip(), description=__doc__.splitlines()[0],
                                     epilog="OPTIONs go to preshard convert.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, required=True, help="how many there are: --tp times --pp")
    parser.add_argument("--cpus", type=int, default=8, help="cores for each rank")
    parser.add_argument("--retries", type=int, default=4, help="how often a rank is started again")
    parser.add_argument("--preshard", default="preshard", help="the command, at the same place on every node")
    own = sys.argv[1:sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = sys.argv[len(own) + 2:]
    args = parser.parse_args(own)
    gguf, out = args.gguf.absolute(), args.out.absolute()

    ray.init(log_to_driver=False)
    command = [args.preshard, "-q", "convert", str(gguf), *options, "--threads", str(args.cpus)]
    task = ray.remote(convert).options(num_cpus=args.cpus, max_retries=args.retries,
                                       retry_exceptions=[ConnectionAbortedError])
    waiting = [task.remote(command, rank, str(out)) for rank in range(args.ranks)]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        print(f"rank {ray.get(done)}: done", flush=True)
    dirs = [f"{out}.ranks/{rank}" for rank in range(args.ranks)]
    subprocess.run([args.preshard, "merge", *dirs, "-o", out], check=True)


if __name__ == "__main__":
    main()
