"""Optax's other transformations, with everything on the host: whatever ties the leaves together, ten planned steps equal ten resident ones.

One small model holds each form in which parameters are stored: a table, stacked layers that a scan reads, layers written out, a scalar.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from resident import Program, assert_equal, planned, resident

pytestmark = pytest.mark.usefixtures("small")
OLDEST = ("adafactor", "injected", "lamb", "muon", "noise", "every third step", "frozen")  # also with the oldest jax

HOST = {"parameter": "host", "optimizer": "host"}


def loss_fn(params, batch):
    x = params["table"][batch["x"]]
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["in"]) @ w["out"] + w["bias"], None), x, params["scanned"])
    for weights in params["written"]:
        x = x + jnp.tanh(x @ weights["in"]) @ weights["out"]
    return jnp.mean(x**2) + params["scalar"] ** 2


def batch(step):
    return {"x": (np.arange(8) * 3 + step) % 7}


@functools.cache
def program():
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape) * 0.4  # noqa: E731
    params = {
        "table": normal(7, 4),
        "scanned": {"in": normal(3, 4, 5), "out": normal(3, 5, 4), "bias": normal(3, 4)},
        "written": [{"in": normal(4, 6), "out": normal(6, 4)} for _ in range(2)],
        "scalar": normal(),
    }
    return Program(loss_fn=loss_fn, params=params, batch=batch)


def halves(params):
    """A label per leaf: the table and the biases apart from the rest."""
    chosen = lambda path: bool({"table", "bias"} & {getattr(k, "key", "") for k in path})  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: "some" if chosen(path) else "rest", params)


def depths(params):
    """A label per written layer: its number."""
    return jax.tree_util.tree_map_with_path(lambda path, _: next((str(k.idx) for k in path if hasattr(k, "idx")), "rest"), params)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    # Shared values: norms, counts, schedules, values of the loss
    "blockwise clipping": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.adam(1e-2)),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=lambda count: 1e-2 / (1.0 + count)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=2)),
    "polyak": lambda: optax.polyak_sgd(1e-2),
    "prodigy": contrib.prodigy,
    "schedule free": lambda: contrib.schedule_free_adamw(1e-2),
    # Values of one leaf, or of one layer
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "muon": lambda: contrib.muon(1e-2),
    "zero nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    # Masks and groups
    "masked decay": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "groups": lambda: optax.multi_transform({"some": optax.adam(1e-2), "rest": optax.sgd(0.1, 0.9)}, halves),
    "frozen": lambda: optax.multi_transform({"some": optax.set_to_zero(), "rest": optax.adamw(1e-2)}, halves),
    "clipped, then frozen": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.multi_transform({"some": optax.set_to_zero(), "rest": optax.adamw(1e-2)}, halves)
    ),
    "rates by depth": lambda: optax.multi_transform({"0": optax.adam(1e-2), "1": optax.adam(2e-2), "rest": optax.sgd(0.1)}, depths),
    "first layer frozen": lambda: optax.multi_transform({"0": optax.set_to_zero(), "1": optax.adam(2e-2), "rest": optax.sgd(0.1)}, depths),
    # State of other kinds
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, key=jax.random.key(3)), optax.sgd(0.1)),
    "bf16 moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    # Conditions
    "every third step": lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), 3),
    "if finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    # Joint by its nature: moves whole
    "flattened": lambda: optax.flatten(optax.adamw(1e-2)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.oldest if n in OLDEST else ()) for n in OPTIMIZERS])
def test_ten_planned_steps_equal_ten_resident_ones(name):
    optimizer = OPTIMIZERS[name]()
    got, plan = planned(program(), optimizer, HOST)
    assert_equal(got, resident(program(), optimizer), 1e-10, norms=name not in ("frozen", "first layer frozen"))
    if name not in ("flattened", "muon", "frozen", "clipped, then frozen", "rates by depth", "first layer frozen"):
        assert [s.reason for s in plan.streams if s.mode in ("whole", "resident")] == []


def test_frozen_parameters_have_no_part_in_the_norm_unless_the_optimizer_gives_them_one():
    """A gradient that nothing needs is not computed; where clipping reads it, the resident norm comes out."""
    norm_of = lambda tree: sum(np.sum(np.square(g)) for g in jax.tree.leaves(tree)) ** 0.5  # noqa: E731
    grads = jax.jit(jax.grad(loss_fn))(program().params, batch(0))
    trained = {
        "scanned": {k: v for k, v in grads["scanned"].items() if k != "bias"},
        "written": grads["written"],
        "scalar": grads["scalar"],
    }
    alone, _ = planned(program(), OPTIMIZERS["frozen"](), HOST, steps=1)
    clipped, _ = planned(program(), OPTIMIZERS["clipped, then frozen"](), HOST, steps=1)
    np.testing.assert_allclose(alone.norms, norm_of(trained), rtol=1e-10)
    np.testing.assert_allclose(clipped.norms, norm_of(grads), rtol=1e-10)


def test_an_optimizer_without_state():
    optimizer = optax.sgd(0.1)
    got, plan = planned(program(), optimizer, HOST, steps=4)
    assert_equal(got, resident(program(), optimizer, steps=4), 1e-10)
    assert plan.role("optimizer") == ()


def test_a_joint_update_says_so():
    _, plan = planned(program(), optax.flatten(optax.adamw(1e-2)), HOST, steps=1)
    assert [s.mode for s in plan.streams] == ["whole"]
    assert "joint" in plan.streams[0].reason


def test_layers_that_are_updated_in_different_ways_move_whole_and_say_so():
    _, plan = planned(program(), OPTIMIZERS["rates by depth"](), HOST, steps=1)
    assert {s.reason for s in plan.streams if s.mode == "whole"} == {
        "its layers are updated in different ways, so they move whole, one after the other"
    }


def test_muon_keeps_to_the_leaf():
    """A matrix cannot be cut, but its update moves no other leaf: the coefficients that all share are small and stay on the device."""
    _, plan = planned(program(), contrib.muon(1e-2), HOST, steps=1)
    assert [s.mode for s in plan.streams].count("whole") == 2, "the table and the biases, both matrices to Muon"
    assert not any("joint" in s.reason for s in plan.streams)


def test_a_gradient_that_is_not_finite_changes_nothing_under_apply_if_finite():
    """The branch that is not taken leaves state and parameters as they were, on the host too."""
    optimizer = optax.apply_if_finite(optax.adamw(1e-2), 5)
    broken = lambda step: batch(step) | {"scale": np.float64(np.nan if step == 2 else 1.0)}  # noqa: E731
    spoilt = Program(loss_fn=lambda p, b: loss_fn(p, b) * b["scale"], params=program().params, batch=broken)
    got, _ = planned(spoilt, optimizer, HOST, steps=4)
    wanted = resident(spoilt, optimizer, steps=4)
    assert np.isnan(wanted.losses[2]) and np.isnan(got.losses[2])
    assert int(got.opt_state.total_notfinite) == 1
    for a, b in zip(jax.tree.leaves((got.params, got.opt_state)), jax.tree.leaves((wanted.params, wanted.opt_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
