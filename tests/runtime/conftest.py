"""What the tests of equality share: thresholds so low that small arrays are sharded and streamed in several chunks, and quick compiles."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # resident and programs

from forebay.plan import fsdp, streams


@pytest.fixture
def small(monkeypatch):
    """Sharded from 32 elements on, streamed in chunks of at most 160 bytes (a rest remains), compiled without LLVM's optimisations."""
    monkeypatch.setattr(fsdp, "REPLICATED_BELOW", 32)
    monkeypatch.setattr(streams, "CHUNK_BYTES", 160)
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
