"""``train_step``: one jitted, donated step that carries a plan out.

state, batch -> loss and gradients (planned loss) -> update (resident or streamed) -> state', {loss, grad_norm, aux}
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from forebay.errors import InputError, PlanError
from forebay.plan import Plan, State
from forebay.runtime import copies, updating
from forebay.runtime.accumulate import accumulated
from forebay.runtime.gradients import loss_and_gradients
from forebay.workload import Workload, trace
from forebay.workload.sharding import mesh_shape, named


class TrainStep:
    """``step(state, batch) -> (state, metrics)``. Compiles once; the state is donated. ``trace`` and ``lower`` work on abstract states."""

    def __init__(self, loss_fn: Callable, optimizer: Any, plan: Plan, mesh: Any = None):
        self.loss_fn, self.optimizer, self.plan, self.mesh = loss_fn, optimizer, plan, mesh
        self._jitted: dict[Any, Any] = {}
        self._traced: dict[Any, int] = {}
        self._ran: set[Any] = set()

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        mesh = self.mesh if self.mesh is not None else _mesh_of(state)
        jitted = self._on(mesh, state, batch)
        self._ran.add(mesh)
        return jitted(state, batch)

    def trace(self, state: State, batch: Any):
        """The step traced on a state of ShapeDtypeStructs or arrays: ``.lower()`` it, or give the step to ``judge``."""
        return self._on(_mesh_of(state), state, batch).trace(state, batch)

    def lower(self, state: State, batch: Any):
        """The step lowered on a state of ShapeDtypeStructs or arrays."""
        return self._on(_mesh_of(state), state, batch).lower(state, batch)

    def compiles(self) -> int:
        """How many programs have been compiled so far: one, in a healthy run.

        Counted by traces: shardings are given, so one trace is one program (jax's own cache also counts the ways of calling it).
        """
        return sum(self._traced[mesh] for mesh in self._ran)

    def _on(self, mesh, state, batch):
        if mesh not in self._jitted:
            self.plan = bound(self.plan, self.loss_fn, self.optimizer, state, batch)
            self._jitted[mesh] = self._jit(mesh)
        _check_batch(self.plan, batch)
        return self._jitted[mesh]

    def _jit(self, mesh):
        plan = self.plan
        wanted = plan.abstract_state(mesh)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        batch_shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_batch(mesh))
        plain = named(mesh, (), "hbm")

        def train_step(state, batch):
            self._traced[mesh] = self._traced.get(mesh, 0) + 1
            return _step(plan, getattr(mesh, "abstract_mesh", mesh), state, batch)

        return jax.jit(
            train_step,
            donate_argnums=(0,),
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, _metric_shardings(plan, plain)),
            compiler_options=plan.compiler_options if _platform(mesh) == "cuda" else None,
        )


def _platform(mesh) -> str:
    """The platform of a concrete mesh; an abstract mesh has none, and whoever compiles it brings the options."""
    devices = getattr(mesh, "devices", None) if isinstance(mesh, jax.sharding.Mesh) else None
    if devices is None:
        return "none"
    platform = devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def _metric_shardings(plan, plain):
    program = plan.bound.program
    aux = jax.tree.unflatten(program.out_tree, program.jaxpr.out_avals)[1]
    metrics = {"loss": plain, "grad_norm": plain}
    return metrics if aux is None else metrics | {"aux": None}


def _mesh_of(state):
    sharding = getattr(jax.tree.leaves(state)[0], "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise InputError("the state's arrays carry no NamedSharding; make the state with forebay.init, forebay.place or State.from_tree")
    return sharding.mesh


def bound(plan: Plan, loss_fn, optimizer, state: State, batch) -> Plan:
    """The plan bound to these functions: as it is if it carries its workload, else traced on the state's shapes and compared."""
    if plan.work is not None:
        return plan
    work = retrace(loss_fn, optimizer, state.params, batch, state.key is not None, state.extra)
    return plan.bind(work)


def retrace(loss_fn, optimizer, params, batch, rng: bool, extra: Any) -> Workload:
    bare = lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype)  # noqa: E731
    params, batch, extra = jax.tree.map(bare, (params, batch, extra))
    return trace(loss_fn, optimizer, params, batch, rng=rng, extra=extra)


def _check_batch(plan: Plan, batch):
    wanted = plan.bound.args.batch
    if jax.tree.structure(batch) != jax.tree.structure(wanted):
        raise PlanError(f"the batch is {jax.tree.structure(batch)} and the plan was made for {jax.tree.structure(wanted)}")
    for (path, leaf), like in zip(jax.tree_util.tree_flatten_with_path(batch)[0], jax.tree.leaves(wanted), strict=True):
        if jnp.shape(leaf) != like.shape:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise PlanError(
                f"batch:{where} has shape {list(jnp.shape(leaf))} and the plan was made for {list(like.shape)}; make a plan for this batch"
            )


def _step(plan: Plan, mesh: Any, state: State, batch: Any):
    """One step. ``mesh``: the abstract mesh of the state's own mesh, which jax 0.10 tells from one that does not know its devices' kind."""
    with jax.sharding.use_abstract_mesh(mesh):
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        values = updating.begin(plan, state.stored_params, state.stored_opt_state, state.stored_copies)
        program = plan.bound.program_on(mesh, plan.options["microbatches"])
        weights = copies.travelling(plan, program, state.stored_params, state.stored_copies)
        if plan.options["microbatches"] > 1:
            loss, aux, extra, grads = accumulated(plan, mesh, weights, state.extra, batch, key)
        else:
            loss, aux, extra, grads = loss_and_gradients(plan, program, values, weights, state.extra, batch, key)
        values.receive(pinned(plan, mesh, grads), loss)
        params, opt_state, norm = updating.finish(values, plan.fused)
    metrics = {"loss": loss, "grad_norm": norm} | ({} if aux is None else {"aux": aux})
    new = dataclasses.replace(
        state, step=state.step + 1, stored_params=params, stored_opt_state=opt_state, extra=extra,
        stored_copies=tuple(values.arrays["copies", p] for p in plan.copies),
    )  # fmt: skip
    return new, metrics


def pinned(plan: Plan, mesh, grads: dict[int, Any]) -> dict[int, Any]:
    """Gradients in HBM on the specs of their parameters: they are reduce-scattered, not all-reduced."""
    entries = plan.role("accumulator") or plan.role("gradient")
    pin = lambda p, g: g if entries[p].placement == "host" else jax.lax.with_sharding_constraint(g, named(mesh, entries[p].spec, "hbm"))  # noqa: E731
    return {p: pin(p, g) for p, g in grads.items()}


def train_step(loss_fn: Callable, optimizer: Any, plan: Plan, mesh: Any = None) -> TrainStep:
    """The train step of a plan: ``step(state, batch) -> (state, metrics)``, jitted, with the state donated.

    ``metrics`` holds fp32 scalars ``loss`` and ``grad_norm``, and the user's ``aux`` if there is one. ``mesh`` defaults to the
    mesh on which the state stands.

    Raises:
        PlanError: the plan was made for other shapes, or the batch is not the plan's.
    """
    if mesh is not None and plan.mesh is not None and mesh_shape(mesh) != plan.mesh:
        raise PlanError(f"the mesh {dict(mesh.shape)} is not the plan's {dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))}")
    return TrainStep(loss_fn, optimizer, plan, mesh)
