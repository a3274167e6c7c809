"""Jobs: what a family of the update does to one slice, ready for the streaming loop.

A job reads the slices of its arrays, evaluates the family's own equations on them (``workload.slicing`` for a slice of a
user's leaf, the layer's program itself for a stack), and gives the slices to write back and, if asked, partial sums.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.plan.fusion import gradient_dependent
from forebay.plan.streams import Stream
from forebay.runtime import copies, streaming
from forebay.runtime.streaming import Job, Port
from forebay.runtime.values import Values
from forebay.workload import jaxprs, slicing
from forebay.workload.families import Family, Item
from forebay.workload.update import outside, slice_equations


def targets(family: Family) -> list[tuple[str, int]]:
    """The slots that a family replaces: parameters, then state."""
    return [("params", p) for p in family.params] + [("state", j) for j in family.state]


def leaves(family: Family) -> list[tuple[str, int]]:
    """The leaves of the user's trees that the first item of a family replaces."""
    return leaves_of(family.items[0])


def leaves_of(item: Item) -> list[tuple[str, int]]:
    """The leaves of the user's trees that one item replaces."""
    return [("params", k) for k in item.component.params] + [("state", k) for k in item.component.state]


def ports(values: Values, family: Family, variables, axis=lambda v: 0) -> tuple[Port, ...]:
    """The arrays of variables as a loop over the family's slices sees them; what is kept in parts counts from its own first layer."""
    slots = [values.slot(v, family) for v in variables]
    first = family.window[0] if family.window else 0
    return tuple(
        Port(slot=s, axis=axis(v), host=values.host[s], first=first if (v, family.window) in values.parts else 0, dtype=values.dtype(s))
        for s, v in zip(slots, variables, strict=True)
    )


def final_job(values: Values, family: Family, stream: Stream) -> tuple[Job, list[Any]]:
    """The job that replaces a streamed family's arrays, and the variables that it sums on the way, since nothing needs them earlier."""
    if family.kind == "stack":
        job, late = item_job(values, family, stream)
    else:
        late = late_sums(values, family, stream)
        job = slice_job(values, family, stream, late, write=True)
    return copies.follow(values.plan, job), late


def late_sums(values: Values, family: Family, stream: Stream) -> list[Any]:
    """Exported sums over host arrays that the update itself does not need: taken in the same pass."""
    f = values.work.families.index(family)
    outs = [v for leaf in leaves(family) if not jaxprs.is_literal(v := values.update.outvar(*leaf))]
    values.whole(outside(values.update, stream.along, outs))
    exported = set(family.items[0].exports)
    sums = [values.equations[i].outvars[0] for i in sorted(stream.along.reductions)]
    return [v for v in sums if v not in values.env and v in exported and values.reads_host(f, values.equations[values.made[v]].invars)]


def sums_job(values: Values, family: Family, stream: Stream) -> tuple[Job, list[Any]]:
    """The job of a first pass: it changes nothing and takes the family's exported sums of its gradient."""
    if family.kind == "stack":
        return _export_job(values, family)
    sums = [v for i in sorted(stream.along.reductions) if (v := values.equations[i].outvars[0]) not in values.env]
    return slice_job(values, family, stream, sums, write=False), sums


def streams(values: Values, sliced, kind: str, k: int) -> bool:
    """Whether a leaf is replaced slice by slice."""
    old, new = values.update.invar(kind, k), values.update.outvar(kind, k)
    return new is not old and not jaxprs.is_literal(new) and sliced.axis.get(new) is not None


