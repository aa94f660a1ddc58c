"""Per-rank safetensors shards of GGUF models: convert, verify, and load them to a GPU.

>>> import preshard
>>> preshard.convert("GLM-5-Q4_K_M-00001-of-00010.gguf", "glm5-tp8", tp=8)
>>> shard = preshard.load("glm5-tp8", rank=0, device="cuda:0")
>>> shard["model.norm.weight"]            # a torch tensor, a view into one allocation

torch is imported only when a tensor is taken as a torch tensor. The vLLM plugin is
:mod:`preshard.vllm`.
"""

from ._native import __version__
from .conversion import Converted, Fate, Plan, PlannedFile, Verified, convert, plan, verify
from .errors import (
    DeviceError,
    Error,
    FileError,
    Interrupted,
    MappingError,
    OutputError,
    RequestError,
    ShardsError,
    SourceError,
)
from .manifest import Manifest, Member, ShardEntry, Shards, TensorEntry
from .shard import LoadStats, Shard, load

__all__ = [
    "Converted",
    "DeviceError",
    "Error",
    "Fate",
    "FileError",
    "Interrupted",
    "LoadStats",
    "Manifest",
    "MappingError",
    "Member",
    "OutputError",
    "Plan",
    "PlannedFile",
    "RequestError",
    "Shard",
    "ShardEntry",
    "Shards",
    "ShardsError",
    "SourceError",
    "TensorEntry",
    "Verified",
    "__version__",
    "convert",
    "load",
    "plan",
    "verify",
]
