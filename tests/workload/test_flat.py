"""What survives flattening and rolling: names, source lines, checkpoints as the user wrote them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.workload.flat import flatten
from forebay.workload.repeats import find_repeats
from forebay.workload.roll import roll

pytestmark = pytest.mark.oldest

SQUARE = jax.ShapeDtypeStruct((4, 4), np.float32)


def scan_of(loss, count=3):
    """The body of the loop that ``loss(leaves, x)`` rolls into."""
    jaxpr = jax.make_jaxpr(lambda *arguments: loss(arguments[:-1], arguments[-1]))(*[SQUARE] * (count + 1))
    rolled, storage = roll(jaxpr, find_repeats(jaxpr, [()] * count + [None]))
    outer = jax.make_jaxpr(rolled)(jax.eval_shape(storage.stack, [SQUARE] * (count + 1)))
    (scan,) = [equation for equation in outer.eqns if equation.primitive.name == "scan"]
    return scan.params["jaxpr"]


def test_nested_jits_are_opened_and_named():
    inner = jax.jit(lambda x: jnp.tanh(x))
    program = flatten(jax.make_jaxpr(lambda x: jax.jit(lambda y: inner(y) + 1.0)(x))(1.0))
    assert [equation.name for equation in program.equations] == ["tanh", "add"]
    assert str(program.equations[0].source.source_info.name_stack).count("jit(") == 2


def test_a_jit_with_shardings_of_its_own_stays_whole():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    program = flatten(jax.make_jaxpr(jax.jit(jnp.tanh, in_shardings=sharding))(1.0))
    assert len(program.equations) == 1
    assert "jaxpr" in program.equations[0].source.params


def test_equal_constants_are_one_value():
    program = flatten(jax.make_jaxpr(lambda x: x + np.arange(4.0) * (x - np.arange(4.0)))(np.ones(4)))
    assert len(program.constants) <= 1


def test_names_and_source_lines_survive():
    def loss(leaves, x):
        for leaf in leaves:
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ leaf)
        return x.sum()

    dot = next(equation for equation in scan_of(loss).eqns if equation.primitive.name == "dot_general")
    assert "layer" in str(dot.source_info.name_stack)
    assert any(frame.function_name.endswith("loss") for frame in dot.source_info.traceback.frames)


@pytest.mark.parametrize("literals_differ", [False, True])
def test_checkpoint_keeps_its_policy_flags_and_names(literals_differ):
    def loss(leaves, x):
        for number, leaf in enumerate(leaves):
            scale = 1.0 + number * literals_differ
            policy = jax.checkpoint_policies.save_only_these_names("h")
            block = jax.checkpoint(lambda x, w, s=scale: checkpoint_name(jnp.tanh(x @ w), "h") * s, policy=policy, prevent_cse=False)
            x = block(x, leaf)
        return x.sum()

    (inner,) = [equation for equation in scan_of(loss).eqns if "prevent_cse" in equation.params]
    assert inner.params["policy"] is not None
    assert inner.params["prevent_cse"] is False
    assert "name=h" in str(inner.params["jaxpr"])
    assert len(inner.invars) == 2 + literals_differ
