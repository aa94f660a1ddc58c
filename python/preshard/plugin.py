"""What the plugins of all engines share: the refusals, the loader's options, and a rank's file into a model."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from . import bind
from .errors import RequestError, ShardsError
from .manifest import Manifest, ShardEntry
from .shard import load

FORMAT = "preshard"
"""The load format, as ``--load-format`` takes it."""


def version_file(engine: str, versions: dict[str, str], found: str, logger: logging.Logger) -> str:
    """The file that knows the version ``found``; the newest, with a warning, for one that none knows."""
    if found in versions:
        return versions[found]
    logger.warning(
        "preshard: tested with %s %s, this is %s; what does not fit is refused when a model is loaded",
        engine,
        ", ".join(versions),
        found or "of unknown version",
    )
    return list(versions.values())[-1]


class Problems:
    """Why a directory does not serve an engine; all reasons are told at once."""

    def __init__(self, directory: str, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._found: list[str] = []

    def add(self, what: str) -> None:
        """One reason, with what to do."""
        self._found.append(f"{self.directory}: {what}")

    def differs(self, what: str, converted: object, runs: object, remedy: str) -> None:
        """The engine runs something else than was converted for."""
        if converted != runs:
            self.add(f"converted for {what} {converted}, the engine runs {runs}: {remedy}")

    def layout(self, engine: str) -> None:
        """The files are another engine's, or an ordinary checkpoint."""
        layout = self.manifest.model.layout
        if layout.startswith(engine):
            return
        what, remedy = "written for another engine", f"convert with --layout {engine}"
        if layout.split("-")[0] == "hf":
            what, remedy = "an ordinary checkpoint", f"leave out --load-format {FORMAT}"
        self.add(f"{what} (layout {layout}): {remedy}")

    def model_class(self, names: tuple[str, ...]) -> None:
        """The engine builds another class; ``names`` is empty where it does not say."""
        own = self.manifest.model.class_name
        if names and own not in names:
            self.differs("class", own, ", ".join(names), "leave config.json as it was written")

    def quantization(self, asked: str | None, allowed: tuple[str, ...] = ()) -> None:
        """A quantisation was asked for that the files are not in."""
        if asked is not None and asked not in allowed:
            self.add(f"quantization {asked} asked for, expected none: leave out --quantization")

    def refuse(self) -> None:
        """Raises, if there is a reason."""
        if self._found:
            raise ShardsError("\n".join(self._found), self._found)


class Options:
    """``--model-loader-extra-config``: ``verify`` (true), ``threads``, ``method`` ("auto") and ``allocate`` (false: large
    parameters get no memory of their own; true is for a model class that writes to its parameters while it is built).
    """

    def __init__(self, extra: dict[str, Any] | None) -> None:
        left = dict(extra or {})
        self.allocate = bool(left.pop("allocate", False))
        self.how = {k: left.pop(k) for k in ("verify", "threads", "method") if k in left}
        if left:
            raise RequestError(
                f"--model-loader-extra-config: {', '.join(sorted(left))} unknown, "
                "expected verify, threads, method or allocate"
            )


def local(path: str) -> str:
    """The directory to serve, which is never a name to download."""
    if not os.path.isdir(path):
        raise RequestError(
            f"{path}: no directory; load format {FORMAT} serves a directory of preshard convert"
        )
    return path


def fill(
    path: str,
    model: nn.Module,
    entry: ShardEntry,
    options: Options,
    install: bind.Install,
    logger: logging.Logger,
) -> None:
    """Loads a rank's file and points the model's parameters at it."""
    pairs = bind.match(model, entry)
    device = next(t.device for slot, _ in pairs for t in slot.tensors)  # with its index
    memory = None
    if device.type == "cuda":
        # From torch's allocator, so that the engine's accounting (and vLLM's sleep mode) sees the weights.
        torch.cuda.empty_cache()
        memory = torch.empty(entry.bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    shard = load(path, entry.tp, device, pp=entry.pp, part=entry.part, memory=memory, **options.how)
    bind.bind(pairs, shard, install)
    stats = shard.stats
    logger.info(
        "preshard: %s: %d tensors, %.1f MB in %.2f s (%.1f GB/s)%s",
        entry.file,
        len(shard),
        stats.bytes / 1e6,
        stats.seconds,
        stats.bytes / 1e9 / max(stats.seconds, 1e-9),
        ", verified" if stats.verified else ", not verified",
    )
