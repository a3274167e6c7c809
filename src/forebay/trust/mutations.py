"""Faults planted into a planned step, to show that the gate sees them: a draw is a (tensor, kind), and each kind a bug that could be ours.

    stale slice            a loop reads the slice before the one it should
    wrong layer order      a loop reads the slices of a stack from the other end
    swapped residual       the backward loop gets two saved residuals of one shape the wrong way round
    dropped update         one layer (or the whole) of a tensor of the state comes out as it went in
    lost cast              a tensor of the state passes through bfloat16
    reused donated buffer  one layer of a tensor of the state holds what belongs to another tensor of its shape

The first three rewrite the traced program, at any depth; the others stand on the step's results. A fault that changes nothing is
excluded by where faults are sought: slices at an index that the loop counts, of state by name; residuals that are different variables
of the loop that made them, of which a matrix product reads at least one (the factors of an elementwise product may change places);
tensors of at least two dimensions that the optimizer changes. None is dropped because of what a run showed.

Cost: one compile of the step for each fault. Limits: faults of the compiler itself (openxla/xla 46231) have these effects, but are found by
the gate on the accelerator, not planted here.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from forebay.trust.planned import batch_shardings
from forebay.trust.twin import Twin
from forebay.workload import jaxprs

STALE, ORDER, RESIDUAL = "stale slice", "wrong layer order", "swapped residual"
DROPPED, CAST, REUSED = "dropped update", "lost cast", "reused donated buffer"
KINDS = (STALE, ORDER, RESIDUAL, DROPPED, CAST, REUSED)
_SAME = ("device_put", "sharding_constraint", "optimization_barrier", "name", "copy", "dynamic_update_slice")
_LAYOUT = ("transpose", "reshape", "convert_element_type", "device_put", "sharding_constraint", "optimization_barrier", "name", "copy")
_INNER = {"scan": "jaxpr", "while": "body_jaxpr", "jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``tensor`` and ``other`` are entry names, or describe residuals; ``path`` leads to an equation, ``operands`` are of it."""

    kind: str
    tensor: str
    other: str = ""
    layer: int | None = None
    path: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.kind}: {self.tensor}{f' and {self.other}' if self.other else ''}{layer}"


def possible(twin: Twin, step: Any) -> tuple[Fault, ...]:
    """Every fault that can be planted into ``step``."""
    traced = _traced(twin, step)
    names = _state_names(twin)
    batch = len(traced.jaxpr.jaxpr.invars) - len(names)
    return (*_in_program(traced.jaxpr.jaxpr, [*names, *[None] * batch], (), False), *_in_state(twin))


def draw(random: np.random.Generator, faults: tuple[Fault, ...]) -> Fault:
    """One of ``faults``, its kind first."""
    kind = random.choice([kind for kind in KINDS if any(f.kind == kind for f in faults)])
    among = [f for f in faults if f.kind == kind]
    return among[int(random.integers(len(among)))]


def planted(twin: Twin, step: Any, fault: Fault) -> Callable:
    """``step`` with one fault in it, jitted and donated like the true one."""
    traced = _traced(twin, step)
    program = rewritten(traced.jaxpr, fault.path, functools.partial(_wrong, fault)) if fault.path else traced.jaxpr
    tree = jax.tree.structure(traced.out_info)

    def wrong_step(state, batch):
        new, metrics = jax.tree.unflatten(tree, jaxprs.evaluate(program, jax.tree.leaves((state, batch))))
        return (new if fault.path else _wrong_state(twin, fault, state, new)), metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, twin.plan.abstract_state(twin.mesh))
    placed = {"in_shardings": (shardings, batch_shardings(twin)), "out_shardings": (shardings, None)}
    return jax.jit(wrong_step, donate_argnums=(0,), **placed)


def _traced(twin: Twin, step: Any):
    return step.trace(twin.plan.abstract_state(twin.mesh), twin.plan.abstract_batch(twin.mesh))


