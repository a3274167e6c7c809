"""A plan from rules: every tensor gets a placement and the reason for it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from forebay.errors import InputError, PlacementError
from forebay.plan import fsdp
from forebay.plan.fusion import loop_layers
from forebay.plan.options import compiler_options
from forebay.plan.rules import Rule, choose, parse_rules
from forebay.plan.streams import WHOLE_BELOW_BYTES
from forebay.records import Entry
from forebay.workload import Tensor, Workload
from forebay.workload.parts import cut, family_of_state, layers_of
from forebay.workload.sharding import MeshShape, local_shape
from forebay.workload.trace import follow_spec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What rules decide: the parts of a plan."""

    work: Workload
    mesh: MeshShape | None
    entries: tuple[Entry, ...]
    options: dict[str, Any]


def draft(
    work: Workload, rules: Mapping[str, str], hardware: Any, options: Mapping[str, Any], halves: Mapping[int, set[int]] | None = None
) -> Draft:
    """Place every tensor of ``work``: by the last rule that names it, else as the program has it.

    ``halves``: layers at which the state of a stored parameter is cut, beside where rules name only some layers.
    """
    mesh = _mesh(work, hardware)
    platform = hardware.target.platform if hardware is not None else "cpu"
    won = choose(parse_rules(rules), work.tensors)
    work, won = _by_layers(work, won, halves or {})
    stands = {
        t.name.partition(":")[2]: _state_placement(t, won.get(t.name), (), platform)[0] for t in work.tensors if t.role == "parameter"
    }
    hosted = {path for path, place in stands.items() if place == "host"}
    entries = tuple(_entry(work, t, won.get(t.name), mesh, hosted, platform) for t in work.tensors)
    if options.get("prefetch", 1) not in (0, 1):
        raise InputError(f"prefetch is the number of layers fetched ahead, 0 or 1, not {options['prefetch']!r}")
    count = options.get("microbatches", 1)
    if count != 1:
        _check_microbatches(work, count, mesh, entries)
        entries += _accumulators(entries, options.get("accumulator_dtype"))
    on_host = any(e.placement == "host" for e in entries)
    devices, hosts = (hardware.devices, hardware.hosts) if hardware is not None else (1, 1)
    compiler, reasons = compiler_options(platform, hosted=on_host, devices=devices, hosts=hosts)
    merged = {
        "microbatches": 1,
        "prefetch": 1,
        "whole_below_bytes": WHOLE_BELOW_BYTES,
        "reasons": [*reasons, *work.program.changed],
        **options,
    }
    return Draft(work=work, mesh=mesh, entries=entries, options=merged | {"compiler": compiler | dict(options.get("compiler", {}))})


def _by_layers(work: Workload, won: dict[str, Rule], halves: Mapping[int, set[int]]) -> tuple[Workload, dict[str, Rule]]:
    """The workload with the state cut where rules name only some layers, and the rules by the names of the parts."""
    points = {f: set(halves[family.params[0]]) for f, family in enumerate(work.families) if halves.keys() & set(family.params)}
    windows: dict[str, tuple[int, int]] = {}
    for name, rule in [(n, r) for n, r in won.items() if r.partial]:
        f = family_of_state(work, name)
        if f is None or not (layers := layers_of(work, f)):
            if rule.whole_role or "*" in rule.glob:
                continue
            raise PlacementError(f"{rule.text}: {name} is not the state of a stack of layers")
        windows[name] = rule.window(layers)
        points.setdefault(f, set()).update(set(windows[name]) - {0, layers})
    if not points:
        return work, {n: r for n, r in won.items() if not r.partial}
    cut_work = cut(work, points)
    placed = {n: r for n, r in won.items() if not r.partial}
    for t in cut_work.tensors:
        whole = t.name.partition("[")[0] if t.part else t.name
        named = whole in windows and (t.part is None or windows[whole][0] <= t.part[0] < windows[whole][1])
        if named or (t.part is not None and whole in won and whole not in windows):
            placed[t.name] = won[whole]
    return cut_work, placed


def _check_microbatches(work, count, mesh, entries) -> None:
    if not isinstance(count, int) or count < 1:
        raise InputError(f"microbatches must be a positive whole number, not {count!r}")
    if not work.reduction:
        raise InputError(f"{count} microbatches need to know how losses combine: pass reduction='mean', 'sum' or 'weight:NAME' to trace")
    for e in (e for e in entries if e.role == "batch"):
        parts = count * (mesh.size(e.spec[0]) if mesh is not None else 1)
        if not e.shape or e.shape[0] % parts:
            raise InputError(
                f"{e.name} has {e.shape[0] if e.shape else 0} rows, which {count} microbatches on {parts // count} shards do not divide"
            )


