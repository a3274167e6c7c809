"""Random programs: trees, shardings, placements and optimizers drawn together; planned steps equal resident ones, nothing crashes.

Few examples, always the same ones, and no search for a smaller one, since each try is a compile. A longer search:
``FOREBAY_EXAMPLES=500 pytest tests/runtime/test_random.py``.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from resident import Program, assert_equal, planned, resident, trace

from forebay.records import LEGAL

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]

STEPS, ROWS, WIDTH = 3, 8, 8
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped momentum": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "masked": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "every second": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "frozen vectors": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params),
    ),
}


@st.composite
def groups(draw):
    """The groups of a model: each a stack to scan, a list of written layers, or a pair of leaves used once, with some vectors."""
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "kind": st.sampled_from(["scan", "list", "once"]),
                    "layers": st.integers(1, 4),
                    "hidden": st.sampled_from([4, 6, 16]),
                    "bias": st.booleans(),
                    "checkpoint": st.booleans(),
                    "named": st.booleans(),
                    "reverse": st.booleans(),
                }
            ),
            min_size=1,
            max_size=3,
        )
    )


def leaves_of(group, random):
    def one():
        normal = lambda *shape: random.normal(size=shape) * 0.4  # noqa: E731
        bias = {"bias": normal(WIDTH)} if group["bias"] else {}
        return {"in": normal(WIDTH, group["hidden"]), "out": normal(group["hidden"], WIDTH)} | bias

    if group["kind"] == "once":
        return one()
    layers = [one() for _ in range(group["layers"])]
    return layers if group["kind"] == "list" else jax.tree.map(lambda *each: np.stack(each), *layers)


def loss_of(drawn):
    def block(group, number, x, w):
        hidden = x @ w["in"]
        if group["named"]:
            hidden = jax.ad_checkpoint.checkpoint_name(hidden, f"hidden{number}")
        return x + jnp.tanh(hidden) @ w["out"] + w.get("bias", 0.0)

    def loss(params, batch):
        x = batch["x"]
        for number, (group, weights) in enumerate(zip(drawn, params["groups"], strict=True)):
            run = lambda x, w, g=group, n=number: block(g, n, x, w)  # noqa: E731
            run = jax.checkpoint(run) if group["checkpoint"] else run
            if group["kind"] == "scan":
                x, _ = jax.lax.scan(lambda x, w, run=run: (run(x, w), None), x, weights, reverse=group["reverse"])
            else:
                for w in weights if group["kind"] == "list" else [weights]:
                    x = run(x, w)
        return jnp.mean((x - batch["y"]) ** 2) * params["scale"]

    return loss


def batch(step):
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH))
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def some_spec(data, shape, stacked):
    """A spec whose axes divide the array; the axis of a stack stays whole."""
    free = list(AXES)
    parts = []
    for k, n in enumerate(shape):
        fits = [axis for axis in free if n % AXES[axis] == 0]
        axis = data.draw(st.sampled_from([None, *fits])) if not (stacked and k == 0) else None
        free = [a for a in free if a != axis]
        parts.append(axis)
    return P(*parts)


def some_specs(data, drawn, params):
    specs = [
        jax.tree.map(lambda leaf, g=g: some_spec(data, leaf.shape, g["kind"] == "scan"), w)
        for g, w in zip(drawn, params["groups"], strict=True)
    ]
    return {"groups": specs, "scale": P()}


@settings(
    max_examples=int(os.environ.get("FOREBAY_EXAMPLES", "14")), deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)  # fmt: skip
@given(data=st.data())
def test_random_programs_under_random_plans(data):
    drawn = data.draw(groups())
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    params = {"groups": [leaves_of(group, random) for group in drawn], "scale": np.float64(1.5)}
    own = data.draw(st.booleans())
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3) if own else None
    specs = some_specs(data, drawn, params) if own else None
    program = Program(loss_fn=loss_of(drawn), params=params, batch=batch, mesh=mesh, specs=specs, batch_spec=("data",) if own else None)
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    optimizer = OPTIMIZERS[name]()
    work = trace(program, optimizer)
    rules = {"parameter": data.draw(st.sampled_from(LEGAL["parameter"])), "optimizer": data.draw(st.sampled_from(LEGAL["optimizer"]))}
    for tensor in data.draw(
        st.lists(st.sampled_from([t for t in work.tensors if t.role in ("parameter", "optimizer", "activation") and t.movable]), max_size=4)
    ):
        if tensor.role != "activation" or len(tensor.shape) > 1:
            rules[tensor.name] = data.draw(st.sampled_from(LEGAL[tensor.role]))
    options = {"fuse_update": data.draw(st.sampled_from(["auto", "two_pass", "never"]))}
    got, _ = planned(program, optimizer, rules, work=work, options=options, steps=STEPS)
    assert_equal(got, resident(program, optimizer, steps=STEPS), 1e-9, norms=name != "frozen vectors")