def _state_names(twin: Twin) -> list[str | None]:
    """The entry name of every leaf of the state, in flattening order; None for what is no tensor of the plan."""
    plan, state = twin.plan, twin.plan.abstract_state(twin.mesh)
    named = dataclasses.replace(
        jax.tree.map(lambda _: "", state),
        stored_params=tuple(e.name for e in plan.role("parameter")),
        stored_opt_state=tuple(e.name for e in plan.role("optimizer")),
    )
    return [name or None for name in jax.tree.leaves(named)]


def _in_state(twin: Twin) -> Iterator[Fault]:
    entries = [e for e in (*twin.plan.role("parameter"), *twin.plan.role("optimizer")) if len(e.shape) > 1]
    still = {e.name for e, frozen in zip(twin.plan.role("parameter"), twin.work.frozen, strict=True) if frozen}
    entries = [e for e in entries if e.name not in still and jnp.issubdtype(e.dtype, jnp.floating)]
    for entry in entries:
        yield Fault(kind=CAST, tensor=entry.name)
        layers = range(entry.shape[0]) if len(entry.shape) == 3 else (None,)
        for layer in layers:
            yield Fault(kind=DROPPED, tensor=entry.name, layer=layer)
            for other in entries:
                if other.name != entry.name and (other.shape, other.dtype) == (entry.shape, entry.dtype):
                    yield Fault(kind=REUSED, tensor=entry.name, other=other.name, layer=layer)


def _wrong_state(twin: Twin, fault: Fault, old, new):
    names = [*(e.name for e in twin.plan.role("parameter")), *(e.name for e in twin.plan.role("optimizer"))]
    find = lambda state, name: jax.device_put((*state.stored_params, *state.stored_opt_state)[names.index(name)], jax.memory.Space.Device)  # noqa: E731
    value = find(new, fault.tensor)
    source = {
        CAST: lambda: lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7),  # XLA may drop a pair of casts, never this
        DROPPED: lambda: find(old, fault.tensor),
        REUSED: lambda: find(new, fault.other),
    }[fault.kind]()
    wrong = source if fault.layer is None else value.at[fault.layer].set(source[fault.layer])
    arrays = [*new.stored_params, *new.stored_opt_state]
    at = names.index(fault.tensor)
    arrays[at] = jax.device_put(wrong, jax.typeof(arrays[at]).memory_space)
    count = len(new.stored_params)
    return dataclasses.replace(new, stored_params=tuple(arrays[:count]), stored_opt_state=tuple(arrays[count:]))


def _in_program(jaxpr, names: list, path: tuple[int, ...], looped: bool) -> Iterator[Fault]:
    """The faults of one level of the program and of those inside; ``names`` are of its inputs, where they are tensors of the state."""
    known = {v: name for v, name in zip(jaxpr.invars, names, strict=True) if name}
    made = {}
    needed = jaxprs.cone(jaxpr.outvars, {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars})
    for k, eqn in enumerate(jaxpr.eqns):
        if not needed.intersection(eqn.outvars):
            continue
        kind, given = eqn.primitive.name, [None if jaxprs.is_literal(v) else known.get(v) for v in eqn.invars]
        if kind == "dynamic_slice" and looped and given[0] and (axes := _counted(eqn)):
            for fault in (STALE, ORDER):
                yield Fault(kind=fault, tensor=given[0], path=(*path, k), operands=axes)
        elif kind == "scan":
            yield from _of_scan(eqn, given, made, (*path, k))
        if kind in _INNER:
            inner, inside = jaxprs.closed(eqn.params[_INNER[kind]]).jaxpr, given
            if kind == "while":
                inside = given[eqn.params["cond_nconsts"] :]
            yield from _in_program(inner, inside, (*path, k), looped or kind in ("scan", "while"))
        if kind in _SAME:
            known.update((out, name) for out, name in zip(eqn.outvars, given, strict=False) if name)
        made.update((out, eqn) for out in eqn.outvars)


def _counted(eqn) -> tuple[int, ...]:
    """The axes along which a slice moves with an index that is computed."""
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    return tuple(k for k, n in enumerate(sizes) if n < shape[k] and not jaxprs.is_literal(eqn.invars[1 + k]))


