"""Carrying out the optimizer's update under a plan: resident families at once, host families by streaming.

Idea: the traced update is evaluated on demand. Shared values (norms, schedules, counts) are computed first, whole, on the
device. A sum over an array that stands on the host is a pass over its slices; one over arrays in HBM is computed directly.
Then each host family runs once more, slice by slice, and is written back in place:

    whole(values that the update needs)        counts, schedules; norms over gradients in HBM
    sums over host arrays, if any are needed   one pass each level (clipping by global norm with host gradients)
    for each group of families of equal length: streaming.run(...)
    whole(what is left)                        new counts, the gradient norm

Cost: one read and one write of every host array, and one more read for each level of sums that the update itself needs.
"""

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.plan import Plan
from forebay.plan.streams import Stream
from forebay.runtime import streaming
from forebay.runtime.streaming import DEVICE, HOST, Job, Port
from forebay.workload import jaxprs, slicing
from forebay.workload.families import Family


def apply(plan: Plan, grads, params, opt_state, loss) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """New stored params, new stored optimizer state and the gradient norm. All arguments are tuples of stored arrays."""
    run = _Run(plan, grads, params, opt_state, loss)
    run.finish()
    work = plan.bound
    new_params = tuple(run.arrays["params", p] for p in range(len(work.stored)))
    new_state = tuple(run.arrays["state", j] for j in range(len(work.stored_state)))
    return new_params, new_state, run.whole([work.update.grad_norm_outvar])[0]


