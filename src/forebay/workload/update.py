"""The optimizer's update as a program, split into what each parameter needs and what they share.

``optimizer.update`` and ``apply_updates`` are traced once on the user's tree. Arrays that meet in an equation belong to
one *component* (as a rule: a parameter, its gradient and its state). Scalars do not tie components together: a step
count, a schedule's value or a global norm is *shared*, computed between passes. A scalar that only one component uses
and that depends on no other (a trust ratio) belongs to that component.

    grads, params, state, loss -> | component 0 | -> params', state'
                                  | component 1 |
                                  |   shared    | -> counts, norms, schedules

Conditionals (``MultiSteps``) become selections, since both branches are needed for a streamed slice anyway.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from forebay.errors import InputError
from forebay.workload import jaxprs, slicing
from forebay.workload.frozen import frozen_leaves

TABLE_SIZE = 64  # elements: what is shared is computed whole, so it must be small
_WRITTEN_OUT = (*jaxprs.REMAT, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Component:
    """Equations that must run together. All members are positions: of leaves in the user's trees, of equations in the program."""

    params: tuple[int, ...]
    grads: tuple[int, ...]
    state: tuple[int, ...]
    equations: tuple[int, ...]

    @property
    def members(self) -> int:
        return len(self.params) + len(self.state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """The traced update. ``jaxpr``: (grads, params, state, loss) -> (params', state', grad_norm), flat, calls written out.

    ``owner[i]`` is the component that owns equation ``i``, or None where it is shared. ``frozen[k]``: leaf ``k`` never changes and
    needs no gradient; it has no part in the gradient norm.
    """

    jaxpr: Any
    leaves: int
    state_leaves: int
    components: tuple[Component, ...]
    owner: tuple[int | None, ...]
    frozen: tuple[bool, ...] = ()

    def invar(self, kind: str, k: int):
        """The input variable of leaf ``k`` of ``grads``, ``params`` or ``state``."""
        return self.jaxpr.jaxpr.invars[{"grads": 0, "params": self.leaves, "state": 2 * self.leaves}[kind] + k]

    @property
    def loss_invar(self):
        return self.jaxpr.jaxpr.invars[-1]

    def outvar(self, kind: str, k: int):
        """The result variable of leaf ``k`` of ``params`` or ``state``: of a frozen parameter, its input."""
        if kind == "params" and self.frozen[k]:
            return self.invar(kind, k)
        return self.jaxpr.jaxpr.outvars[{"params": 0, "state": self.leaves}[kind] + k]

    @property
    def grad_norm_outvar(self):
        return self.jaxpr.jaxpr.outvars[-1]

    def inputs(self, component: Component) -> list[Any]:
        """Input variables of a component: gradients, parameters, state, in that order."""
        return [self.invar(kind, k) for kind, ks in _members(component) for k in ks]


def _members(c: Component):
    return (("grads", c.grads), ("params", c.params), ("state", c.state))


def grad_norm(grads: Any):
    """The global L2 norm of a gradient tree, accumulated in at least fp32, leaf by leaf (a vdot would gather shards)."""
    total = jnp.zeros((), jnp.float32)
    for g in jax.tree.leaves(grads):
        total = total + jnp.sum(jnp.square(jnp.abs(g.astype(jnp.promote_types(g.dtype, jnp.float32)))))
    return jnp.sqrt(total)


def apply_update(optimizer, grads, params, state, loss):
    """The resident update: new params, new state. ``loss`` reaches the transformations that ask for ``value``."""
    optimizer = optax.with_extra_args_support(optimizer)
    updates, state = optimizer.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


def trace_update(optimizer, params: Any, state: Any, loss_dtype=jnp.float32) -> Update:
    """Trace and split the update of ``params`` (a tree of ShapeDtypeStructs) with optimizer ``state``."""
    leaves, tree = jax.tree.flatten(params)
    state_leaves, state_tree = jax.tree.flatten(state)

    def flat(counted, grads, values, states, loss):
        counted = [g for g, c in zip(grads, counted, strict=True) if c]
        grads = jax.tree.unflatten(tree, grads)
        new, new_state = apply_update(optimizer, grads, jax.tree.unflatten(tree, values), jax.tree.unflatten(state_tree, states), loss)
        if jax.tree.structure(new_state) != state_tree:
            raise InputError(f"the optimizer changes the structure of its state from {state_tree} to {jax.tree.structure(new_state)}")
        return jax.tree.leaves(new), jax.tree.leaves(new_state), grad_norm(counted)

    args = leaves, leaves, state_leaves, jax.ShapeDtypeStruct((), loss_dtype)
    try:
        traced = jax.make_jaxpr(functools.partial(flat, [True] * len(leaves)))(*args)
    except jax.dtypes.TypePromotionError as problem:
        raise InputError(
            f"the optimizer does not work on parameters of these types, in forebay or without it: {str(problem).splitlines()[0]} Keep the "
            "parameters in a wider type and cast them in the loss"
        ) from problem
    _same_avals(params, state, traced, len(leaves))
    jaxpr = _written_out(traced)
    frozen = frozen_leaves(jaxpr, len(leaves), len(state_leaves))
    if any(frozen):
        jaxpr = _written_out(jax.make_jaxpr(functools.partial(flat, [not f for f in frozen]))(*args))
    owner, components = _split(jaxpr, len(leaves), len(state_leaves))
    return Update(jaxpr=jaxpr, leaves=len(leaves), state_leaves=len(state_leaves), components=components, owner=owner, frozen=frozen)


def _same_avals(params, state, traced, n):
    names = [*jax.tree_util.tree_flatten_with_path(params)[0], *jax.tree_util.tree_flatten_with_path(state)[0]]
    for (path, old), new in zip(names, traced.out_avals, strict=False):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(
                f"one step of the optimizer turns {where} from {old.dtype}{list(old.shape)} into {new.dtype}{list(new.shape)}; "
                "state that changes its type cannot be updated in place: fix its dtype in the optimizer (for example mu_dtype=) "
                "or the parameter's"
            )


def _written_out(traced):
    def rule(eqn, values):
        name = eqn.primitive.name
        if name == "cond":
            index, *args = values
            cases = [jaxprs.evaluate(branch, args, rule) for branch in eqn.params["branches"]]
            pick = index if index.dtype == jnp.bool_ else jnp.asarray(index, jnp.int32)
            return [lax.select_n(pick, *case) for case in zip(*cases, strict=True)]
        if name in (*jaxprs.INLINED, *_WRITTEN_OUT) and (inner := jaxprs.subjaxpr(eqn)) is not None:
            return jaxprs.evaluate(inner, values, rule)
        return None

    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(traced, args, rule))(*traced.in_avals)