def _of_scan(eqn, given: list, made: dict, path: tuple[int, ...]) -> Iterator[Fault]:
    loop = jaxprs.loop_of(eqn)
    scanned = range(loop.consts + loop.carry, len(eqn.invars))
    for k in scanned if loop.length > 1 else ():
        if given[k]:
            for fault in (STALE, ORDER):
                yield Fault(kind=fault, tensor=given[k], path=path, operands=(k,))
    saved = [(k, origin) for k in scanned if (origin := _saved(eqn.invars[k], made)) is not None]
    for n, (a, one) in enumerate(saved):
        for b, two in saved[n + 1 :]:
            product = any(_feeds_product(loop.body.jaxpr, loop.body.jaxpr.invars[k]) for k in (a, b))
            if one is not two and product and eqn.invars[a].aval == eqn.invars[b].aval:
                text = f"residuals {a} and {b} of {eqn.invars[a].aval.str_short()}"
                yield Fault(kind=RESIDUAL, tensor=text, path=path, operands=(a, b))


def _saved(v: Any, made: dict):
    """The variable of an earlier loop's body that ``v`` stacks, a floating value of more than a scalar a layer; else None."""
    aval: Any = v.aval
    eqn = None if jaxprs.is_literal(v) else made.get(v)
    if eqn is None or eqn.primitive.name != "scan" or len(aval.shape) < 2 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    body = jaxprs.loop_of(eqn).body.jaxpr
    origin, inside = body.outvars[eqn.outvars.index(v)], {out: e for e in body.eqns for out in e.outvars}
    while origin in inside and inside[origin].primitive.name in ("name", "copy", "device_put"):
        origin = inside[origin].invars[0]
    return origin


def _feeds_product(jaxpr, v) -> bool:
    """Whether a matrix product reads ``v``, as it is or in another layout: factors of an elementwise product could be swapped unseen."""
    for eqn in jaxpr.eqns:
        at = [k for k, operand in enumerate(eqn.invars) if operand is v]
        kind = eqn.primitive.name
        if at and kind == "dot_general":
            return True
        if at and kind in _LAYOUT and _feeds_product(jaxpr, eqn.outvars[at[0]]):
            return True
        if at and kind in _INNER and kind != "while":
            inner = jaxprs.closed(eqn.params[_INNER[kind]]).jaxpr
            if any(_feeds_product(inner, inner.invars[k]) for k in at):
                return True
    return False


def rewritten(program, path: tuple[int, ...], change: Callable):
    """``program`` with ``change(equation, operands)`` in place of the equation that ``path`` leads to."""
    target = program.jaxpr.eqns[path[0]]

    def rule(eqn, values):
        if eqn is not target:
            return None
        if len(path) == 1:
            return change(eqn, values)
        key = _INNER[eqn.primitive.name]
        inner = eqn.params[key]
        new = rewritten(jaxprs.closed(inner), path[1:], change)
        return jaxprs.bind(eqn.replace(params={**eqn.params, key: new if inner is not jaxprs.closed(inner).jaxpr else new.jaxpr}), values)

    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(program, args, rule))(*program.in_avals)


def _wrong(fault: Fault, eqn, values: list[Any]) -> list[Any]:
    values = list(values)
    if fault.kind == RESIDUAL:
        a, b = fault.operands
        values[a], values[b] = values[b], values[a]
    elif eqn.primitive.name == "scan":
        [k] = fault.operands
        stack = jax.device_put(values[k], jax.memory.Space.Device)
        wrong = jnp.flip(stack, 0) if fault.kind == ORDER else jnp.concatenate([stack[:1], stack[:-1]])
        values[k] = jax.device_put(wrong, jax.typeof(values[k]).memory_space)
    else:
        for axis in fault.operands:
            size, start = eqn.params["slice_sizes"][axis], values[1 + axis]
            last = eqn.invars[0].aval.shape[axis] - size
            wrong = last - start if fault.kind == ORDER else lax.max(start - size, lax.full_like(start, 0))
            values[1 + axis] = lax.convert_element_type(wrong, start.dtype)
    return jaxprs.bind(eqn, values)
