"""What the tests of reports share: the programs and the resident run of ``tests/runtime``, at small sizes."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "runtime"))  # programs, resident


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty compile cache for each test."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def host():
    """The facts of an ordinary host of 512 GiB, as preflight reads them."""
    from forebay.trust.preflight_machine import Machine, Node

    nodes = tuple(Node(number=k, bytes=256 * 2**30, cpus=frozenset(range(16 * k, 16 * k + 16))) for k in range(2))
    return Machine(
        ram_limit_bytes=512 * 2**30, ram_limit_source="/proc/meminfo, MemTotal", ram_used_bytes=2**35, memlock_bytes=None, nodes=nodes,
        cpus=frozenset(range(32)), memory_nodes=frozenset((0, 1)), device_nodes=(1,), local_processes=None, local_processes_source="",
        environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}, backend_ready=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def stack():
    """``(layers, width, rows)`` to the workload of one square float32 matrix a layer, trained by Adam on ``rows`` rows."""
    import jax
    import jax.numpy as jnp
    import optax

    import forebay as fb

    def traced(layers, width, rows):
        loss = lambda p, b: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b, p)[0] ** 2)  # noqa: E731
        shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
        return fb.trace(loss, optax.adam(0.1), shape(layers, width, width), shape(rows, width))

    return traced
