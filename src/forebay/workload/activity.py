"""Which values depend on trained parameters: only these are differentiated, so only they ask for residuals."""

from typing import Any

import jax.numpy as jnp

from forebay.workload import jaxprs


def spread(eqn, active: set[Any]) -> tuple[bool, ...]:
    """Add the results of an equation that depend on ``active`` variables to these.

    Returns which of its operands do; of a scan, in any iteration.
    """
    operands = [not jaxprs.is_literal(v) and v in active for v in eqn.invars]
    if eqn.primitive.name == "scan":
        loop = jaxprs.loop_of(eqn)
        head, results = loop.consts, _results(loop.body, operands)
        while any(r and not operands[head + k] for k, r in enumerate(results[: loop.carry])):
            for k, r in enumerate(results[: loop.carry]):
                operands[head + k] |= r
            results = _results(loop.body, operands)
    else:
        results = [any(operands)] * len(eqn.outvars)
    active.update(v for v, r in zip(eqn.outvars, results, strict=True) if r and jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return tuple(operands)


def _results(body, operands: list[bool]) -> list[bool]:
    jaxpr = body.jaxpr
    active = {v for v, a in zip(jaxpr.invars, operands, strict=True) if a}
    for eqn in jaxpr.eqns:
        spread(eqn, active)
    return [not jaxprs.is_literal(v) and v in active for v in jaxpr.outvars]