def _accumulators(entries, dtype: str | None) -> tuple[Entry, ...]:
    """One accumulator for each gradient, where its gradient stands, in at least fp32."""
    made = []
    for e in (e for e in entries if e.role == "gradient"):
        kind = dtype or str(jnp.promote_types(e.dtype, jnp.float32))
        size = e.bytes_per_device * jnp.dtype(kind).itemsize // jnp.dtype(e.dtype).itemsize
        path = e.name.partition(":")[2]
        made.append(
            dataclasses.replace(
                e, name=f"accumulator:{path}", role="accumulator", dtype=kind, bytes_per_device=size, reason="beside its gradient"
            )
        )
    return tuple(made)


def _mesh(work: Workload, hardware) -> MeshShape | None:
    if work.mesh is not None:
        if hardware is not None and work.mesh.devices != hardware.devices:
            raise InputError(
                f"the workload is sharded over a mesh of {work.mesh.devices} devices and {hardware.name} has {hardware.devices}; "
                "shard it for that machine, or pass no shardings and forebay proposes FSDP"
            )
        return work.mesh
    return fsdp.propose_mesh(hardware.devices) if hardware is not None and hardware.devices > 1 else None


def _spec(work: Workload, tensor: Tensor, mesh: MeshShape | None) -> tuple:
    if mesh is None:
        return (None,) * len(tensor.shape)
    if tensor.spec is not None:
        return tensor.spec
    if tensor.role == "batch":
        return fsdp.batch_spec(tensor, mesh.devices)
    if tensor.role == "optimizer":
        return _state_spec(work, tensor, mesh)
    same = [t.name.partition(":")[2] for t in work.tensors if t.role == "parameter"]
    p = same.index(tensor.name.partition(":")[2])
    return fsdp.propose_spec(tensor, mesh.devices, work.stored[p].stacked or work.program.streams(p))


def _state_spec(work: Workload, tensor: Tensor, mesh: MeshShape) -> tuple:
    """The spec of optimizer state: its parameter's, on the axes that it shares with it."""
    j = [t.name for t in work.tensors if t.role == "optimizer"].index(tensor.name)
    owner = next((f.params[0] for f in work.families if f.params and j in f.state), None)
    if owner is None:
        return (None,) * len(tensor.shape)
    param = [t for t in work.tensors if t.role == "parameter"][owner]
    spec = _spec(work, param, mesh)
    return spec if len(tensor.shape) == len(param.shape) else follow_spec(tensor.shape, param.shape, spec)


def _entry(work, tensor: Tensor, rule: Rule | None, mesh, hosted, platform) -> Entry:
    if tensor.role == "activation":
        return _activation(work, tensor, rule, mesh)
    spec = _spec(work, tensor, mesh)
    local = tensor.bytes * math.prod(local_shape(tensor.shape, spec, mesh, tensor.name)) // max(1, math.prod(tensor.shape))
    placement, reason = _state_placement(tensor, rule, hosted, platform)
    return Entry(
        name=tensor.name,
        role=tensor.role,
        bytes_per_device=local,
        placement=placement,
        reason=reason,
        shape=tensor.shape,
        dtype=tensor.dtype,
        spec=spec,
        layers=tensor.part,
    )


def _state_placement(tensor: Tensor, rule: Rule | None, hosted, platform) -> tuple[str, str]:
    if tensor.role == "gradient":
        return _gradient(tensor, rule, hosted)
    if rule is None:
        return "hbm", "resident: no rule names it"
    if rule.placement == "host" and not tensor.movable:
        if not rule.whole_role and "*" not in rule.glob:
            raise PlacementError(f"{rule.text}: {tensor.name} cannot stand on the host: {tensor.note}")
        return "hbm", tensor.note
    if rule.placement == "host" and platform == "tpu" and (why := _tpu_refuses(tensor)):
        return "hbm", why
    if rule.placement == "host" and tensor.role == "batch":
        return "hbm", "a batch arrives from the loader and is used once; it stays on the device"
    return rule.placement, f"rule {rule.text}"


def _tpu_refuses(tensor: Tensor) -> str:
    if tensor.shape and tensor.shape[-1] < 128:
        return f"its minor axis has {tensor.shape[-1]} elements, which the TPU compiler cannot keep in host memory"
    return "the TPU compiler cannot keep this dtype in host memory" if tensor.dtype.startswith(("int4", "uint4", "float8")) else ""


