"""What the tests of reports share: the programs and the resident run of ``tests/runtime``, at small sizes."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # programs, resident

from forebay.plan import fsdp, streams


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty compile cache for each test."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small(monkeypatch):
    """Small arrays are sharded and streamed in several chunks, in float64, and compiled without LLVM's optimisations."""
    monkeypatch.setattr(fsdp, "REPLICATED_BELOW", 32)
    monkeypatch.setattr(streams, "CHUNK_BYTES", 160)
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
