"""The user's own offloads where no XLA compiles them: the same numbers in another form, and a sentence for each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import forebay as fb
from forebay.workload import jaxprs

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("quick")]
LAYERS, WIDTH, ROWS = 3, 8, 4


def offloaded(function):
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
    ))  # fmt: skip


def layer(x, w):
    return x + checkpoint_name(jnp.tanh(x @ w), "kept")


def scanned(x, stack, step=layer, **how):
    return jax.lax.scan(lambda x, w: (step(x, w), None), x, stack, **how)[0]


def either(step):
    return lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda x: step(x, w), lambda x: 2 * x, x)


LATER, AGAIN = "moved in the backward pass alone", "recomputed instead"
PROGRAMS = {
    "a loop around it": (lambda x, w: scanned(x, w, lambda x, s: scanned(x, s, offloaded(layer))), (2, LAYERS), LATER),
    "two loops around it": (
        lambda x, w: scanned(x, w, lambda x, s: scanned(x, s, lambda x, t: scanned(x, t, offloaded(layer)))), (2, 2, LAYERS), LATER
    ),
    "a loop inside it": (lambda x, w: scanned(x, w, offloaded(scanned)), (2, LAYERS), AGAIN),
    "unrolled": (lambda x, w: scanned(x, w, offloaded(layer), unroll=2), (LAYERS,), "not unrolled"),
    "a branch around the loop": (lambda x, w: either(lambda x, w: scanned(x, w, offloaded(layer)))(x, w), (LAYERS,), LATER),
    "a branch around it": (lambda x, w: scanned(x, w, either(offloaded(layer))), (LAYERS,), LATER),
    "a branch inside it": (lambda x, w: scanned(x, w, offloaded(either(layer))), (LAYERS,), AGAIN),
    "in a jit in a loop": (lambda x, w: scanned(x, w, jax.jit(lambda x, s: scanned(x, s, offloaded(layer)))), (2, LAYERS), LATER),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_stay_and_the_plan_says_what_changed(name):
    model, stack, said = PROGRAMS[name]
    loss = lambda w, x: jnp.mean(model(x, w) ** 2)  # noqa: E731
    random = np.random.default_rng(0)
    w, x = (random.normal(size=shape) / 2 for shape in ((*stack, WIDTH, WIDTH), (ROWS, WIDTH)))
    with jax.enable_x64(True):
        work = fb.trace(loss, optax.sgd(0.1), w, x)
        ours = lambda w: jaxprs.evaluate(work.program.jaxpr, [w, x])[0]  # noqa: E731
        for got, wanted in zip(jax.value_and_grad(ours)(w), jax.value_and_grad(loss)(w, x), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)
    [sentence] = work.program.changed
    assert sentence.startswith("your policy offloads 'kept' (test_own_offload.py:")
    assert sentence.endswith(said)
    assert sentence in fb.Plan.by_hand(work, {}).options["reasons"]


def test_where_xla_compiles_it_nothing_changes():
    loss = lambda w, x: jnp.mean(scanned(x, w, offloaded(layer)) ** 2)  # noqa: E731
    work = fb.trace(loss, optax.sgd(0.1), jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    assert work.program.changed == ()
    assert next(t for t in work.tensors if t.name == "activation:kept").written == "host"
