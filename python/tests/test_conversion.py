"""Converting, planning and verifying from Python do what the command does."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from conftest import GLM5, LLAMA

import preshard


def files(dir: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in dir.iterdir() if f.is_file()}


def test_same_bytes_each_time(llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = preshard.convert(
        str(LLAMA), tmp_path / "x", tp=2, weights="bf16", threads=1, progress=lambda *now: seen.append(now)
    )
    assert files(tmp_path / "x") == files(llama)
    total = sum(s.bytes for s in done.manifest.shards)
    assert done.written == total and done.resumed == 0
    assert seen[-1] == (total, total)


def test_plan_tells_what_convert_writes(llama: Path) -> None:
    plan = preshard.plan(LLAMA, tp=2, weights="bf16")
    manifest = preshard.Manifest.read(llama)
    assert [(f.file, f.bytes) for f in plan.files] == [(s.file, s.bytes) for s in manifest.shards]
    assert plan.rank_bytes(1) == manifest.shards[1].bytes
    fates = {t.name: t for t in plan.tensors}
    assert fates["blk.0.attn_q.weight"].fate == "decoded"
    assert {t.name for t in plan.tensors if t.fate == "dropped"} == {d.tensor for d in manifest.dropped}


def test_a_split_set_and_a_draft(tmp_path: Path) -> None:
    done = preshard.convert(sorted(GLM5.glob("*.gguf")), tmp_path / "x", tp=2, weights="bf16", indexer="drop")
    assert {s.part for s in done.manifest.shards} == {"model", "mtp"}
    draft = preshard.load(tmp_path / "x", 1, part="mtp")
    assert draft.entry.file == "mtp-rank-1-part-0.safetensors"
    again = preshard.convert(GLM5, tmp_path / "y", tp=2, weights="bf16", indexer="drop")
    assert again.manifest == done.manifest


def test_verify(own_llama: Path) -> None:
    checked = preshard.verify(own_llama)
    assert checked.bytes > 2_000_000
    preshard.verify(own_llama, source=LLAMA)
    for file in ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"):
        with open(own_llama / file, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_END)
            f.write(bytes([byte ^ 255]))
    with pytest.raises(preshard.ShardsError) as error:
        preshard.verify(own_llama)
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": "int3"}, "weights: unknown variant .int3., expected one of .keep., .bf16."),
        ({"layout": "tensorrt"}, "llama names hf, sglang, vllm"),
        ({"tp": 2, "layout": "hf"}, "leave out --tp"),
        ({"device": "tpu"}, "expected auto, cpu, cuda or cuda:N"),
        ({"pp": 99}, "99 stages for 2 layers"),
        ({"tp": 3}, "3"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(preshard.RequestError, match=text):
        preshard.convert(LLAMA, tmp_path / "x", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_other_sources_than_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model")
    with pytest.raises(preshard.SourceError, match="a.gguf"):
        preshard.plan(tmp_path / "a.gguf")
    with pytest.raises(preshard.FileError):
        preshard.plan(tmp_path / "b.gguf")


def test_an_exception_in_progress_stops_and_the_same_call_goes_on(tmp_path: Path, llama: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        preshard.convert(LLAMA, tmp_path / "x", tp=2, weights="bf16", progress=stop)
    preshard.convert(LLAMA, tmp_path / "x", tp=2, weights="bf16", force=True)
    assert files(tmp_path / "x") == files(llama)


def test_ctrl_c(tmp_path: Path) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(10_000):
            preshard.convert(LLAMA, tmp_path / "x", tp=2, force=True, weights="bf16")
    timer.join()


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    ticks = 0
    over = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    preshard.convert(LLAMA, tmp_path / "x", weights="f32", threads=1)
    over.set()
    thread.join()
    assert ticks > 0
