"""The small twin of a step: the user's own code at sizes that fit here resident, under the same placements as the plan.

The plan goes over by names: a tensor of the twin stands where the tensor of that name stands in the plan. A stack that the plan splits
by layers is split at the same share of the twin's layers. Where the twin has the plan's own shapes and mesh, the plan itself is used.
"""

import dataclasses
import glob
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import InputError, PlanError, nearest
from forebay.hardware import Hardware
from forebay.hardware.memory import host_ram_bytes
from forebay.plan import Plan
from forebay.units import show_bytes
from forebay.workload import Workload, jaxprs, trace

COPIES = 4  # of the trained state that a check holds at its peak: before and after a step, the gradients, and the one to compare with


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Twin:
    """What both runs start from: values (numpy, but for random keys), one batch a step, and the plan on its mesh."""

    plan: Plan
    mesh: Any
    params: Any
    batches: tuple[Any, ...]
    key: Any
    extra: Any

    @property
    def work(self) -> Workload:
        return self.plan.bound

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def compute_dtype(self) -> Any:
        """The narrowest floating type in which the loss computes anything: what its rounding is measured by."""
        found = {leaf.dtype for leaf in jax.tree.leaves(self.work.args.params) if jnp.issubdtype(leaf.dtype, jnp.floating)}

        def collect(eqn):
            dtypes = {v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")}
            found.update(dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
            return False

        jaxprs.contains(self.work.program.jaxpr, collect)
        return min(found, key=lambda dtype: (jnp.finfo(dtype).bits, -jnp.finfo(dtype).eps))


def make_twin(loss_fn, optimizer, plan: Plan, params, batch, extra, *, steps: int, seed: int, integers: int, hardware) -> Twin:
    """The twin with sizes (and values, where arrays are given) of ``params``, ``batch`` and ``extra``; None: those of the plan.

    Raises:
        InputError: the resident run does not fit on this machine, or the batch does not divide over its devices.
        PlanError: a tensor of the twin is not in the plan.
    """
    known = plan.bound.args
    params = known.params if params is None else params
    batch, extra = (known.batch if batch is None else batch), (known.extra if extra is None else extra)
    rng = plan.bound.args.key is not None
    work = trace(loss_fn, optimizer, params, batch, rng=rng, extra=extra, name=plan.bound.name, reduction=plan.bound.reduction or None)
    _check_room(work)
    twin_plan = _plan_of(plan, work, hardware)
    random = np.random.default_rng(seed)
    return Twin(
        plan=twin_plan,
        mesh=twin_plan.make_mesh(),
        params=make_values(params, random, integers),
        batches=tuple(make_values(batch, random, integers) for _ in range(steps)),
        key=jax.random.key(seed) if rng else None,
        extra=make_values(extra, random, integers),
    )


def make_values(tree: Any, random: np.random.Generator, integers: int) -> Any:
    """Arrays as they are; shapes as random values: floats normal, scaled by the input axis, integers below ``integers``."""

    def value(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf if isinstance(leaf, jax.Array) else jax.random.split(jax.random.key(int(random.integers(2**31))), leaf.shape)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            width = leaf.shape[-2] if len(leaf.shape) > 1 else 1
            return (random.normal(size=leaf.shape) / np.sqrt(width)).astype(leaf.dtype)
        return random.integers(2 if leaf.dtype == bool else integers, size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(value, tree)


def _check_room(work: Workload) -> None:
    needed = COPIES * sum(t.bytes for t in work.tensors if t.role in ("parameter", "optimizer"))
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    there = min(s.get("bytes_limit", 0) for s in stats) or host_ram_bytes()[0]
    if needed > there / 2:
        raise InputError(
            f"the resident run that the plan is held against needs some {show_bytes(needed)} for the parameters and their state and this "
            f"machine has {show_bytes(there)}; check a small twin: pass params and batch of smaller sizes (shapes are enough)"
        )


def _plan_of(plan: Plan, work: Workload, hardware: Hardware) -> Plan:
    wanted, here = (plan.mesh.devices if plan.mesh else 1), len(jax.devices())
    if dict(plan.signature) == work.signature and wanted <= here and _platform(plan) in (None, hardware.chip.platform):
        return plan.bind(work)
    devices = _devices(work, min(wanted, here))
    carried = {name: value for name, value in plan.options.items() if name not in ("compiler", "reasons", "whole_below_bytes")}
    machine = dataclasses.replace(hardware, hosts=1, devices_per_host=devices)
    return Plan.by_hand(work, rules_of(plan, work), hardware=machine, options=carried | {"whole_below_bytes": 0})


def _platform(plan: Plan) -> str | None:
    return plan.hardware["chip"]["platform"] if plan.hardware else None


def _devices(work: Workload, most: int) -> int:
    """The most devices that divide the rows of the batch."""
    rows = [t.shape[0] for t in work.tensors if t.role == "batch" and t.shape]
    if work.mesh is not None:
        return work.mesh.devices
    return next(n for n in range(most, 0, -1) if all(count % n == 0 for count in rows))


def rules_of(plan: Plan, work: Workload) -> dict[str, str]:
    """Rules that place the tensors of ``work`` as ``plan`` places those of the same names.

    Raises:
        PlanError: the plan has no such parameter or state.
    """
    placed: dict[str, list[Any]] = {}
    for entry in plan.entries:
        placed.setdefault(entry.name.partition("[")[0] if entry.layers else entry.name, []).append(entry)
    rules = {}
    for tensor in work.tensors:
        if tensor.role not in ("parameter", "optimizer", "activation"):
            continue
        entries = placed.get(tensor.name, [])
        if not entries and tensor.role != "activation":
            names = [name for name in placed if name.startswith(tensor.role)]
            raise PlanError(f"the plan has no {tensor.name}; {nearest(tensor.name, names)} The twin must be the plan's model, only smaller")
        rules |= _rule(tensor, entries)
    return rules


def _rule(tensor, entries) -> Mapping[str, str]:
    role, _, path = tensor.name.partition(":")
    key = f"{role}:{glob.escape(path)}"
    hosted = [e for e in entries if e.placement == "host"]
    if entries and entries[0].layers and hosted and len(hosted) < len(entries):
        layers, mine = max(e.layers[1] for e in entries), tensor.shape[0]
        start, stop = min(e.layers[0] for e in hosted) * mine // layers, -(-max(e.layers[1] for e in hosted) * mine // layers)
        return {key: f"host[{start}:{stop}]"}
    written = tensor.written if role == "activation" else "hbm"
    placement = entries[0].placement if entries else written
    return {key: placement} if placement != written and tensor.movable else {}