def slice_job(values: Values, family: Family, stream: Stream, sums: list[Any], write: bool) -> Job:
    """A job on slices of a user's leaf: writes its new value if ``write``, and sums ``sums`` over the slices."""
    sliced, eqns = stream.along, values.equations
    changed = [leaf for leaf in leaves(family) if streams(values, sliced, *leaf)] if write else []
    outs = [values.update.outvar(*leaf) for leaf in changed]
    partial_of = [eqns[values.made[v]] for v in sums]
    starts = [v for e in partial_of for v in e.invars if not jaxprs.is_literal(v)]
    values.whole(outside(values.update, sliced, [*outs, *starts]))
    order, inputs = slice_equations(values.update, sliced, [*outs, *starts])
    inputs = sorted(inputs, key=list(values.where).index)
    known = values.env

    def compute(start, size, slices):
        env = dict(zip(inputs, slices, strict=True))
        window = slicing.Window(start, size, sliced.size)
        for i in [*order, *(values.made[v] for v in sums)]:
            axes = [None if jaxprs.is_literal(v) else sliced.axis.get(v) for v in eqns[i].invars]
            given = [v.val if jaxprs.is_literal(v) else env[v] if v in env else known[v] for v in eqns[i].invars]
            where = slicing.out_axes(eqns[i], axes)
            env.update(zip(eqns[i].outvars, slicing.bind(eqns[i], given, axes, where, window), strict=True))
        return [env[v] for v in outs], [env[v] for v in sums]

    names = [e.primitive.name for e in partial_of]
    return Job(
        reads=ports(values, family, inputs, sliced.axis.get),
        writes=ports(values, family, [values.update.invar(*leaf) for leaf in changed], sliced.axis.get),
        compute=compute,
        sums=tuple(identity(name, v.aval) for name, v in zip(names, sums, strict=True)),
        combine=tuple(slicing.REDUCTIONS[n] for n in names),
        size=stream.size,
        rest=stream.rest,
        first=family.window[0] if family.window else 0,
    )


def item_job(values: Values, family: Family, stream: Stream) -> tuple[Job, list[Any]]:
    """A job on the layers of a stack, with the layer's own program. It collects its exports, one vector over layers each."""
    first, n = family.items[0], len(family.items)
    shared, axes = imports(values, family, first.imports)
    inputs = values.update.inputs(first.component)
    changed = [values.update.invar(*leaf) for leaf in leaves(family)]
    start_at, stop_at = family.window or (0, n)
    late = [k for k, v in enumerate(first.exports) if v not in values.env]

    def compute(start, size, slices):
        given = [v if a is None else lax.dynamic_index_in_dim(v, start, 0, keepdims=False) for v, a in zip(shared, axes, strict=True)]
        outs = jaxprs.evaluate(first.jaxpr, [*(s[0] for s in slices), *given])
        exports = [spread(outs[len(changed) + k], start, n) for k in late]
        return [o[None] for o in outs[: len(changed)]], exports

    zeros = tuple(jnp.zeros((n, *first.exports[k].aval.shape), first.exports[k].aval.dtype) for k in late)
    job = Job(
        reads=ports(values, family, inputs), writes=ports(values, family, changed),
        compute=compute, sums=zeros, combine=joins(zeros), rest=stream.rest, first=start_at,
    )  # fmt: skip
    return job, [tuple(item.exports[k] if start_at <= i < stop_at else None for i, item in enumerate(family.items)) for k in late]


def gathered(found: dict[Any, Any], job: Job, variables: list[Any], totals: list[Any]) -> None:
    """Add the sums of a job to ``found``: a stack whose state is kept in parts has a job for each part."""
    for v, combine, total in zip(variables, job.combine, totals, strict=True):
        found[v] = combine(found[v], total) if v in found else total


def record(values: Values, variables: Iterable[Any], totals: Iterable[Any]) -> None:
    """Put the sums of a job into ``env``: one variable each, or one variable per layer for a vector over layers."""
    for v, total in zip(variables, totals, strict=True):
        if isinstance(v, tuple):
            values.env.update((one, total[i]) for i, one in enumerate(v) if one is not None)
        else:
            values.env[v] = total


def spread(value, at, n: int):
    """A vector of ``n`` that is ``value`` at position ``at`` and zero elsewhere."""
    return lax.dynamic_update_index_in_dim(jnp.zeros((n, *value.shape), value.dtype), value, at, 0)


def joins(vectors) -> tuple[Any, ...]:
    """How vectors made by ``spread`` are put together: each position is nonzero in one of them at most."""
    return tuple(lax.bitwise_or if v.dtype == jnp.bool_ else lax.add for v in vectors)


def imports(values: Values, family: Family, needs) -> tuple[list[Any], list[int | None]]:
    """Shared values that a stack's program reads; axis 0 where each layer has its own (stacked here), else None."""
    found, axes = [], []
    for k, v in enumerate(family.items[0].imports):
        if v not in needs:
            continue
        each = [item.imports[k] for item in family.items]
        whole = values.whole(each)
        same = all(u is v for u in each)
        found.append(whole[0] if same else jnp.stack(whole))
        axes.append(None if same else 0)
    return found, axes


