"""Optimizer state of a stack of layers in parts: some layers' state in one place, the rest in another.

A family whose state is cut becomes several families, one for each *window* of layers. The parameter and its gradient stay
whole; the state of each window is an array of its own:

    mu [L, ...]   cut at 16   ->   mu[0:16]  and  mu[16:L],  each with a placement

Limits: the parameter stands in HBM, its update runs layer by layer, and it sums over no state (a trust ratio would).
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from forebay.errors import PlacementError
from forebay.workload import jaxprs, slicing
from forebay.workload.families import Family
from forebay.workload.program import Stored
from forebay.workload.trace import Tensor, Workload
from forebay.workload.update import outside, slice_component


def family_of_state(work: Workload, name: str) -> int | None:
    """The family that owns the optimizer state named ``optimizer:PATH``, if that is a stack of layers that can be cut."""
    names = [t.name for t in work.tensors if t.role == "optimizer"]
    j = names.index(name)
    return next((f for f, family in enumerate(work.families) if j in family.state and len(family.params) == 1), None)


def layers_of(work: Workload, f: int) -> int:
    """Layers of a family's stack; 0 where its parameter is not one."""
    [p] = work.families[f].params
    if work.stored[p].stacked:
        return len(work.stored[p].members)
    shape = work.update.invar("params", work.stored[p].members[0]).aval.shape
    return shape[0] if work.program.streams(p) else 0


def cut(work: Workload, points: Mapping[int, Collection[int]]) -> Workload:
    """``work`` with the state of each family ``f`` in parts that meet at ``points[f]``.

    Raises:
        PlacementError: a family cannot be cut by layers.
    """
    families: list[Family] = []
    state: list[Stored] = list(work.stored_state)
    for f, family in enumerate(work.families):
        if f not in points:
            families.append(family)
            continue
        _check(work, family)
        bounds = [0, *sorted(points[f]), layers_of(work, f)]
        for k, window in enumerate(itertools.pairwise(bounds)):
            mine = []
            for j in family.state:
                part = dataclasses.replace(work.stored_state[j], part=window)
                if k == 0:
                    state[j] = part
                    mine.append(j)
                else:
                    state.append(part)
                    mine.append(len(state) - 1)
            families.append(dataclasses.replace(family, state=tuple(mine), window=window))
    return dataclasses.replace(
        work, families=tuple(families), stored_state=tuple(state), tensors=_tensors(work, state), uncut=work.uncut or work
    )  # fmt: skip


def _tensors(work: Workload, state: Sequence[Stored]) -> tuple[Tensor, ...]:
    """The tensors, with those of the state in the order of ``state``: a part is named ``PATH[start:stop]``."""
    old = [t for t in work.tensors if t.role == "optimizer"]
    of = {s.members: t for s, t in zip(work.stored_state, old, strict=True)}
    new = tuple(of[s.members] if s.part is None else _part(of[s.members], s.part) for s in state)
    first = work.tensors.index(old[0])
    return (*work.tensors[:first], *new, *work.tensors[first + len(old) :])


def _part(tensor: Tensor, part: tuple[int, int]) -> Tensor:
    start, stop = part
    layers = tensor.shape[0]
    return dataclasses.replace(
        tensor,
        name=f"{tensor.name}[{start}:{stop}]",
        shape=(stop - start, *tensor.shape[1:]),
        bytes=tensor.bytes // layers * (stop - start),
        part=part,
    )


def with_parts(work: Workload, entries: Sequence[Any]) -> Workload:
    """``work`` cut as the entries of a plan for it are: their ``layers`` say where."""
    points: dict[int, set[int]] = {}
    for entry in entries:
        if entry.layers is not None and (f := family_of_state(work, entry.name.rpartition("[")[0])) is not None:
            points.setdefault(f, set()).update(set(entry.layers) - {0, layers_of(work, f)})
    return cut(work, points) if points else work


def _check(work: Workload, family: Family) -> None:
    name = [t.name for t in work.tensors if t.role == "parameter"][family.params[0]]
    if why := uncut_reason(work, family):
        raise PlacementError(f"the optimizer state of {name} cannot be placed by layers: {why}; place all of it in one place")


def uncut_reason(work: Workload, family: Family) -> str:
    """Why the state of a family cannot be cut by layers; empty where it can."""
    update = work.update
    component = family.items[0].component
    states = {update.invar("state", j) for j in component.state}
    if family.kind == "joint":
        return "its update is joint with that of other parameters"
    if family.kind == "stack":
        made = {v: update.jaxpr.jaxpr.eqns[i] for i in component.equations for v in update.jaxpr.jaxpr.eqns[i].outvars}
        return "the update sums over its state" if jaxprs.cone(family.items[0].exports, made) & states else ""
    try:
        sliced = slice_component(update, component, 0)
    except slicing.NotSeparable as why:
        return str(why)
    if any(sliced.axis.get(v) != 0 for v in states):
        return "its state has no axis of layers"
    read = [v for i in sliced.reductions for v in update.jaxpr.jaxpr.eqns[i].invars if not jaxprs.is_literal(v)]
    made = {v: e for e in update.jaxpr.jaxpr.eqns for v in e.outvars}
    return "the update sums over its state" if (jaxprs.cone(read, made) & states or set(outside(update, sliced, read)) & states) else ""
