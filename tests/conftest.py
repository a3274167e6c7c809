"""The setting of every test: eight virtual CPU devices, and a compile cache that dies with the test run; sizes and compiles that are quick.

The variables are set here, before any test module imports jax; child processes inherit them.
"""

import os
import tempfile

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="forebay-test-cache-")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["FOREBAY_CACHE"] = _CACHE.name
os.environ["FOREBAY_MACHINES"] = os.path.join(_CACHE.name, "machines")


@pytest.fixture
def quick():
    """Compiled without LLVM's optimisations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def small(quick, monkeypatch):
    """Sharded from 32 elements on, streamed in chunks of at most 160 bytes (a rest remains), in float64, and compiled quickly."""
    import jax

    from forebay.plan import fsdp, streams

    monkeypatch.setattr(fsdp, "REPLICATED_BELOW", 32)
    monkeypatch.setattr(streams, "CHUNK_BYTES", 160)
    with jax.enable_x64(True):
        yield
