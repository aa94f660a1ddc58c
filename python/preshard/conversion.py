"""Planning, converting and verifying: the ``preshard`` command's work as functions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import _native
from .manifest import Manifest

__all__ = ["Converted", "Fate", "Plan", "PlannedFile", "Verified", "convert", "plan", "verify"]

Path = str | os.PathLike[str]
Keep = Literal["keep", "drop"]
Mtp = Literal["keep", "drop", "only"]
SharedExperts = Literal["auto", "fused", "separate"]
Fit = Literal["refuse", "dequantise", "dequantize"]
Weights = Literal["keep", "bf16", "f16", "f32", "fast", "fast-f16"]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Fate:
    """What becomes of one GGUF tensor."""

    name: str
    type: str
    """Its ggml type."""
    bytes: int
    part: str
    """``model``, or ``mtp`` for the multi-token-prediction block."""
    fate: str
    """``packed``, ``float``, ``decoded`` or ``dropped``."""
    why: str | None


@dataclass(frozen=True)
class PlannedFile:
    """A file that a conversion would write."""

    file: str
    pp: int
    tp: int
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Plan:
    """What a conversion would write; nothing is written."""

    architecture: str
    layout: str
    layers: int
    files: tuple[PlannedFile, ...]
    tensors: tuple[Fate, ...]
    notes: tuple[str, ...]

    def rank_bytes(self, tp: int, pp: int = 0) -> int:
        """Bytes of one rank, its draft included."""
        return sum(f.bytes for f in self.files if (f.tp, f.pp) == (tp, pp))


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    manifest: Manifest
    written: int
    """Bytes written by this run."""
    resumed: int
    """Bytes that an earlier run of the same conversion had written."""
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """What was checked and found right."""

    files: int
    bytes: int
    seconds: float


def _paths(source: Path | Iterable[Path]) -> list[str]:
    if isinstance(source, (str, os.PathLike)):
        return [os.fspath(source)]
    return [os.fspath(p) for p in source]


def plan(
    source: Path | Iterable[Path],
    *,
    tp: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] | None = None,
    ep: bool = False,
    weights: Weights = "keep",
    indexer: Keep = "keep",
    mtp: Mtp = "keep",
    shared_experts: SharedExperts = "auto",
    misaligned: Fit = "refuse",
    mixed: Fit = "refuse",
    layout: str = "vllm",
    max_file_size: int = 50_000_000_000,
    max_error: float | None = None,
    mappings: Path | None = None,
    allow_unknown_keys: bool = False,
) -> Plan:
    """What each tensor of ``source`` would become, and the bytes of each rank.

    The options are those of ``preshard plan``; see :func:`convert`.
    """
    choices = dict(locals(), source=_paths(source), hf_config=None)
    choices["pp_layers"] = None if pp_layers is None else list(pp_layers)
    choices["mappings"] = None if mappings is None else os.fspath(mappings)
    p = json.loads(_native.plan(choices))
    return Plan(
        architecture=p["architecture"],
        layout=p["layout"],
        layers=p["layers"],
        files=tuple(PlannedFile(**dict(f, tensors=len(f["tensors"]))) for f in p["files"]),
        tensors=tuple(Fate(**t) for t in p["tensors"]),
        notes=tuple(p["notes"]),
    )


def convert(
    source: Path | Iterable[Path],
    out: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] | None = None,
    ep: bool = False,
    weights: Weights = "keep",
    indexer: Keep = "keep",
    mtp: Mtp = "keep",
    shared_experts: SharedExperts = "auto",
    misaligned: Fit = "refuse",
    mixed: Fit = "refuse",
    layout: str = "vllm",
    max_file_size: int = 50_000_000_000,
    max_error: float | None = None,
    hf_config: Path | None = None,
    mappings: Path | None = None,
    allow_unknown_keys: bool = False,
    ranks: Sequence[int] | None = None,
    threads: int = 0,
    memory: int = 1 << 30,
    device: str = "auto",
    device_memory: int = 1 << 30,
    force: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Converts a GGUF into one safetensors file per rank, in ``out``.

    A run that dies or is interrupted is continued by the same call.

    :param source: the GGUF: a file, any file of a split set, all of them, or the directory.
    :param tp: tensor-parallel ranks. ``pp``: pipeline stages, of ``pp_layers`` layers each.
    :param ep: place whole experts on the ranks instead of cutting each.
    :param weights: ``"keep"`` leaves packed weights packed where the engine computes with them;
        ``"fast"`` and ``"fast-f16"``, with ``layout="hf"``, write them in forms that tensor cores take; the
        others decode everything. An ordinary checkpoint (``layout="hf"``) takes ``"keep"`` for ``"bf16"``.
    :param max_error: the most, in percent, that ``"fast"`` may lose; 0.5 when ``None``.
    :param indexer: the DSA indexer of GLM-5. ``mtp``: the multi-token-prediction block, beside the model, left
        out, or alone in ``out``.
    :param shared_experts: as one more of the routed experts, or apart; ``"auto"`` as the engine has them.
    :param misaligned: packed tensors whose cut falls inside a block.
    :param mixed: joined tensors of which some are packed and some are not.
    :param hf_config: a directory with the original config.json and tokenizer; its files win.
    :param mappings: a directory of mapping tables that override the built-in ones.
    :param allow_unknown_keys: go on when the metadata has keys of the architecture that are unknown here.
    :param ranks: only these global ranks (``stage * tp + rank``).
    :param threads: 0 for one per core. ``memory``: bytes of host memory for buffers.
    :param device: what decodes packed weights: ``"auto"`` takes a GPU for the types that it decodes
        faster, ``"cpu"``, ``"cuda"``, ``"cuda:N"``. The bytes are the same. ``device_memory``: bytes
        of the GPU's memory for it.
    :param force: replace an earlier conversion in ``out``.
    :param progress: called with ``(bytes done, bytes in all)`` from this thread.
    :raises Error: one of its subclasses says who must act.
    """
    choices: dict[str, Any] = {
        "source": _paths(source),
        "tp": tp,
        "pp": pp,
        "pp_layers": None if pp_layers is None else list(pp_layers),
        "ep": ep,
        "weights": weights,
        "indexer": indexer,
        "mtp": mtp,
        "shared_experts": shared_experts,
        "misaligned": misaligned,
        "mixed": mixed,
        "layout": layout,
        "max_file_size": max_file_size,
        "max_error": max_error,
        "hf_config": None if hf_config is None else os.fspath(hf_config),
        "mappings": None if mappings is None else os.fspath(mappings),
        "allow_unknown_keys": allow_unknown_keys,
    }
    running = {
        "ranks": None if ranks is None else list(ranks),
        "threads": threads,
        "memory": memory,
        "device": device,
        "device_memory": device_memory,
        "force": force,
        "allow_nonfinite": allow_nonfinite,
    }
    start = time.perf_counter()
    written, resumed, notes = _native.convert(choices, os.fspath(out), running, progress)
    return Converted(Manifest.read(out), written, resumed, time.perf_counter() - start, tuple(notes))


def verify(
    dir: Path,
    *,
    source: Path | Iterable[Path] | None = None,
    mappings: Path | None = None,
    hf_config: Path | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> Verified:
    """Checks every byte of a converted directory: against the manifest's hashes, or, with
    ``source``, by recomputing it from the GGUF (and ``hf_config``, if it was converted with one).

    :raises ShardsError: what is damaged, one problem a line.
    """
    start = time.perf_counter()
    sources = [] if source is None else _paths(source)
    tables = None if mappings is None else os.fspath(mappings)
    given = None if hf_config is None else os.fspath(hf_config)
    files, count = _native.verify(os.fspath(dir), sources, tables, given, threads, progress)
    return Verified(files, count, time.perf_counter() - start)