def _gradient(tensor: Tensor, rule: Rule | None, hosted) -> tuple[str, str]:
    if not tensor.movable:
        return "hbm", tensor.note
    if tensor.name.partition(":")[2] in hosted:
        if rule is not None and rule.placement == "hbm" and not rule.whole_role:
            raise PlacementError(f"{rule.text}: the gradient of a host parameter leaves with its layer; place {tensor.name} on the host")
        return "host", "the gradient of a host parameter is written to the host layer by layer"
    if rule is not None and rule.placement == "host" and rule.role == "gradient":
        raise PlacementError(f"{rule.text}: {tensor.name} belongs to a parameter in HBM; place the parameter on the host as well")
    return "hbm", "consumed by the update on the device"


def _activation(work, tensor: Tensor, rule: Rule | None, mesh) -> Entry:
    written = f"as written: the program {'recomputes' if tensor.written == 'recompute' else 'keeps'} it"
    placement, reason = tensor.written, written
    carry = any(r.carry for loop in work.program.loops for r in loop.body.residuals if f"activation:{r.path}" == tensor.name)
    if rule is not None and not tensor.movable:
        if not rule.whole_role and "*" not in rule.glob:
            raise PlacementError(f"{rule.text} would do nothing: {tensor.note}")
        reason = f"not moved by {rule.text}: {tensor.note}"
    elif rule is not None and rule.whole_role and tensor.written == "recompute" and not tensor.named and not carry:
        reason = f"{written}; {rule.text} moves what you named and what is kept"
    elif rule is not None and rule.placement == "recompute" and carry:
        placement, reason = "hbm", "the loop's carry, from which recomputation starts"
    elif rule is not None and rule.placement == "host" and (why := _scalar_residual(tensor)):
        if not rule.whole_role and "*" not in rule.glob:
            raise PlacementError(f"{rule.text}: {tensor.name} cannot stand on the host: {why}")
        placement, reason = "hbm" if tensor.written == "host" else tensor.written, why
    elif rule is not None:
        placement, reason = rule.placement, f"rule {rule.text}"
    stands = 0 if placement == "recompute" or not tensor.needed else _activation_bytes(work, tensor, mesh)
    return Entry(
        name=tensor.name,
        role="activation",
        bytes_per_device=stands,
        placement=placement,
        reason=reason,
        shape=tensor.shape,
        dtype=tensor.dtype,
    )


def _scalar_residual(tensor: Tensor) -> str:
    if math.prod(tensor.shape) <= 1:
        return "a scalar of each layer stays on the device"
    return "random keys stay on the device" if tensor.dtype.startswith("key<") else ""


def _activation_bytes(work, tensor: Tensor, mesh) -> int:
    """Bytes on one device, taking what has the rows of the batch to be split like the batch (a forecast; the verdict has the fact)."""
    batch = next((t for t in work.tensors if t.role == "batch" and t.shape), None)
    if mesh is None or batch is None or not tensor.batched:
        return tensor.bytes
    spec = _spec(work, batch, mesh)
    return tensor.bytes // mesh.size(spec[0])


def with_fusion(plan: Any) -> tuple[Entry, ...]:
    """The plan's entries as fusion leaves them.

    Gradients that the backward pass consumes layer by layer hold one layer's bytes, and others say why they do not.
    """
    gradients = plan.role("gradient")
    changed = {}
    for f, why in {**dict.fromkeys(plan.fused, ""), **plan.unfused}.items():
        for p in plan.bound.families[f].params:
            entry = gradients[p]
            if not why:
                one = entry.bytes_per_device // max(1, plan.streams[f].count)
                changed[entry.name] = dataclasses.replace(
                    entry,
                    placement="hbm",
                    bytes_per_device=one,
                    reason="consumed by the update inside the backward pass, one layer at a time",
                )
            elif plan.role("accumulator") and loop_layers(plan.bound.program, p) > 1:
                one = entry.bytes_per_device // max(1, entry.shape[0])
                why = "added to its accumulator inside the backward pass, one layer at a time"
                changed[entry.name] = dataclasses.replace(entry, placement="hbm", bytes_per_device=one, reason=why)
            elif plan.streams[f].mode == "whole" and plan.bound.program.streams(p) and not plan.bound.program.whole[p]:
                changed[entry.name] = dataclasses.replace(entry, placement="hbm", reason="small: its stack stays on the device")
            else:
                changed[entry.name] = dataclasses.replace(entry, reason=f"{entry.reason}, and read again by the update: {why}")
    return tuple(changed.get(e.name, e) for e in plan.entries)
