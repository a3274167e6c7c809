"""Reports of theme 9, asked for and not had: optimizer state by fraction, by layer, by pattern; frozen parameters too."""

import jax
import numpy as np
import optax
import pytest
from programs import scanned
from resident import assert_equal, by_hand, planned, resident, trace

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]


@pytest.fixture
def work():
    program = scanned()
    return program, trace(program, optax.adam(1e-2))


def on_host(plan):
    return {e.name for e in plan.entries if e.role == "optimizer" and e.placement == "host"}


def test_optimizer_state_by_pattern(work):
    assert on_host(by_hand(*work, {"optimizer:*/mu/*": "host"})) == {
        "optimizer:0/mu/embed", "optimizer:0/mu/head", "optimizer:0/mu/layers/down", "optimizer:0/mu/layers/scale",
        "optimizer:0/mu/layers/up",
    }  # fmt: skip


def places(plan, path):
    """Where each layer of a stack of optimizer state stands."""
    parts = [e for e in plan.entries if e.role == "optimizer" and path in e.name]
    return [e.placement for e in sorted(parts, key=lambda e: e.layers) for _ in range(*e.layers)]


def test_optimizer_state_by_layer(work):
    plan = by_hand(*work, {"optimizer:*/layers/up": "host[0:2]"})
    assert places(plan, "mu/layers/up") == ["host", "host", "hbm"]


def test_optimizer_state_by_fraction(work):
    plan = by_hand(*work, {"optimizer:*/layers/up": "host:67%"})
    assert places(plan, "nu/layers/up") == ["host", "host", "hbm"]


def test_frozen_parameters_train_under_offload_as_in_lora():
    labels = lambda p: jax.tree_util.tree_map_with_path(lambda path, _: "own" if "head" in jax.tree_util.keystr(path) else "base", p)  # noqa: E731
    optimizer = optax.multi_transform({"own": optax.adam(1e-2), "base": optax.set_to_zero()}, labels)
    program = scanned()
    got, plan = planned(program, optimizer, {"parameter": "host", "optimizer": "host"}, steps=2)
    assert_equal(got, resident(program, optimizer, steps=2), 1e-10, norms=False)
    np.testing.assert_array_equal(got.params["embed"], program.params["embed"])
    assert all(e.bytes_per_device == 0 for e in plan.role("gradient") if "head" not in e.name)
