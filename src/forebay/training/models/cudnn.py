"""The door to cuDNN's fused attention: the two XLA custom calls, written out, with nothing that needs a device.

``jax.nn.dot_product_attention(implementation="cudnn")`` asks for the devices of the program while lowering, so it refuses
an abstract mesh, and it leaves its softmax statistics unnamed, so a rematerialised backward pass runs the forward kernel again.
XLA itself needs neither: its cuDNN fMHA calls take q, k, v and a JSON configuration (the protobuf
``xla.gpu.CudnnfMHABackendConfig`` in its JSON form), and XLA fills in the workspace and the plan when it compiles.

    __cudnn$fmhaSoftmax          (q, k, v)                       -> (context, statistics, workspace)
    __cudnn$fmhaSoftmaxBackward  (q, k, v, statistics, d, context) -> (dq, dk, dv, workspace)

Arrays are [batch, sequence, heads, head_dim]; the results are written [batch, heads, ...] with the layout of the former, so the
transposes below cost nothing. The statistics are the log-sum-exp of the scaled scores, float32 [batch, heads, sequence].

Known limits: causal attention only, bfloat16 or float16, head_dim a multiple of 8 and at most 128 (256 from Hopper on).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
DTYPES = {"bfloat16": "BF16", "float16": "F16"}
# (contracting of the left, of the right, batch of the left, of the right) with q, k, v as [batch, sequence, heads, head_dim] and the
# scores as [batch, heads, sequence, sequence].
_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
    "bmm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
}
_SEQUENCE_MAJOR = (0, 2, 1, 3)  # [batch, heads, sequence, head_dim] stored as [batch, sequence, heads, head_dim]


def forward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    window: int | None,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Causal attention and its softmax statistics; ``window`` limits it to that many last positions."""
    batch, seq, heads, head_dim = q.shape
    results = [
        jax.ShapeDtypeStruct((batch, heads, seq, head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    ]
    call = _call(FORWARD, results, [_SEQUENCE_MAJOR, None, None], _backend_config(q, k, window, _FORWARD_PRODUCTS))
    context, statistics, _ = call(q, k, v)
    return context.transpose(_SEQUENCE_MAJOR), statistics


def backward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    context: Float[Array, "batch seq heads head_dim"],
    statistics: Float[Array, "batch heads seq"],
    cotangent: Float[Array, "batch seq heads head_dim"],
    window: int | None,
) -> tuple[Array, Array, Array]:
    """The cotangents of q, k and v from that of the context and what `forward` returned."""
    results = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v)]
    results.append(jax.ShapeDtypeStruct((0,), jnp.uint8))
    layouts = [_SEQUENCE_MAJOR] * 3 + [None]
    call = _call(BACKWARD, results, layouts, _backend_config(q, k, window, _BACKWARD_PRODUCTS))
    dq, dk, dv, _ = call(q, k, v, statistics, cotangent, context)
    return dq.transpose(_SEQUENCE_MAJOR), dk.transpose(_SEQUENCE_MAJOR), dv.transpose(_SEQUENCE_MAJOR)


def _call(target: str, results: list, layouts: list, config: dict):
    return jax.ffi.ffi_call(
        target,
        results,
        output_layouts=layouts,
        vmap_method="sequential",
        custom_call_api_version=2,  # the calls that XLA's own cuDNN rewriter emits; not the typed FFI
        legacy_backend_config=json.dumps(config),
    )


def _backend_config(q: Array, k: Array, window: int | None, products: dict) -> dict:
    batch, seq, heads, head_dim = q.shape
    scores = {
        "element_type": DTYPES[str(q.dtype)],
        "dimensions": [str(n) for n in (batch, heads, seq, k.shape[1])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1 / math.sqrt(head_dim),
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL",
        "dropout_rate": 0.0,
        "seed": 0,
        "sliding_window_length": window or 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention | {n: _product(*p) for n, p in products.items()}}


def _product(left: int, right: int, left_batch: tuple[int, int], right_batch: tuple[int, int]) -> dict:
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": [str(i) for i in left_batch],
        "rhs_batch_dimensions": [str(i) for i in right_batch],
    }
