"""Which values of a loop's body differentiation keeps, each with a name a person can use.

The body is written out flat and every value in it is given a marker (``marking``). What differentiating it saves is a marker, or is made
from markers inside the derivative rule of one equation:

    flat   = body with nested jits and checkpoints written out, each result marked  m0, m1, ...
    needed = {the markers nearest to each residual of vjp(flat), on the way back to what it is made from}
    kept   = needed, folded into the few values from which the rest costs nothing (``folding``)

An equation of the body may be *opaque*, a loop that has a body of its own: it is not differentiated. Its results are new inputs, its
operands new results of the flat body, and those of them that its own backward pass reads are asked for beside the markers.

Only what depends on trained parameters is differentiated. Markers that are the same value (a name on the loop's carry, a name on a name)
are one residual, marked where it is first made: a value named after its first use stays alive twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forebay.workload import jaxprs, recompute
from forebay.workload.equations import value_bytes
from forebay.workload.folding import Table
from forebay.workload.marking import Marked, Origin, mark_body


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A value of one loop body. ``path`` is the user's name or ``Block.attention/dot_general/0``; ``aliases`` are further names of the
    user's on values that cost nothing to make from it.

    ``written`` is what the program does with it by itself: ``hbm``, ``host`` or ``recompute``. ``needed``: keeping it saves
    work in the backward pass; False for a value that the user named but that only leaves the body (a block's output).
    ``read``: the backward pass reads it, or what is free to make from it; ``held``: it does, or a checkpoint of the user's starts from it
    when it recomputes what is read. ``carry``: it is the loop's own carry, from which everything
    recomputed starts. ``weights_only``: made from parameters alone. ``node`` is its place in the recompute graph, -1 for the carry.
    """

    path: str
    mark: str
    shape: tuple[int, ...]
    dtype: Any
    written: str
    needed: bool
    read: bool
    held: bool
    carry: bool
    weights_only: bool
    user_named: bool
    source: str
    aliases: tuple[str, ...] = ()
    node: int = -1
    born: int = 0
    dies: int = 0
    consumers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Body:
    """A loop body written out flat, with a mark on every value, its residuals, and the graph of what each value is made from.

    ``reads``: the operands of the body, other than the carry, that its backward pass reads as the program is written.
    """

    flat: Any
    residuals: tuple[Residual, ...]
    nodes: tuple[recompute.Node, ...]
    reads: tuple[int, ...] = ()


def discover(
    loop: jaxprs.Loop,
    origin: Origin,
    weights: tuple[bool, ...],
    active: tuple[bool, ...],
    opaque: Sequence[tuple[Any, tuple[int, ...]]] = (),
) -> Body:
    """Find the residuals of ``loop.body``.

    ``origin`` is the loop's own place in the source; ``weights[i]``: scanned input i is a parameter; ``active[i]``: operand i of the
    body depends on trained parameters. ``opaque``: equations of the body that have bodies of their own, each with the operands that its
    backward pass reads.
    """
    marked = mark_body(loop, origin, active, [eqn for eqn, _ in opaque])
    table = Table(marked, (loop.consts, loop.carry), weights)
    names, operands = _needed(marked.flat, active, table.shut)
    held = _held_at_borders(marked, names)
    for mark in [m for m, known in marked.marks.items() if known.border and m not in held]:
        table.marks[table.of_mark[mark]].remove(mark)
    read = {table.of_mark[name] for name in names if name in table.of_mark}
    read |= {v for eqn, (_, at) in zip(table.shut, opaque, strict=True) for k in at if (v := table.value(eqn.invars[k])) is not None}
    asked = read | {table.of_mark[mark] for mark in held}
    kept = _kept(table, asked, set(table.of_mark.values()))
    graph = recompute.build(table, kept, read)
    starts = {n for n, node in enumerate(graph.nodes) if node.needed}
    useful = starts | recompute.ancestors(graph.nodes, starts)
    carried = {v for n in useful for v in graph.carried[n]}
    homes = {table.home(v, set(kept)) for v in asked}
    residuals = []
    for value in kept:
        number = graph.number.get(value, -1)
        needed = graph.read[value] or number in useful or value in carried
        found = _residual(table, value, kept, graph, needed)
        residuals.append(dataclasses.replace(found, node=number, held=value in homes))
    inputs = {v: k for k, v in enumerate(marked.flat.jaxpr.invars)}
    reads = operands | {inputs[v] for v in map(table.source, asked) if v in inputs}
    carry = range(loop.consts, loop.consts + loop.carry)
    return Body(
        flat=marked.flat,
        residuals=tuple(residuals),
        nodes=tuple(graph.nodes),
        reads=tuple(sorted(reads - set(carry))),
    )


def _kept(table: Table, read: set[Any], values: set[Any]) -> list[Any]:
    """The values to keep, in the order in which they are made: of each tree what is read follows from, or what the user named."""
    named = {v for v in values if _user_names(table, [v])}
    kept = {}
    for root in dict.fromkeys(table.root(v) for v in table.marks):
        tree = set(table.below(root))
        for v in table.keepers(root, (read & tree) or (named & tree)):
            kept[v] = None
    order = {v: k for k, v in enumerate(table.marks)}
    return sorted(kept, key=lambda v: order[v])


