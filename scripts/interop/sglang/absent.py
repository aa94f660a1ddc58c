"""Stand-ins for what SGLang imports and only a GPU has. Import this before SGLang, to load weights on a CPU."""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from unittest.mock import MagicMock

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

PACKAGES = {
    "cutlass",
    "decord",
    "deep_ep",
    "deep_gemm",
    "flash_attn",
    "flashinfer",
    "quack",
    "sgl_kernel",
    "smg_grpc_servicer",
    "tilelang",
    "torch_memory_saver",
}


class Absent(types.ModuleType):
    """A module of which every name is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an :class:`Absent` for each of the packages and all below them."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        module.__version__ = "0"


sys.meta_path.insert(0, Finder())
