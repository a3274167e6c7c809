"""Models of Flax NNX, Flax Linen and Equinox, each in its own idiom, trained by unchanged user code: planned steps equal resident ones."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from resident import Program, assert_equal, by_hand, planned, resident, trace

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]

EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}
LAYERS, WIDTH, ROWS, STEPS = 3, 8, 8, 5


def batch(step):
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH))
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def arrays(tree):
    """The tree with numpy leaves, so that both runs may place it."""
    return jax.tree.map(np.asarray, tree)


class NnxBlock(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    """Blocks in a list: NNX's default has no scan. Batch normalisation and dropout carry state of their own."""

    def __init__(self, *, rngs):
        self.blocks = nnx.List([NnxBlock(rngs=rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def nnx_program():
    graph, params, rest = nnx.split(NnxModel(rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch, extra):
        model = nnx.merge(graph, params, extra, copy=True)
        value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return value, (None, nnx.state(model, nnx.Not(nnx.Param)))

    double = lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    return Program(loss_fn=loss, params=arrays(params), batch=batch, extra=jax.tree.map(double, rest))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(2 * WIDTH, param_dtype=jnp.float64, name="up")(nn.LayerNorm(param_dtype=jnp.float64, name="norm")(x))
        h = jax.ad_checkpoint.checkpoint_name(h, "hidden")
        return x + nn.Dense(WIDTH, param_dtype=jnp.float64, name="down")(nn.gelu(h)), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False)
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(WIDTH, param_dtype=jnp.float64, name="head")(x)


def linen_program():
    model = LinenModel()
    params = model.init(jax.random.key(0), jnp.zeros((ROWS, WIDTH)))

    def loss(params, batch):
        return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)

    return Program(loss_fn=loss, params=arrays(params), batch=batch)


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=a), eqx.nn.Linear(2 * WIDTH, WIDTH, key=b)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def equinox_program():
    blocks = [EquinoxBlock(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    params, static = eqx.partition(blocks, eqx.is_inexact_array)

    def loss(params, batch):
        blocks = eqx.combine(params, static)
        x = batch["x"]
        for block in blocks:
            x = jax.vmap(block)(x)
        return jnp.mean((x - batch["y"]) ** 2)

    return Program(loss_fn=loss, params=arrays(params), batch=batch)


PROGRAMS = {"nnx": nnx_program, "linen": linen_program, "equinox": equinox_program}


@functools.cache
def baseline(name):
    program, optimizer = PROGRAMS[name](), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return program, optimizer, resident(program, optimizer, steps=STEPS)


@pytest.mark.parametrize("rules", [{"optimizer": "host"}, EVERYTHING], ids=["optimizer", "everything"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_planned_steps_equal_resident_ones(name, rules):
    program, optimizer, wanted = baseline(name)
    got, plan = planned(program, optimizer, rules, steps=STEPS)
    assert_equal(got, wanted, 1e-10)
    assert {e.placement for e in plan.role("optimizer") if len(e.shape) > 1} == {"host"}


def test_blocks_of_a_list_are_stored_stacked_under_names_of_the_users_tree():
    for name, path in (("nnx", "parameter:blocks/*/up/kernel"), ("equinox", "parameter:*/up/weight")):
        program, optimizer, _ = baseline(name)
        plan = by_hand(program, trace(program, optimizer), {})
        found = [e for e in plan.role("parameter") if e.name.removesuffix("/value") == path]
        assert [e.shape[0] for e in found] == [LAYERS], [e.name for e in plan.role("parameter")]


def test_the_mutable_state_of_nnx_moves_on():
    program, _, wanted = baseline("nnx")
    plain = lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    before, after = jax.tree.leaves(jax.tree.map(plain, program.extra)), jax.tree.leaves(wanted.extra)
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
