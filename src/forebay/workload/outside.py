"""What differentiation keeps outside of the layer loops: the logits, a final norm, all of a model that has no loop.

The program around the loops is a body that runs once. It is read as a loop's body is (``residuals``), with the loops as opaque equations:

    embed, loop(x, w), norm, head, loss    ->    marked: embed, m0, loop, m1 (its result), norm, m2, head, m3, ...
    kept = what the backward pass of all but the loops reads, and those constants and scanned inputs of the loops that theirs reads

The first carry of a loop is not among them: the loop keeps it as the first of its stack of carries. Names are made as in a loop, but for
their numbers: those count what is kept alone.

Left out: what is made from parameters alone; scalars; and whatever is smaller than both ``WORTH_A_LINE`` and a thousandth of the largest
value found, too little to decide anything.

Cost: one more trace of the equations around the loops and of their derivative (of a model without loops: of all of it, half as much again
as the rest of the trace). Limits: nothing found here can be placed. The program keeps, offloads or recomputes it as it is written: the
runtime rewrites loops only. XLA may keep less: it makes cheap values again inside the kernels that read them.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from forebay.workload import jaxprs, program, residuals, sharding, slicing
from forebay.workload.marking import Origin

WORTH_A_LINE = 2**20
_UNNAMED = re.compile(r"(.+?)/(\d+)((?:\.\d+)?(?:/\d+)?)")  # function/primitive, which of them, which result or saved value of it
_SHARE = 1e-3
WHY_NOT = "outside the layer loops it stays as the model has it (a jax.checkpoint there, or a loop over chunks, would change that)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outside:
    """``body`` holds the residuals worth a line; ``batched``: the marks of those that have the batch's rows on one of their axes."""

    body: residuals.Body
    batched: frozenset[str]


def discover(traced: program.Program, args: program.Arguments, mesh) -> Outside:
    """What stands around the loops of ``traced``; ``mesh`` is the AbstractMesh it was traced on, or None."""
    count, jaxpr = len(traced.stored), traced.jaxpr
    once = jaxprs.Loop(consts=0, carry=0, length=1, reverse=False, unroll=1, body=jaxpr)
    trained = tuple(k < count for k in range(len(jaxpr.in_avals)))
    opaque = [(loop.equation, loop.body.reads) for loop in traced.loops if loop.equation.outvars]
    with program.on_mesh(mesh):
        body = residuals.discover(once, Origin(source="", function=""), trained, trained, opaque)
    found = [r for r in body.residuals if r.held and not r.weights_only and math.prod(r.shape) > 1]
    size = {r.mark: sharding.nbytes(r.shape, r.dtype) for r in found}
    least = min(WORTH_A_LINE, _SHARE * max(size.values(), default=0))
    listed = tuple(r for r in found if size[r.mark] >= least)
    paths = _paths(found, {r.path for loop in traced.loops for r in loop.body.residuals})
    first = count + len(jax.tree.leaves(args.extra))
    rows = range(first, first + len(jax.tree.leaves(args.batch)))
    return Outside(
        body=residuals.renamed(dataclasses.replace(body, residuals=listed), paths),
        batched=_batched(body.flat.jaxpr, rows) & {r.mark for r in listed},
    )


def _paths(found: list[residuals.Residual], taken: set[str]) -> dict[str, str]:
    """The path of each mark: told apart from those of loops, and a user's name on values that are not alike numbered.

    What has no name is numbered among what is kept alone, so that a new metric moves no name.
    """
    known: dict[str, dict[Any, int]] = {}
    inside = {path if (parts := _UNNAMED.fullmatch(path)) is None else parts[1] for path in taken}
    paths = {}
    for r in found:
        if not r.user_named and (parts := _UNNAMED.fullmatch(r.path)):
            base, which, rest = parts.groups()
            number = _numbered(known, base, which)
            path = f"{base}/{number}{rest}"
        else:
            base = r.path
            number = _numbered(known, base, (r.shape, r.dtype, r.written))
            path = f"{base}/{number}" if number else base
        paths[r.mark] = f"{path}/outside" if base in inside else path
    return paths


def _numbered(known: dict[str, dict[Any, int]], base: str, which: Any) -> int:
    numbers = known.setdefault(base, {})
    return numbers.setdefault(which, len(numbers))


def _batched(jaxpr, rows: range) -> frozenset[str]:
    """The marks of values that have the batch's rows on one of their axes; ``rows``: the operands that are the batch."""
    axes: dict[Any, int] = {jaxpr.invars[k]: 0 for k in rows if jaxpr.invars[k].aval.shape}
    marks = set()
    for eqn in jaxpr.eqns:
        given = [None if jaxprs.is_literal(v) else axes.get(v) for v in eqn.invars]
        if all(axis is None for axis in given):
            continue
        axes.update((v, axis) for v, axis in zip(eqn.outvars, _axes_of(eqn, given), strict=True) if axis is not None)
        if eqn.primitive.name == "name" and eqn.outvars[0] in axes:
            marks.add(eqn.params["name"])
    return frozenset(marks)


def _axes_of(eqn, given: list[int | None]) -> list[int | None]:
    """The axis of each result that has the rows; of an equation without a rule, its first axis where that is as long as before."""
    try:
        found = slicing.out_axes(eqn, given)
    except slicing.NotSeparable:
        leading = {v.aval.shape[0] for v, axis in zip(eqn.invars, given, strict=True) if axis == 0}
        return [0 if v.aval.shape[:1] and v.aval.shape[0] in leading else None for v in eqn.outvars]
    return [None] * len(eqn.outvars) if isinstance(found, str) else list(found)
