#!/usr/bin/env python3
"""The recipes in scripts/cluster, run: do the ranks of many processes become the directory of one run?

    scripts/check_cluster.py [--binary PATH] [--megabytes N] [CHECK…]

Checks: slurm, kubernetes, ray; all when none is named. Each runs the recipe itself with the variables that the
scheduler sets, and merges; the result is compared with a run on one host, file by file.

slurm       the scripts under bash, as the jobs of an array and as the processes of a job. `--real-slurm` submits
            them to the Slurm of this machine instead.
kubernetes  the Jobs against the schemas of Kubernetes (needs kubernetes-validate), then the command of each pod
            with its JOB_COMPLETION_INDEX.
ray         a cluster of several nodes as processes of this machine (needs ray). One worker is killed with some
            leaves on disk; its rank must be started again and go on from there.

What a check needs and is not installed leaves that check out, with a line that says so.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_faults import Bench, make_model

RECIPES = Path(__file__).parent / "cluster"
RANKS = 2
# Each leaf is synced by itself, so that a small model has several on disk before it is done.
OPTIONS = ["--tp", str(RANKS), "--weights", "bf16", "--device", "cpu", "--checkpoint", str(16 << 20)]


class Failed(Exception):
    pass


def must(condition, text):
    if not condition:
        raise Failed(text)


def run(command, env, **variables):
    variables = {name: str(value) for name, value in variables.items()}
    done = subprocess.run([str(word) for word in command], env={**env, **variables}, capture_output=True, text=True)
    must(done.returncode == 0, f"{command}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stderr


def slurm(root, source, env, args):
    if args.real_slurm:
        submit = lambda *words: run(["sbatch", "--wait", f"--output={root}/log", *words], env)
        submit("--cpus-per-task=1", f"--array=0-{RANKS - 1}", RECIPES / "slurm_array.sh", source, root / "array", *OPTIONS)
        submit(RECIPES / "slurm_merge.sh", root / "array")
        submit("--cpus-per-task=1", f"--ntasks={RANKS}", RECIPES / "slurm_tasks.sh", source, root / "tasks", *OPTIONS)
        return [root / "array", root / "tasks"]
    for rank in range(RANKS):
        told = run([RECIPES / "slurm_array.sh", source, root / "array", *OPTIONS], env, SLURM_ARRAY_TASK_ID=rank,
                   SLURM_PROCID=0)
        must(f"rank {rank} of {RANKS}, read from SLURM_ARRAY_TASK_ID" in told, told)
    run([RECIPES / "slurm_merge.sh", root / "array"], env)
    # Stands in for srun: its command once for each process, with the process's number.
    srun = root / "bin" / "srun"
    srun.write_text('#!/usr/bin/env bash\nset -e\nwhile [[ $1 == --* ]]; do shift; done\n'
                    'for ((rank = 0; rank < SLURM_NTASKS; rank++)); do SLURM_PROCID=$rank "$@"; done\n')
    srun.chmod(0o755)
    run([RECIPES / "slurm_tasks.sh", source, root / "tasks", *OPTIONS], env, SLURM_NTASKS=RANKS)
    return [root / "array", root / "tasks"]


def kubernetes(root, source, env, args):
    if not importlib.util.find_spec("kubernetes_validate"):
        return None
    import kubernetes_validate
    import yaml

    jobs = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    for job in jobs:
        kubernetes_validate.validate(job, "1.33", strict=True)
    convert, merge = jobs
    must(convert["spec"]["completionMode"] == "Indexed", "completionMode")

    def command(job, **variables):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
        # What Kubernetes puts in the place of $(NAME).
        return [re.sub(r"\$\((\w+)\)", lambda m: str(variables[m[1]]), word) for word in words]

    def here(word):
        """A pod's path or the model's options, as they are in this check."""
        return re.sub(r"/shards/", f"{root}/", word)

    for rank in range(RANKS):
        words = command(convert, JOB_COMPLETION_INDEX=rank)
        tp = words.index("--tp")
        must(int(words[tp + 1]) == convert["spec"]["completions"], "as many completions as ranks")
        words[2] = str(source)
        words[tp:tp + 2] = OPTIONS
        told = run([here(word) for word in words], env, JOB_COMPLETION_INDEX=rank)
        must(f"rank {rank} of {RANKS}, read from JOB_COMPLETION_INDEX" in told, told)
    run([here(word) for word in command(merge)], env)
    (out,) = (path for path in root.iterdir() if (path / "preshard.json").exists())
    return [out]


def converting(directory):
    """The process that converts into a directory, and its parent; None when there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if str(directory).encode() in words and b"convert" in words:
                return int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return None


