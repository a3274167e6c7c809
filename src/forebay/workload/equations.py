"""What one equation costs: floating-point operations, bytes through memory, bytes of explicit collectives. Global shapes.

    matrix product    2 M N K per batch element           inputs + outputs
    convolution       2 x outputs x taps x channels       inputs + outputs
    reduction         1 per input element                 outputs
    elementwise       1 per output element                outputs (a fusion reads what the one before it wrote)
    free              0                                   0: casts, broadcasts, reshapes, transposes, slices, constants
    a call            its inner equations, times the trips of a scan or the devices of a shard_map; of a conditional the dearest branch
    attention         a call with two products around an exponential: its inner flops; inputs + outputs, as a fused kernel moves

Limits: a ``while`` of unknown length counts once. A custom call has no equations inside: cuDNN attention is known by its name and by
its mask; any other costs its bytes alone. Work that a kernel skips by a mask is counted if its equations do not skip it.
"""

import dataclasses
import math
from typing import Any

from forebay.workload import jaxprs
from forebay.workload.sharding import nbytes

FREE = frozenset(
    {
        "convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "split", "unstack", "rev",
        "copy", "copy_p", "reduce_precision", "bitcast_convert_type", "stop_gradient", "pvary", "pcast", "iota", "name", "empty",
    }
)  # fmt: skip
LINEAR = FREE | {"add", "add_any", "sub", "neg", "reduce_sum", "concatenate", "pad", "sharding_constraint"}  # derivatives read no input
_COLLECTIVES = ("psum", "all_gather", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "pmax", "pmin", "ragged_all_to_all")
_MOVES = (
    "gather",
    "scatter",
    "scatter-add",
    "dynamic_slice",
    "dynamic_update_slice",
    "concatenate",
    "pad",
    "sharding_constraint",
    "select_n",
)
_REDUCTIONS = ("reduce_", "arg", "cum")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one equation. ``kind``: ``matmul attention elementwise other free``."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    collective_bytes: float = 0.0
    kind: str = "free"


def cost_of(eqn) -> Cost:
    """The cost of an equation with everything inside it."""
    name = eqn.primitive.name
    if name in FREE:
        return Cost()
    if (inner := _inner_cost(eqn)) is not None:
        return inner
    if name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"):
        return Cost(flops=_products(eqn), moved_bytes=_all_bytes(eqn), kind="matmul")
    if _is_kernel(eqn):
        return Cost(flops=_attention(eqn), moved_bytes=_all_bytes(eqn), kind="attention")
    if name.startswith(_COLLECTIVES):
        return Cost(moved_bytes=_all_bytes(eqn), collective_bytes=_largest(eqn), kind="other")
    if name in _MOVES:
        return Cost(moved_bytes=_bytes(eqn.outvars), kind="elementwise" if name == "select_n" else "other")
    if name in ("ffi_call", "custom_call", "sort", "top_k") or not eqn.outvars:
        return Cost(moved_bytes=_all_bytes(eqn), kind="other")
    sized = eqn.invars if name.startswith(_REDUCTIONS) else eqn.outvars
    return Cost(flops=float(max((_size(v) for v in sized), default=0)), moved_bytes=_bytes(eqn.outvars), kind="elementwise")


def total(jaxpr) -> Cost:
    """The sum over the equations of a jaxpr."""
    return _sum([cost_of(eqn) for eqn in jaxprs.closed(jaxpr).jaxpr.eqns], 1)


def sees_attention(jaxpr) -> bool:
    """Whether a jaxpr holds products around an exponential, or a kernel known to be attention."""
    products = _count(jaxpr, lambda eqn: eqn.primitive.name == "dot_general")
    around = products >= 2 and _count(jaxpr, lambda eqn: eqn.primitive.name in ("exp", "exp2")) > 0
    return around or _count(jaxpr, _is_kernel) > 0


def _is_kernel(eqn) -> bool:
    called = str(eqn.params.get("target_name", eqn.params.get("call_target_name", "")))
    return "dot_product_attention" in eqn.primitive.name or "fmha" in called


def _count(jaxpr, wanted) -> int:
    inner = jaxprs.closed(jaxpr).jaxpr.eqns
    return sum((1 if wanted(eqn) else 0) + sum(_count(part, wanted) for part in jaxprs.inner_jaxprs(eqn)) for eqn in inner)


def _inner_cost(eqn) -> Cost | None:
    """The cost of an equation that runs jaxprs, or None."""
    parts = list(jaxprs.inner_jaxprs(eqn))
    name = eqn.primitive.name
    if not parts or name.startswith(("reduce", "scatter", "sort", "custom_lin")):
        return None
    costs = [total(part) for part in parts]
    if name == "cond":
        cost = max(costs, key=lambda c: (c.flops, c.moved_bytes))
    elif name == "custom_jvp_call" or name.startswith("custom_vjp"):
        cost = costs[0]  # the primal; the others are its rules
    else:
        cost = _sum(costs, _times(eqn))
    return dataclasses.replace(cost, **_as_called(eqn, parts, cost))


def _times(eqn) -> int:
    name = eqn.primitive.name
    if name == "scan":
        return eqn.params["length"]
    if name == "shard_map":
        mesh, manual = eqn.params["mesh"], eqn.params.get("manual_axes")
        return math.prod(n for axis, n in mesh.shape.items() if not manual or axis in manual)
    if name == "pallas_call":
        return math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return 1


def _as_called(eqn, parts, cost: Cost) -> dict[str, Any]:
    if cost.kind == "attention" or any(sees_attention(part) for part in parts):
        return {"kind": "attention", "moved_bytes": _all_bytes(eqn)}
    return {"moved_bytes": _all_bytes(eqn)} if eqn.primitive.name == "pallas_call" else {}


def _sum(costs: list[Cost], times: int) -> Cost:
    kinds = {c.kind for c in costs}
    kind = next((k for k in ("attention", "matmul", "other", "elementwise") if k in kinds), "free")
    return Cost(
        flops=times * sum(c.flops for c in costs),
        moved_bytes=times * sum(c.moved_bytes for c in costs),
        collective_bytes=times * sum(c.collective_bytes for c in costs),
        kind=kind,
    )


def _products(eqn) -> float:
    out = float(_size(eqn.outvars[0]))
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        taps = math.prod(kernel[axis] for axis in numbers.rhs_spec[2:])
        return 2.0 * out * taps * kernel[numbers.rhs_spec[1]]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return 2.0 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _attention(eqn) -> float:
    """Four per query, visible key and element of a head: queries [b, t, n, h] (or [b, n, t, h]) and keys alike, read by position."""
    query, key = (v.aval.shape for v in eqn.invars[:2])
    if len(query) != 4:
        return 0.0
    rows = 2 if str(eqn.params.get("layout", "")) in ("1", "BNTH") else 1
    visible = 0.5 if "CAUSAL" in str(eqn.params) else 1.0
    return 4.0 * visible * math.prod(query) * key[rows]


def _size(v) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def _bytes(variables) -> float:
    return float(sum(value_bytes(v) for v in variables))


def value_bytes(v) -> int:
    """Bytes of a variable or literal; a reference (inside a kernel) counts as its array, a token as nothing."""
    aval = getattr(v.aval, "inner_aval", v.aval)
    return nbytes(aval.shape, aval.dtype) if hasattr(aval, "shape") and hasattr(aval, "dtype") else 0


def _all_bytes(eqn) -> float:
    return _bytes(eqn.invars) + _bytes(eqn.outvars)


def _largest(eqn) -> float:
    return float(max((value_bytes(v) for v in (*eqn.invars, *eqn.outvars)), default=0))