def sum_pass(values: Values, f: int, variables: list[Any]) -> None:
    """Put sums (or a stack's exports) of family ``f`` into ``env``, without changing any array."""
    family = values.work.families[f]
    if family.kind == "stack":
        _stack_exports(values, family, variables)
        return
    found: dict[Any, Any] = {}
    for part, stream in zip(values.work.families, values.plan.streams, strict=True):
        if part.items is family.items:
            job = slice_job(values, part, stream, variables, write=False)
            [sums] = streaming.run([job], dict(values.given), stream.count)
            gathered(found, job, variables, sums)
    record(values, found.keys(), found.values())


def _stack_exports(values: Values, family: Family, variables) -> None:
    first = family.items[0]
    position = {v: k for item in family.items for k, v in enumerate(item.exports)}
    wanted = sorted({position[v] for v in variables})
    results = [first.exports[k] for k in wanted]
    needs, needed = _part(values, first, results)
    shared, axes = imports(values, family, needs)

    def one(*args):
        env = dict(zip(needs, args, strict=True))
        jaxprs.run_equations([values.equations[i] for i in needed], env)
        return [env[v] for v in results]

    own = set(values.update.inputs(first.component))
    slots = [values.where[v][0] for v in needs if v in own]
    if any(values.host[s] for s in slots):
        vectors = _loop_exports(values, family, one, slots, shared, axes, [v.aval for v in results])
    else:
        vectors = jax.vmap(one, in_axes=(*([0] * len(slots)), *axes))(*(values.given[s] for s in slots), *shared)
    record(values, [tuple(item.exports[k] for item in family.items) for k in wanted], vectors)


def _export_job(values: Values, family: Family) -> tuple[Job, list[Any]]:
    """A stack's exports that need nothing which another pass must give first, one vector over layers each."""
    first, n = family.items[0], len(family.items)
    tainted = gradient_dependent(values.update)
    parts = [(k, *_part(values, first, [v])) for k, v in enumerate(first.exports)]
    ready = [k for k, needs, _ in parts if not any(v in tainted and v in first.imports for v in needs)]
    results = [first.exports[k] for k in ready]
    needs, needed = _part(values, first, results)
    shared, axes = imports(values, family, needs)
    own = set(values.update.inputs(first.component))
    slots = [values.where[v][0] for v in needs if v in own]

    def compute(start, size, slices):
        given = [v if a is None else v[start] for v, a in zip(shared, axes, strict=True)]
        env = dict(zip(needs, [*(s[0] for s in slices), *given], strict=True))
        jaxprs.run_equations([values.equations[i] for i in needed], env)
        return [], [spread(env[v], start, n) for v in results]

    zeros = tuple(jnp.zeros((n, *v.aval.shape), v.aval.dtype) for v in results)
    reads = tuple(Port(slot=s, axis=0, host=values.host[s], dtype=values.dtype(s)) for s in slots)
    job = Job(reads=reads, writes=(), compute=compute, sums=zeros, combine=joins(zeros))
    return job, [tuple(item.exports[k] for item in family.items) for k in ready]


def _loop_exports(values: Values, family, one, slots, shared, axes, avals):
    n = len(family.items)

    def compute(start, size, slices):
        given = [v if a is None else v[start] for v, a in zip(shared, axes, strict=True)]
        return [], [spread(o, start, n) for o in one(*(s[0] for s in slices), *given)]

    zeros = tuple(jnp.zeros((n, *a.shape), a.dtype) for a in avals)
    reads = tuple(Port(slot=s, axis=0, host=values.host[s], dtype=values.dtype(s)) for s in slots)
    job = Job(reads=reads, writes=(), compute=compute, sums=zeros, combine=joins(zeros))
    return streaming.run([job], dict(values.given), n)[0]


def _part(values: Values, item: Item, wanted):
    """Inputs and imports (in order) and equations that some results of an item need."""
    own = {v: i for i in item.component.equations for v in values.equations[i].outvars}
    stack, seen, needed = list(wanted), set(), set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in own:
            needed.add(own[v])
            stack.extend(u for u in values.equations[own[v]].invars if not jaxprs.is_literal(u))
    return [v for v in [*values.update.inputs(item.component), *item.imports] if v in seen], sorted(needed)


def identity(name: str, aval):
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
