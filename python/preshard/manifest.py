"""The manifest ``preshard.json``: what a converted directory holds, byte by byte."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from . import _native

__all__ = [
    "Dropped",
    "Manifest",
    "Member",
    "Model",
    "Policy",
    "Recoded",
    "ShardEntry",
    "Shards",
    "SmallFile",
    "Source",
    "TensorEntry",
]


@dataclass(frozen=True)
class Source:
    """One GGUF file."""

    file: str
    bytes: int
    header_blake3: str


@dataclass(frozen=True)
class Model:
    """The model and the engine layout."""

    architecture: str
    """GGUF architecture, ``glm-dsa``."""
    class_name: str
    """The class the engine builds, ``GlmMoeDsaForCausalLM``."""
    layout: str
    """The engine mapping's name, ``vllm-dsa``, or ``hf``."""
    layers: int
    """Decoder layers, the multi-token-prediction block not counted."""
    vocab: int
    """Rows of the vocabulary."""
    vocab_padded: int
    """Rows of the vocabulary after padding, over all ranks."""
    experts: int
    """Routed experts, 0 for a dense model."""


@dataclass(frozen=True)
class Policy:
    """Parallelism and policies of the conversion."""

    tp: int
    pp: int
    ep: bool
    stages: tuple[int, ...]
    """First layer of each pipeline stage, and the end."""
    layout: str
    max_file_size: int
    weights: str
    """``keep``, ``bf16``, ``f16``, ``f32``, ``fast`` or ``fast-f16``."""
    indexer: str
    mtp: str
    """``keep``, ``drop`` or ``only``."""
    misaligned: str
    mixed: str
    max_error: int | None = None
    """What packed weights may lose in another form, in millionths."""
    shared_experts: str = "separate"
    """``fused`` into the routed experts, or ``separate``."""


@dataclass(frozen=True)
class Member:
    """One member of a fused tensor."""

    hf: str
    """The Hugging Face tensor; ``{E}`` stands for every expert of a stack."""
    sources: tuple[str, ...]
    """The GGUF tensors it comes from."""
    types: tuple[str, ...]
    """Their ggml types."""
    rows: tuple[int, int]
    """First row here and the end; rows of each expert's matrix in a stack."""
    row_bytes: int | None
    """Bytes of one row before padding to the widest member; packed tensors only."""


@dataclass(frozen=True)
class Recoded:
    """A form of packed weights for tensor cores, and what of it a tensor holds."""

    holds: str
    """``codes``, ``scales``, ``zero_points`` or ``shape``."""
    bits: int
    """Bits of a code."""
    group: int
    """Columns that share a scale."""
    error: int
    """What the weights lose, in millionths of their root mean square; measured on a sample."""
    zero_point: bool = False
    """Whether each group has a zero point."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a shard."""

    name: str
    dtype: str
    """safetensors dtype, ``BF16``."""
    shape: tuple[int, ...]
    """Shape as stored."""
    offset: int
    """Byte offset in the file."""
    bytes: int
    logical: tuple[int, ...] | None
    """Shape in elements, of packed bytes."""
    members: tuple[Member, ...]
    """What it is made of, in order."""
    decoded: str | None
    """Why a quantised source was decoded, when it was."""
    nonfinite: int
    """NaN and infinity in it: packed blocks, or elements of a float tensor."""
    aliases: tuple[str, ...]
    """Other names by which the engine reaches the same storage."""
    recoded: Recoded | None = None
    """The form that a quantised source was written in, when it was."""

    @property
    def packed(self) -> bool:
        """Whether it holds ggml blocks."""
        return self.logical is not None and self.recoded is None


@dataclass(frozen=True)
class ShardEntry:
    """One shard file."""

    file: str
    part: str
    """``model``, or ``mtp`` for the draft."""
    pp: int
    tp: int
    bytes: int
    data_start: int
    blake3: str
    leaves: tuple[str, ...]
    """BLAKE3 chaining value of each 16 MiB leaf."""
    experts: tuple[int, ...]
    """Global ids of the routed experts it holds."""
    vocab_rows: tuple[int, int] | None
    """First vocabulary row and the end of the real ones."""
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class SmallFile:
    """config.json, a tokenizer file, …"""

    file: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class Dropped:
    """A GGUF tensor that was left out on purpose."""

    tensor: str
    reason: str


