"""Residuals of a loop body: which values differentiation keeps, what the program does with each by itself, and names that mean nothing."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import forebay as fb
from forebay.workload import jaxprs, residuals

pytestmark = pytest.mark.oldest

LAYERS, WIDTH, ROWS = 3, 8, 4
SAVED = jax.checkpoint_policies.save_only_these_names("hidden")
OFFLOADED = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def residuals_of(body, params=None, carry=(ROWS, WIDTH)):
    params = params or {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}

    def loss(params, batch):
        return jnp.sum(jax.lax.scan(body, batch["x"], params)[0] ** 2)

    work = fb.trace(loss, optax.sgd(0.1), params, {"x": jax.ShapeDtypeStruct(carry, jnp.float32)})
    [loop] = work.program.loops
    return {r.path: r for r in loop.body.residuals}, loop


def named(x, w):
    x = checkpoint_name(x, "entry")
    return checkpoint_name(jnp.tanh(checkpoint_name(x @ w["w"], "hidden")), "exit"), None


def test_a_name_on_the_carry_is_the_carry_and_a_name_on_the_output_is_nothing():
    found, _ = residuals_of(named)
    assert found["entry"].carry and found["entry"].needed
    assert not found["exit"].carry
    assert all(r.user_named for r in found.values() if r.path in ("entry", "hidden", "exit"))
    linear = lambda x, w: (checkpoint_name(x @ w["w"], "exit"), None)  # noqa: E731
    assert residuals_of(linear)[0]["exit"].needed is False


@pytest.mark.parametrize(
    ("wrap", "written"),
    [
        (lambda f: f, "hbm"),
        (jax.checkpoint, "recompute"),
        (functools.partial(jax.checkpoint, policy=SAVED), "hbm"),
        (functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable), "hbm"),
        (lambda f: jax.checkpoint(jax.checkpoint(f, policy=SAVED)), "recompute"),
    ],
    ids=["no checkpoint", "full", "by name", "everything", "nested"],
)
def test_what_the_program_does_by_itself(wrap, written):
    """Inside two checkpoints the outer one decides: it recomputes the inner."""
    found, _ = residuals_of(wrap(named))
    assert found["hidden"].written == written


def test_an_offloading_policy_is_read():
    found, _ = residuals_of(jax.checkpoint(lambda x, w: (jnp.tanh(checkpoint_name(x @ w["w"], "hidden")), None), policy=OFFLOADED))
    assert "host" in {r.written for r in found.values()}


def test_a_value_named_twice_is_one_residual_marked_where_it_is_first_made():
    def body(x, w):
        h = x @ w["w"]
        h = checkpoint_name(checkpoint_name(h, "first"), "second")
        return jnp.tanh(h) * h, None

    found, _ = residuals_of(body)
    assert "first" in found and "second" not in found


def test_values_made_from_parameters_alone_are_marked_so():
    """A cast or a norm of the weights is rebuilt from the weights: where they are fetched again it is not worth keeping."""

    def body(x, w):
        weights = w["w"] / jnp.sqrt(jnp.sum(w["w"] ** 2))
        return jnp.tanh(x @ weights), None

    found, _ = residuals_of(body)
    assert any(r.weights_only for r in found.values())
    assert not any(r.weights_only for r in found.values() if r.shape == (ROWS, WIDTH))


def test_a_body_with_random_keys_and_literals():
    """Equations that make literals or keys have no marks to follow."""

    def body(carry, w):
        x, key = carry
        key, now = jax.random.split(key)
        return (jnp.where(jax.random.bernoulli(now, 0.5, x.shape), jnp.tanh(x @ w["w"]), 0.0), key), None

    def loss(params, batch, key):
        return jnp.sum(jax.lax.scan(body, (batch["x"], key), params)[0][0] ** 2)

    params = {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}
    work = fb.trace(loss, optax.sgd(0.1), params, {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}, rng=True)
    assert any(t.role == "activation" for t in work.tensors)


def test_names_of_two_loops_are_one_tensor_and_its_bytes_are_the_sum():
    def loss(params, batch):
        x = batch["x"]
        for part in ("a", "b"):
            x, _ = jax.lax.scan(named, x, {"w": params[part]})
        return jnp.sum(x**2)

    like = lambda n: jax.ShapeDtypeStruct((n, WIDTH, WIDTH), jnp.float32)  # noqa: E731
    work = fb.trace(loss, optax.sgd(0.1), {"a": like(2), "b": like(5)}, {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)})
    [hidden] = [t for t in work.tensors if t.name == "activation:hidden"]
    assert (hidden.count, hidden.bytes) == (7, 7 * ROWS * WIDTH * 4)


def test_marking_changes_nothing():
    """The body written out, with names bound where a plan wants them, computes what the body computes."""
    _, loop = residuals_of(named)
    args = [jax.random.normal(jax.random.key(k), v.shape, v.dtype) for k, v in enumerate(loop.loop.body.in_avals)]
    wanted = jaxprs.evaluate(loop.loop.body, args)
    for keep in ({}, {r.mark: "kept" for r in loop.body.residuals}):
        got = residuals.apply_marks(loop.body, keep, args)
        assert all(jnp.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    kept = jax.make_jaxpr(lambda *a: residuals.apply_marks(loop.body, {loop.body.residuals[0].mark: "kept"}, list(a)))(*args)
    assert [e.params["name"] for e in kept.jaxpr.eqns if e.primitive.name == "name"] == ["kept"]
