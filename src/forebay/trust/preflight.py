"""``preflight``: what could stop a plan on this host before it has trained a step, each with its numbers and the command that mends it.

Pure functions from a plan and a ``Machine`` (facts read once) to lines. A line has *passed*, is a *warning* (it will run, slower or nearer
the edge than planned) or has *failed* (it will stop, or not do what the plan says). Host memory that runs out is the report behind most
"the GPU ran out" messages, so the host comes first.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.hardware import Hardware
from forebay.hardware import environment as around
from forebay.hardware.environment import FRACTION, HOST_LIMIT
from forebay.trust.preflight_machine import Machine, read_machine
from forebay.trust.report import FAILED, PASSED, WARNING, Check, Report
from forebay.units import GIB, show_bytes, show_seconds

PROCESS_BYTES = 2 * GIB
"""Python, jax, the CUDA context and the compiled programs of one process, roughly; beside what the plan places on the host."""
SLOW_CHECKPOINT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan asks of one host, in bytes; ``host_arrays`` are those of one device. ``compiled``: the compiler gave the sizes, they were
    not added up from the entries."""

    host_arrays: tuple[int, ...]
    hbm_per_device: int
    checkpoint: int
    devices: int
    hardware: Hardware
    compiled: bool

    @property
    def host_per_device(self) -> int:
        return sum(self.host_arrays)


def preflight(plan: Any, hardware: Hardware | None = None, *, folder: Path | None = None, machine: Machine | None = None) -> Report:
    """What on this host could stop ``plan``.

    Args:
        plan: the plan; its verdict's sizes are used where it has one, else the bytes of its entries.
        hardware: the machine, by default the one that the plan was made for, or this one.
        folder: where checkpoints go; without it the disk is not looked at. Up to 128 MiB are written there and removed.
        machine: the facts, where they are not to be read from this host.
    """
    if hardware is None:
        hardware = Hardware.from_json(plan.hardware) if plan.hardware is not None else Hardware.here()
    machine = machine or read_machine(folder)
    needs = needs_of(plan, hardware)
    lines = [host_ram(needs, machine), locked_memory(needs, machine), processes(needs, machine), numa(needs, machine)]
    if hardware.target.platform == "cuda":
        lines += [host_pool(needs, machine), memory_fraction(needs, machine), environment(needs, machine)]
    if machine.folder is not None:
        lines.append(disk(needs, machine))
    return Report(title=f"preflight on {hardware.name}", checks=tuple(lines))


def needs_of(plan: Any, hardware: Hardware) -> Needs:
    """What ``plan`` asks of a host of ``hardware``."""
    verdict = plan.verdict
    hbm, host = (None, None) if verdict is None else (verdict.hbm, verdict.host)
    standing = sum(e.bytes_per_device for e in plan.entries if e.placement == "hbm")
    entries = [{"role": e.role, "placement": e.placement, "bytes_per_device": e.bytes_per_device} for e in plan.entries]
    state = [e for e in plan.entries if e.role in ("parameter", "optimizer") and e.copy_of is None]
    return Needs(
        host_arrays=around.host_arrays({"entries": entries, "verdict": host and {"host_bytes": host.total_bytes}}),
        hbm_per_device=standing if hbm is None else hbm.total_bytes,
        checkpoint=sum(math.prod(e.shape) * _item_bytes(e.dtype) for e in state),
        devices=hardware.devices_per_host, hardware=hardware, compiled=hbm is not None,
    )  # fmt: skip


