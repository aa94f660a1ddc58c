"""SGLang plugin: ``python3 -m sglang.launch_server --model-path DIR --load-format preshard``.

SGLang calls :func:`register` in each of its processes (entry point ``sglang.srt.plugins``). What is known of one
SGLang version is in one file, ``_v0_5_23.py``; ``contract.py`` says what is refused whatever the version, and
:mod:`preshard.plugin` and :mod:`preshard.bind` do what no engine changes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

VERSIONS = {"0.5.23": "_v0_5_23"}
"""SGLang versions tested, and the file that knows each."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers load format ``preshard``."""
    from .. import plugin  # imports torch, which a mere import of this module does not need

    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = ""
    file = plugin.version_file("SGLang", VERSIONS, found, logger)
    import_module(f"{__name__}.{file}").register()
