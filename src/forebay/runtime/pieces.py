"""``value_and_grad`` and ``update``: the two halves of a planned step, for people who keep their own step.

    grad, update = value_and_grad(loss_fn, plan), update(optimizer, plan)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(plan's, plan's, None))
    def my_step(params, opt_state, batch):
        (loss, aux), grads = grad(params, batch)
        params, opt_state, grad_norm = update(params, opt_state, grads)
        return params, opt_state, loss

Idea: the same code as the train step's, without its State. Each function takes the user's own tree, or the tuple of *stored*
arrays (``state.stored_params``, ``state.stored_opt_state``), and answers in kind. Where the plan stores leaves of repeated layers
stacked, only the stored arrays can be streamed; the user's tree is then refused: to put it together would be a second copy.

Limits: gradients pass from one function to the other, so a backward pass fused with the update exists in ``train_step`` alone, and so does
gradient accumulation. Both functions are for the inside of the user's ``jax.jit``, whose arguments stand where the plan puts them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from forebay.errors import InputError, PlanError
from forebay.plan import Plan
from forebay.plan.state import unstack
from forebay.runtime.gradients import loss_and_gradients
from forebay.runtime.step import pinned
from forebay.runtime.updating import begin, finish
from forebay.workload.families import make_families
from forebay.workload.update import trace_update

_SPACES = {"hbm": jax.memory.Space.Device, "host": jax.memory.Space.Host}


def value_and_grad(loss_fn: Callable, plan: Plan) -> Callable:
    """``grad(params, batch, key=None, extra=None) -> ((loss, aux), grads)`` with parameters and activations where ``plan`` puts them.

    ``params`` is the user's tree or ``state.stored_params``; ``grads`` comes back in kind, that of a host parameter on the host,
    and None for a parameter that the plan's optimizer never changes.
    ``aux`` is None for a loss without it, and ``(aux, new_extra)`` for one with extra state, as ``loss_fn`` returns it.

    Raises:
        PlanError: the plan is not bound to a workload, or (when called) was made for other parameters.
        InputError: when called, an array does not stand where the plan puts it.
    """
    plan = _unfused(_with_loss(plan, loss_fn))
    mesh = plan.abstract_mesh()

    def grad(params: Any, batch: Any, key: Any = None, extra: Any = None) -> tuple[tuple[Any, Any], Any]:
        arrays, kind = _stored(plan, "parameter", params)
        with jax.sharding.use_abstract_mesh(mesh):
            loss, aux, new_extra, grads = loss_and_gradients(plan, plan.bound.program_on(mesh), None, arrays, extra, batch, key)
            grads = pinned(plan, mesh, grads)
        grads = tuple(None if frozen else grads[p] for p, frozen in enumerate(plan.bound.frozen))
        return (loss, aux if extra is None else (aux, new_extra)), kind(grads)

    return grad


def update(optimizer: Any, plan: Plan) -> Callable:
    """``update(params, opt_state, grads, loss=None) -> (params, opt_state, grad_norm)``: Optax's update, applied, under ``plan``.

    What stands on the host is streamed and written back in place, so donate ``params`` and ``opt_state`` to the jit around it; jax
    pairs donated arrays with results of the same shape in order, which is why both have the same order here. Arguments are the
    user's trees or stored arrays, and come back in kind. ``loss`` reaches transformations that ask for ``value``.

    Raises:
        PlanError: the plan is not bound to a workload, or was made for another optimizer or other parameters.
        InputError: when called, an array does not stand where the plan puts it, or the optimizer needs ``loss``.
    """
    plan = _unfused(_with_optimizer(plan, optimizer))

    def apply(params: Any, opt_state: Any, grads: Any, loss: Any = None) -> tuple[Any, Any, Any]:
        if loss is None and _reads_loss(plan):
            raise InputError("this optimizer asks for the value of the loss: pass it, update(params, opt_state, grads, loss)")
        gradients, _ = _stored(plan, "gradient", grads)
        states, kind_of_state = _stored(plan, "optimizer", opt_state)
        values, kind_of_params = _stored(plan, "parameter", params)
        with jax.sharding.use_abstract_mesh(plan.abstract_mesh()):
            run = begin(plan, values, states)
            run.receive({p: g for p, g in enumerate(gradients) if g is not None}, loss)
            values, states, norm = finish(run)
        return kind_of_params(values), kind_of_state(states), norm

    return apply


def _with_loss(plan: Plan, loss_fn) -> Plan:
    """``plan`` for this very function: the program is traced again (on first use) where it is not the one that the plan was made with."""
    if plan.bound.loss_fn is loss_fn:
        return plan
    return dataclasses.replace(plan, work=dataclasses.replace(plan.bound, loss_fn=loss_fn))


def _with_optimizer(plan: Plan, optimizer) -> Plan:
    work = plan.bound
    if work.optimizer is optimizer:
        return plan
    state = jax.eval_shape(optimizer.init, work.args.params)
    wanted = work.opt_state
    if jax.tree.structure(state) != jax.tree.structure(wanted) or str(state) != str(wanted):
        made, like = jax.tree.structure(state), jax.tree.structure(wanted)
        raise PlanError(f"this optimizer's state is {made} and the plan was made for {like}: make a plan for it")
    traced = trace_update(optimizer, work.args.params, state, work.program.jaxpr.out_avals[0].dtype)
    families, stored_state = make_families(traced, work.stored)
    if stored_state != work.stored_state:
        raise PlanError("this optimizer ties its arrays together in another way than that of the plan: make a plan for it")
    return dataclasses.replace(plan, work=dataclasses.replace(work, optimizer=optimizer, update=traced, families=families))


def _unfused(plan: Plan) -> Plan:
    """``plan`` as two functions carry it out: the gradient of a host parameter stands whole on the host between them."""
    hosted = {e.name.partition(":")[2] for e in plan.role("parameter") if e.placement == "host"}
    whole = {e.name: e.bytes_per_device for e in plan.role("parameter")}

    def entry(e):
        path = e.name.partition(":")[2]
        if e.role != "gradient" or path not in hosted:
            return e
        size = whole[f"parameter:{path}"]
        return dataclasses.replace(e, placement="host", bytes_per_device=size, reason="it passes from value_and_grad to update")

    entries = tuple(entry(e) for e in plan.entries if e.copy_of is None and e.role != "accumulator")
    return dataclasses.replace(plan, entries=entries, options={**plan.options, "fuse_update": "never", "microbatches": 1})


def _reads_loss(plan: Plan) -> bool:
    update = plan.bound.update
    return any(v is update.loss_invar for eqn in update.jaxpr.jaxpr.eqns for v in eqn.invars)


def _stored(plan: Plan, role: str, tree: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The stored arrays of one role, and the function that gives such arrays back in the form in which they came."""
    layout, entries = plan.layout, plan.role(role)
    stored, wanted = (layout.opt_state, layout.opt_tree) if role == "optimizer" else (layout.params, layout.params_tree)
    if (leaves := _leaves(wanted, tree)) is not None:
        _refuse_stacked(stored, entries, role)
        arrays = tuple(leaves[s.members[0]] for s in stored)
        kind = lambda arrays: jax.tree.unflatten(wanted, unstack(stored, arrays))  # noqa: E731
    elif isinstance(tree, tuple) and len(tree) == len(stored):
        arrays, kind = tree, tuple
    else:
        raise PlanError(
            f"the {role} tree is {jax.tree.structure(tree)} and the plan was made for {wanted}, stored as {len(stored)} arrays in a tuple"
        )
    for p, (array, entry) in enumerate(zip(arrays, entries, strict=True)):
        if not (role == "gradient" and plan.bound.frozen[p] and array is None):
            _check(array, entry)
    return arrays, kind


