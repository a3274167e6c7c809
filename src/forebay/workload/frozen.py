"""Parameters that the optimizer never changes, found in the traced update itself.

``optax.set_to_zero`` in a ``multi_transform``, a mask, a partition for LoRA: whatever the user wrote, a leaf is *frozen* where
its new value is the old one and nothing else of the update reads its gradient. It then has no gradient and is never written.
"""

from typing import Any

from forebay.workload import jaxprs


def frozen_leaves(jaxpr, n: int, m: int) -> tuple[bool, ...]:
    """For each of the ``n`` parameter leaves, whether it is frozen.

    ``jaxpr``: (grads, params, state, loss) -> (params', state', norm), with ``m`` leaves of state.
    """
    flat = jaxpr.jaxpr
    zero = _zeros(flat)
    made = {v: e for e in flat.eqns for v in e.outvars}
    readers: dict[Any, set[Any]] = {}
    for eqn in flat.eqns:
        for v in eqn.invars:
            if not jaxprs.is_literal(v):
                readers.setdefault(v, set()).update(eqn.outvars)
    results = {v for v in flat.outvars[: n + m] if not jaxprs.is_literal(v)}
    return tuple(
        _is_same(flat.outvars[k], flat.invars[n + k], made, zero) and not (_reach(flat.invars[k], readers) & results) for k in range(n)
    )


def _zeros(flat) -> set[Any]:
    """Variables that are zero everywhere."""
    zero: set[Any] = set()
    is_zero = lambda v: v in zero if not jaxprs.is_literal(v) else bool((v.val == 0) is True or v.val == 0)  # noqa: E731
    for eqn in flat.eqns:
        name = eqn.primitive.name
        kept = name in ("broadcast_in_dim", "convert_element_type", "neg", "reshape", "copy") and is_zero(eqn.invars[0])
        if kept or (name == "mul" and any(is_zero(v) for v in eqn.invars)):
            zero.update(eqn.outvars)
    return zero


def _is_same(new, old, made, zero) -> bool:
    """Whether ``new`` is ``old`` itself, or ``old`` with zeros added to it."""
    while new is not old:
        eqn = None if jaxprs.is_literal(new) else made.get(new)
        if eqn is None:
            return False
        if eqn.primitive.name in ("add", "add_any") and any(not jaxprs.is_literal(v) and v in zero for v in eqn.invars):
            new = next((v for v in eqn.invars if jaxprs.is_literal(v) or v not in zero), old)
        elif eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
            new = eqn.invars[0]
        else:
            return False
    return True


def _reach(v, readers) -> set[Any]:
    stack, seen = [v], set()
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack.extend(readers.get(v, ()))
    return seen
