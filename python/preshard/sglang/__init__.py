"""SGLang plugin: ``python3 -m sglang.launch_server --model-path DIR --load-format preshard``.

SGLang calls :func:`register` in each of its processes (entry point ``sglang.srt.plugins``). What is known of one
SGLang version is in one file, ``_v0_5_23.py``; ``contract.py`` says what is refused whatever the version, and
:mod:`preshard.bind` does what no engine changes.
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
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = ""
    file = VERSIONS.get(found)
    if file is None:
        file = list(VERSIONS.values())[-1]
        logger.warning(
            "preshard: tested with SGLang %s, this is %s; what does not fit is refused when a model is loaded",
            ", ".join(VERSIONS),
            found or "of unknown version",
        )
    import_module(f"{__name__}.{file}").register()