def _leaves(wanted: Any, tree: Any) -> list[Any] | None:
    """What ``tree`` holds in the places of the leaves of ``wanted``, or None where it is another tree."""
    if jax.tree_util.treedef_is_leaf(wanted) and isinstance(tree, tuple):
        return None  # the tree of a bare array takes anything for its leaf, stored arrays too
    try:
        return wanted.flatten_up_to(tree)
    except ValueError:
        return None


def _refuse_stacked(stored, entries, role: str) -> None:
    stacks = [e.name for s, e in zip(stored, entries, strict=True) if s.stacked]
    parts = [e.name for s, e in zip(stored, entries, strict=True) if s.part and not s.stacked]
    if parts:
        raise PlanError(
            f"the plan keeps {parts[0]} apart from the other layers, so this cannot take your own tree: make the state with forebay.init "
            "or forebay.place and pass state.stored_opt_state, or plan with the option duplex='never' and no rule for some layers only"
        )
    if stacks:
        field = "stored_opt_state" if role == "optimizer" else "stored_params"
        raise PlanError(
            f"the plan stores {len(stacks)} stacks of the leaves of repeated layers (such as {stacks[0]}), so this cannot take your own "
            f"tree: make the state with forebay.init or forebay.place and pass state.{field}, or write the layers as a scan"
        )


def _check(array: Any, entry) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise PlanError(f"{entry.name} is {type(array).__name__} and the plan was made for {entry.dtype}{list(entry.shape)}")
    aval = jax.typeof(array)
    if (aval.shape, str(aval.dtype)) != (entry.shape, entry.dtype):
        raise PlanError(f"{entry.name} is {aval.dtype}{list(aval.shape)} and the plan was made for {entry.dtype}{list(entry.shape)}")
    if aval.memory_space != _SPACES[entry.placement]:
        stands, wanted = ("host", "HBM") if entry.placement == "hbm" else ("HBM", "host")
        raise InputError(
            f"{entry.name} stands in {stands} memory and the plan puts it in {wanted} memory; give jit the shardings of "
            "plan.abstract_state(mesh), or make the state with forebay.init"
        )
