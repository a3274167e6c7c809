"""Which values of a loop's body differentiation keeps, each with a name a person can use.

The body is written out flat and every value in it is given a marker (``checkpoint_name``). Differentiating it under a
policy that saves *only* markers then leaves exactly the markers that the backward pass needs:

    flat   = body with nested jits and checkpoints written out, each result marked  m0, m1, ...
    needed = {markers among the residuals of vjp(checkpoint(flat, save_any_names))}

What the user's own ``jax.checkpoint`` would do with a value (keep, offload, recompute) is asked of its policy, equation by
equation; outside any checkpoint everything needed is kept. Markers that are the same value (a name on the loop's carry,
a name on a name) are one residual, marked where it is first made: a value named after its first use stays alive twice.
"""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forebay.workload import jaxprs

MARK = "forebay:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A value of one loop body. ``path`` is the user's name or ``file.py:12/dot_general/0``.

    ``written`` is what the program does with it by itself: ``hbm``, ``host`` or ``recompute``. ``needed``: keeping it saves
    work in the backward pass; False for a value that the user named but that only leaves the body (a block's output).
    ``carry``: it is the loop's own carry, from which everything recomputed starts.
    ``weights_only``: made from parameters alone.
    """

    path: str
    mark: str
    shape: tuple[int, ...]
    dtype: Any
    written: str
    needed: bool
    carry: bool
    weights_only: bool
    user_named: bool
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Body:
    """A loop body written out flat, with a mark on every value, and its residuals. ``roots`` maps each mark to the residual's."""

    flat: Any
    residuals: tuple[Residual, ...]
    roots: dict[str, str]


@dataclasses.dataclass(slots=True)
class _Seen:
    equation: Any
    verdict: str
    user_name: str | None
    carry: bool
    source: str
    policy: Any


def discover(loop: jaxprs.Loop, line: str, weights: tuple[bool, ...]) -> Body:
    """Find the residuals of ``loop.body``. ``line`` is the loop's own source line; ``weights[i]``: scanned input i is a parameter."""
    seen: dict[str, _Seen] = {}
    flat = _marked(loop, line, seen)
    roots, taint = _aliases_and_taint(flat, loop, weights)
    found = _needed(flat)
    asked = {roots[name] for name in found if name.startswith(MARK)}
    useful = _ancestors(flat, asked, roots)
    members = collections.defaultdict(list)
    for mark in seen:
        members[roots[mark]].append(mark)
    counts: collections.Counter = collections.Counter()
    residuals = []
    for root, marks in members.items():
        first = seen[root]
        user = next((seen[m].user_name for m in marks if seen[m].user_name), None)
        base = f"{first.source or 'unknown'}/{'carry' if first.carry else first.equation.primitive.name}"
        path = user or f"{base}/{counts[base]}"
        counts[base] += user is None
        if root not in asked and not user and not first.carry:
            continue
        written = _written([seen[m].verdict for m in marks], first.carry)
        residuals.append(_residual(path, root, _aval(flat, root), written, root in useful, first, taint[root], user is not None))
    residuals += _inside_custom_rules(found, seen)
    return Body(flat=flat, residuals=tuple(residuals), roots=roots)


def _written(verdicts: list[str], carry: bool) -> str:
    kept = next((v for v in ("host", "hbm") if v in verdicts), "recompute")
    return "hbm" if carry and kept == "recompute" else kept


def _residual(path, mark, aval, written, needed, seen: _Seen, weights_only, user_named) -> Residual:
    return Residual(
        path=path, mark=mark, shape=aval.shape, dtype=aval.dtype, written=written, needed=needed, carry=seen.carry,
        weights_only=weights_only, user_named=user_named, source=seen.source,
    )  # fmt: skip


def _inside_custom_rules(found: dict[str, Any], seen: dict[str, _Seen]) -> list[Residual]:
    """Values that the forward rule of a custom derivative names (an attention kernel's statistics): their own names are their marks."""
    rules = [s for s in seen.values() if s.equation is not None and s.equation.primitive.name.startswith("custom_vjp")]
    out = []
    for name, eqn in found.items():
        if not name.startswith(MARK) and rules:
            written = _verdict(rules[0].policy, eqn)
            out.append(_residual(name, name, eqn.outvars[0].aval, written, True, dataclasses.replace(rules[0], carry=False), False, True))
    return out


def _verdict(policy, eqn) -> str:
    """What a checkpoint policy (None: no checkpoint around) does with an equation's results."""
    if policy is None:
        return "hbm"
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if isinstance(answer, bool):
        return "hbm" if answer else "recompute"
    kind = type(answer).__name__.removesuffix("Type")
    return {"Saveable": "hbm", "Offloadable": "host", "Recompute": "recompute"}[kind]


def nothing_saveable(*_, **__) -> bool:
    return False


def _marked(loop, line, seen):
    def mark(value, eqn, policy, source):
        name = f"{MARK}{len(seen)}"
        user = eqn.params["name"] if eqn is not None and eqn.primitive.name == "name" else None
        seen[name] = _Seen(eqn, "hbm" if eqn is None else _verdict(policy, eqn), user, eqn is None, source, policy)
        return checkpoint_name(value, name)

    def walk(jaxpr, args, policy, caller):
        def rule(eqn, values):
            name, inner = eqn.primitive.name, jaxprs.subjaxpr(eqn)
            source = jaxprs.source_line(eqn) or caller  # inside a library's function, the line that called it
            if name in jaxprs.INLINED and inner is not None:
                return walk(inner, values, policy, source)
            if name in jaxprs.REMAT and inner is not None:
                return walk(inner, values, policy or eqn.params["policy"] or nothing_saveable, source)
            return [mark(out, eqn, policy, source) for out in jaxprs.bind(eqn, values)]

        return jaxprs.evaluate(jaxpr, args, rule)

    def body(*args):
        args = list(args)
        for k in range(loop.consts, loop.consts + loop.carry):
            args[k] = mark(args[k], None, None, line)
        return walk(loop.body, args, None, line)

    return jax.make_jaxpr(body)(*loop.body.in_avals)


def marks_of(flat) -> dict[Any, str]:
    """The marking equations of a flat body: result variable to mark."""
    return {
        eqn.outvars[0]: eqn.params["name"]
        for eqn in flat.jaxpr.eqns
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARK)
    }


