"""Slicing: where the streamed axis goes through each primitive, what is refused, and slices that together give the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from forebay.workload import jaxprs, slicing
from forebay.workload.slicing import NotSeparable, Window, out_axes, propagate

pytestmark = pytest.mark.oldest

A, B, C = 6, 4, 3


def last(fn, *shapes, axes):
    """The rule's answer for the last equation of ``fn``."""
    jaxpr = jax.make_jaxpr(fn)(*(jnp.ones(s) for s in shapes))
    return out_axes(jaxpr.jaxpr.eqns[-1], axes)


RULES = {
    "elementwise": (lambda x, y: x * y, [(A, B), (A, B)], [0, 0], [0]),
    "with an unstreamed array": (lambda x, y: x + y, [(A, B), (A, B)], [1, None], [1]),
    "sum over another axis": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), [(A, B, C)], [2], [1]),
    "sum over it": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), [(A, B)], [0], "reduce"),
    "maximum over it": (lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), [(A, B)], [0], "reduce"),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (C, A, B), (1, 2)), [(A, B)], [0], [1]),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), [(1, A, B)], [1], [0]),
    "expand": (lambda x: lax.expand_dims(x, (0, 1)), [(A, B)], [0], [2]),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(A, B, C)], [0], [1]),
    "reshape behind it": (lambda x: lax.reshape(x, (A, B * C)), [(A, B, C)], [0], [0]),
    "reshape merging it": (lambda x: lax.reshape(x, (A * B, C)), [(A, B, C)], [0], [0]),
    "concatenate": (lambda x: lax.concatenate([x, x], 1), [(A, B)], [0, 0], [0]),
    "slice of another axis": (lambda x: lax.slice(x, (0, 1), (A, 3)), [(A, B)], [0], [0]),
    "pad another axis": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, 1, 0)]), [(A, B)], [0, None], [0]),
    "sort along another axis": (lambda x: lax.sort(x, dimension=1), [(A, B)], [0], [0]),
    "sum along another axis": (lambda x: lax.cumsum(x, axis=1), [(A, B)], [0], [0]),
    "product, rows": (lambda x, y: lax.dot(x, y), [(A, B), (B, C)], [0, None], [0]),
    "product, columns": (lambda x, y: lax.dot(x, y), [(B, C), (C, A)], [None, 1], [1]),
    "product, contracted": (lambda x, y: lax.dot(x, y), [(B, A), (A, C)], [1, 0], "reduce"),
    "product, one side contracted": (lambda x, y: lax.dot(x, y), [(B, A), (A, C)], [1, None], "reduce"),
    "product, batched": (lambda x, y: lax.batch_matmul(x, y), [(A, B, C), (A, C, B)], [0, 0], [0]),
    "factorisation of each": (lambda x: lax.linalg.cholesky_p.bind(x), [(A, C, C)], [0], [0]),
}


@pytest.mark.parametrize("name", RULES)
def test_where_the_streamed_axis_goes(name):
    fn, shapes, axes, wanted = RULES[name]
    assert last(fn, *shapes, axes=axes) == wanted


REFUSED = {
    "takes part of it": (lambda x: lax.slice(x, (1, 0), (3, B)), [(A, B)], [0]),
    "pads it": (lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]), [(A, B)], [0, None]),
    "runs along it": (lambda x: lax.cumsum(x, axis=0), [(A, B)], [0]),
    "picks one position": (lambda x: lax.argmax(x, 0, jnp.int32), [(A, B)], [0]),
    "reshapes it away": (lambda x: lax.reshape(x, (B, A)), [(A, B)], [0]),
    "joins along it": (lambda x: lax.concatenate([x, x], 0), [(A, B)], [0, 0]),
    "factorises across it": (lambda x: lax.linalg.cholesky_p.bind(x), [(A, C, C)], [1]),
    "outer product": (lambda x, y: lax.dot(x, y), [(A, B), (B, A)], [0, 1]),
    "two axes": (lambda x, y: x + y, [(A, A), (A, A)], [0, 1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_the_slices_is_refused_with_the_line_that_does(name):
    fn, shapes, axes = REFUSED[name]
    with pytest.raises(NotSeparable, match=r" at (test_slicing\.py:\d+|an unknown line) "):
        last(fn, *shapes, axes=axes)


def test_a_primitive_without_a_rule_is_refused_by_name():
    with pytest.raises(NotSeparable, match=r"conv_general_dilated .*has no rule for it"):
        last(lambda x: lax.conv_general_dilated(x, x, (1, 1), "SAME"), (1, 1, A, B), axes=[2, None])


def in_slices(fn, arrays, axes, size):
    """The result of ``fn`` put together from slices of ``size`` positions along the streamed axes."""
    jaxpr = jaxprs.inline(jax.make_jaxpr(fn)(*arrays))
    [out_axis] = propagate(jaxpr, axes)
    total = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    pieces = []
    for start in range(0, total, size):
        window = Window(start, min(size, total - start), total)
        cut = [a if axis is None else lax.dynamic_slice_in_dim(a, start, window.size, axis) for a, axis in zip(arrays, axes, strict=True)]
        pieces += slicing.run(jaxpr, cut, axes, window)
    return jnp.concatenate(pieces, out_axis)


def normalised(x, table):
    """Reductions, broadcasts, reshapes, products and constants that span the streamed axis, along whichever axis is not reduced."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    weighted = centred * jnp.arange(x.shape[0], dtype=x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    flat = weighted.reshape(x.shape[0], -1)
    flat = flat @ jnp.linspace(0.0, 1.0, 2 * flat.shape[1], dtype=x.dtype).reshape(-1, 2)
    return jnp.where(flat > 0, jnp.tanh(flat), flat) + table.reshape(x.shape[0], -1)[:, :2]


def newton_schulz(x):
    """A loop of products of each matrix with itself, as Muon has it."""

    def body(x, c):
        return c * x + jnp.einsum("lij,lkj,lkm->lim", x, x, x), None

    return lax.scan(body, x / 9.0, jnp.array([1.0, 0.5, 0.25]))[0]


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 7), st.integers(2, 4), st.integers(2, 5), st.integers(1, 8), st.integers(0, 9))
def test_slices_together_are_the_whole(rows, columns, depth, size, seed):
    random = np.random.default_rng(seed)
    x, table = (jnp.asarray(random.normal(size=(rows, columns, depth)), jnp.float32) for _ in range(2))
    mean = lambda x: x / (1.0 + jnp.sum(x * x, axis=(0, 2), keepdims=True))  # noqa: E731
    cases = [(normalised, [x, table], [0, None]), (normalised, [x, table], [0, 0]), (newton_schulz, [x], [0]), (mean, [x], [1])]

    @jax.jit
    def both():
        return [(in_slices(fn, arrays, axes, size), fn(*arrays)) for fn, arrays, axes in cases]

    for got, wanted in both():
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_a_reduction_inside_a_loop_is_refused():
    with pytest.raises(NotSeparable, match="reduces over it inside a loop"):
        propagate(jaxprs.inline(jax.make_jaxpr(newton_schulz)(jnp.ones((A, B, C)))), [1])