def loose(v) -> bool:
    """Values that are shared rather than streamed: arrays of one element at most, and random keys."""
    aval = v.aval
    return aval.size <= 1 or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) or (aval.dtype == np.uint32 and aval.size <= 16)


def _split(jaxpr, n, m):
    eqns, invars = jaxpr.jaxpr.eqns, jaxpr.jaxpr.invars
    tables = _tables(jaxpr, n, m)
    free = lambda v: loose(v) or v in tables  # noqa: E731
    parent: dict[Any, Any] = {}

    def find(v):
        while parent.setdefault(v, v) is not v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for k in range(n):
        if not free(invars[k]):
            parent[find(invars[k])] = find(invars[n + k])
    for eqn in eqns:
        outs = [v for v in eqn.outvars if not free(v)]
        ties = [v for v in eqn.invars if not jaxprs.is_literal(v) and not free(v) and v not in jaxpr.jaxpr.constvars]
        for v in (*ties, *outs) if outs else ():
            parent[find(v)] = find(outs[0])
    owner: list[Any] = [_array_owner(e, find, free) for e in eqns]
    _claim_scalars(jaxpr, owner, find, free)
    return _components(jaxpr, owner, find, free, n, m)


def _tables(jaxpr, n, m) -> set[Any]:
    """Small state arrays that the update reads and never changes (Muon's coefficients), and small arrays made from them alone: shared."""
    new = jaxpr.jaxpr.outvars[n : n + m]
    kept = {v for v, after in zip(jaxpr.jaxpr.invars[2 * n :], new, strict=False) if v is after and v.aval.size <= TABLE_SIZE}
    for eqn in jaxpr.jaxpr.eqns:
        read = [v for v in eqn.invars if not jaxprs.is_literal(v) and not loose(v)]
        if read and kept.issuperset(read):
            kept.update(v for v in eqn.outvars if v.aval.size <= TABLE_SIZE)
    return kept


def _array_owner(eqn, find, free):
    """The component of an equation that makes arrays, or that sums the arrays of one component."""
    made = [v for v in eqn.outvars if not free(v)]
    read = {find(v) for v in eqn.invars if not jaxprs.is_literal(v) and not free(v)}
    return find(made[0]) if made else read.pop() if len(read) == 1 else None


def _claim_scalars(jaxpr, owner, find, free):
    """Give each shared scalar equation to the one component from which it is made and that uses it, where there is just one.

    What is made from shared values alone stays shared: the key of one layer is cut from the keys of all at that layer's place, so
    layers that did it for themselves would not be one program.
    """
    eqns = jaxpr.jaxpr.eqns
    depends: dict[Any, frozenset] = {}
    for eqn, own in zip(eqns, owner, strict=True):
        sources = [v for v in eqn.invars if not jaxprs.is_literal(v)]
        found = frozenset().union(*(depends.get(v, frozenset()) if free(v) else {find(v)} for v in sources), {own} - {None})
        depends.update((v, found) for v in eqn.outvars)
    users: dict[Any, set] = {v: {"result"} for v in jaxpr.jaxpr.outvars if not jaxprs.is_literal(v)}
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        if owner[i] is None:
            used_by = set().union(*(users.get(v, set()) for v in eqn.outvars))
            if len(used_by) == 1 and (only := next(iter(used_by))) not in ("result", "shared") and depends[eqn.outvars[0]] == {only}:
                owner[i] = only
        for v in eqn.invars:
            if not jaxprs.is_literal(v):
                users.setdefault(v, set()).add("shared" if owner[i] is None else owner[i])


