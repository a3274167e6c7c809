"""A hook on what a nested equation saves for its derivative: a loop inside a body, a custom rule, a conditional, a shard_map.

A checkpoint policy sees no value inside such an equation that bears no name, so the whole of it would run again in the backward pass
(an attention kernel whose statistics nobody named, say). The hook takes the equation's own derivative and names what that saves:

    hooked(x) = custom_vjp:   forward   y, pullback = vjp(equation, x);  leaves(pullback) = name(leaves, marks);  save pullback
                              backward  pullback(dy)

Only operands that depend on trained parameters are differentiated. Where everything saved is an operand or has a name already, the
equation is left as it is. Cost: one more trace of the equation. Limits: what the user's own policy has put in host memory gets no name;
reverse mode only, which is all that a planned loss is differentiated by; equations with effects are left alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from forebay.workload import jaxprs
from forebay.workload.equations import FREE

_NESTED = ("scan", "cond", "shard_map")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value that the derivative of a nested equation saves. ``name``: the user's, or empty. ``result``: it is that result."""

    number: int
    aval: Any
    name: str
    result: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a nested equation saves beside its operands, and which of them a hook must name."""

    leaves: tuple[Leaf, ...]
    count: int

    @property
    def unnamed(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if not leaf.name)


NOTHING = Saved(leaves=(), count=0)


def survey(eqn, active: Sequence[bool]) -> Saved:
    """What differentiating an equation by its ``active`` operands saves; nothing for an equation that is not nested, or has effects."""
    name = eqn.primitive.name
    if not (name in _NESTED or name.startswith("custom_vjp")) or eqn.effects or eqn.params.get("symbolic_zeros") or not any(active):
        return NOTHING

    def forward(*args):
        outs, pullback = _differentiated(eqn, active, args)
        return outs, jax.tree.leaves(pullback)

    traced = jax.make_jaxpr(forward)(*(v.aval for v in eqn.invars)).jaxpr
    made: dict[Any, Any] = {out: e for e in traced.eqns for out in e.outvars}
    results = [_unnamed(v, made) for v in traced.outvars[: len(eqn.outvars)]]
    leaves, seen = [], set()
    for number, v in enumerate(traced.outvars[len(eqn.outvars) :]):
        value = _unnamed(v, made)
        if value is None or value in seen or _given(value, made) or _on_host(v):
            continue
        seen.add(value)
        name = made[v].params["name"] if made[v].primitive.name == "name" else ""
        leaves.append(Leaf(number=number, aval=v.aval, name=name, result=results.index(value) if value in results else None))
    return Saved(leaves=tuple(leaves), count=len(traced.outvars) - len(eqn.outvars))


def _unnamed(v, made):
    """The value behind names; None for a literal."""
    while not jaxprs.is_literal(v) and v in made and made[v].primitive.name == "name":
        v = made[v].invars[0]
    return None if jaxprs.is_literal(v) else v


def _on_host(v: Any) -> bool:
    return v.aval.memory_space == jax.memory.Space.Host


def _given(v, made) -> bool:
    """Whether a value is an operand, or a cast or a view of one or of a constant."""
    while v in made:
        sources = [u for u in made[v].invars if not jaxprs.is_literal(u)]
        if made[v].primitive.name not in FREE or len(sources) > 1:
            return False
        if not sources:
            return True
        [v] = sources
    return True


def _differentiated(eqn, active, args):
    def run(*floats):
        floats = iter(floats)
        return jaxprs.bind(eqn, [next(floats) if a else v for v, a in zip(args, active, strict=True)])

    return jax.vjp(run, *(v for v, a in zip(args, active, strict=True) if a))


def hooked(eqn, active: Sequence[bool], saved: Saved, marks: dict[int, str], args: list[Any]) -> list[Any]:
    """The equation's results, with ``marks[number]`` on what its derivative saves."""
    same = {leaf.result: leaf.number for leaf in saved.leaves if leaf.result is not None}

    @jax.custom_vjp
    def call(*args):
        return jaxprs.bind(eqn, args)

    def forward(*args):
        outs, pullback = _differentiated(eqn, active, args)
        leaves, tree = jax.tree.flatten(pullback)
        assert len(leaves) == saved.count, f"{eqn.primitive.name} saved {saved.count} values when it was traced and {len(leaves)} now"
        leaves = [checkpoint_name(leaf, marks[k]) if k in marks else leaf for k, leaf in enumerate(leaves)]
        outs = [leaves[same[j]] if j in same else out for j, out in enumerate(outs)]
        return outs, jax.tree.unflatten(tree, leaves)

    def backward(pullback, cotangents):
        given = iter(pullback(cotangents))
        return tuple(next(given) if a else None for a in active)

    call.defvjp(forward, backward)
    return list(call(*args))
