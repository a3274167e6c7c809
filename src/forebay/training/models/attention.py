"""Causal attention that never holds a sequence x sequence matrix, on any target: one function, one traced program.

Which kernel runs is settled when the program is lowered, by `jax.lax.platform_dependent`: cuDNN for CUDA (`cudnn`), the blockwise
form elsewhere (`blockwise`). Both give the same context and the same statistics (log-sum-exp), so either backward pass fits.

The custom derivative is outermost; on a mesh its two rules run per device under `jax.shard_map`, because XLA cannot partition a
custom call. The rules name what the backward pass reads, ``attn_context`` and ``attn_stats``, *on the residuals themselves*:

    q, k, v ---forward kernel---> name(context), name(stats) ---> (context, residuals = q, k, v, context, stats)

Saving or offloading both names under `jax.checkpoint` therefore leaves nothing that needs the forward kernel a second time; saving
the context alone would run it again for the statistics.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
from jax.ad_checkpoint import checkpoint_name

from forebay.errors import InputError
from forebay.training.models import blockwise, cudnn
from forebay.training.models.layout import Layout, current

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_HEADS, _ROWS = ("batch", None, "heads", None), ("batch", "heads", None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """All that a kernel needs to know besides arrays."""

    kernel: str
    window: int | None
    layout: Layout
    block: int


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    kernel: str,
    window: int | None = None,
    block: int = blockwise.BLOCK,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention with scale 1/sqrt(head_dim); each group of heads / kv_heads query heads shares a key/value head.

    ``kernel`` is ``cudnn`` (on CUDA targets; blockwise elsewhere) or ``blockwise``. ``window`` limits each position to that many
    last ones, itself included. The batch is split over the mesh of the context, see `layout`.

    Raises:
        InputError: cuDNN was asked for a dtype that it has no kernel for.
    """
    if kernel == "cudnn" and str(q.dtype) not in cudnn.DTYPES:
        raise InputError(f"cuDNN attention is for {' and '.join(cudnn.DTYPES)}; these queries are {q.dtype}. Use kernel='blockwise'")
    if window is not None and window >= q.shape[1]:
        window = None
    layout = current(q.shape[0], k.shape[2])
    return _attention(_Static(kernel=kernel, window=window, layout=layout, block=block), q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q: Array, k: Array, v: Array) -> Array:
    return _forward(static, q, k, v)[0]


def _forward(static: _Static, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    kernels = _by_platform(static, cudnn.forward, blockwise.forward)
    return static.layout.per_device(kernels, (_HEADS, _HEADS, _HEADS), (_HEADS, _ROWS))(q, k, v)


def _forward_rule(static: _Static, q: Array, k: Array, v: Array):
    context, statistics = _forward(static, q, k, v)
    context, statistics = checkpoint_name(context, "attn_context"), checkpoint_name(statistics, "attn_stats")
    return context, (q, k, v, context, statistics)


def _backward_rule(static: _Static, residuals: tuple, cotangent: Array):
    kernels = _by_platform(static, cudnn.backward, blockwise.backward)
    ins = (_HEADS, _HEADS, _HEADS, _HEADS, _ROWS, _HEADS)
    return static.layout.per_device(kernels, ins, (_HEADS, _HEADS, _HEADS))(*residuals, cotangent)


_attention.defvjp(_forward_rule, _backward_rule)


def _by_platform(static: _Static, fused, plain):
    plain = functools.partial(plain, window=static.window, block=static.block)
    if static.kernel == "blockwise":
        return plain
    fused = functools.partial(fused, window=static.window)
    return lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=fused, default=plain)
