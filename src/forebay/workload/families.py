"""The units in which an optimizer's update is carried out, and how its state is stored beside the parameters.

A *family* is one or more components of the update with the arrays they own:

    leaf    one component on arrays of the user's tree; may be streamed along an axis of its parameter
    stack   the same program for every layer of a stacked parameter; run over the stack item by item (or under vmap)
    joint   anything else (several arrays tied together, or the layers of a stack updated in different ways): run whole

State that belongs to a stacked parameter is stored stacked in the same way.
"""

import dataclasses
from typing import Any

import jax

from forebay.workload import jaxprs
from forebay.workload.program import Stored
from forebay.workload.update import Component, Update, loose


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """One component as a function. ``jaxpr``: (grads, params, state, imports) -> (params', state', exports).

    The variables in ``imports`` and ``exports`` are of the update's jaxpr.
    """

    component: Component
    imports: tuple[Any, ...]
    exports: tuple[Any, ...]
    jaxpr: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A unit of the update. ``params`` and ``state`` are positions of stored arrays; ``items`` one per layer (stack) or one (leaf, joint).

    ``window``: the family updates only these layers, ``(start, stop)``; its state arrays hold no others (see ``parts``).
    """

    kind: str
    params: tuple[int, ...]
    state: tuple[int, ...]
    items: tuple[Item, ...]
    window: tuple[int, int] | None = None


def make_families(update: Update, stored: tuple[Stored, ...]) -> tuple[tuple[Family, ...], tuple[Stored, ...]]:
    """Families of an update whose parameters are stored as ``stored``, and how its state is stored."""
    owner_of = {k: i for i, c in enumerate(update.components) for k in c.params}
    state: list[Stored] = []
    families: list[Family] = []
    done: set[int] = set()

    def store(leaves) -> int:
        state.append(Stored(members=tuple(leaves), stacked=len(leaves) > 1))
        return len(state) - 1

    for p, s in enumerate(stored):
        if not s.stacked or not all(k in owner_of for k in s.members):
            continue
        indices = [owner_of[k] for k in s.members]
        items = _same_program(update, indices) if len(set(indices)) == len(indices) else None
        if items and done.isdisjoint(indices):
            kept = tuple(store(leaves) for leaves in zip(*(update.components[i].state for i in indices), strict=True))
            families.append(Family(kind="stack", params=(p,), state=kept, items=items))
            done.update(indices)
    place = {k: p for p, s in enumerate(stored) for k in s.members}
    for together in _sharing(update, place, [i for i in range(len(update.components)) if i not in done]):
        items = tuple(item_of(update, i) for i in together)
        params = tuple(dict.fromkeys(place[k] for item in items for k in item.component.params))
        single = len(items) == len(params) == 1 and not stored[params[0]].stacked and len(items[0].component.params) == 1
        kept = tuple(store((j,)) for item in items for j in item.component.state)
        families.append(Family(kind="leaf" if single else "joint", params=params, state=kept, items=items))
    owned = {j for s in state for j in s.members}
    state.extend(Stored(members=(j,)) for j in range(update.state_leaves) if j not in owned)
    return tuple(families), tuple(state)


def _sharing(update: Update, place: dict[int, int], indices: list[int]) -> list[list[int]]:
    """Components in groups: those whose layers are stored in one stack, though they are not one program, must be replaced together."""
    groups: list[tuple[set[int], list[int]]] = []
    for i in indices:
        slots, members = {place[k] for k in update.components[i].params}, [i]
        for group in [g for g in groups if g[0] & slots]:
            groups.remove(group)
            slots, members = slots | group[0], group[1] + members
        groups.append((slots, members))
    return [members for _, members in groups]


def item_of(update: Update, index: int) -> Item:
    """Component ``index`` as a function of its arrays and of the shared values it reads."""
    component = update.components[index]
    eqns = [update.jaxpr.jaxpr.eqns[i] for i in component.equations]
    made = {v for e in eqns for v in e.outvars}
    inputs = update.inputs(component)
    outputs = [update.outvar(kind, k) for kind, ks in (("params", component.params), ("state", component.state)) for k in ks]
    read = [v for e in eqns for v in e.invars] + outputs
    imports = tuple(dict.fromkeys(v for v in read if not jaxprs.is_literal(v) and v not in made and v not in inputs))
    used_outside = _used_outside(update, index)
    exports = tuple(v for e in eqns for v in e.outvars if v in used_outside)

    def run(*values):
        env = dict(zip([*inputs, *imports], values, strict=True))
        jaxprs.run_equations(eqns, env)
        return [v.val if jaxprs.is_literal(v) else env[v] for v in [*outputs, *exports]]

    jaxpr = jax.make_jaxpr(run)(*(v.aval for v in [*inputs, *imports]))
    return Item(component=component, imports=imports, exports=exports, jaxpr=jaxpr)


def _used_outside(update, index):
    """Variables that other equations read, or that are results of the update and that no component owns: the norm, scalars of the state."""
    used = {
        v
        for e, own in zip(update.jaxpr.jaxpr.eqns, update.owner, strict=True)
        if own != index
        for v in e.invars
        if not jaxprs.is_literal(v)
    }
    return used | {v for v in update.jaxpr.jaxpr.outvars if not jaxprs.is_literal(v) and loose(v)}


def _same_program(update, indices) -> tuple[Item, ...] | None:
    """The items of these components if they are one program on arrays of the same shapes, else None."""
    items = []
    for i in indices:
        item = item_of(update, i)
        if len(item.component.params) != 1:
            return None
        if items and (len(item.component.state) != len(items[0].component.state) or str(item.jaxpr) != str(items[0].jaxpr)):
            return None
        items.append(item)
    return tuple(items)
