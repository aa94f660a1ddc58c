#!/usr/bin/env python3
"""Kills, errors, full disks, races and flipped bits, on purpose: does a conversion keep its promises?

    scripts/check_faults.py [--binary PATH] [--count N] [--megabytes N] [CHECK…]

Checks: kills, errors, order, limits, signals, races, source, nonfinite, flips; all when none is named.
--count is how many kills and how many flipped bits. Needs Linux, strace, and for `limits` root (a small
tmpfs is mounted). Everything happens in a fresh directory under $TMPDIR, which is removed at the end.
Prints one line per check with the numbers, and every breach; exits 1 when there was any.
"""

import argparse
import contextlib
import hashlib
import io
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKPOINT = 8 << 20  # bytes between syncs, so that a small model has many
breaches = []


def breach(text):
    breaches.append(text)
    print(f"BREACH  {text}", flush=True)


def text_value(text):
    return struct.pack("<Q", len(text)) + text.encode()


def make_model(path, megabytes, seed=1, nan=False):
    """A Llama of about so many megabytes, in q8_0 with scales of 2^-5 and random codes."""
    rng = random.Random(seed)
    hidden, ffn, vocab, heads, kv = 1024, 2816, 4096, 16, 4
    layer = [("attn_q", hidden, hidden), ("attn_k", hidden, hidden // 4), ("attn_v", hidden, hidden // 4),
             ("attn_output", hidden, hidden), ("ffn_gate", hidden, ffn), ("ffn_up", hidden, ffn), ("ffn_down", ffn, hidden)]
    per_layer = sum(c * r for _, c, r in layer) * 34 // 32
    layers = max(1, (megabytes * 1_000_000 - 2 * hidden * vocab * 34 // 32) // per_layer)
    tensors = [("token_embd.weight", 8, [hidden, vocab]), ("output.weight", 8, [hidden, vocab]),
               ("output_norm.weight", 0, [hidden])]
    for l in range(layers):
        tensors += [(f"blk.{l}.{n}.weight", 8, [c, r]) for n, c, r in layer]
        tensors += [(f"blk.{l}.{n}.weight", 0, [hidden]) for n in ("attn_norm", "ffn_norm")]
    size = lambda ty, ne: ne[0] // 32 * 34 * ne[1] if ty == 8 else 4 * ne[0]
    pairs = [("general.architecture", 8, text_value("llama"))]
    for key, n in [("block_count", layers), ("attention.head_count", heads), ("attention.head_count_kv", kv),
                   ("embedding_length", hidden), ("feed_forward_length", ffn), ("context_length", 2048)]:
        pairs.append((f"llama.{key}", 4, struct.pack("<I", n)))
    pairs.append(("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, ty, value in pairs:
        head += text_value(key) + struct.pack("<I", ty) + value
    offset = 0
    for name, ty, ne in tensors:
        head += text_value(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne) + struct.pack("<IQ", ty, offset)
        offset += -(-size(ty, ne) // 32) * 32
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for name, ty, ne in tensors:
            n = size(ty, ne)
            if ty == 8:
                data = bytearray(rng.randbytes(n))
                data[0::34], data[1::34] = bytes(n // 34), b"\x28" * (n // 34)
                if nan and name == "blk.1.ffn_up.weight":
                    data[34 * 5:34 * 5 + 2] = b"\x00\x7e"
            else:
                data = struct.pack("<f", 1.0) * ne[0]
            file.write(data + bytes(-n % 32))


class Bench:
    def __init__(self, binary, root, megabytes, count):
        self.binary, self.root, self.count = binary, root, count
        self.rng = random.Random(20261129)
        self.source = root / "model.gguf"
        make_model(self.source, megabytes)
        self.small = root / "small.gguf"
        make_model(self.small, 60)
        started = time.time()
        self.reference = self.fresh(self.source, "whole")
        self.seconds = time.time() - started
        self.small_reference = self.fresh(self.small, "small-whole")

    def command(self, source, out, *more):
        return [str(self.binary), "convert", str(source), "--tp", "2", "--weights", "bf16", "--device", "cpu",
                "--threads", "2", "--checkpoint", str(CHECKPOINT), "-o", str(out), *more]

    def run(self, source, out, *more, prefix=(), **kw):
        return subprocess.run([*prefix, *self.command(source, out, *more)], capture_output=True,
                              text=True, timeout=600, **kw)

    def fresh(self, source, name):
        out = self.root / name
        done = self.run(source, out)
        if done.returncode != 0:
            sys.exit(f"an undisturbed run fails: {done.stderr}")
        return self.snapshot(out)

    @staticmethod
    def snapshot(out):
        """Hash of every file but those of an unfinished run."""
        files = {}
        for path in sorted(out.rglob("*")):
            name = str(path.relative_to(out))
            if path.is_file() and not name.startswith(".partial"):
                with open(path, "rb") as file:
                    files[name] = hashlib.file_digest(file, "blake2b").hexdigest()
        return files

    def complete(self, out):
        return (out / "preshard.json").exists()

    def expect_whole(self, out, reference, what):
        if self.snapshot(out) != reference:
            breach(f"{what}: the result differs from an undisturbed run")

    def finish(self, source, out, reference, what):
        """Runs the same command to its end."""
        if self.complete(out):
            self.expect_whole(out, reference, what)
            return
        done = self.run(source, out)
        if done.returncode != 0:
            breach(f"{what}: the next run fails: {done.stderr.strip()}")
        else:
            if (out / ".partial").exists():
                breach(f"{what}: the finished run left .partial behind")
            self.expect_whole(out, reference, what)

    # SIGKILL at random times, also of the runs that go on.
    def kills(self):
        tried = resumed = in_resume = late = 0
        while tried < self.count:
            out = self.root / "killed"
            shutil.rmtree(out, ignore_errors=True)
            deaths = 0
            while tried < self.count and not self.complete(out):
                # A third at the end, where files are renamed.
                upto = self.seconds * 1.1
                delay = self.rng.uniform(0.8, 1.0) * upto if self.rng.random() < 0.33 else self.rng.uniform(0, upto)
                child = subprocess.Popen(self.command(self.source, out), stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
                try:
                    child.wait(delay)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                    tried += 1
                    deaths += 1
                    in_resume += deaths > 1
                    journal = out / ".partial" / "journal"
                    resumed += journal.exists() and journal.read_bytes().count(b"\n") > 1
                    late += any(out.glob("*.safetensors")) if out.exists() else 0
                if self.complete(out) or self.rng.random() < 0.4:
                    break
            self.finish(self.source, out, self.reference, f"kill {tried}")
        # By system call, so that every step of the end is hit: killed at the n-th rename, fsync, unlink, …
        steps = 0
        for call in ["rename,renameat,renameat2", "fsync", "fdatasync", "unlink,unlinkat,rmdir", "pwrite64", "ftruncate", "mkdir,mkdirat", "flock"]:
            for n in range(1, 60):
                out = self.root / "step"
                shutil.rmtree(out, ignore_errors=True)
                self.run(self.small, out, prefix=["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}",
                                                  "-e", f"inject={call}:signal=SIGKILL:when={n}"])
                if self.complete(out) and not (out / ".partial").exists():
                    break
                steps += 1
                self.finish(self.small, out, self.small_reference, f"killed at {call} {n}")
        print(f"kills: {tried} at random times ({in_resume} of runs that went on, {resumed} with leaves in the journal, "
              f"{late} while files were put in place), {steps} at system calls")

    # A system call fails: exit 1, one line, no manifest; then all is well again.
    def errors(self):
        tried, faults = 0, {}
        # Nothing before the output directory is touched, where the loader and the shell do the opening.
        for call, errors in [("pwrite64", ["EIO", "ENOSPC", "EDQUOT"]), ("fdatasync", ["EIO", "ENOSPC"]), ("fsync", ["EIO"]),
                             ("rename", ["EIO", "EACCES"]), ("ftruncate", ["EIO", "EFBIG"]), ("flock", ["ENOLCK"]),
                             ("mkdir", ["EACCES", "EROFS"]), ("write", ["EIO", "ENOSPC"]), ("openat", ["EACCES", "EMFILE"]),
                             ("fstatfs,statfs", ["EIO"])]:
            for error in errors:
                n, clean, misses = 0, 0, 0
                while clean < 1 and n < 400 and misses < 3:
                    n += 1
                    out = self.root / "failed"
                    shutil.rmtree(out, ignore_errors=True)
                    log = self.root / "strace"
                    paths = ["-P", str(out), "-P", str(out / ".partial")]
                    for name in ["journal", "lock", "B3SUMS", "preshard.json", "config.json", "generation_config.json",
                                 "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"]:
                        paths += ["-P", str(out / ".partial" / name), "-P", str(out / name)]
                    done = self.run(self.small, out, prefix=["strace", "-f", "-o", str(log), *paths, "-e", f"trace={call}",
                                                             "-e", f"inject={call}:error={error}:when={n}"])
                    if "(INJECTED)" not in log.read_text():
                        clean += 1
                        if done.returncode != 0:
                            breach(f"{call} {error} {n}: fails without a fault: {done.stderr.strip()}")
                        continue
                    tried += 1
                    faults[call] = faults.get(call, 0) + 1
                    what = f"{error} at {call} {n}"
                    lines = [l for l in done.stderr.splitlines() if not l.startswith("note: ")]
                    if done.returncode == 0:
                        # What follows the manifest is only tidying up.
                        self.expect_whole(out, self.small_reference, what)
                        misses += 1
                        continue
                    if done.returncode != 1 or len(lines) != 1 or not lines[0].startswith("error: "):
                        breach(f"{what}: exit {done.returncode}, said {done.stderr.strip()!r}")
                    if self.complete(out):
                        # The last sync of all: the manifest is there, and whole.
                        self.expect_whole(out, self.small_reference, what)
                        continue
                    self.finish(self.small, out, self.small_reference, what)
        print(f"errors: {tried} injected ({', '.join(f'{c} {n}' for c, n in faults.items())})")

    # What a power cut may take: the order of writes, syncs, journal lines and renames.
    def order(self):
        out, log = self.root / "ordered", self.root / "strace"
        shutil.rmtree(out, ignore_errors=True)
        calls = "openat,write,pwrite64,fdatasync,fsync,rename,renameat,renameat2,ftruncate"
        done = self.run(self.small, out, prefix=["strace", "-f", "-y", "-s", "100000", "-o", str(log), "-e", f"trace={calls}"])
        if done.returncode != 0:
            breach(f"order: the traced run fails: {done.stderr.strip()}")
        trace = log.read_text()
        facts = check_order(trace, str(out))
        # The check must see a step that is missing or early.
        global breaches
        kept, lines = breaches, trace.splitlines()
        manifest = next(l for l in lines if "rename" in l and l.endswith('/preshard.json") = 0'))
        for what, changed in [
            ("no data is synced", [l for l in lines if not ("fdatasync" in l and ".safetensors" in l)]),
            ("the journal is not synced", [l for l in lines if not ("fdatasync" in l and "/journal" in l)]),
            ("the directory is not synced", [l for l in lines if not ("fsync" in l and f"<{out}>" in l)]),
            ("the manifest comes first", [manifest, *(l for l in lines if l != manifest)]),
        ]:
            breaches = []
            with contextlib.redirect_stdout(io.StringIO()):
                check_order("\n".join(changed), str(out))
            if not breaches:
                kept.append(f"order: the check does not see it when {what}")
                print(f"BREACH  {kept[-1]}")
        breaches = kept
        print("order: " + ", ".join(f"{n} {what}" for what, n in facts.items()))

    # File size limits, full and read-only file systems, directories that are not ours.
    def limits(self):
        tried = 0

        def refused(what, done, out, reference=None, before=None):
            nonlocal tried
            tried += 1
            lines = [l for l in done.stderr.splitlines() if not l.startswith("note: ")]
            if done.returncode != 1 or len(lines) != 1 or not lines[0].startswith("error: "):
                breach(f"{what}: exit {done.returncode}, said {done.stderr.strip()!r}")
            if self.complete(out):
                breach(f"{what}: a manifest")
            if before is not None and self.snapshot(out) != before:
                breach(f"{what}: the directory changed")
            print(f"  {what}: {lines[0] if lines else ''}")

        out = self.root / "limited"
        for megabytes in [0, 1, 30, 45]:
            shutil.rmtree(out, ignore_errors=True)
            done = self.run(self.small, out, prefix=["prlimit", f"--fsize={megabytes << 20}"])
            refused(f"files of at most {megabytes} MiB", done, out)
            self.finish(self.small, out, self.small_reference, f"after files of at most {megabytes} MiB")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        refused("a directory with a foreign file", self.run(self.small, out), out, before=self.snapshot(out))
        refused("the same with --force", self.run(self.small, out, "--force"), out, before=self.snapshot(out))
        before = hashlib.file_digest(open(self.small, "rb"), "blake2b").digest()
        beside = self.root / "beside"
        beside.mkdir()
        shutil.copy(self.small, beside)
        refused("the source's own directory", self.run(beside / "small.gguf", beside), beside, before=self.snapshot(beside))
        if os.geteuid() != 0:
            print("  not root: full and read-only file systems left out")
        else:
            mount = self.root / "mount"
            mount.mkdir()
            for what, size, fill in [("a full file system", 60, 0), ("one that fills up", 140, 40)]:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", mount], check=True)
                try:
                    out = mount / "out"
                    if fill:
                        # Room by the count at the start, taken by another while the run is on.
                        child = subprocess.Popen(self.command(self.small, out), stderr=subprocess.PIPE, text=True)
                        while not (out / ".partial" / "journal").exists() and child.poll() is None:
                            time.sleep(0.001)
                        filler = os.open(mount / "filler", os.O_CREAT | os.O_WRONLY)
                        try:
                            while os.write(filler, bytes(1 << 20)):
                                pass
                        except OSError:
                            pass
                        os.close(filler)
                        stderr = child.communicate()[1]
                        done = subprocess.CompletedProcess([], child.returncode, "", stderr)
                        if done.returncode == 0:
                            print("  the run was faster than the filler: not counted")
                            continue
                    else:
                        done = self.run(self.small, out)
                    refused(what, done, out)
                    if not fill and out.exists():
                        breach(f"{what}: something was written")
                    (mount / "filler").unlink(missing_ok=True)
                    subprocess.run(["mount", "-o", "remount,size=300m", mount], check=True)
                    self.finish(self.small, out, self.small_reference, f"after {what}")
                    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
                    refused("a read-only file system", self.run(self.small, mount / "other"), mount / "other")
                finally:
                    subprocess.run(["umount", mount], check=True)
            self.quota(mount, refused)
        print(f"limits: {tried} tried")

    # A real quota: the file system has room, this directory may not use it.
    def quota(self, mount, refused):
        if shutil.which("mkfs.btrfs") is None:
            print("  no mkfs.btrfs (btrfs-progs): the quota left out")
            return
        image = self.root / "quota.img"
        with image.open("wb") as f:
            f.truncate(600 << 20)
        subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        try:
            limited = mount / "limited"
            for command in [("subvolume", "create", limited), ("quota", "enable", mount)]:
                subprocess.run(["btrfs", *command], check=True, capture_output=True)
            for megabytes in [1, 20, 45]:
                shutil.rmtree(limited / "out", ignore_errors=True)
                os.sync()
                subprocess.run(["btrfs", "qgroup", "limit", f"{megabytes}M", limited], check=True)
                out = limited / "out"
                refused(f"a quota of {megabytes} MiB", self.run(self.small, out), out)
                subprocess.run(["btrfs", "qgroup", "limit", "none", limited], check=True)
                self.finish(self.small, out, self.small_reference, f"after a quota of {megabytes} MiB")
        finally:
            subprocess.run(["umount", mount], check=True)
            image.unlink()

    # Ctrl-C and termination: exit 1, how to go on, and the same command goes on.
    def signals(self):
        tried = 0
        for sig in [signal.SIGINT, signal.SIGTERM] * 10:
            out = self.root / "stopped"
            shutil.rmtree(out, ignore_errors=True)
            child = subprocess.Popen(self.command(self.source, out), stderr=subprocess.PIPE,
                                     stdout=subprocess.DEVNULL, text=True)
            time.sleep(self.rng.uniform(0.2, 0.7) * self.seconds)
            child.send_signal(sig)
            stderr = child.communicate()[1]
            if child.returncode == 0:
                # It was done with the source before; then the result is right.
                got = self.snapshot(out)
                if any(got.get(n) != want for n, want in self.reference.items() if n.endswith(".safetensors")):
                    breach(f"a source that {how}: a wrong result, and exit 0")
                continue
            tried += 1
            if child.returncode != 1 or "the same command goes on" not in stderr:
                breach(f"{sig.name}: exit {child.returncode}, said {stderr.strip()!r}")
            if self.complete(out):
                breach(f"{sig.name}: a manifest")
            self.finish(self.source, out, self.reference, sig.name)
        # A reader that went away.
        for stream in ["stdout", "stderr"]:
            read, write = os.pipe()
            os.close(read)
            out = self.root / "stopped"
            shutil.rmtree(out, ignore_errors=True)
            done = subprocess.run(self.command(self.small, out), **{stream: write})
            os.close(write)
            if done.returncode != 0:
                breach(f"closed {stream}: exit {done.returncode}")
            self.expect_whole(out, self.small_reference, f"closed {stream}")
        print(f"signals: {tried} stopped and gone on with, 2 closed pipes")

    # Two runs on one directory: one of them writes, the other is told.
    def races(self):
        told = 0
        rounds = 40
        for i in range(rounds):
            out = self.root / "raced"
            shutil.rmtree(out, ignore_errors=True)
            children = []
            for _ in range(2):
                children.append(subprocess.Popen(self.command(self.small, out), stderr=subprocess.PIPE,
                                                 stdout=subprocess.DEVNULL, text=True))
                if i >= 10:
                    # Also about when the first one ends.
                    time.sleep(self.rng.uniform(0, 1.3) * self.seconds * 60 / max(60, self.source.stat().st_size / 1e6))
            codes = []
            for child in children:
                stderr = child.communicate()[1]
                codes.append(child.returncode)
                if child.returncode == 1:
                    told += 1
                    if not re.search("another preshard convert is writing here|already holds this conversion", stderr):
                        breach(f"race {i}: said {stderr.strip()!r}")
            if sorted(codes) != [0, 1]:
                breach(f"race {i}: exits {codes}")
            if (out / ".partial").exists():
                breach(f"race {i}: .partial is left")
            self.expect_whole(out, self.small_reference, f"race {i}")
        print(f"races: {rounds} pairs, {told} told")

    # A source that shrinks or changes while it is read.
    def source_changes(self):
        tried = 0
        for how in ["shrinks", "changes"] * 10:
            source, out = self.root / "moving.gguf", self.root / "moved"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copy(self.source, source)
            child = subprocess.Popen(self.command(source, out), stderr=subprocess.PIPE,
                                     stdout=subprocess.DEVNULL, text=True)
            # From the first leaf on.
            while child.poll() is None and not (out / ".partial" / "journal").exists():
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0, 0.4) * self.seconds)
            if how == "shrinks":
                os.truncate(source, 1 << 20)
            else:
                with open(source, "r+b") as file:
                    file.seek(-100, 2)
                    file.write(b"changed")
            stderr = child.communicate()[1]
            if child.returncode == 0:
                continue
            tried += 1
            lines = [l for l in stderr.splitlines() if not l.startswith("note: ")]
            if child.returncode != 1 or len(lines) != 1 or not lines[0].startswith("error: "):
                breach(f"a source that {how}: exit {child.returncode}, said {stderr.strip()!r}")
            if self.complete(out):
                breach(f"a source that {how}: a manifest")
            # Whole again, it must be converted from its start.
            shutil.copy(self.source, source)
            done = self.run(source, out)
            if done.returncode == 1 and "changed since" in done.stderr:
                done = self.run(source, out, "--force")
            if done.returncode != 0:
                breach(f"a source that {how}: the next run says {done.stderr.strip()!r}")
            got = self.snapshot(out)
            if any(got.get(n) != want for n, want in self.reference.items() if n.endswith(".safetensors")):
                breach(f"a source that {how}: leaves of the changed source are in the result")
        print(f"source: {tried} changed or cut while read")

    # NaN: refused with nothing left, or converted and told.
    def nonfinite(self):
        source, out = self.root / "nan.gguf", self.root / "nan"
        make_model(source, 60, nan=True)
        done = self.run(source, out)
        if done.returncode != 1 or "NaN" not in done.stderr or out.exists():
            breach(f"NaN: exit {done.returncode}, {done.stderr.strip()!r}, directory there: {out.exists()}")
        out.mkdir()
        done = self.run(source, out)
        if done.returncode != 1 or not out.exists() or any(out.iterdir()):
            breach("NaN: an empty directory did not stay so")
        shutil.copytree(self.root / "small-whole", self.root / "keep")
        done = self.run(source, self.root / "keep", "--force")
        if done.returncode != 1 or self.snapshot(self.root / "keep") != self.small_reference:
            breach("NaN: a refused --force destroyed the conversion before it")
        done = self.run(source, out, "--allow-nonfinite")
        manifest = (out / "preshard.json").read_text() if self.complete(out) else ""
        if done.returncode != 0 or manifest.count('"nonfinite": 32') != 1:
            breach(f"NaN: --allow-nonfinite gives exit {done.returncode}, {done.stderr.strip()!r}")
        print("nonfinite: refused with nothing left, 32 elements of one block counted when allowed")

    # One flipped bit anywhere.
    def flips(self):
        out = self.root / "small-whole"
        clean = subprocess.run([self.binary, "verify", out], capture_output=True, text=True)
        if clean.returncode != 0:
            breach(f"flips: a sound directory is refused: {clean.stderr.strip()!r}")
        files = [p for p in sorted(out.iterdir()) if p.is_file()]
        caught, by_file = 0, {}
        for i in range(self.count):
            # As many in the small files as in the shards, where one bit in millions would hit them.
            path = files[i % len(files)]
            at, bit = self.rng.randrange(path.stat().st_size), self.rng.randrange(8)
            if path.suffix == ".safetensors" and i % 7 == 0:
                at = self.rng.randrange(8192)
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit]))
            done = subprocess.run([self.binary, "verify", out], capture_output=True, text=True)
            named = path.name in done.stderr
            if path.suffix == ".safetensors":
                named = named and f"leaf {at >> 24} " in done.stderr
            if done.returncode == 1 and named and "panicked" not in done.stderr:
                caught += 1
                by_file[path.name] = by_file.get(path.name, 0) + 1
            else:
                breach(f"bit {bit} of byte {at} of {path.name}: exit {done.returncode}, said {done.stderr.strip()[:300]!r}")
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes([byte]))
        print(f"flips: {self.count} tried, {caught} caught with file (and leaf) named: "
              + ", ".join(f"{n} {c}" for n, c in by_file.items()))


def check_order(trace, out):
    """Reads strace's record of one run and holds it to the order that survives a power cut."""
    partial = f"{out}/.partial"
    dirty = {}  # file -> written since its last sync
    synced_leaves = set()
    facts = {"data writes": 0, "data syncs": 0, "journal lines": 0, "journal syncs": 0, "renames": 0, "directory syncs": 0}
    journal_dirty = False
    renamed = []
    last = None
    pending, before = {}, {}  # by thread
    for line in trace.splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        # A call that another thread's interrupted in the record: joined again where it ends.
        if rest.endswith("<unfinished ...>"):
            pending[pid] = rest[: -len("<unfinished ...>")].rstrip()
            begun = pending[pid]
            if (m := re.match(r"fdatasync\(\d+<([^>]*)>", begun)):
                # Only what was written before the sync began may be counted on.
                before[pid] = set(dirty.get(m[1], set()))
            continue
        if (m := re.match(r"<\.\.\. \w+ resumed>(.*)", rest)):
            rest = pending.pop(pid, "") + m[1]
        if "= -1" in rest:
            continue
        if (m := re.match(r"pwrite64\(\d+<([^>]*)>.*, (\d+), (\d+)\) += (\d+)", rest, re.S)):
            path, offset = m[1], int(m[3])
            facts["data writes"] += 1
            dirty.setdefault(path, set()).add(offset)
            if renamed:
                breach("order: a data write after the first rename")
        elif (m := re.match(r"fdatasync\(\d+<([^>]*)>\) += 0", rest)):
            path = m[1]
            done = before.pop(pid, set(dirty.get(path, set())))
            if path.endswith("/journal"):
                facts["journal syncs"] += 1
                journal_dirty = False
            else:
                facts["data syncs"] += 1
                dirty[path] = dirty.get(path, set()) - done
                synced_leaves |= {(Path(path).name, offset) for offset in done}
        elif (m := re.match(r'write\(\d+<([^>]*)>, "(.*)", \d+\) += \d+', rest, re.S)) and m[1] == f"{partial}/journal":
            journal_dirty = True
            for text in m[2].split("\\n"):
                words = text.split(" ")
                if len(words) >= 3 and words[0].endswith(".safetensors"):
                    facts["journal lines"] += 1
                    if (words[0], int(words[1]) << 24) not in synced_leaves:
                        breach(f"order: the journal names leaf {words[1]} of {words[0]} before it is synced")
        elif (m := re.match(r"fsync\(\d+<([^>]*)>\) += 0", rest)):
            facts["directory syncs"] += m[1] in (out, partial, str(Path(out).parent))
            last = ("fsync", m[1])
        elif (m := re.match(r'rename(?:at2?)?\(.*?"([^"]*)", .*?"([^"]*)"', rest)):
            facts["renames"] += 1
            if any(dirty.values()):
                breach(f"order: {m[2]} is put in place before {', '.join(f for f, d in dirty.items() if d)} is synced")
            if journal_dirty:
                breach("order: a rename before the journal is synced")
            if m[2].endswith("/preshard.json"):
                if last != ("fsync", out):
                    breach(f"order: the manifest is put in place after {last}, not after a sync of the directory")
            renamed.append(m[2])
            last = ("rename", m[2])
    if not renamed or not renamed[-1].endswith("/preshard.json"):
        breach(f"order: the last rename is {renamed[-1:]}")
    if last != ("fsync", out):
        breach(f"order: the directory is not synced after the manifest: {last}")
    if facts["journal lines"] == 0 or facts["data writes"] == 0:
        breach("order: the record holds no data writes or journal lines")
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, help="preshard; built in release mode when absent")
    parser.add_argument("--count", type=int, default=100, help="kills, and bits flipped")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the model")
    parser.add_argument("checks", nargs="*")
    args = parser.parse_args()
    if args.binary is None:
        top = Path(__file__).resolve().parent.parent
        subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=top, check=True)
        args.binary = Path(os.environ.get("CARGO_TARGET_DIR", top / "target")) / "release" / "preshard"
    names = ["kills", "errors", "order", "limits", "signals", "races", "source", "nonfinite", "flips"]
    if unknown := [c for c in args.checks if c not in names]:
        parser.error(f"no check {unknown[0]}; there are {', '.join(names)}")
    root = Path(tempfile.mkdtemp(prefix="preshard-faults-"))
    try:
        bench = Bench(args.binary.resolve(), root, args.megabytes, args.count)
        print(f"a run takes {bench.seconds:.1f} s", flush=True)
        for name in args.checks or names:
            started = time.time()
            getattr(bench, {"source": "source_changes"}.get(name, name))()
            print(f"  ({time.time() - started:.0f} s)", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
