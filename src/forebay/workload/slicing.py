"""Can a program be run slice by slice along one axis of its arrays, and how.

An optimizer's update of a stacked leaf ``[L, ...]`` is nearly always independent along ``L``. Each equation is given a
rule that says on which axis of its results the streamed axis stands, or that it *reduces* over it:

    axis(out) = rule(eqn, axes of the operands)      None: the value is the same for every slice
    reduce_sum over the streamed axis   -> a partial result per slice, to be summed over the slices

An operand that is not streamed but spans the axis (a mask, a constant) is cut at the slice's position when it is used.
What has no rule raises ``NotSeparable`` with the primitive's name: such an update moves whole.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from jax import lax

from forebay.workload import jaxprs

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz convert_element_type copy
    copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma imag integer_pow is_finite le lgamma log
    log1p logistic lt max min mul name ne neg nextafter not optimization_barrier or polygamma population_count pow real reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor random_gamma""".split()
)
REDUCTIONS = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or, "dot_general": lax.add,
}  # fmt: skip
ALONG = ("argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "split")
BATCHED = ("eigh", "qr", "svd", "cholesky", "triangular_solve", "lu", "householder_product", "geqrf", "schur", "eig")

Axes = Sequence[int | None] | Literal["reduce"]


class NotSeparable(Exception):
    """The program mixes the slices along the streamed axis; the text says which equation does."""


def out_axes(eqn, axes: Sequence[int | None]) -> Axes:
    """The streamed axis of each result, or ``"reduce"`` where the equation reduces over it.

    ``axes`` holds the streamed axis of each operand (None: not streamed); at least one is streamed.
    """
    name, params = eqn.primitive.name, eqn.params
    axis, shape = next((a, v.aval.shape) for a, v in zip(axes, eqn.invars, strict=True) if a is not None)
    if name in ELEMENTWISE:
        return _elementwise(eqn, axes)
    if name == "dot_general":
        return _dot_general(eqn, axes)
    if name in REDUCTIONS or name in ("argmax", "argmin"):
        if axis in params["axes"]:
            return _refuse(eqn, "picks one position of it") if name.startswith("arg") else "reduce"
        return [axis - sum(d < axis for d in params["axes"])]
    if name == "broadcast_in_dim":
        return [params["broadcast_dimensions"][axis]]
    if name == "reshape":
        return [_reshaped(eqn, shape, params["new_sizes"], axis)]
    if name == "squeeze":
        dims = [d % len(shape) for d in params["dimensions"]]
        return _refuse(eqn, "drops it") if axis in dims else [axis - sum(d < axis for d in dims)]
    if name == "expand_dims":
        return [axis + sum(d <= axis for d in sorted(params["dimensions"]))]
    if name == "transpose":
        return [params["permutation"].index(axis)]
    if name == "concatenate":
        return _refuse(eqn, "joins along it") if params["dimension"] == axis or len(set(axes) - {None}) > 1 else [axis]
    if name == "slice":
        return [axis] if _keeps_all(params, shape, axis) else _refuse(eqn, "cuts it")
    if name == "pad":
        return [axis] if tuple(params["padding_config"][axis]) == (0, 0, 0) else _refuse(eqn, "pads it")
    if name in ALONG:
        where = params.get("axis", params.get("dimension", params.get("dimensions")))
        along = axis in where if isinstance(where, tuple) else axis == where
        return _refuse(eqn, "runs along it") if along else [axis] * len(eqn.outvars)
    if name in BATCHED:
        return [axis] * len(eqn.outvars) if axis < len(shape) - 2 else _refuse(eqn, "factorises across it")
    if name == "scan":
        return _scan_axes(eqn, axes)
    return _refuse(eqn, "has no rule for it")


def _keeps_all(params, shape, axis) -> bool:
    """Whether a ``slice`` takes every position of an axis."""
    first, limit = params["start_indices"][axis], params["limit_indices"][axis]
    return first == 0 and limit == shape[axis] and (params["strides"] is None or params["strides"][axis] == 1)


def _refuse(eqn, why: str) -> NoReturn:
    raise NotSeparable(f"{eqn.primitive.name} at {jaxprs.source_line(eqn) or 'an unknown line'} {why}")


def _elementwise(eqn, axes):
    rank = len(eqn.outvars[0].aval.shape)
    found = {a for a in axes if a is not None}
    for a, v in zip(axes, eqn.invars, strict=True):
        if a is not None and len(v.aval.shape) != rank:
            _refuse(eqn, "mixes shapes")
    if eqn.primitive.name == "optimization_barrier":
        return list(axes)
    if len(found) != 1:
        _refuse(eqn, "meets two different axes")
    return [found.pop()] * len(eqn.outvars)


def _dot_general(eqn, axes):
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = axes
    ranks = [len(v.aval.shape) for v in eqn.invars]
    if lhs in lhs_batch or rhs in rhs_batch:
        at = {b.index(a) for a, b in ((lhs, lhs_batch), (rhs, rhs_batch)) if a is not None and a in b}
        same = all(a is None or a in b for a, b in ((lhs, lhs_batch), (rhs, rhs_batch)))
        return [at.pop()] if len(at) == 1 and same else _refuse(eqn, "meets two different axes")
    if lhs in lhs_contract or rhs in rhs_contract:
        at = {c.index(a) for a, c in ((lhs, lhs_contract), (rhs, rhs_contract)) if a is not None and a in c}
        same = all(a is None or a in c for a, c in ((lhs, lhs_contract), (rhs, rhs_contract)))
        return "reduce" if len(at) == 1 and same else _refuse(eqn, "meets two different axes")
    if lhs is not None and rhs is not None:
        _refuse(eqn, "makes an outer product over it")
    free = [d for d in range(ranks[0]) if d not in lhs_contract and d not in lhs_batch]
    if lhs is not None:
        return [len(lhs_batch) + free.index(lhs)]
    assert rhs is not None, "one operand is streamed"
    right = [d for d in range(ranks[1]) if d not in rhs_contract and d not in rhs_batch]
    return [len(lhs_batch) + len(free) + right.index(rhs)]


def _reshaped(eqn, old, new, axis):
    """Where the axis stands after a reshape: alone, or merged with axes behind it (a slice is then a block)."""
    before = math.prod(old[:axis])
    for at, size in enumerate(new):
        merged = [math.prod(old[axis:end]) for end in range(axis + 1, len(old) + 1)]
        if math.prod(new[:at]) == before and size in merged:
            return at
    return _refuse(eqn, "reshapes it away")


def _scan_axes(eqn, axes):
    """Streamed axes through a loop that does not run along the streamed axis: the carry's axes are a fixed point."""
    loop = jaxprs.loop_of(eqn)
    head, xs = list(axes[: loop.consts + loop.carry]), axes[loop.consts + loop.carry :]
    if any(a == 0 for a in xs):
        _refuse(eqn, "loops along it")
    inner_xs = [None if a is None else a - 1 for a in xs]
    for _ in range(loop.carry + 1):
        outs = propagate(loop.body, [*head, *inner_xs])
        carry = [o if o is not None else h for o, h in zip(outs[: loop.carry], head[loop.consts :], strict=True)]
        if carry == head[loop.consts :]:
            return [*carry, *(None if o is None else o + 1 for o in outs[loop.carry :])]
        head[loop.consts :] = carry
    return _refuse(eqn, "has a carry whose axis changes")


def propagate(jaxpr, in_axes: Sequence[int | None]) -> list[int | None]:
    """Streamed axes of a whole jaxpr's results; raises NotSeparable, also where anything reduces over the axis."""
    env: dict[Any, int | None] = dict(zip(jaxpr.jaxpr.invars, in_axes, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        axes = [None if jaxprs.is_literal(v) else env.get(v) for v in eqn.invars]
        if all(a is None for a in axes):
            continue
        outs = out_axes(eqn, axes)
        if outs == "reduce":
            _refuse(eqn, "reduces over it inside a loop")
        env.update(zip(eqn.outvars, outs, strict=True))
    return [None if jaxprs.is_literal(v) else env.get(v) for v in jaxpr.jaxpr.outvars]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The slice at hand: ``size`` of ``total`` positions of the streamed axis, from ``start`` (traced) on."""

    start: Any
    size: int
    total: int

    def cut(self, value, axis: int):
        """The part of a whole array that belongs to this slice; the axis may be ``total`` times a block long."""
        block = value.shape[axis] // self.total
        return lax.dynamic_slice_in_dim(value, self.start * block, self.size * block, axis=axis)


def bind(eqn, values: Sequence[Any], axes: Sequence[int | None], outs: Axes, window: Window) -> list[Any]:
    """Evaluate ``eqn`` on one slice: streamed operands are slices already, others are cut where they span the axis."""
    if eqn.primitive.name == "scan":
        return _bind_scan(eqn, values, axes, window)
    values = [_cut(eqn, k, v, axes, window) for k, v in enumerate(values)]
    key = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}.get(eqn.primitive.name)
    if key is None or outs == "reduce":
        return jaxprs.bind(eqn, values)
    sizes, at = list(eqn.params[key]), outs[0]
    assert at is not None, "one axis of the result is streamed"
    sizes[at] = sizes[at] * window.size // window.total
    return jaxprs.bind(eqn.replace(params={**eqn.params, key: tuple(sizes)}), values)


def _cut(eqn, k, value, axes, window):
    """Cut operand ``k``, which is not streamed, where it spans the streamed axis of its streamed fellow."""
    name = eqn.primitive.name
    if axes[k] is not None or not eqn.invars[k].aval.shape:
        return value
    fellow = next(i for i, a in enumerate(axes) if a is not None)
    if name in ELEMENTWISE or name == "concatenate":
        return value if value.shape[axes[fellow]] == 1 else window.cut(value, axes[fellow])  # a length of one is broadcast
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        pair = next((p for p in (batch, contract) if axes[fellow] in p[fellow]), None)
        return value if pair is None else window.cut(value, pair[k][list(pair[fellow]).index(axes[fellow])])
    return value


def _bind_scan(eqn, values, axes, window):
    loop = jaxprs.loop_of(eqn)
    head = loop.consts + loop.carry
    carry_axes = _scan_axes(eqn, axes)[: loop.carry]
    # A carry that becomes streamed only inside the loop starts as a whole value: cut it.
    carry = [
        window.cut(value, into) if given is None and into is not None else value
        for value, given, into in zip(values[loop.consts : head], axes[loop.consts : head], carry_axes, strict=True)
    ]
    inner = [*axes[: loop.consts], *carry_axes, *(None if a is None else a - 1 for a in axes[head:])]

    def body(carry, xs):
        out = run(loop.body, [*values[: loop.consts], *carry, *xs], inner, window)
        return out[: loop.carry], out[loop.carry :]

    last, ys = lax.scan(body, carry, list(values[head:]), length=loop.length, reverse=loop.reverse, unroll=loop.unroll)
    return [*last, *ys]


def run(jaxpr, values: Sequence[Any], in_axes: Sequence[int | None], window: Window) -> list[Any]:
    """Evaluate a whole separable jaxpr on one slice."""
    axis_of: dict[Any, int | None] = dict(zip(jaxpr.jaxpr.invars, in_axes, strict=True))

    def rule(eqn, inputs):
        axes = [None if jaxprs.is_literal(v) else axis_of.get(v) for v in eqn.invars]
        if all(a is None for a in axes):
            return None
        outs = out_axes(eqn, axes)
        assert outs != "reduce", "a separable program does not reduce over the axis"
        axis_of.update(zip(eqn.outvars, outs, strict=True))
        return bind(eqn, inputs, axes, outs, window)

    return jaxprs.evaluate(jaxpr, values, rule)
