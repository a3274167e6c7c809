"""Carrying out the optimizer's update under a plan: resident families at once, host families by streaming.

    whole(values that the update needs)        counts, schedules; norms over gradients in HBM
    sums over host arrays, if any are needed   one pass for each level (clipping by global norm with host gradients)
    for each group of families of equal length: streaming.run(...)
    whole(what is left)                        new counts, the gradient norm

Families that the backward pass has updated already (``fused``) are left alone; their sums are known.
Cost: one read and one write of every host array, and one more read for each level of sums that the update itself needs.
"""

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from forebay.plan import Plan
from forebay.runtime import jobs, packs, streaming
from forebay.runtime.streaming import HOST
from forebay.runtime.values import Values
from forebay.workload import jaxprs
from forebay.workload.families import Family


def begin(plan: Plan, params, opt_state, copies=()) -> Values:
    """The evaluation of an update, before its gradients are known. All but ``plan``: tuples of stored arrays."""
    values = Values(plan, params, opt_state, copies)
    values.sums = functools.partial(jobs.sum_pass, values)
    return values


def apply(plan: Plan, grads, params, opt_state, loss) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """New stored params, new stored optimizer state and the gradient norm. All arguments are tuples of stored arrays."""
    values = begin(plan, params, opt_state)
    values.receive(dict(enumerate(grads)), loss)
    return finish(values)


def finish(values: Values, fused: frozenset[int] = frozenset()) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Replace every stored array by its new value, but for the families in ``fused``; the results as ``apply`` gives them."""
    work, streams = values.work, values.plan.streams
    left = [(f, s) for k, (f, s) in enumerate(zip(work.families, streams, strict=True)) if k not in fused and not _unchanged(values, f)]
    groups: dict[int, list] = defaultdict(list)
    for family, stream in left:
        if stream.mode in ("slices", "items"):
            groups[stream.count].append((family, stream))
    ready = [([jobs.final_job(values, *member) for member in group], count) for count, group in groups.items()]
    for family, stream in left:
        if stream.mode in ("resident", "whole"):
            _at_once(values, family)
    found: dict[Any, Any] = {}
    for made, count in ready:
        _stream(values, made, count, found)
    jobs.record(values, found.keys(), found.values())
    for family, stream in zip(work.families, streams, strict=True):
        if stream.mode == "slices":
            _unstreamed(values, family, stream)
    _loose_state(values)
    new_params = tuple(values.arrays["params", p] for p in range(len(work.stored)))
    new_state = tuple(values.arrays["state", j] for j in range(len(work.stored_state)))
    return new_params, new_state, values.whole([values.update.grad_norm_outvar])[0]


def _stream(values: Values, made: list, count: int, found: dict[Any, Any]) -> None:
    """One loop over the jobs of ``made`` (each with the variables that it sums, into ``found``), in packs that fill the link both ways."""
    arrays = values.arrays | _grads(values)
    taken = packs.packed([job for job, _ in made], arrays)
    members = [packs.pack([made[k][0] for k in pack]) for pack in taken]
    sums = streaming.run(members, arrays, count, values.arrays)
    for pack, job, totals in zip(taken, members, sums, strict=True):
        jobs.gathered(found, job, [v for k in pack for v in made[k][1]], totals)


def _unchanged(values: Values, family: Family) -> bool:
    """Whether every array of a family comes out as it went in: frozen parameters."""
    owned = [item.component for item in family.items]
    leaves = [("params", k) for c in owned for k in c.params] + [("state", k) for c in owned for k in c.state]
    return all(values.update.outvar(*leaf) is values.update.invar(*leaf) for leaf in leaves)


def _grads(values: Values):
    return {slot: v for slot, v in values.given.items() if slot[0] == "grads"}


def _at_once(values: Values, family: Family) -> None:
    """A resident family, or a host family moved whole."""
    places = jobs.targets(family)
    if family.kind == "stack":
        first = family.items[0]
        shared, axes = jobs.imports(values, family, first.imports)
        slots = [values.where[v][0] for v in values.update.inputs(first.component)]
        given = [values.fetch(s) for s in slots]
        run = jax.vmap(lambda *args: jaxprs.evaluate(first.jaxpr, args), in_axes=(*([0] * len(slots)), *axes))
        new = run(*given, *shared)[: len(places)]
    else:
        members = [leaf for item in family.items for leaf in jobs.leaves_of(item)]
        outs = dict(zip(members, values.whole([values.update.outvar(*leaf) for leaf in members]), strict=True))
        new = [_gather(values, outs, kind, slot) for kind, slot in places]
    for place, value in zip(places, new, strict=True):
        values.arrays[place] = jax.device_put(value, HOST) if values.host[place] else value


def _gather(values: Values, outs, kind: str, slot: int):
    stored = (values.work.stored if kind == "params" else values.work.stored_state)[slot]
    found = [outs[kind, k] for k in stored.members]
    return jnp.stack(found) if stored.stacked else found[0]


def _unstreamed(values: Values, family: Family, stream) -> None:
    """State of a streamed family that does not follow the streamed axis (a factored moment): computed whole."""
    for kind, k in jobs.leaves(family):
        old, new = values.update.invar(kind, k), values.update.outvar(kind, k)
        if new is not old and not jobs.streams(values, stream.sliced, kind, k):
            slot = values.where[old][0]
            [value] = values.whole([new])
            values.arrays[slot] = jax.device_put(value, HOST) if values.host[slot] else value


def _loose_state(values: Values) -> None:
    """State and parameters that no family owns: scalars, and tables that the update only reads."""
    owned = {place for family in values.work.families for place in jobs.targets(family)}
    for kind, stored in (("params", values.work.stored), ("state", values.work.stored_state)):
        for slot, s in enumerate(stored):
            if (kind, slot) in owned or all(values.update.outvar(kind, k) is values.update.invar(kind, k) for k in s.members):
                continue
            outs = {(kind, k): values.whole([values.update.outvar(kind, k)])[0] for k in s.members}
            value = _gather(values, outs, kind, slot)
            values.arrays[kind, slot] = jax.device_put(value, HOST) if values.host[kind, slot] else value
