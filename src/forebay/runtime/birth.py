"""``init`` and ``place``: every array of the state is born where the plan puts it.

Idea: one array at a time. A parameter is computed by a program that makes only that leaf (XLA drops the rest) and whose
output stands on the plan's memory. State that the optimizer fills with a constant is written shard by shard from the host,
so that zeros for the host never pass through HBM; other state (a copy of the parameters) is computed like a parameter.
Cost: HBM holds one leaf of one stack at a time, beside what stays there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import InputError, PlanError
from forebay.plan import Plan, State
from forebay.plan.copies import rebuild
from forebay.plan.state import restack
from forebay.workload import jaxprs


def init(init_fn: Callable, optimizer: Any, plan: Plan, key: Any, mesh: Any = None, extra: Any = None) -> State:
    """A new state under ``plan``.

    Args:
        init_fn: ``init_fn(key) -> params``, the user's tree.
        key: a PRNG key (typed or raw). ``init_fn`` gets one half of it; the other is kept in the state if the loss takes a key.
        mesh: the devices to stand on; by default the plan's mesh over this process's devices.
        extra: the initial mutable state, if the loss has one.

    Raises:
        PlanError: ``init_fn`` makes other parameters than the plan was made for.
    """
    plan = _bound(plan, init_fn, key)
    mesh = mesh if mesh is not None else plan.make_mesh()
    wanted = plan.abstract_state(mesh)
    params_key, step_key = jax.random.split(key)
    _check(plan, jax.eval_shape(init_fn, params_key))

    def stored(k):
        s = plan.layout.params[k]

        def make(key):
            leaves = jax.tree.leaves(init_fn(key))
            return jnp.stack([leaves[i] for i in s.members]) if s.stacked else leaves[s.members[0]]

        return jax.jit(make, out_shardings=wanted.stored_params[k].sharding)(params_key)

    params = tuple(stored(k) for k in range(len(wanted.stored_params)))
    return _complete(optimizer, plan, wanted, params, step_key, extra)


def place(params: Any, optimizer: Any, plan: Plan, key: Any = None, mesh: Any = None, extra: Any = None) -> State:
    """A new state from weights that exist: ``params`` (arrays or numpy arrays, the user's tree) go leaf by leaf to their places.

    The weights are consumed: what stands in its place already is not copied, and the first step donates it.
    """
    mesh = mesh if mesh is not None else plan.make_mesh()
    wanted = plan.abstract_state(mesh)
    _check(plan, params)
    stored = restack(plan.layout.params, jax.tree.leaves(params), wanted.stored_params)
    return _complete(optimizer, plan, wanted, stored, jax.random.key(0) if key is None else key, extra)


def _bound(plan: Plan, init_fn, key) -> Plan:
    if plan.work is None:
        raise PlanError("this plan was read from a file: bind it first, Plan.load(path, fb.trace(loss_fn, optimizer, params, batch))")
    return plan


def _check(plan: Plan, params):
    made, wanted = jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(plan.bound.args.params)
    if jax.tree.structure(params) != plan.layout.params_tree:
        raise PlanError(f"these parameters are {jax.tree.structure(params)} and the plan was made for {plan.layout.params_tree}")
    for (path, leaf), like in zip(made, wanted, strict=True):
        if (tuple(leaf.shape), leaf.dtype) != (like.shape, like.dtype):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise PlanError(f"parameter:{where} is {leaf.dtype}{list(leaf.shape)} and the plan was made for {like.dtype}{list(like.shape)}")


def _complete(optimizer, plan: Plan, wanted: State, params, key, extra) -> State:
    state = optimizer_state(optimizer, plan, wanted, params)
    if wanted.extra is not None and extra is None:
        raise InputError("the loss has extra state: pass its initial value as extra=")
    # A copy: the first step donates the state, and the caller's key and mutable state must outlive that.
    put = lambda value, like: jax.device_put(jnp.copy(value), like.sharding)  # noqa: E731
    return State(
        step=put(jnp.zeros((), jnp.int32), wanted.step),
        stored_params=params,
        stored_opt_state=state,
        key=None if wanted.key is None else put(_typed(key), wanted.key),
        extra=jax.tree.map(put, extra, wanted.extra),
        layout=plan.layout,
        stored_copies=rebuild(plan, params, wanted.stored_copies),
    )


def _typed(key):
    return key if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def optimizer_state(optimizer, plan: Plan, wanted: State, params) -> tuple[Any, ...]:
    """The optimizer's first state, array by array. ``params`` are the stored parameters."""
    leaves = plan.bound.args.params
    flat, tree = jax.tree.flatten(leaves)
    traced = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(optimizer.init(jax.tree.unflatten(tree, leaves))))(*flat)
    program = jaxprs.inline(traced)
    constants = _constants(program)
    out = []
    for s, like in zip(plan.layout.opt_state, wanted.stored_opt_state, strict=True):
        values = [constants.get(program.jaxpr.outvars[k]) if not jaxprs.is_literal(program.jaxpr.outvars[k]) else None for k in s.members]
        if all(v is not None for v in values) and like.shape:
            start, stop = s.part or (0, len(values))
            out.append(_filled(values[start:stop] if s.stacked else values, s.stacked, like))
        else:
            out.append(_computed(program, plan, s, like, params))
    return tuple(out)


def _constants(program) -> dict[Any, Any]:
    """Results that are one constant everywhere: variable to numpy scalar."""
    found: dict[Any, Any] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "broadcast_in_dim" and all(jaxprs.is_literal(v) for v in eqn.invars):
            found[eqn.outvars[0]] = np.asarray(eqn.invars[0].val, eqn.outvars[0].aval.dtype)
        elif eqn.primitive.name == "convert_element_type" and eqn.invars[0] in found:
            found[eqn.outvars[0]] = found[eqn.invars[0]].astype(eqn.outvars[0].aval.dtype)
    return found


def _filled(values, stacked, like):
    """An array of constants, made shard by shard in host memory."""

    def shard(index):
        shape = tuple(len(range(*i.indices(n))) for i, n in zip(index, like.shape, strict=True))
        if not stacked:
            return np.broadcast_to(values[0], shape)
        return np.broadcast_to(np.stack(values)[index[0]].reshape(-1, *(1,) * (len(shape) - 1)), shape)

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _computed(program, plan, s, like, params):
    """State that depends on the parameters: computed for this array alone."""
    stored = plan.layout.params
    wanted = [program.jaxpr.outvars[k] for k in s.members]
    used = _leaves_used(program, wanted)
    slots = [p for p, st in enumerate(stored) if used & set(st.members)]

    def make(*arrays):
        leaves = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]
        for p, array in zip(slots, arrays, strict=True):
            array = jax.device_put(array, jax.memory.Space.Device)
            for i, k in enumerate(stored[p].members):
                leaves[k] = array[i] if stored[p].stacked else array
        outs = jaxprs.evaluate(program, leaves)
        outs = [outs[k] for k in s.members]
        value = jnp.stack(outs) if s.stacked else outs[0]
        return value if s.part is None else value[slice(*s.part)]

    return jax.jit(make, out_shardings=like.sharding)(*(params[p] for p in slots))


def _leaves_used(program, wanted) -> set[int]:
    seen = jaxprs.cone(wanted, {v: e for e in program.jaxpr.eqns for v in e.outvars})
    return {k for k, v in enumerate(program.jaxpr.invars) if v in seen}