def _aval(flat, mark):
    return next(v.aval for v, name in marks_of(flat).items() if name == mark)


def _aliases_and_taint(flat, loop, weights):
    """For each mark: the first mark of the same value, and whether the value is made from parameters alone."""
    first: dict[Any, str | None] = {}
    only: dict[Any, bool | None] = {}  # True: parameters alone, None: constants alone, False: anything else
    for k, v in enumerate(flat.jaxpr.invars):
        scanned = k - loop.consts - loop.carry
        only[v] = scanned >= 0 and weights[scanned]
    roots: dict[str, str] = {}
    taint: dict[str, bool] = {}
    for eqn in flat.jaxpr.eqns:
        kinds = [only.get(v) for v in eqn.invars if not jaxprs.is_literal(v)]
        kind = None if all(k is None for k in kinds) else all(k is not False for k in kinds)
        for out in eqn.outvars:
            only[out] = kind
            if eqn.primitive.name == "name":
                before = None if jaxprs.is_literal(eqn.invars[0]) else first.get(eqn.invars[0])
                name = eqn.params["name"]
                root = first[out] = before or (name if name.startswith(MARK) else None)
                if root is not None and name.startswith(MARK):
                    roots[name], taint[name] = root, kind is True
    return roots, taint


def _needed(flat) -> dict[str, Any]:
    """The names among the residuals of differentiating the flat body, with the equations that bind them."""
    save = jax.checkpoint_policies.save_any_names_but_these()
    run = jax.checkpoint(lambda *args: jaxprs.evaluate(flat, args), policy=save, prevent_cse=False)
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(run, *args)[1]))(*flat.in_avals)
    made = {out: eqn for eqn in traced.jaxpr.eqns for out in eqn.outvars}
    found = {}
    for v in traced.jaxpr.outvars:
        while not jaxprs.is_literal(v) and v in made:
            eqn = made[v]
            if eqn.primitive.name == "name":
                found[eqn.params["name"]] = eqn
                break
            if len(eqn.invars) != 1:
                break
            v = eqn.invars[0]
    return found


def _ancestors(flat, asked, roots) -> set[str]:
    """The marks in ``asked`` and those from which one of them is made: keeping such a value spares the work before it."""
    marks = marks_of(flat)
    wanted, found = {v for v, name in marks.items() if roots[name] in asked}, set(asked)
    for eqn in reversed(flat.jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            found.update(roots[marks[v]] for v in eqn.outvars if v in marks)
            wanted.update(v for v in eqn.invars if not jaxprs.is_literal(v))
    return found


def apply_marks(body: Body, keep: dict[str, str], args: list[Any]) -> list[Any]:
    """Run the flat body, binding the name ``keep[mark]`` where a residual is first made and no other marks."""

    def rule(eqn, values):
        if eqn.primitive.name == "name":
            name = keep.get(eqn.params["name"])
            return [checkpoint_name(values[0], name) if name else values[0]]
        return None

    return jaxprs.evaluate(body.flat, args, rule)


def float_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array of ``shape`` and ``dtype``."""
    size = 1
    for n in shape:
        size *= n
    return size * jnp.dtype(dtype).itemsize