def _components(jaxpr, owner, find, free, n, m):
    invars = jaxpr.jaxpr.invars
    roots: dict[Any, dict] = {}

    def member(kind, k, v):
        if not free(v):
            roots.setdefault(find(v), {"params": [], "grads": [], "state": [], "equations": []})[kind].append(k)

    for k in range(n):
        member("grads", k, invars[k])
        member("params", k, invars[n + k])
    for j in range(m):
        member("state", j, invars[2 * n + j])
    for i, root in enumerate(owner):
        if root is not None and root in roots:
            roots[root]["equations"].append(i)
    index = {root: c for c, root in enumerate(roots)}
    components = tuple(Component(**{key: tuple(value) for key, value in parts.items()}) for parts in roots.values())
    return tuple(index.get(root) for root in owner), components


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sliced:
    """How a component runs slice by slice: the streamed axis of its variables, and where it must sum over the slices."""

    size: int
    axis: dict[Any, int | None]
    reductions: frozenset[int]


def slice_component(update: Update, component: Component, axis: int) -> Sliced:
    """Lay ``component`` out for streaming along ``axis`` of its parameter.

    Raises:
        slicing.NotSeparable: an equation mixes the slices.
    """
    lead = update.invar("params", component.params[0]) if component.params else update.invar("state", component.state[0])
    shape = lead.aval.shape
    if any(update.invar("params", k).aval.shape != shape for k in component.params):
        raise slicing.NotSeparable("parameters of different shapes are updated together")
    fixed = {v: axis for v in update.inputs(component) if v.aval.shape == shape}
    free = [v for v in update.inputs(component) if v not in fixed]
    refused: slicing.NotSeparable | None = None
    for choice in _choices(free, shape[axis]):
        try:
            return _try(update, component, fixed | choice, shape[axis])
        except slicing.NotSeparable as error:
            refused = refused or error
    raise refused or slicing.NotSeparable("no axis of its state follows the parameter's")


def _choices(free, size):
    """Axes to try for state that is shaped unlike its parameter (factored moments): each that has the streamed length, or none."""
    if not free:
        return [{}]
    first, *rest = free
    axes = [a for a, s in enumerate(first.aval.shape) if s == size] + [None]
    return [{first: a} | more for a in axes for more in _choices(rest, size)][:256]


def _try(update, component, axis, size):
    axis = dict(axis)
    reductions = set()
    for i in component.equations:
        eqn = update.jaxpr.jaxpr.eqns[i]
        axes = [None if jaxprs.is_literal(v) else axis.get(v) for v in eqn.invars]
        if all(a is None for a in axes):
            continue
        outs = slicing.out_axes(eqn, axes)
        if outs == "reduce":
            reductions.add(i)
        else:
            axis.update((v, a) for v, a in zip(eqn.outvars, outs, strict=True) if a is not None)
    for kind, ks in (("params", component.params), ("state", component.state)):
        for k in ks:
            old, new = axis.get(update.invar(kind, k)), axis.get(update.outvar(kind, k))
            if old != new and update.outvar(kind, k) is not update.invar(kind, k):
                raise slicing.NotSeparable(f"{kind} leaf {k} would come out on another axis")
    return Sliced(size=size, axis=axis, reductions=frozenset(reductions))


def outside(update: Update, sliced: Sliced, wanted) -> list[Any]:
    """Variables that slices of ``wanted`` read and that are not streamed themselves."""
    return _walk(update, sliced, wanted)[2]


def slice_equations(update: Update, sliced: Sliced, wanted) -> tuple[list[int], list[Any]]:
    """Equations to evaluate on a slice, in order, and the streamed inputs that they read, for slices of ``wanted``."""
    order, inputs, _ = _walk(update, sliced, wanted)
    return order, inputs


def _walk(update: Update, sliced: Sliced, wanted):
    eqns = update.jaxpr.jaxpr.eqns
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    stack, seen, order, inputs, found = [v for v in wanted if not jaxprs.is_literal(v)], set(), set(), [], []
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if sliced.axis.get(v) is None:
            found.append(v)
        elif v in made:
            order.add(made[v])
            stack.extend(u for u in eqns[made[v]].invars if not jaxprs.is_literal(u))
        else:
            inputs.append(v)
    return sorted(order), inputs, found
