"""Chunked cross-entropy against the whole logits, in float64, alone and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from forebay.training.models.cross_entropy import cross_entropy

pytestmark = pytest.mark.oldest


def whole(h, head, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ head.astype(h.dtype), axis=-1), targets[..., None], -1)[..., 0]


def problem(dtype, batch=3, seq=5, model=8, vocab=37):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, vocab, (batch, seq), np.int32)
    targets[0, 0] = vocab - 1
    return 3 * rng.standard_normal((batch, seq, model)).astype(dtype), rng.standard_normal((model, vocab)).astype(dtype), targets


def value_and_grads(f, h, head, targets):
    out, pull = jax.vjp(lambda h, head: f(h, head, targets), h, head)
    return out, *pull(jnp.sin(1.0 + jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@pytest.mark.parametrize("chunk", [None, 5, 36])
def test_chunks_equal_the_whole_with_their_gradients(chunk):
    with jax.enable_x64(True):
        args = problem(jnp.float64)
        ours = jax.jit(lambda *a: value_and_grads(lambda *b: cross_entropy(*b, chunk=chunk), *a))(*args)
        for got, want in zip(ours, jax.jit(lambda *a: value_and_grads(whole, *a))(*args), strict=True):
            assert got.dtype == jnp.float64
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_masters_stay_float32_and_large_logits_stay_finite():
    h, head, targets = problem(jnp.float32)
    f = jax.jit(lambda *a: value_and_grads(lambda *b: cross_entropy(*b, chunk=8), *a))
    loss, dh, dhead = f((1e3 * h).astype(jnp.bfloat16), head, targets)
    assert (loss.dtype, dh.dtype, dhead.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (loss, dh, dhead))


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp"), (None, None)])
def test_on_a_mesh_the_same_comes_out_however_the_matrix_lies(spec):
    h, head, targets = problem(jnp.float32, batch=8, vocab=40)
    f = jax.jit(lambda *a: value_and_grads(lambda *b: cross_entropy(*b, chunk=16), *a))
    alone = f(h, head, targets)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def put(x, *s):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s)))

    with jax.set_mesh(mesh):
        for got, want in zip(f(put(h, "fsdp"), put(head, *spec), put(targets, "fsdp")), alone, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
