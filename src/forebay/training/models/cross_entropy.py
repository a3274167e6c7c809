"""Cross-entropy from hidden states and the output matrix, without ever holding the logits.

Idea: walk over the vocabulary in chunks. A chunk of logits serves a running log-sum-exp and the target's own logit; the backward
pass rebuilds it. (The same trade as the "cut" losses of Wijmans et al., 2024, but in plain jax.)

    forward:   for c in chunks of columns:   z = h head[:, c];   lse = logaddexp(lse, z);   hit += z[target] where target in c
    backward:  for c in chunks of columns:   z = h head[:, c];   dz = (exp(z - lse) - onehot) * cotangent
                                             dh += dz head[:, c]^T;   dhead[:, c] = h^T dz

Why columns, not tokens: a chunk of columns needs that chunk of the matrix only. With the matrix sharded over its rows (FSDP), each
chunk is gathered alone and its gradient is reduced and scattered once, so neither the gathered matrix nor an unsharded
gradient of it ever exists (3 GiB for Llama-3 8B, 6 GiB for 70B), and the sum over tokens needs no accumulator.

Cost: one more product of h and the matrix than the whole logits would take (4 instead of 3), the usual price of recomputing them.
Precision: logits and log-sum-exp in float32 or wider; the gradient of the matrix leaves each product in the dtype of ``h``, as
that of every other weight cast at its use.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from forebay.training.models.layout import Layout, current

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHUNK_BYTES = 256 * 2**20  # of float32 logits, per device
_MULTIPLE, _LEAST = 128, 1024  # columns: a multiple of the matmul tiles, wide enough to fill them


def cross_entropy(
    h: Float[Array, "batch seq model"],
    head: Float[Array, "model vocab"],
    targets: Int[Array, "batch seq"],
    *,
    chunk: int | None = None,
) -> Float[Array, "batch seq"]:
    """Minus the log-probability of each target, float32 (float64 from float64).

    ``head`` may be wider than ``h`` (float32 masters): each chunk is cast at its use. ``chunk`` is the number of columns, by default
    what makes `CHUNK_BYTES` of logits per device. A target outside the vocabulary finds no logit: its loss is the log-sum-exp alone.
    """
    layout = current(h.shape[0])
    if chunk is None:
        tokens = h.shape[0] * h.shape[1] // layout.shards
        chunk = max(CHUNK_BYTES // (4 * tokens) // _MULTIPLE * _MULTIPLE, _LEAST)
    # Once, before the loops: a matrix sharded over its columns would otherwise be exchanged whole for every chunk. No-op by rows.
    head = layout.constrain(head, layout.batch, None)
    return _cross_entropy(layout, min(chunk, head.shape[1]), h, head, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(layout: Layout, chunk: int, h: Array, head: Array, targets: Array) -> Array:
    return _forward_rule(layout, chunk, h, head, targets)[0]


def _forward_rule(layout: Layout, chunk: int, h: Array, head: Array, targets: Array):
    wide = jnp.promote_types(h.dtype, jnp.float32)

    def visit(carry, start, size):
        total, hit = carry
        z = _logits(layout, h, _columns(layout, head, start, size, h.dtype), wide)
        total = jnp.logaddexp(total, jax.nn.logsumexp(z, axis=-1))
        return total, hit + jnp.where(_onehot(targets, start, size), z, 0).sum(-1)

    carry = jnp.full(targets.shape, -jnp.inf, wide), jnp.zeros(targets.shape, wide)
    total, hit = _over_chunks(visit, carry, head.shape[1], chunk)
    return total - hit, (h, head, targets, total)


def _backward_rule(layout: Layout, chunk: int, residuals: tuple, cotangent: Array):
    h, head, targets, total = residuals
    wide = total.dtype

    def visit(carry, start, size):
        dh, dhead = carry
        columns = _columns(layout, head, start, size, h.dtype)
        p = jnp.exp(_logits(layout, h, columns, wide) - total[..., None])
        dz = ((p - _onehot(targets, start, size)) * cotangent[..., None]).astype(h.dtype)
        dh = dh + jnp.einsum("bsv,dv->bsd", dz, columns, preferred_element_type=wide)
        dcolumns = layout.constrain(jnp.einsum("bsd,bsv->dv", h, dz), layout.batch, None)
        return layout.constrain(dh, layout.batch, None, None), _put_columns(layout, dhead, dcolumns, start)

    dh = layout.constrain(jnp.zeros(h.shape, wide), layout.batch, None, None)
    dhead = layout.constrain(jnp.zeros(head.shape, head.dtype), layout.batch, None)
    dh, dhead = _over_chunks(visit, (dh, dhead), head.shape[1], chunk)
    return dh.astype(h.dtype), dhead, None


_cross_entropy.defvjp(_forward_rule, _backward_rule)


def _over_chunks(visit, carry, vocab: int, chunk: int):
    """``visit`` every whole chunk in one loop, then the rest of the columns, if any."""
    count = vocab // chunk
    carry, _ = jax.lax.scan(lambda c, i: (visit(c, i * chunk, chunk), None), carry, jnp.arange(count, dtype=jnp.int32))
    return visit(carry, count * chunk, vocab - count * chunk) if vocab % chunk else carry


def _columns(layout: Layout, head: Array, start, size: int, dtype) -> Array:
    """``head[:, start : start + size]`` in the compute dtype, then whole on every device: cast first, so half the bytes travel."""
    columns = jax.lax.dynamic_slice_in_dim(head, start, size, 1).astype(dtype)
    return layout.constrain(layout.constrain(columns, layout.batch, None), None, None)


def _put_columns(layout: Layout, dhead: Array, dcolumns: Array, start) -> Array:
    updated = jax.lax.dynamic_update_slice_in_dim(dhead, dcolumns.astype(dhead.dtype), start, 1)
    return layout.constrain(updated, layout.batch, None)


def _logits(layout: Layout, h: Array, columns: Array, wide) -> Array:
    z = jnp.einsum("bsd,dv->bsv", h, columns, preferred_element_type=wide)
    return layout.constrain(z, layout.batch, None, None)


def _onehot(targets: Array, start, size: int) -> Array:
    return targets[..., None] - start == jnp.arange(size, dtype=targets.dtype)
