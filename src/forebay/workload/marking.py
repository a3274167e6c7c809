"""A loop's body written out flat, with a mark (``checkpoint_name``) on every value, and what is known of each mark.

Nested jits and the user's own checkpoints are written out in place. What a checkpoint's policy would do with each value (keep, offload,
recompute) is asked equation by equation; outside any checkpoint everything needed is kept. So a value that enters a checkpoint or leaves
it gets one more mark at this border: what its policy recomputes is kept all the same if what reads it stands on the other side.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from forebay.workload import hooks, jaxprs

MARK = "forebay:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value is made: ``file.py:12`` and ``Block.attention``."""

    source: str
    function: str

    @classmethod
    def of(cls, eqn, caller: "Origin | None" = None) -> "Origin":
        """Of an equation; inside a library's function, the line that called it."""
        source = jaxprs.source_line(eqn)
        return caller if caller is not None and not source else cls(source=source, function=jaxprs.function_name(eqn))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is known of a marked value.

    ``place`` is ``function/primitive/n``, the n-th of that primitive in that function; ``verdict`` what the program does with the value.
    ``scope``: the number of the user's outermost checkpoint that holds it, 0: none. ``border``: it stands where a value enters that
    checkpoint (``in``) or leaves one (``out``), and has no place of its own.
    """

    place: str
    verdict: str
    user_name: str | None
    carry: bool
    source: str
    scope: int = 0
    border: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marked:
    """``flat``: the marked body. ``saved[mark]``: the marks and leaves inside the nested equation whose first result bears ``mark``.

    ``opaque``: the marks of the first results of equations that were not looked into.
    """

    flat: Any
    marks: dict[str, Mark]
    saved: dict[str, tuple[tuple[str, hooks.Leaf], ...]]
    opaque: tuple[str, ...]


def mark_body(loop: jaxprs.Loop, origin: Origin, active: tuple[bool, ...], opaque: Sequence[Any] = ()) -> Marked:
    """Mark ``loop.body``. ``origin`` is the loop's own; ``active[i]``: operand i of the body depends on trained parameters.

    ``opaque``: equations of the body that are not looked into.
    """
    walk = _Walk(opaque)

    def body(*args):
        args = list(args)
        walk.active = {id(v): v for v, a in zip(args, active, strict=True) if a}
        for k in range(loop.consts, loop.consts + loop.carry):
            args[k] = walk.mark(args[k], walk.place(origin, "carry"), "hbm", origin, carry=True, active=active[k])
        return walk.run(loop.body, args, None, origin)

    flat = jax.make_jaxpr(body)(*loop.body.in_avals)
    return Marked(flat=flat, marks=walk.marks, saved=walk.saved, opaque=tuple(walk.shut))


class _Walk:
    def __init__(self, opaque: Sequence[Any]):
        self.opaque = {id(eqn) for eqn in opaque}
        self.shut: list[str] = []
        self.scopes = 0
        self.scope = 0
        self.marks: dict[str, Mark] = {}
        self.saved: dict[str, tuple[tuple[str, hooks.Leaf], ...]] = {}
        self.active: dict[int, Any] = {}  # by identity; the values are held, so that no identity is used again
        self.counts: collections.Counter = collections.Counter()

    def place(self, origin: Origin, primitive: str) -> str:
        base = f"{origin.function or 'unknown'}/{primitive}"
        self.counts[base] += 1
        return f"{base}/{self.counts[base] - 1}"

    def mark(self, value, place, verdict, origin, *, user=None, carry=False, active=False, border=""):
        name = f"{MARK}{len(self.marks)}"
        self.marks[name] = Mark(
            place=place, verdict=verdict, user_name=user, carry=carry, source=origin.source, scope=self.scope, border=border
        )
        out = checkpoint_name(value, name)
        if active and jnp.issubdtype(out.dtype, jnp.inexact):
            self.active[id(out)] = out
        return out

    def run(self, jaxpr, args, policy, caller: Origin):
        def rule(eqn, values):
            name, inner = eqn.primitive.name, jaxprs.subjaxpr(eqn)
            origin = Origin.of(eqn, caller)
            if name in jaxprs.INLINED and inner is not None:
                return self.run(inner, values, policy, origin)
            if name in jaxprs.REMAT and inner is not None:
                if policy is not None:
                    return self.run(inner, values, policy, origin)
                return self._checkpoint(inner, values, eqn.params["policy"] or nothing_saveable, origin)
            return self._equation(eqn, values, policy, origin)

        return jaxprs.evaluate(jaxpr, args, rule)

    def _checkpoint(self, inner, values, policy, origin):
        """The user's outermost checkpoint: differentiation keeps what enters it, and of its results what is read behind it."""
        self.scopes += 1
        self.scope = self.scopes
        outs = self.run(inner, self._bordered(values, "in", origin), policy, origin)
        self.scope = 0
        return self._bordered(outs, "out", origin)

    def _bordered(self, values, border: str, origin):
        return [self.mark(v, "", "hbm", origin, active=id(v) in self.active, border=border) if isinstance(v, Tracer) else v for v in values]

    def _equation(self, eqn, values, policy, origin):
        active = [id(v) in self.active for v in values]
        opaque = id(eqn) in self.opaque
        saved = hooks.NOTHING if opaque else hooks.survey(eqn, active)
        place = self.place(origin, eqn.primitive.name)
        verdict = _verdict(policy, eqn)
        inner = {}
        for k, leaf in enumerate(saved.leaves):
            inner[leaf.number] = leaf.name or f"{MARK}{len(self.marks)}"
            asked = _named_verdict(policy, leaf) if leaf.name else verdict
            self.marks[inner[leaf.number]] = Mark(
                place=f"{place}/{k}", verdict=asked, user_name=leaf.name or None, carry=False, source=origin.source, scope=self.scope
            )
        if saved.unnamed:
            outs = hooks.hooked(eqn, active, saved, {leaf.number: inner[leaf.number] for leaf in saved.unnamed}, values)
        else:
            outs = jaxprs.bind(eqn, values)
        user = eqn.params["name"] if eqn.primitive.name == "name" else None
        if saved.leaves:
            self.saved[f"{MARK}{len(self.marks)}"] = tuple((inner[leaf.number], leaf) for leaf in saved.leaves)
        if opaque and outs:
            self.shut.append(f"{MARK}{len(self.marks)}")
        places = [f"{place}.{j}" if j else place for j in range(len(outs))]
        return [self.mark(v, at, verdict, origin, user=user, active=any(active)) for v, at in zip(outs, places, strict=True)]


def nothing_saveable(*_, **__) -> bool:
    return False


def _named_verdict(policy, leaf: hooks.Leaf) -> str:
    """What a policy does with a value that a custom rule names."""
    named = jax.make_jaxpr(lambda v: checkpoint_name(v, leaf.name))(leaf.aval)
    return _verdict(policy, named.jaxpr.eqns[0])


def _verdict(policy, eqn) -> str:
    """What a checkpoint policy (None: no checkpoint around) does with an equation's results."""
    if policy is None:
        return "hbm"
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if isinstance(answer, bool):
        return "hbm" if answer else "recompute"
    kind = type(answer).__name__.removesuffix("Type")
    return {"Saveable": "hbm", "Offloadable": "host", "Recompute": "recompute"}[kind]
