"""Whole values of the update's variables, computed on demand, on the device.

Idea: the traced update is a graph. What is asked for is evaluated from what is known; a sum over an array that stands on
the host is not evaluated whole but asked of a pass over its slices (``Jobs``), and so is what a stacked family exports.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from forebay.errors import PlanError
from forebay.plan import Plan
from forebay.runtime.streaming import DEVICE
from forebay.workload import jaxprs
from forebay.workload.families import Family

ROLES = {"grads": "gradient", "params": "parameter", "state": "optimizer"}


class Values:
    """The evaluation of one update. ``given``: stored arrays as they came in; ``arrays``: as they are replaced; ``env``: variable to value.

    A slot is ``(kind, k)``: stored array ``k`` of ``grads``, ``params`` or ``state``, or of ``copies``, where ``k`` is the parameter.
    ``sums(family, variables)`` is called for variables that only a pass over a family's slices can give, and puts them into ``env``.
    """

    def __init__(self, plan: Plan, params, opt_state, copies=()):
        self.plan, self.work = plan, plan.bound
        self.update = self.work.update
        self.equations = self.update.jaxpr.jaxpr.eqns
        self.given = {("params", p): v for p, v in enumerate(params)} | {("state", j): v for j, v in enumerate(opt_state)}
        self.given |= {("copies", p): v for p, v in zip(plan.copies, copies, strict=True)}
        self.arrays = dict(self.given)
        roles = ROLES | ({"grads": "accumulator"} if plan.options["microbatches"] > 1 else {})
        self.host = {(kind, k): e.placement == "host" for kind, role in roles.items() for k, e in enumerate(plan.role(role))}
        self.env: dict[Any, Any] = dict(zip(self.update.jaxpr.jaxpr.constvars, self.update.jaxpr.consts, strict=True))
        self.made = {v: i for i, e in enumerate(self.equations) for v in e.outvars}
        # Never whole: seen slice by slice in the backward pass.
        self.consumed = {("grads", p) for f in plan.fused for p in self.work.families[f].params}
        self._fetched: dict[Any, Any] = {}
        self.sums: Callable[[int, list[Any]], None] | None = None
        self._index()

    def receive(self, grads: dict[int, Any], loss) -> None:
        """Gradients of stored parameters (those that were not consumed in the backward pass), and the loss."""
        self.given.update((("grads", p), g) for p, g in grads.items())
        self.env[self.update.loss_invar] = loss

    def _index(self):
        """Where each input variable is stored, and which family owns each component."""
        self.where: dict[Any, tuple[tuple[str, int], int | None]] = {}
        for kind, stored in (("grads", self.work.stored), ("params", self.work.stored), ("state", self.work.stored_state)):
            for slot, s in enumerate(stored):
                for i, k in enumerate(s.members):
                    self.where[self.update.invar(kind, k)] = ((kind, slot), i if s.stacked else None)
        parted = [(slot, s) for slot, s in enumerate(self.work.stored_state) if s.part]
        self.parts: dict[tuple[Any, tuple[int, int] | None], tuple[str, int]] = {
            (self.update.invar("state", k), s.part): ("state", slot) for slot, s in parted for k in s.members
        }
        position = {id(c): i for i, c in enumerate(self.update.components)}
        self.family: dict[int | None, int] = {
            position[id(item.component)]: f for f, family in enumerate(self.work.families) for item in family.items
        }

    def fetch(self, slot: tuple[str, int]):
        """A stored array as it came in, whole, on the device, in the dtype in which the update reads it."""
        value = jax.device_put(self.given[slot], DEVICE) if self.host[slot] else self.given[slot]
        return value if value.dtype == self.dtype(slot) else value.astype(self.dtype(slot))

    def dtype(self, slot: tuple[str, int]):
        """The dtype in which the update reads an array; an accumulator may have more bits."""
        kind, k = slot
        stored = self.work.stored_state if kind == "state" else self.work.stored
        return self.update.invar(kind, stored[k].members[0]).aval.dtype

    def slot(self, v, family: Family):
        """The slot in which a family finds an input variable: of state that is kept in parts, its own."""
        return self.parts.get((v, family.window), self.where[v][0])

    def whole(self, wanted: list[Any]) -> list[Any]:
        """Values of variables, whole and on the device, computing what they need."""
        eqns, sums = self._closure([v for v in wanted if not jaxprs.is_literal(v)])
        for f, variables in sums.items():
            assert self.sums is not None, "set by update.begin"
            self.sums(f, variables)
        for i in sorted(eqns):
            eqn = self.equations[i]
            values = [v.val if jaxprs.is_literal(v) else self._input(v) for v in eqn.invars]
            self.env.update(zip(eqn.outvars, jaxprs.bind(eqn, values), strict=True))
        return [v.val if jaxprs.is_literal(v) else self._input(v) for v in wanted]

    def _closure(self, wanted):
        """Equations to evaluate whole, and the variables that must come from passes over families, by family."""
        eqns: set[int] = set()
        sums: dict[int, list[Any]] = defaultdict(list)
        stack, seen = list(wanted), set()
        while stack:
            v = stack.pop()
            if v in seen or v in self.env or v not in self.made:
                continue
            seen.add(v)
            i = self.made[v]
            f = self.family.get(self.update.owner[i]) if self.update.owner[i] is not None else None
            if f is not None and self._by_pass(f, i):
                sums[f].append(v)
                continue
            eqns.add(i)
            stack.extend(u for u in self.equations[i].invars if not jaxprs.is_literal(u))
        return eqns, sums

    def _by_pass(self, f: int, i: int) -> bool:
        """Whether equation ``i`` of family ``f`` can be had only by a pass.

        So it is where it sums over slices of an array on the host, or belongs to a stack.
        """
        family, stream = self.work.families[f], self.plan.streams[f]
        if family.kind == "stack":
            return True
        return stream.mode == "slices" and i in stream.along.reductions and self.reads_host(f, self.equations[i].invars)

    def reads_host(self, f: int, variables) -> bool:
        stack, seen = [v for v in variables if not jaxprs.is_literal(v)], set()
        while stack:
            v = stack.pop()
            if v in seen or v in self.env:
                continue
            seen.add(v)
            if v in self.where and (self.host[self.where[v][0]] or self.where[v][0] in self.consumed):
                return True
            i = self.made.get(v)
            if i is not None and self.family.get(self.update.owner[i]) == f:
                stack.extend(u for u in self.equations[i].invars if not jaxprs.is_literal(u))
        return False

    def _input(self, v):
        if v not in self.env:
            slot, item = self.where[v]
            if slot not in self.given:
                raise PlanError(
                    f"the update needs the whole gradient of {self.plan.role('parameter')[slot[1]].name}, which the backward pass consumes "
                    "layer by layer; plan with the option fuse_update='never'"
                )
            if slot not in self._fetched:
                self._fetched[slot] = self.fetch(slot)
            self.env[v] = self._fetched[slot] if item is None else self._fetched[slot][item]
        return self.env[v]
