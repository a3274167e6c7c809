"""Blockwise attention against the textbook form, in float64; no sequence x sequence array; statistics that can be saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.errors import InputError
from forebay.training.models.attention import attention

pytestmark = pytest.mark.oldest

BLOCK = 16


def textbook(q, k, v, window=None):
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None, :]
    allowed = (behind >= 0) & (behind < (window or q.shape[1]))
    scores = jnp.where(allowed, jnp.einsum("bqnh,bsnh->bnqs", q, k) / np.sqrt(q.shape[-1]), -jnp.inf)
    return jnp.einsum("bnqs,bsnh->bqnh", jax.nn.softmax(scores, axis=-1), v)


def random_qkv(seq, heads, kv_heads, dtype, batch=2, head_dim=8):
    rng = np.random.default_rng(seq)
    return [rng.standard_normal((batch, seq, n, head_dim)).astype(dtype) for n in (heads, kv_heads, kv_heads)]


def value_and_grads(f, q, k, v):
    out, pull = jax.vjp(f, q, k, v)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    return out, *pull(jnp.cos(jnp.arange(out.size, dtype=wide)).reshape(out.shape).astype(out.dtype))


@pytest.mark.parametrize(("seq", "heads", "kv_heads", "window"), [
    (1, 1, 1, None), (37, 4, 2, None), (48, 6, 2, 1), (37, 4, 1, 16), (50, 2, 2, 17), (40, 2, 1, 400),
])  # fmt: skip
def test_blockwise_equals_the_textbook_with_its_gradients(seq, heads, kv_heads, window):
    with jax.enable_x64(True):
        arrays = random_qkv(seq, heads, kv_heads, jnp.float64)
        blockwise = functools.partial(attention, kernel="blockwise", window=window, block=BLOCK)
        ours = jax.jit(lambda *a: value_and_grads(blockwise, *a))(*arrays)
        wanted = jax.jit(lambda *a: value_and_grads(functools.partial(textbook, window=window), *a))(*arrays)
        for got, want in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_a_kernel_that_does_not_exist_for_the_dtype_is_refused():
    with pytest.raises(InputError, match="cuDNN attention is for bfloat16 and float16; these queries are float32"):
        attention(*random_qkv(4, 1, 1, jnp.float32), kernel="cudnn")


def test_the_cudnn_program_runs_blockwise_on_a_cpu():
    arrays = [x.astype(jnp.bfloat16) for x in random_qkv(37, 4, 2, jnp.float32)]
    fused = jax.jit(lambda *a: value_and_grads(functools.partial(attention, kernel="cudnn", block=BLOCK), *a))(*arrays)
    plain = jax.jit(lambda *a: value_and_grads(functools.partial(attention, kernel="blockwise", block=BLOCK), *a))(*arrays)
    for a, b in zip(fused, plain, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_half_precision_is_as_near_as_its_rounding():
    narrow = [x.astype(jnp.bfloat16) for x in random_qkv(100, 4, 2, jnp.float32)]
    got = jax.jit(lambda *a: value_and_grads(functools.partial(attention, kernel="blockwise", block=32), *a))(*narrow)
    wanted = jax.jit(lambda *a: value_and_grads(textbook, *a))(*[x.astype(jnp.float32) for x in narrow])
    for a, b in zip(got, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def shapes_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("kernel", ["cudnn", "blockwise"])
def test_no_array_is_as_large_as_the_scores(kernel):
    seq, arrays = 96, [x.astype(jnp.bfloat16) for x in random_qkv(96, 2, 1, jnp.float32)]
    f = functools.partial(attention, kernel=kernel, block=BLOCK)
    jaxpr = jax.make_jaxpr(lambda *a: value_and_grads(f, *a))(*arrays).jaxpr
    shapes = list(shapes_in(jaxpr))
    assert len(shapes) > 50
    assert not [s for s in shapes if sum(n >= seq for n in s) > 1]


@pytest.mark.parametrize(("saved", "forwards"), [((), 2), (("attn_context",), 2), (("attn_context", "attn_stats"), 1)])
def test_with_context_and_statistics_saved_the_forward_kernel_runs_once(saved, forwards):
    arrays = [x.astype(jnp.bfloat16) for x in random_qkv(32, 2, 1, jnp.float32)]

    def loss(*a):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        return jax.checkpoint(lambda *a: jnp.sin(attention(*a, kernel="cudnn")), policy=policy)(*a).astype(jnp.float32).sum()

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@__cudnn$fmhaSoftmax(") == forwards
    assert program.count("@__cudnn$fmhaSoftmaxBackward(") == 1


def test_on_a_mesh_each_device_attends_to_its_own_sequences_and_heads():
    arrays = random_qkv(24, 4, 2, jnp.float32, batch=4)
    f = functools.partial(attention, kernel="blockwise", window=9, block=BLOCK)
    alone = jax.jit(lambda *a: value_and_grads(f, *a))(*arrays)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp"), None, "tensor"))
        split = jax.jit(lambda *a: value_and_grads(f, *a))
        arrays = jax.device_put(arrays, spec)
        text = split.lower(*arrays).compile().as_text()
        for got, want in zip(split(*arrays), alone, strict=True):
            assert got.sharding.shard_shape(got.shape)[0] == 1
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert not [kind for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if f" {kind}(" in text]