def _member(m: dict[str, Any]) -> Member:
    return Member(
        m["hf"], tuple(m["from"]), tuple(m["types"]), (m["rows"][0], m["rows"][1]), m.get("row_bytes")
    )


def _tensor(t: dict[str, Any]) -> TensorEntry:
    logical = t.get("logical")
    return TensorEntry(
        name=t["name"],
        dtype=t["dtype"],
        shape=tuple(t["shape"]),
        offset=t["offset"],
        bytes=t["bytes"],
        logical=None if logical is None else tuple(logical),
        members=tuple(_member(m) for m in t.get("members", ())),
        decoded=t.get("decoded"),
        nonfinite=t.get("nonfinite", 0),
        aliases=tuple(t.get("aliases", ())),
        recoded=Recoded(**t["recoded"]) if "recoded" in t else None,
    )


def _shard(s: dict[str, Any]) -> ShardEntry:
    rows = s.get("vocab_rows")
    return ShardEntry(
        file=s["file"],
        part=s["part"],
        pp=s["pp"],
        tp=s["tp"],
        bytes=s["bytes"],
        data_start=s["data_start"],
        blake3=s["blake3"],
        leaves=tuple(s["leaves"]),
        experts=tuple(s.get("experts", ())),
        vocab_rows=None if rows is None else (rows[0], rows[1]),
        tensors=tuple(_tensor(t) for t in s["tensors"]),
    )


class Shards(Sequence[ShardEntry]):
    """A manifest's shards, in the order of the file. An entry is made when it is first asked for."""

    def __init__(
        self,
        native: _native.Manifest | None,
        keys: list[tuple[str, str, int, int]],
        made: dict[int, ShardEntry] | None = None,
    ) -> None:
        """``made`` holds all entries where there is no ``native``."""
        self._native = native
        self._keys = keys
        self._made = made or {}

    def __reduce__(self) -> tuple[type[Shards], tuple[None, list[tuple[str, str, int, int]], Any]]:
        return Shards, (None, self._keys, dict(enumerate(self)))

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        if i not in self._made and self._native is not None:
            self._made[i] = _shard(json.loads(self._native.shard(i)))
        return self._made[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self._keys))

    def __repr__(self) -> str:
        return f"<{len(self)} shards>"

    def named(self, file: str) -> ShardEntry:
        """The entry of that file."""
        return self[next(i for i, key in enumerate(self._keys) if key[0] == file)]

    def find(self, part: str, pp: int, tp: int) -> ShardEntry | None:
        """The entry of that part, stage and rank, when there is one."""
        for i, key in enumerate(self._keys):
            if key[1:] == (part, pp, tp):
                return self[i]
        return None


@dataclass(frozen=True)
class Manifest:
    """The whole manifest. :meth:`read` checks it; the fields are those of the file, and ``packed``."""

    tool: str
    """The tool that wrote it and its version."""
    plan: str
    """BLAKE3 of everything that decides the output."""
    sources: tuple[Source, ...]
    model: Model
    policy: Policy
    shards: Shards
    files: tuple[SmallFile, ...]
    dropped: tuple[Dropped, ...]
    packed: bool
    """Whether any tensor holds ggml blocks."""

    @classmethod
    def read(cls, dir: str | os.PathLike[str]) -> Manifest:
        """Reads and checks ``dir/preshard.json``.

        Raises :class:`preshard.ShardsError` when it is missing, damaged or of another version.
        """
        return cls._of(_native.read_manifest(os.fspath(dir)))

    @classmethod
    def _of(cls, native: _native.Manifest) -> Manifest:
        m = json.loads(native.head())
        policy = dict(m["policy"], stages=tuple(m["policy"]["stages"]))
        model = dict(m["model"])
        model["class_name"] = model.pop("class")
        return cls(
            tool=m["tool"],
            plan=m["plan"],
            sources=tuple(Source(**s) for s in m["sources"]),
            model=Model(**model),
            policy=Policy(**policy),
            shards=Shards(native, [(file, part, pp, tp) for file, part, pp, tp in m["shards"]]),
            files=tuple(SmallFile(**f) for f in m["files"]),
            dropped=tuple(Dropped(**d) for d in m["dropped"]),
            packed=m["packed"],
        )

    def shard(self, rank: int, *, pp: int = 0, part: str = "model") -> ShardEntry | None:
        """The entry of that rank's file, when the directory holds it."""
        return self.shards.find(part, pp, rank)
