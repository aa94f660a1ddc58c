"""Loading one rank's file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from . import _native
from .errors import RequestError
from .manifest import Manifest, ShardEntry, TensorEntry

if TYPE_CHECKING:
    import torch

__all__ = ["LoadStats", "Shard", "load"]


class _DeviceMemory(Protocol):
    """What :func:`load` needs of lent memory; a contiguous torch tensor has it."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True)
class LoadStats:
    """What a load did and how long it took."""

    bytes: int
    """Bytes of the file."""
    seconds: float
    """From the call to its return, allocation and verification included."""
    first_byte: float
    """Seconds until the first chunk was in its place."""
    last_byte: float
    """Seconds until the last byte was."""
    memory: float
    """Seconds in which the driver allocated the device memory."""
    locking: float
    """Seconds in which readers waited for page-locked memory, the longest of them."""
    kernels: float
    """Seconds in which the hash kernels were loaded, while the readers read."""
    threads: int
    pinned: int
    """Bytes of page-locked host memory used."""
    direct: int
    """Bytes read past the page cache."""
    verified: bool
    """Whether every leaf was compared with the manifest."""


class Shard(Mapping[str, "torch.Tensor"]):
    """One rank's tensors, all in one piece of memory: a mapping of names to torch tensors.

    The tensors are views: taking one copies nothing, and writing to one writes to the shard's
    memory, which is freed when the shard and all tensors taken from it are gone. :meth:`raw` gives
    a tensor without torch.
    """

    manifest: Manifest
    """The directory's manifest."""
    stats: LoadStats
    """What the load did."""

    def __init__(self, arena: _native.Arena, lent: object | None = None) -> None:
        self._arena = arena
        self._lent = lent
        self.manifest = Manifest._of(arena.manifest)
        self.stats = LoadStats(**json.loads(arena.stats))
        self._names = dict.fromkeys(arena.names())
        self._tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name; the same object each time."""
        tensor = self._tensors.get(name)
        if tensor is None:
            import torch

            tensor = torch.from_dlpack(self._arena.tensor(name))
            self._tensors[name] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Names in file order."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @cached_property
    def entry(self) -> ShardEntry:
        """This file's entry in the manifest."""
        return self.manifest.shards.named(self._arena.file)

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        return {t.name: t for t in self.entry.tensors}

    def info(self, name: str) -> TensorEntry:
        """Its manifest entry: dtype, shapes, ggml types, members, aliases."""
        return self._entries[name]

    def raw(self, name: str) -> _native.Tensor:
        """The tensor without torch: it speaks DLPack, and in host memory the buffer protocol
        (``memoryview(shard.raw(name))`` is its bytes)."""
        return self._arena.tensor(name)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        kind, number = self._arena.device
        return "cpu" if kind == 1 else f"cuda:{number}"

    @property
    def address(self) -> int:
        """Address of the file's first byte; tensor ``t`` lies at ``address + info(t).offset``."""
        return self._arena.address

    def __repr__(self) -> str:
        return f"<preshard.Shard {self._arena.file}: {len(self)} tensors, {self.stats.bytes} bytes on {self.device}>"


def load(
    dir: str | os.PathLike[str],
    rank: int = 0,
    device: str | torch.device = "cpu",
    verify: bool = True,
    *,
    pp: int = 0,
    part: str = "model",
    threads: int | None = None,
    chunk: int | None = None,
    method: str = "auto",
    memory: _DeviceMemory | None = None,
) -> Shard:
    """Loads the file of tensor-parallel rank ``rank`` (of pipeline stage ``pp``) of a directory that
    ``preshard convert`` wrote.

    The file is copied once, whole, into one allocation on ``device`` (``"cpu"``, ``"cuda:N"``, or a
    ``torch.device``), and its BLAKE3 leaves are compared with the manifest where they arrived, on
    the GPU for a GPU. Nothing is handed out before that is done.

    :param part: ``"mtp"`` for the multi-token-prediction draft's file.
    :param threads: reader threads; chosen by the cores at hand when ``None``.
    :param chunk: bytes of one copy to the GPU, or of one read into host memory, a power of two from 64 KiB
        to 16 MiB.
    :param method: ``"auto"``, ``"buffered"`` (through the page cache) or ``"direct"`` (past it).
    :param memory: contiguous GPU memory to load into (a torch tensor on ``device`` of at least the
        file's bytes) in place of a fresh allocation; nothing else may use it meanwhile.
    :raises ShardsError: missing, damaged, changed or foreign files, or no such rank.
    :raises DeviceError: no driver, no such GPU, or not enough of its memory.
    """
    lent = None
    if memory is not None:
        if not getattr(memory, "is_contiguous", lambda: True)():
            raise RequestError("memory: not contiguous")
        lent = (memory.data_ptr(), memory.numel() * memory.element_size(), memory)
    request: dict[str, Any] = {
        "dir": os.fspath(dir),
        "part": part,
        "pp": pp,
        "tp": rank,
        "device": str(device),
        "verify": verify,
        "threads": threads,
        "chunk": chunk,
        "method": method,
        "memory": lent,
    }
    return Shard(_native.load(request), memory)
