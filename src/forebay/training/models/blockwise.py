"""Exact causal attention in blocks, in plain jax, never holding a sequence x sequence matrix.

Idea: softmax can be accumulated over blocks of keys with a running maximum (Milakov and Gimelshein, 2018; Rabe and Staats, 2021),
and its backward pass needs only the log-sum-exp of each row to rebuild a block of probabilities (Dao et al., FlashAttention, 2022).

    forward, for (i, j) in the blocks that the mask does not empty, row by row, the diagonal first:
        s = q[i] k[j]^T * scale, masked;  m' = max(m, rowmax s);  p = exp(s - m')
        o = o exp(m - m') + p v[j];  l = l exp(m - m') + rowsum p      of row block i alone, anew at its diagonal
        context[i] = o / l;  statistics[i] = m' + log l                 the last block of the row stays
    backward, the same blocks column by column, the diagonal first:
        p = exp(s - statistics[i]);  ds = p (do[i] v[j]^T - rowsum(o do)[i])
        dv += p^T do[i];  dk += ds^T q[i]                               of column block j alone, anew at its diagonal
        dq[i] += ds k[j]

Each is one loop with a known trip count. Blocks above the diagonal and, with a window, blocks wholly left of it are not in the
list, so their work is skipped, not masked. The diagonal comes first, so the running maximum is finite from the start.

Cost: the multiplications of the unmasked blocks, half of seq^2 and a diagonal; memory: the results in their own dtype, float32
accumulators of one block, in the backward pass of the whole dq, and one block of scores, batch x heads x BLOCK^2. Known limit:
one block after another, so it is for targets without a fused kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float

BLOCK = 512


def forward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    window: int | None,
    block: int = BLOCK,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Causal attention and the log-sum-exp of its scaled scores; ``window`` limits it to that many last positions."""
    batch, seq, heads, head_dim = q.shape
    block, wide = min(block, seq), _accumulator(q)
    q, k, v = _split_heads(_pad(q, block), k.shape[2]), _pad(k, block), _pad(v, block)
    rows = (batch, q.shape[2], q.shape[3], q.shape[1])
    none = jnp.zeros((batch, block, *q.shape[2:]), wide), jnp.zeros((*rows[:3], block), wide), jnp.full((*rows[:3], block), -jnp.inf, wide)

    def step(carry, pair):
        context, statistics, *running = carry
        i, j, old = _tied(pair, running[2])
        acc, total, old = (jnp.where(i == j, start, x) for start, x in zip(none, (*running[:2], old), strict=True))
        scores = _scores(q, k, i, j, block, window, wide)
        top = jnp.maximum(old, scores.max(-1))
        shrink, p = jnp.exp(old - top), jnp.exp(scores - top[..., None])
        update = jnp.einsum("bkgqs,bskh->bqkgh", p.astype(v.dtype), _take(v, j, block, 1), preferred_element_type=wide)
        acc, total = acc * _rows_first(shrink)[..., None] + update, total * shrink + p.sum(-1)
        context = _put(context, (acc / _rows_first(total)[..., None]).astype(v.dtype), i, block, 1)
        return (context, _put(statistics, top + jnp.log(total), i, block, 3), acc, total, top), None

    start = jnp.zeros(q.shape, v.dtype), jnp.zeros(rows, wide), *none
    (context, statistics, *_), _ = jax.lax.scan(step, start, _pairs(q.shape[1] // block, block, window))
    return context.reshape(batch, -1, heads, head_dim)[:, :seq], statistics.reshape(batch, heads, -1)[..., :seq]


def backward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    context: Float[Array, "batch seq heads head_dim"],
    statistics: Float[Array, "batch heads seq"],
    cotangent: Float[Array, "batch seq heads head_dim"],
    window: int | None,
    block: int = BLOCK,
) -> tuple[Array, Array, Array]:
    """The cotangents of q, k and v from that of the context and what `forward` returned."""
    seq, groups, block, wide = q.shape[1], k.shape[2], min(block, q.shape[1]), _accumulator(q)
    shapes, dtype, scale = (q.shape, k.shape, v.shape), q.dtype, 1 / math.sqrt(q.shape[-1])
    dot = (context.astype(wide) * cotangent.astype(wide)).sum(-1).transpose(0, 2, 1)  # rowsum(o do), as [batch, heads, seq]
    dot, statistics = (_grouped_rows(x, groups, block) for x in (dot, statistics.astype(wide)))
    q, cotangent = (_split_heads(_pad(x, block), groups) for x in (q, cotangent))
    k, v = _pad(k, block), _pad(v, block)

    def step(carry, pair):
        dq, dk, dv, *running = carry
        i, j, rows = _tied(pair, _take(statistics, pair[0], block, 3))
        dk_j, dv_j = (jnp.where(i == j, 0, x) for x in running)
        p = jnp.exp(_scores(q, k, i, j, block, window, wide) - rows[..., None])
        d, vj = _take(cotangent, i, block, 1), _take(v, j, block, 1)
        dv_j += jnp.einsum("bkgqs,bqkgh->bskh", p.astype(dtype), d, preferred_element_type=wide)
        dp = jnp.einsum("bqkgh,bskh->bkgqs", d, vj, preferred_element_type=wide)
        ds = (p * (dp - _take(dot, i, block, 3)[..., None]) * scale).astype(dtype)
        dk_j += jnp.einsum("bkgqs,bqkgh->bskh", ds, _take(q, i, block, 1), preferred_element_type=wide)
        dq_i = _take(dq, i, block, 1) + jnp.einsum("bkgqs,bskh->bqkgh", ds, _take(k, j, block, 1), preferred_element_type=wide)
        dk, dv = _put(dk, dk_j.astype(dtype), j, block, 1), _put(dv, dv_j.astype(dtype), j, block, 1)
        return (_put(dq, dq_i, i, block, 1), dk, dv, dk_j, dv_j), None

    column = jnp.zeros((k.shape[0], block, *k.shape[2:]), wide)
    start = jnp.zeros(q.shape, wide), jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype), column, column
    by_column = sorted(zip(*_pairs(k.shape[1] // block, block, window), strict=True), key=lambda pair: (pair[1], pair[0]))
    grads, _ = jax.lax.scan(step, start, tuple(np.array(by_column, np.int32).T))
    dq, dk, dv = (g.reshape(s[0], -1, *s[2:])[:, :seq].astype(dtype) for g, s in zip(grads[:3], shapes, strict=True))
    return dq, dk, dv


def _pairs(count: int, block: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Indices (row block, column block) that hold at least one unmasked score, the diagonal of each row first."""
    pairs = [
        (i, j) for i in range(count) for j in range(i, -1, -1) if window is None or (i - j) * block - (block - 1) < window
    ]  # fmt: skip
    rows, columns = np.array(pairs, np.int32).T
    return rows, columns


def _tied(pair, rows):
    """The pair's two indices and ``rows``, as they are. So tied to the data, the mask is made block by block: alone it is known before
    the step runs, and jax would make it for all blocks, batch and heads at once (1.2 GB for 4 sequences of 4096 and 32 heads)."""
    return jax.lax.optimization_barrier((*pair, rows))


def _scores(q, k, i, j, block, window, wide):
    """Scaled scores of row block ``i`` against column block ``j``, minus infinity where the mask forbids."""
    qi, kj = _take(q, i, block, 1), _take(k, j, block, 1)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", qi, kj, preferred_element_type=wide) / math.sqrt(q.shape[-1])
    # Rows and columns past the end of the sequence need no mask: a real row never sees a later column, and padded rows are cut off.
    behind = (i - j) * block + jnp.arange(block, dtype=jnp.int32)[:, None] - jnp.arange(block, dtype=jnp.int32)[None, :]
    allowed = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return jnp.where(allowed, scores, -jnp.inf)


def _accumulator(q):
    return jnp.promote_types(q.dtype, jnp.float32)


def _pad(x, block):
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)])


def _split_heads(x, kv_heads):
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])


def _grouped_rows(x, kv_heads, block):
    """[batch, heads, seq] as [batch, kv_heads, group, padded seq]."""
    x = x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])
    return jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % block)])


def _rows_first(x):
    """[batch, kv_heads, group, rows] as [batch, rows, kv_heads, group], the order of the context."""
    return x.transpose(0, 3, 1, 2)


def _take(x, index, block, axis):
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _put(x, update, index, block, axis):
    return jax.lax.dynamic_update_slice_in_dim(x, update, index * block, axis)