def kill_worker(directory, driver):
    """Kills the Ray worker that converts into a directory, once there are leaves on disk."""
    journal = directory / ".partial" / "journal"
    until = time.time() + 120
    while driver.poll() is None and time.time() < until:
        found = converting(directory)
        with contextlib.suppress(OSError):
            if found and journal.read_bytes().count(b"\n") > 2:
                # Stopped first, so that it cannot finish between the two.
                os.kill(found[0], signal.SIGSTOP)
                leaves = journal.read_bytes().count(b"\n") - 1
                name = Path(f"/proc/{found[1]}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                must("ray::" in name, f"the parent is no Ray worker: {name}")
                os.kill(found[1], signal.SIGKILL)
                return name, leaves
        time.sleep(0.002)
    return None, 0


def ray(root, source, env, args):
    if not importlib.util.find_spec("ray"):
        return None
    from ray.cluster_utils import Cluster

    # A raylet for each node: what a cluster has, as processes of one machine.
    os.environ.update(env, RAY_USAGE_STATS_ENABLED="0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        variables = {"RAY_ADDRESS": cluster.address}
        with open(root / "log", "w+") as log:
            driver = subprocess.Popen(
                [sys.executable, RECIPES / "ray_convert.py", source, root / "out", "--ranks", str(RANKS), "--cpus",
                 "1", "--", *OPTIONS],
                env={**env, **variables}, stdout=log, stderr=log, text=True)
            try:
                worker, leaves = kill_worker(root / "out.ranks" / "1", driver)
                code = driver.wait(600) if worker else None
            finally:
                driver.kill()
            log.seek(0)
            must(worker, f"no conversion with leaves on disk was seen: {log.read()}")
            must(code == 0, log.read())
        print(f"ray: killed {worker!r} with {leaves} leaves on disk")
        return [root / "out"]
    finally:
        cluster.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=Path, default=Path(__file__).parents[1] / "target/debug/preshard")
    parser.add_argument("--megabytes", type=int, default=120)
    parser.add_argument("--real-slurm", action="store_true", help="submit to the Slurm of this machine")
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    args = parser.parse_args()
    checks = {check.__name__: check for check in (slurm, kubernetes, ray)}
    if wrong := set(args.checks) - set(checks):
        parser.error(f"no check {', '.join(sorted(wrong))}; there are {', '.join(checks)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="preshard-cluster-") as directory:
        root = Path(directory)
        source = root / "model.gguf"
        make_model(source, args.megabytes)
        bin_dir = root / "bin"
        bin_dir.mkdir()
        shutil.copy(args.binary, bin_dir / "preshard")
        ours = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "RAY_ADDRESS")
        env = {**{k: v for k, v in os.environ.items() if k not in ours},
               "PATH": f"{bin_dir}:{os.environ['PATH']}"}
        run(["preshard", "convert", source, *OPTIONS, "-o", root / "whole"], env)
        whole = Bench.snapshot(root / "whole")
        for name in args.checks or checks:
            place = root / name
            (place / "bin").mkdir(parents=True)
            mine = {**env, "PATH": f"{place / 'bin'}:{env['PATH']}"}
            try:
                made = checks[name](place, source, mine, args)
                if made is None:
                    print(f"{name}: left out: what it needs is not installed (see --help)")
                    continue
                for out in made:
                    must(Bench.snapshot(out) == whole, f"{out.name}: other files than those of a run on one host")
                print(f"{name}: {len(made)} directories, each as one host makes it")
            except Failed as failure:
                failed += 1
                print(f"{name}: FAILED: {failure}")
            shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
