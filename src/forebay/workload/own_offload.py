"""Offloads that the user's program asks for by itself, where XLA refuses them: in a loop inside a layer loop, or in an unrolled one."""

from collections.abc import Iterator

from jax.extend import core

from forebay.workload import jaxprs


def refused_as_written(loop: jaxprs.Loop) -> bool:
    """Whether a checkpoint policy inside ``loop`` offloads a name in a place where no XLA compiles it as it is written."""
    return any(nested or loop.unroll > 1 for nested in _offloads(loop.body.jaxpr, None, False))


def _offloads(jaxpr, policy, nested: bool) -> Iterator[bool]:
    """For each name that a policy offloads: whether it stands in a further loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and _offloaded(policy, eqn):
            yield nested
        own = policy
        if eqn.primitive.name in jaxprs.REMAT:
            own = policy or eqn.params["policy"]
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from _offloads(jaxprs.closed(inner).jaxpr, own, nested or eqn.primitive.name in ("scan", "while"))


def _offloaded(policy, eqn) -> bool:
    if policy is None:
        return False
    return type(policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)).__name__.startswith("Offloadable")