def _item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def host_ram(needs: Needs, machine: Machine) -> Check:
    """RAM or the container's limit against what the plan places on the host, over all devices of this host."""
    placed = needs.host_per_device * needs.devices
    wanted = placed + PROCESS_BYTES * (machine.local_processes or 1)
    free = machine.ram_limit_bytes - (machine.ram_used_bytes or 0)
    detail = (
        f"{show_bytes(placed)} on the host ({show_bytes(needs.host_per_device)} x {needs.devices} devices) and "
        f"{show_bytes(wanted - placed)} for processes; {show_bytes(free)} free of "
        f"{show_bytes(machine.ram_limit_bytes)} ({machine.ram_limit_source})"
    )
    if wanted <= free:
        return Check(name="host RAM", outcome=PASSED, detail=detail)
    enough = math.ceil((wanted + (machine.ram_used_bytes or 0)) / GIB)
    container = "cgroup" in machine.ram_limit_source
    mend = f"docker run --memory={enough}g, or resources.limits.memory: {enough}Gi in Kubernetes" if container else (
        f"end what holds {show_bytes(machine.ram_used_bytes or 0)} now, or place {show_bytes(wanted - free)} less on the host"
    )  # fmt: skip
    return Check(name="host RAM", outcome=FAILED, detail=detail, mend=mend)


def locked_memory(needs: Needs, machine: Machine) -> Check:
    """RLIMIT_MEMLOCK: a TPU's driver counts mapped host memory against it; CUDA pins past it, RDMA does not."""
    limit, placed = machine.memlock_bytes, needs.host_per_device * needs.devices
    if limit is None or limit >= placed:
        return Check(
            name="locked memory", outcome=PASSED, detail=f"limit {'none' if limit is None else show_bytes(limit)} for {show_bytes(placed)}"
        )
    detail = f"limit {show_bytes(limit)} (RLIMIT_MEMLOCK) for {show_bytes(placed)} of pinned memory"
    mend = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    if needs.hardware.target.platform == "tpu":
        return Check(name="locked memory", outcome=FAILED, detail=detail, mend=mend)
    if needs.hardware.hosts == 1:
        return Check(name="locked memory", outcome=PASSED, detail=f"{detail}; CUDA does not count against it, and one host needs no RDMA")
    return Check(name="locked memory", outcome=WARNING, detail=f"{detail}; CUDA pins past it, RDMA registration does not", mend=mend)


def processes(needs: Needs, machine: Machine) -> Check:
    """How many processes share this host, as its launcher says."""
    count = machine.local_processes
    name, devices = "processes per host", needs.devices
    if count is None or count == 1:
        return Check(
            name=name,
            outcome=PASSED,
            detail=f"1 process for {devices} devices ({machine.local_processes_source or 'no launcher says otherwise'})",
        )
    detail = f"{count} processes for {devices} devices ({machine.local_processes_source}); RAM and each pool are counted over all of them"
    if devices % count:
        return Check(
            name=name,
            outcome=FAILED,
            detail=detail,
            mend=f"start a number of processes that divides {devices}: --ntasks-per-node=1 or {devices}",
        )
    return Check(name=name, outcome=PASSED, detail=detail)


def numa(needs: Needs, machine: Machine) -> Check:
    """Whether this process runs, and takes its memory, beside its accelerator."""
    if len(machine.nodes) < 2 or not machine.device_nodes:
        known = "no accelerator's node is known" if len(machine.nodes) > 1 else "one node"
        return Check(name="NUMA", outcome=PASSED, detail=f"{known} ({len(machine.nodes)} found)")
    wanted = frozenset(machine.device_nodes)
    running = frozenset(node.number for node in machine.nodes if node.cpus & machine.cpus)
    shown = lambda nodes: ",".join(map(str, sorted(nodes)))  # noqa: E731
    memory = shown(machine.memory_nodes or running)
    detail = f"accelerators at node {shown(wanted)}, CPUs of this process at {shown(running)}, memory from {memory}"
    if running <= wanted:
        return Check(name="NUMA", outcome=PASSED, detail=detail)
    if needs.host_per_device == 0 or (wanted == running and len(wanted) > 1):
        return Check(
            name="NUMA", outcome=PASSED, detail=f"{detail}; {'nothing stands on the host' if not needs.host_per_device else 'all are used'}"
        )
    room = sum(node.bytes for node in machine.nodes if node.number in wanted)
    bind = "--membind" if room > needs.host_per_device * needs.devices else "--preferred-many"
    mend = f"numactl --cpunodebind={shown(wanted)} {bind}={shown(wanted)} before the command; copies from the other node are slower"
    return Check(name="NUMA", outcome=WARNING, detail=detail, mend=mend)


