"""Which values of a loop's body differentiation keeps, each with a name a person can use.

The body is written out flat and every value in it is given a marker (``marking``). Differentiating it under a policy that saves *only*
markers then leaves exactly the markers that the backward pass needs:

    flat   = body with nested jits and checkpoints written out, each result marked  m0, m1, ...
    needed = {markers among the residuals of vjp(checkpoint(flat, save_any_names))}
    kept   = needed, folded into the few values from which the rest costs nothing (``folding``)

Only what depends on trained parameters is differentiated. Markers that are the same value (a name on the loop's carry, a name on a name)
are one residual, marked where it is first made: a value named after its first use stays alive twice.
"""

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from forebay.workload import jaxprs, recompute
from forebay.workload.equations import value_bytes
from forebay.workload.folding import Table
from forebay.workload.marking import Origin, mark_body


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A value of one loop body. ``path`` is the user's name or ``Block.attention/dot_general/0``; ``aliases`` are further names of the
    user's on values that cost nothing to make from it.

    ``written`` is what the program does with it by itself: ``hbm``, ``host`` or ``recompute``. ``needed``: keeping it saves
    work in the backward pass; False for a value that the user named but that only leaves the body (a block's output).
    ``read``: the backward pass reads it, or what is free to make from it. ``carry``: it is the loop's own carry, from which everything
    recomputed starts. ``weights_only``: made from parameters alone. ``node`` is its place in the recompute graph, -1 for the carry.
    """

    path: str
    mark: str
    shape: tuple[int, ...]
    dtype: Any
    written: str
    needed: bool
    read: bool
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
    """A loop body written out flat, with a mark on every value, its residuals, and the graph of what each value is made from."""

    flat: Any
    residuals: tuple[Residual, ...]
    nodes: tuple[recompute.Node, ...]


def discover(loop: jaxprs.Loop, origin: Origin, weights: tuple[bool, ...], active: tuple[bool, ...]) -> Body:
    """Find the residuals of ``loop.body``.

    ``origin`` is the loop's own place in the source; ``weights[i]``: scanned input i is a parameter; ``active[i]``: operand i of the
    body depends on trained parameters.
    """
    marked = mark_body(loop, origin, active)
    table = Table(marked, (loop.consts, loop.carry), weights)
    of_mark = {mark: value for value, marks in table.marks.items() for mark in marks}
    read = {of_mark[name] for name in _needed(marked.flat, active) if name in of_mark}
    kept = _kept(table, read, set(of_mark.values()))
    graph = recompute.build(table, kept, read)
    starts = {n for n, node in enumerate(graph.nodes) if node.needed}
    useful = starts | recompute.ancestors(graph.nodes, starts)
    carried = {v for n in useful for v in graph.carried[n]}
    residuals = []
    for value in kept:
        number = graph.number.get(value, -1)
        needed = graph.read[value] or number in useful or value in carried
        found = _residual(table, value, kept, graph, needed)
        residuals.append(dataclasses.replace(found, node=number))
    return Body(flat=marked.flat, residuals=tuple(residuals), nodes=recompute.named(graph.nodes, residuals, loop.length))


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
        needed=needed, read=graph.read[value], carry=value in table.carry, weights_only=table.only.get(value) is True,
        user_named=bool(names), source=marks[mark].source, aliases=tuple(names[1:]), born=graph.born[value], dies=graph.dies[value],
        consumers=graph.consumers[value],
    )  # fmt: skip


def _needed(flat, active: tuple[bool, ...]) -> set[str]:
    """The names among the residuals of differentiating the flat body."""
    save = jax.checkpoint_policies.save_any_names_but_these()
    run = jax.checkpoint(lambda *args: jaxprs.evaluate(flat, args), policy=save, prevent_cse=False)

    def pullback(*args):
        def of(*floats):
            floats = iter(floats)
            return run(*(next(floats) if a else v for v, a in zip(args, active, strict=True)))

        return jax.tree.leaves(jax.vjp(of, *(v for v, a in zip(args, active, strict=True) if a))[1])

    traced = jax.make_jaxpr(pullback)(*flat.in_avals)
    made = {out: eqn for eqn in traced.jaxpr.eqns for out in eqn.outvars}
    found = set()
    for v in traced.jaxpr.outvars:
        while not jaxprs.is_literal(v) and v in made:
            eqn = made[v]
            if eqn.primitive.name == "name":
                found.add(eqn.params["name"])
                break
            if len(eqn.invars) != 1:
                break
            v = eqn.invars[0]
    return found


def renamed(body: Body, paths: dict[str, str], length: int) -> Body:
    """The body with other paths for some of its residuals."""
    changed = tuple(dataclasses.replace(r, path=paths.get(r.path, r.path)) for r in body.residuals)
    return dataclasses.replace(body, residuals=changed, nodes=recompute.named(body.nodes, changed, length))


def apply_marks(body: Body, keep: dict[str, str], args: list[Any]) -> list[Any]:
    """Run the flat body, binding the name ``keep[mark]`` where a residual is first made and no other marks."""

    def rule(eqn, values):
        if eqn.primitive.name == "name":
            name = keep.get(eqn.params["name"])
            return [checkpoint_name(values[0], name) if name else values[0]]
        return None

    return jaxprs.evaluate(body.flat, args, rule)