def _user_names(table: Table, values) -> list[str]:
    names = [table.marked.marks[m].user_name for v in values for m in table.marks.get(v, ())]
    return [n for n in dict.fromkeys(names) if n]


def _residual(table: Table, value, kept, graph: recompute.Built, needed: bool) -> Residual:
    marks, others = table.marked.marks, set(kept) - {value}
    mark = table.marks[value][0]
    family = [value, *(v for v in table.below(value)[1:] if table.home(v, others) not in others)]
    if value not in table.carry:
        family += [v for v in table.above(value) if table.home(v, others) not in others]
    same = [v for v in family if v is value or value_bytes(v) == value_bytes(value)]
    names = list(dict.fromkeys([*_user_names(table, [value]), *_user_names(table, same), *_user_names(table, family)]))
    wanted = {value}
    if value not in table.carry:
        wanted |= {*table.above(value), *(v for v in family if v in graph.asked or _user_names(table, [v]))}
    verdicts = [marks[m].verdict for v in wanted for m in table.marks.get(v, ())]
    written = next((v for v in ("host", "hbm") if v in verdicts), "recompute")
    if value in table.carry and written == "recompute":
        written = "hbm"
    return Residual(
        path=names[0] if names else marks[mark].place, mark=mark, shape=value.aval.shape, dtype=value.aval.dtype, written=written,
        needed=needed, read=graph.read[value], held=False, carry=value in table.carry, weights_only=table.only.get(value) is True,
        user_named=bool(names), source=marks[mark].source, aliases=tuple(names[1:]), born=graph.born[value], dies=graph.dies[value],
        consumers=graph.consumers[value],
    )  # fmt: skip


def _needed(flat, active: tuple[bool, ...], opaque: Sequence[Any]) -> tuple[set[str], set[int]]:
    """The names of the values that differentiating the flat body reads, and those of its operands that it reads without any."""
    results = [v.aval for eqn in opaque for v in eqn.outvars]
    active = (*active, *(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in results))

    def pullback(*args):
        def of(*floats):
            floats = iter(floats)
            return _around(flat, opaque, [next(floats) if a else v for v, a in zip(args, active, strict=True)])

        return jax.tree.leaves(jax.vjp(of, *(v for v, a in zip(args, active, strict=True) if a))[1])

    traced = jax.make_jaxpr(pullback)(*flat.in_avals, *results).jaxpr
    made = {out: eqn for eqn in traced.eqns for out in eqn.outvars}
    named = {out: eqn.params["name"] for out, eqn in made.items() if eqn.primitive.name == "name"}
    read = jaxprs.cone(traced.outvars, {v: eqn for v, eqn in made.items() if v not in named})
    operands = {k for k, v in enumerate(traced.invars[: len(flat.in_avals)]) if v in read}
    return {named[v] for v in read if v in named}, operands


def _around(flat, opaque: Sequence[Any], args):
    """The flat body with the results of its opaque equations given behind its own operands; their operands are results too."""
    given, asked = iter(args[len(flat.in_avals) :]), []

    def rule(eqn, values):
        if not any(eqn is shut for shut in opaque):
            return None
        asked.extend(values)
        return [next(given) for _ in eqn.outvars]

    return jaxprs.evaluate(flat, args[: len(flat.in_avals)], rule), asked


def _held_at_borders(marked: Marked, names: set[str]) -> set[str]:
    """The marks at borders of the user's checkpoints at which differentiation keeps the value, given what is read (``names``).

    A result: what stands behind the checkpoint reads it there. What enters: something read inside is made from it.
    """
    if not any(mark.border for mark in marked.marks.values()):
        return set()
    eqns = marked.flat.jaxpr.eqns
    made = {out: eqn for eqn in eqns for out in eqn.outvars}
    variable = {eqn.params["name"]: eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "name"}
    variable |= {inner: variable[mark] for mark, saved in marked.saved.items() for inner, _ in saved}
    inside: dict[int, list[Any]] = {}
    for name in names & marked.marks.keys():
        inside.setdefault(marked.marks[name].scope, []).append(variable[name])
    cones = {scope: jaxprs.cone(variables, made) for scope, variables in inside.items() if scope}
    entered = {m for m, mark in marked.marks.items() if mark.border == "in" and variable[m] in cones.get(mark.scope, ())}
    return entered | {m for m in names & marked.marks.keys() if marked.marks[m].border == "out"}


def renamed(body: Body, paths: dict[str, str]) -> Body:
    """The body with other paths for some of its residuals, by mark."""
    return dataclasses.replace(body, residuals=tuple(dataclasses.replace(r, path=paths.get(r.mark, r.path)) for r in body.residuals))


def apply_marks(body: Body, keep: dict[str, str], args: list[Any]) -> list[Any]:
    """Run the flat body, binding the name ``keep[mark]`` where a residual is first made and no other marks."""

    def rule(eqn, values):
        if eqn.primitive.name == "name":
            name = keep.get(eqn.params["name"])
            return [checkpoint_name(values[0], name) if name else values[0]]
        return None

    return jaxprs.evaluate(body.flat, args, rule)