class _Run:
    """One evaluation of the update. ``env``: whole values of variables, on the device. ``arrays``: stored arrays, as they are replaced."""

    def __init__(self, plan: Plan, grads, params, opt_state, loss):
        self.plan, self.work = plan, plan.bound
        self.update = self.work.update
        self.arrays = {("grads", p): v for p, v in enumerate(grads)} | {("params", p): v for p, v in enumerate(params)}
        self.arrays |= {("state", j): v for j, v in enumerate(opt_state)}
        self.given = dict(self.arrays)
        roles = {"grads": "gradient", "params": "parameter", "state": "optimizer"}
        self.host = {(kind, k): e.placement == "host" for kind, role in roles.items() for k, e in enumerate(plan.role(role))}
        self.env: dict[Any, Any] = {self.update.loss_invar: loss}
        self.made = {v: i for i, e in enumerate(self.update.jaxpr.jaxpr.eqns) for v in e.outvars}
        self.env.update(zip(self.update.jaxpr.jaxpr.constvars, self.update.jaxpr.consts, strict=True))
        self._index()

    def _index(self):
        """Where each input variable is stored, and which family owns each component."""
        work, self.where = self.work, {}
        for kind, stored in (("grads", work.stored), ("params", work.stored), ("state", work.stored_state)):
            for slot, s in enumerate(stored):
                for i, k in enumerate(s.members):
                    self.where[self.update.invar(kind, k)] = ((kind, slot), i if s.stacked else None)
        position = {id(c): i for i, c in enumerate(self.update.components)}
        self.family = {position[id(item.component)]: f for f, family in enumerate(work.families) for item in family.items}

    # ---- whole values, on demand

    def whole(self, wanted: list[Any]) -> list[Any]:
        """Values of variables, whole and on the device, computing what they need."""
        eqns, sums = self._closure([v for v in wanted if not jaxprs.is_literal(v)])
        for f, variables in sums.items():
            self._sums(f, variables)
        for i in sorted(eqns):
            eqn = self.update.jaxpr.jaxpr.eqns[i]
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
            stack.extend(u for u in self.update.jaxpr.jaxpr.eqns[i].invars if not jaxprs.is_literal(u))
        return eqns, sums

    def _by_pass(self, f: int, i: int) -> bool:
        """Whether equation ``i`` of family ``f`` can be had only by a pass: it sums over slices of an array on the host, or belongs to a stack."""
        family, stream = self.work.families[f], self.plan.streams[f]
        if family.kind == "stack":
            return True
        return stream.mode == "slices" and i in stream.sliced.reductions and self._reads_host(f, self.update.jaxpr.jaxpr.eqns[i].invars)

    def _reads_host(self, f: int, variables) -> bool:
        stack, seen = [v for v in variables if not jaxprs.is_literal(v)], set()
        while stack:
            v = stack.pop()
            if v in seen or v in self.env:
                continue
            seen.add(v)
            if v in self.where and self.host[self.where[v][0]]:
                return True
            i = self.made.get(v)
            if i is not None and self.family.get(self.update.owner[i]) == f:
                stack.extend(u for u in self.update.jaxpr.jaxpr.eqns[i].invars if not jaxprs.is_literal(u))
        return False

    def _input(self, v):
        if v not in self.env:
            slot, item = self.where[v]
            value = self.given[slot] if item is None else self.given[slot][item]
            self.env[v] = jax.device_put(value, DEVICE) if self.host[slot] else value
        return self.env[v]

    # ---- passes that only sum

    def _sums(self, f: int, variables: list[Any]):
        """Put into ``env`` sums (or a stack's exports) of family ``f``, without changing any array."""
        family, stream = self.work.families[f], self.plan.streams[f]
        if family.kind == "stack":
            self._stack_exports(family, stream, variables)
            return
        job = self._slice_job(family, stream, variables, write=False)
        [sums] = streaming.run([job], dict(self.given), stream.size, stream.count, stream.rest)
        self.env.update(zip(variables, sums, strict=True))

    def _stack_exports(self, family: Family, stream: Stream, variables):
        """The exports of every layer of a stack that are wanted: a vector over layers each."""
        first = family.items[0]
        named = {v: (item, k) for item in range(len(family.items)) for k, v in enumerate(family.items[item].exports)}
        wanted = sorted({named[v][1] for v in variables})
        needs = self._needs(first, [first.exports[k] for k in wanted])
        values, axes = self._imports(family, needs)

        def one(*args):
            return self._partial(first, needs, [first.exports[k] for k in wanted], list(args))

        inputs = [v for v in needs if v in self.where]
        slots = [self.where[v][0] for v in inputs]
        if any(self.host[s] for s in slots):
            vectors = self._loop_exports(family, one, slots, values, axes, [first.exports[k].aval for k in wanted])
        else:
            vectors = jax.vmap(one, in_axes=(*([0] * len(slots)), *axes))(*(self.given[s] for s in slots), *values)
        for k, vector in zip(wanted, vectors, strict=True):
            for i, item in enumerate(family.items):
                self.env[item.exports[k]] = vector[i]

    def _loop_exports(self, family, one, slots, values, axes, avals):
        n = len(family.items)
        reads = tuple(Port(slot=s, axis=0, host=self.host[s]) for s in slots)

        def compute(start, size, slices):
            imports = [v if a is None else v[start] for v, a in zip(values, axes, strict=True)]
            outs = one(*(s[0] for s in slices), *imports)
            return [], [lax.dynamic_update_index_in_dim(jnp.zeros((n, *a.shape), a.dtype), o, start, 0) for o, a in zip(outs, avals, strict=True)]

        zeros = tuple(jnp.zeros((n, *a.shape), a.dtype) for a in avals)
        job = Job(reads=reads, writes=(), compute=compute, sums=zeros, combine=(lax.add,) * len(avals))
        return streaming.run([job], dict(self.given), 1, n, 0)[0]

    def _needs(self, item, wanted):
        """Inputs and imports of an item that some of its results need, in their order."""
        eqns = self.update.jaxpr.jaxpr.eqns
        own = {v: i for i in item.component.equations for v in eqns[i].outvars}
        stack, seen = [v for v in wanted if not jaxprs.is_literal(v)], set()
        while stack:
            v = stack.pop()
            if v not in seen:
                seen.add(v)
                stack.extend(u for u in (eqns[own[v]].invars if v in own else ()) if not jaxprs.is_literal(u))
        return [v for v in [*self.update.inputs(item.component), *item.imports] if v in seen]

    def _partial(self, item, needs, wanted, values):
        env = dict(zip(needs, values, strict=True))
        eqns = self.update.jaxpr.jaxpr.eqns
        own = {v: i for i in item.component.equations for v in eqns[i].outvars}
        stack, needed = [v for v in wanted if v in own], set()
        while stack:
            i = own[stack.pop()]
            if i not in needed:
                needed.add(i)
                stack.extend(u for u in eqns[i].invars if not jaxprs.is_literal(u) and u in own)
        jaxprs.run_equations([eqns[i] for i in sorted(needed)], env)
        return [v.val if jaxprs.is_literal(v) else env[v] for v in wanted]

    def _imports(self, family: Family, needs):
        """Shared values that a stack's program reads, and 0 where each layer has its own (stacked) or None."""
        values, axes = [], []
        for k, v in enumerate(family.items[0].imports):
            if v not in needs:
                continue
            each = [item.imports[k] for item in family.items]
            whole = self.whole(each)
            same = all(u is v for u in each)
            values.append(whole[0] if same else jnp.stack(whole))
            axes.append(None if same else 0)
        return values, axes

    # ---- the update itself

    def finish(self):
        """Replace every stored array by its new value."""
        groups: dict[tuple, list[tuple[Family, Stream]]] = defaultdict(list)
        for family, stream in zip(self.work.families, self.plan.streams, strict=True):
            if stream.mode in ("slices", "items"):
                layered = stream.size == 1 and not stream.rest
                groups[(stream.count,) if layered else (stream.count, id(family))].append((family, stream))
        jobs = {key: [self._job(family, stream) for family, stream in group] for key, group in groups.items()}
        for family, stream in zip(self.work.families, self.plan.streams, strict=True):
            if stream.mode in ("resident", "whole"):
                self._at_once(family)
        for key, made in jobs.items():
            stream = groups[key][0][1]
            sums = streaming.run([job for job, _ in made], self.arrays, stream.size, stream.count, stream.rest)
            for (_, variables), totals in zip(made, sums, strict=True):
                self.env.update(zip(variables, totals, strict=True))
        for group in groups.values():
            for family, stream in group:
                self._unstreamed(family, stream)
        self._loose_state()

    def _job(self, family: Family, stream: Stream):
        """The final job of a streamed family, and the variables that it sums on the way because nothing needed them earlier."""
        if family.kind == "stack":
            return self._item_job(family), []
        late = self._late_sums(family, stream)
        return self._slice_job(family, stream, late, write=True), late

    def _late_sums(self, family: Family, stream: Stream) -> list[Any]:
        eqns, f = self.update.jaxpr.jaxpr.eqns, self.work.families.index(family)
        outs = [v for kind, k in self._leaves(family) if not jaxprs.is_literal(v := self.update.outvar(kind, k))]
        self.whole([v for v in self._outside(family, stream, outs)])
        exported = set(family.items[0].exports)
        reductions = [eqns[i].outvars[0] for i in sorted(stream.sliced.reductions)]
        return [v for v in reductions if v not in self.env and v in exported and self._reads_host(f, eqns[self.made[v]].invars)]

    def _leaves(self, family: Family):
        component = family.items[0].component
        return [("params", k) for k in component.params] + [("state", k) for k in component.state]

    def _outside(self, family: Family, stream: Stream, wanted) -> list[Any]:
        """Variables that slices of ``wanted`` read and that are not streamed themselves."""
        axis, eqns = stream.sliced.axis, self.update.jaxpr.jaxpr.eqns
        stack, seen, found = list(wanted), set(), []
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if axis.get(v) is None:
                found.append(v)
            elif v in self.made:
                stack.extend(u for u in eqns[self.made[v]].invars if not jaxprs.is_literal(u))
        return found

    def _slice_job(self, family: Family, stream: Stream, sums: list[Any], write: bool) -> Job:
        sliced, eqns = stream.sliced, self.update.jaxpr.jaxpr.eqns
        leaves = [(kind, k) for kind, k in self._leaves(family) if self._streams(sliced, kind, k)] if write else []
        outs = [self.update.outvar(kind, k) for kind, k in leaves]
        partial_of = [eqns[self.made[v]] for v in sums]
        starts = [v for e in partial_of for v in e.invars if not jaxprs.is_literal(v)]
        self.whole(self._outside(family, stream, [*outs, *starts]))
        order, inputs = self._streamed_equations(sliced, [*outs, *starts])
        ports = lambda vs: tuple(Port(slot=self.where[v][0], axis=sliced.axis[v], host=self.host[self.where[v][0]]) for v in vs)  # noqa: E731

        def compute(start, size, slices):
            env = dict(zip(inputs, slices, strict=True))
            window = slicing.Window(start, size, sliced.size)
            for i in [*order, *(self.made[v] for v in sums)]:
                axes = [None if jaxprs.is_literal(v) else sliced.axis.get(v) for v in eqns[i].invars]
                values = [v.val if jaxprs.is_literal(v) else env[v] if v in env else self.env[v] for v in eqns[i].invars]
                where = slicing.out_axes(eqns[i], axes)
                env.update(zip(eqns[i].outvars, slicing.bind(eqns[i], values, axes, where, window), strict=True))
            return [env[v] for v in outs], [env[v] for v in sums]

        writes = ports([self.update.invar(kind, k) for kind, k in leaves])
        names = [e.primitive.name for e in partial_of]
        zero = tuple(_identity(name, v.aval) for name, v in zip(names, sums, strict=True))
        return Job(reads=ports(inputs), writes=writes, compute=compute, sums=zero, combine=tuple(slicing.REDUCTIONS[n] for n in names))

    def _streams(self, sliced, kind, k) -> bool:
        old, new = self.update.invar(kind, k), self.update.outvar(kind, k)
        return new is not old and not jaxprs.is_literal(new) and sliced.axis.get(new) is not None

    def _streamed_equations(self, sliced, wanted):
        eqns = self.update.jaxpr.jaxpr.eqns
        stack, seen, order, inputs = [v for v in wanted if sliced.axis.get(v) is not None], set(), set(), []
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self.made:
                order.add(self.made[v])
                stack.extend(u for u in eqns[self.made[v]].invars if not jaxprs.is_literal(u) and sliced.axis.get(u) is not None)
            else:
                inputs.append(v)
        return sorted(order), sorted(inputs, key=list(self.where).index)

    def _item_job(self, family: Family) -> Job:
        first = family.items[0]
        values, axes = self._imports(family, first.imports)
        inputs = self.update.inputs(first.component)
        slots = [self.where[v][0] for v in inputs]
        targets = [("params", p) for p in family.params] + [("state", j) for j in family.state]

        def compute(start, size, slices):
            imports = [v if a is None else lax.dynamic_index_in_dim(v, start, 0, keepdims=False) for v, a in zip(values, axes, strict=True)]
            outs = jaxprs.evaluate(first.jaxpr, [*(s[0] for s in slices), *imports])
            return [o[None] for o in outs[: len(targets)]], []

        port = lambda s: Port(slot=s, axis=0, host=self.host[s])  # noqa: E731
        return Job(reads=tuple(map(port, slots)), writes=tuple(map(port, targets)), compute=compute)

    def _at_once(self, family: Family):
        """A resident family, or a host family moved whole."""
        targets = [("params", p) for p in family.params] + [("state", j) for j in family.state]
        if family.kind == "stack":
            first = family.items[0]
            values, axes = self._imports(family, first.imports)
            slots = [self.where[v][0] for v in self.update.inputs(first.component)]
            given = [jax.device_put(self.given[s], DEVICE) if self.host[s] else self.given[s] for s in slots]
            run = jax.vmap(functools.partial(_flat, first.jaxpr), in_axes=(*([0] * len(slots)), *axes))
            new = run(*given, *values)[: len(targets)]
        else:
            outs = dict(zip(self._leaves(family), self.whole([self.update.outvar(*leaf) for leaf in self._leaves(family)]), strict=True))
            new = [self._gather(outs, kind, slot) for kind, slot in targets]
        for target, value in zip(targets, new, strict=True):
            self.arrays[target] = jax.device_put(value, HOST) if self.host[target] else value

    def _gather(self, outs, kind, slot):
        stored = (self.work.stored if kind == "params" else self.work.stored_state)[slot]
        values = [outs[kind, k] for k in stored.members]
        return jnp.stack(values) if stored.stacked else values[0]

    def _unstreamed(self, family: Family, stream: Stream):
        """State of a streamed family that does not follow the streamed axis (a factored moment): computed whole."""
        if stream.mode != "slices":
            return
        for kind, k in self._leaves(family):
            old, new = self.update.invar(kind, k), self.update.outvar(kind, k)
            if new is not old and not self._streams(stream.sliced, kind, k):
                slot = self.where[old][0]
                [value] = self.whole([new])
                self.arrays[slot] = jax.device_put(value, HOST) if self.host[slot] else value

    def _loose_state(self):
        """Scalars of the state and scalar parameters: shared values."""
        owned = {("params", p) for f in self.work.families for p in f.params} | {("state", j) for f in self.work.families for j in f.state}
        for kind, stored in (("params", self.work.stored), ("state", self.work.stored_state)):
            for slot, s in enumerate(stored):
                if (kind, slot) not in owned:
                    [self.arrays[kind, slot]] = self.whole([self.update.outvar(kind, s.members[0])])


def _flat(jaxpr, *values):
    return jaxprs.evaluate(jaxpr, values)


def _identity(name: str, aval):
    """The neutral element of a reduction, as an array."""
    if name in ("reduce_sum", "dot_general", "reduce_or"):
        return jnp.zeros(aval.shape, aval.dtype)
    if name in ("reduce_prod", "reduce_and"):
        return jnp.ones(aval.shape, aval.dtype)
    lowest = name == "reduce_max"
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.full(aval.shape, -jnp.inf if lowest else jnp.inf, aval.dtype)
    info = jnp.iinfo(aval.dtype)
    return jnp.full(aval.shape, info.min if lowest else info.max, aval.dtype)
