"""Two runs of one training program: resident, in plain jax and optax and nothing else, and planned, by forebay.

resident:  jit(value_and_grad; optimizer.update; optax.apply_updates)  on plain NamedShardings
planned:   trace -> Plan.by_hand -> place -> train_step
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import forebay as fb
from forebay.hardware import Hardware

STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A loss, first parameters (numpy), and the batch of each step. ``mesh`` and ``specs``: the user's own sharding, or None for FSDP."""

    loss_fn: Callable
    params: Any
    batch: Callable[[int], Any]
    rng: bool = False
    extra: Any = None
    mesh: Any = None
    specs: Any = None
    batch_spec: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What ten steps leave behind, as numpy: a loss and a norm per step, the last state, in the user's own trees."""

    losses: np.ndarray
    norms: np.ndarray
    params: Any
    opt_state: Any
    extra: Any
    aux: Any


def key():
    return jax.random.key(11)


def resident(program: Program, optimizer, steps: int = STEPS) -> Outcome:
    """Plain data parallelism over eight devices: parameters and state whole on each, unless the program has specs."""
    mesh = program.mesh or jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec(*(program.batch_spec or ("data",)))
    specs = program.specs if program.specs is not None else jax.tree.map(lambda _: PartitionSpec(), program.params)
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), program.params, specs)
    optimizer = optax.with_extra_args_support(optimizer)

    def loss_fn(params, extra, batch, key):
        args = (params, batch, key) if program.rng else (params, batch)
        out = program.loss_fn(*args) if extra is None else program.loss_fn(*args, extra=extra)
        loss, aux = out if isinstance(out, tuple) else (out, None)
        return loss, (aux if extra is not None else (aux, None))

    def step(params, opt_state, extra, batch, number):
        key_of_step = jax.random.fold_in(key(), number)
        (loss, (aux, extra)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extra, batch, key_of_step)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, extra, loss, global_norm(grads), aux

    step, opt_state, extra = jax.jit(step), jax.jit(optimizer.init)(params), program.extra
    losses, norms = [], []
    for number in range(steps):
        batch = jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(mesh, rows if np.ndim(leaf) else PartitionSpec())), program.batch(number)
        )
        params, opt_state, extra, loss, norm, aux = step(params, opt_state, extra, batch, jnp.int32(number))
        losses.append(loss)
        norms.append(norm)
    return _outcome(losses, norms, params, opt_state, extra, aux)


def global_norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))) for leaf in jax.tree.leaves(tree)))


def trace(program: Program, optimizer) -> fb.Workload:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), (program.params, program.batch(0), program.extra))
    params, batch, extra = shapes
    return fb.trace(
        program.loss_fn, optimizer, params, batch, rng=program.rng, extra=extra,
        mesh=program.mesh, param_specs=program.specs, batch_spec=program.batch_spec,
    )  # fmt: skip


def by_hand(program: Program, work: fb.Workload, rules, options=None) -> fb.Plan:
    hardware = Hardware.named("h100-sxm:8") if program.mesh is None else None
    return fb.Plan.by_hand(work, rules, hardware=hardware, options={"whole_below_bytes": 0} | (options or {}))


def planned(program: Program, optimizer, rules, *, work=None, options=None, steps: int = STEPS) -> tuple[Outcome, fb.Plan]:
    """The same run under a plan; in its middle the state goes through the user's tree and back. Everything stands where the plan says."""
    plan = by_hand(program, work or trace(program, optimizer), rules, options)
    state = fb.place(program.params, optimizer, plan, key=key(), extra=program.extra, mesh=program.mesh)
    step = fb.train_step(program.loss_fn, optimizer, plan)
    stands_as_planned(plan, state)
    losses, norms = [], []
    for number in range(steps):
        before = jax.tree.leaves(state)
        state, metrics = step(state, program.batch(number))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        # Leaves of one element may be left: jit drops arguments that nothing reads (an injected hyperparameter, an unused moment).
        assert all(leaf.is_deleted() for leaf in before if leaf.size > 1), "the old state was not donated"
        if number == steps // 2:
            state = fb.State.from_tree(state.to_tree(), plan, mesh=program.mesh)
    assert step.compiles() == 1
    assert int(state.step) == steps
    stands_as_planned(plan, state)
    return _outcome(losses, norms, state.params, state.opt_state, state.extra, metrics.get("aux")), plan


def stands_as_planned(plan: fb.Plan, state: fb.State) -> None:
    """Every array of the state has the memory kind and the spec of its entry."""
    kinds = {"hbm": "device", "host": "pinned_host"}
    for role, arrays in (("parameter", state.stored_params), ("optimizer", state.stored_opt_state)):
        for entry, array in zip(plan.role(role), arrays, strict=True):
            assert array.sharding.memory_kind == kinds[entry.placement], entry.name
            assert array.shape == entry.shape, entry.name
            assert array.addressable_shards[0].data.nbytes == entry.bytes_per_device, entry.name


def _outcome(losses, norms, params, opt_state, extra, aux) -> Outcome:
    plain = lambda leaf: np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)  # noqa: E731
    params, opt_state, extra, aux = jax.tree.map(plain, (params, opt_state, extra, aux))
    return Outcome(
        losses=np.asarray(losses, np.float64), norms=np.asarray(norms, np.float64), params=params, opt_state=opt_state, extra=extra, aux=aux
    )


def assert_equal(got: Outcome, wanted: Outcome, tolerance: float, norms: bool = True) -> None:
    """Losses and norms step by step, and every leaf of parameters, state, extra and aux, relative to the largest element."""
    assert np.isfinite(wanted.losses).all()
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=tolerance, err_msg="loss")
    if norms:
        np.testing.assert_allclose(got.norms, wanted.norms, rtol=tolerance, err_msg="grad_norm")
    for what in ("params", "opt_state", "extra", "aux"):
        ours, theirs = (jax.tree_util.tree_flatten_with_path(getattr(outcome, what)) for outcome in (got, wanted))
        assert ours[1] == theirs[1], what
        for (path, a), (_, b) in zip(ours[0], theirs[0], strict=True):
            name = f"{what}{jax.tree_util.keystr(path)}"
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            scale = np.abs(b.astype(np.float64)).max(initial=0.0) if np.isfinite(b.astype(np.float64)).all() else 1.0
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=tolerance * scale, err_msg=name)
