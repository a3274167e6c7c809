"""Offloads that the user's program asks for by itself, in places where no XLA compiles them, brought into a form that it does.

XLA carries a residual in host memory out of one loop and into another, and across nothing else (openxla/xla; MaxText 4995). So what a
checkpoint policy offloads may not leave a loop inside a loop, an unrolled loop, or a branch of a ``cond``:

    scan(... scan(offload) ...)           ->  scan(... checkpoint(scan(offload)) ...)     offloaded and read again in the backward pass
    cond(scan(offload), ...)              ->  cond(checkpoint(scan(offload)), ...)        likewise
    checkpoint(policy)(... scan(name) ...)  ->  the same without the name                 recomputed, as that policy does with the rest
    scan(offload, unroll=2)               ->  scan(offload)

A program that offloads nothing is left as it is. Limits: the bodies of custom rules and of ``shard_map`` are not looked into.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from forebay.workload import jaxprs

_NO_WAY_OUT = "a loop in a loop or a branch, which XLA refuses"
_OPENED = ("scan", "cond", *jaxprs.REMAT, *jaxprs.INLINED)


def compilable(program: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, tuple[str, ...]]:
    """``program`` with each of its own offloads where XLA compiles it, and a sentence for each that was changed."""
    if not _offloaded_names(program, None):
        return program, ()
    said: dict[str, None] = {}
    return _rewritten(program, said, None, None, looped=False), tuple(said)


def _rewritten(jaxpr: core.ClosedJaxpr, said: dict[str, None], inside: Any, outside: Any, *, looped: bool) -> core.ClosedJaxpr:
    """``inside`` is the checkpoint policy in force; ``outside`` the one whose names have no way out; ``looped``: this is a loop's body."""

    def rule(eqn, values):
        name = eqn.primitive.name
        if name == "name" and _is_offloaded(outside, eqn):
            said[f"your policy offloads {_at([eqn])} out of {_NO_WAY_OUT}: recomputed instead"] = None
            return values
        if name not in _OPENED:
            return None
        policy = inside or eqn.params["policy"] if name in jaxprs.REMAT else inside
        shut = name == "cond" or (name == "scan" and looped)
        own = _offloaded_names(eqn, None) if shut else []
        if own:
            said[f"your policy offloads {_at(own)} out of {_NO_WAY_OUT}: moved in the backward pass alone"] = None
        change = lambda inner: _rewritten(  # noqa: E731
            inner, said, policy, policy if shut else outside, looped=looped or name == "scan"
        )
        params = _with_jaxprs(eqn.params, (lambda inner: _recomputed(change(inner))) if own and name == "cond" else change)
        if name == "scan" and params["unroll"] != 1 and (found := _offloaded_names(eqn, policy)):
            said[f"your policy offloads {_at(found)} in a loop with unroll={params['unroll']}, which XLA refuses: not unrolled"] = None
            params["unroll"] = 1
        run = lambda *args: jaxprs.bind(eqn, args, params)  # noqa: E731
        return (jax.checkpoint(run, prevent_cse=False) if own and name == "scan" else run)(*values)

    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, args, rule))(*jaxpr.in_avals)


def _at(eqns: list[Any]) -> str:
    return ", ".join(dict.fromkeys(f"{e.params['name']!r} ({jaxprs.source_line(e)})" for e in eqns))


def _recomputed(branch: core.ClosedJaxpr) -> core.ClosedJaxpr:
    run = jax.checkpoint(lambda *args: jaxprs.evaluate(branch, args), prevent_cse=False)
    return jax.make_jaxpr(run)(*branch.in_avals)


def _with_jaxprs(params: dict[str, Any], change: Callable) -> dict[str, Any]:
    """The parameters of an equation with its jaxprs changed, each open or closed as it was."""

    def changed(item):
        if isinstance(item, (tuple, list)):
            return type(item)(map(changed, item))
        if not isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
            return item
        new = change(jaxprs.closed(item))
        return new if isinstance(item, core.ClosedJaxpr) else new.jaxpr

    return {name: changed(value) for name, value in params.items()}


def _offloaded_names(within: Any, policy: Any) -> list[Any]:
    """The ``name`` equations in an equation or a jaxpr that a policy, ``policy`` or one inside, offloads."""
    if isinstance(within, (core.Jaxpr, core.ClosedJaxpr)):
        return [found for eqn in jaxprs.closed(within).jaxpr.eqns for found in _offloaded_names(eqn, policy)]
    if within.primitive.name == "name":
        return [within] if _is_offloaded(policy, within) else []
    own = policy or within.params["policy"] if within.primitive.name in jaxprs.REMAT else policy
    return [found for inner in jaxprs.inner_jaxprs(within) for found in _offloaded_names(inner, own)]


def _is_offloaded(policy: Any, eqn: Any) -> bool:
    if policy is None:
        return False
    return type(policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)).__name__.startswith("Offloadable")
