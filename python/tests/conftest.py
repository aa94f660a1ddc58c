"""Small GGUF models of the crate's own tests, converted once per session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import preshard

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
LLAMA = FIXTURES / "dense" / "tiny-llama-Q4_K_M.gguf"
GLM5 = FIXTURES / "glm5"


@pytest.fixture(scope="session")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("llama") / "tp2"
    preshard.convert(LLAMA, out, tp=2, weights="bf16")
    return out


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, packed, one rank."""
    out = tmp_path_factory.mktemp("packed") / "tp1"
    preshard.convert(LLAMA, out)
    return out


@pytest.fixture
def llama(_llama: Path) -> Path:
    """tiny-llama as bf16 for two ranks; not to be written to."""
    return _llama


@pytest.fixture
def own_llama(_llama: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(_llama, tmp_path / "llama"))