def host_pool(needs: Needs, machine: Machine) -> Check:
    """XLA's pinned pool of each device against the plan's arrays and the tails that they leave."""
    limit, wanted = around.host_pool(needs.host_arrays, machine.environment)
    said = f"{HOST_LIMIT}={machine.environment.get(HOST_LIMIT, f'{limit:g}, unset')}"
    detail = f"{show_bytes(needs.host_per_device)} for each device of a pool of {show_bytes(limit * GIB)} ({said})"
    if wanted <= limit:
        return Check(name="XLA's host pool", outcome=PASSED, detail=detail)
    return Check(name="XLA's host pool", outcome=FAILED, detail=detail, mend=f"export {HOST_LIMIT}={wanted}")


def memory_fraction(needs: Needs, machine: Machine) -> Check:
    """jax's pool on the device against the plan's HBM and against the fraction that the plan's budget counts on."""
    hardware, name = needs.hardware, "memory fraction"
    variable, fraction = around.standing_fraction(machine.environment)
    source = f"{variable} is {machine.environment.get(variable, 'unset')}"
    taken, planned = int(hardware.hbm_bytes * fraction), hardware.memory_fraction
    detail = (
        f"{show_bytes(needs.hbm_per_device)} planned{' (compiled)' if needs.compiled else ''} of a pool of {show_bytes(taken)} "
        f"({fraction:g} of {show_bytes(hardware.hbm_bytes)}, {source}); the budget counts on {planned:g}"
    )
    mend = f"export {FRACTION}={planned:g}"
    if needs.hbm_per_device > taken:
        return Check(name=name, outcome=FAILED, detail=detail, mend=mend)
    if machine.environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "") == "platform":
        mend = "unset XLA_PYTHON_CLIENT_ALLOCATOR"
        return Check(name=name, outcome=WARNING, detail=f"{detail}; the platform allocator asks the driver for every buffer", mend=mend)
    if fraction + 0.005 < planned:
        return Check(name=name, outcome=WARNING, detail=detail, mend=mend)
    return Check(name=name, outcome=PASSED, detail=detail)


def environment(needs: Needs, machine: Machine) -> Check:
    """Whether variables that must be set can still be set."""
    wrong = [
        line.mend.removeprefix("export ") for line in (host_pool(needs, machine), memory_fraction(needs, machine)) if line.outcome != PASSED
    ]
    name = "environment"
    if not machine.backend_ready:
        return Check(name=name, outcome=PASSED, detail="jax has not started its backend: variables set now are read")
    if not wrong:
        return Check(name=name, outcome=PASSED, detail="jax has started its backend, and nothing needs to be set")
    detail = f"jax has started its backend in this process: {len(wrong)} settings come too late"
    return Check(name=name, outcome=FAILED, detail=detail, mend=f"start again with {' '.join(wrong)} before the command")


def disk(needs: Needs, machine: Machine) -> Check:
    """Room for one checkpoint more than is kept while it is written, and how long one takes."""
    free, rate, name = machine.disk_free_bytes or 0, machine.write_bytes_per_second, "checkpoint disk"
    seconds = needs.checkpoint / rate if rate else None
    took = f"; {show_bytes(rate)}/s measured, {show_seconds(seconds)} a checkpoint" if rate and seconds is not None else ""
    detail = f"{show_bytes(needs.checkpoint)} a checkpoint, {show_bytes(free)} free under {machine.folder}{took}"
    if free < needs.checkpoint:
        return Check(
            name=name, outcome=FAILED, detail=detail, mend=f"free {show_bytes(needs.checkpoint - free)} there, or choose another --out"
        )
    if free < 2 * needs.checkpoint:
        return Check(
            name=name,
            outcome=WARNING,
            detail=f"{detail}: no room for a second",
            mend=f"free {show_bytes(2 * needs.checkpoint - free)} there",
        )
    if seconds is not None and seconds > SLOW_CHECKPOINT_SECONDS:
        return Check(
            name=name, outcome=WARNING, detail=detail, mend="give --out a folder on a faster disk, or save less often (--checkpoint.every)"
        )
    return Check(name=name, outcome=PASSED, detail=detail)
