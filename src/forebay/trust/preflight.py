"""``preflight``: what could stop a plan on this host before it has trained a step, each with its numbers and the command that mends it.

Pure functions from a plan and a ``Machine`` (facts read once) to lines. A line is *ok*, a *warning* (it will run, slower or nearer the
edge than planned) or *failed* (it will stop, or not do what the plan says). Host memory that runs out is the report behind most "the GPU
ran out" messages, so the host comes first.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.hardware import Hardware, pool
from forebay.hardware.environment import DEFAULT_FRACTION, FRACTION, FRACTIONS, HOST_LIMIT
from forebay.trust.preflight_machine import Machine, read_machine
from forebay.units import GIB, show_bytes, show_seconds

OK, WARNING, FAILED = "ok", "warning", "failed"
PROCESS_BYTES = 2 * GIB
"""Python, jax, the CUDA context and the compiled programs of one process, roughly; beside what the plan places on the host."""
SLOW_CHECKPOINT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing looked at. ``mend`` is the command or the change that mends it, empty where nothing needs mending."""

    name: str
    outcome: str
    detail: str
    mend: str = ""

    def __post_init__(self):
        assert self.outcome in (OK, WARNING, FAILED), self.outcome
        assert bool(self.mend) == (self.outcome != OK), (self.name, self.outcome, self.mend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The lines in the order in which they were looked at."""

    machine: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no line failed."""
        return not self.named(FAILED)

    def named(self, outcome: str) -> tuple[Line, ...]:
        """The lines of one outcome."""
        return tuple(line for line in self.lines if line.outcome == outcome)

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        rows = [f"preflight on {self.machine}"]
        for line in self.lines:
            rows.append(f"{line.outcome:8s} {line.name:{width}s}  {line.detail}")
            rows += [f"{'':{width + 10}s} do: {line.mend}"] if line.mend else []
        return "\n".join(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan asks of one host, in bytes. ``compiled`` says whether the compiler gave the sizes or the entries were added up."""

    host_per_device: int
    hbm_per_device: int
    checkpoint: int
    devices: int
    hardware: Hardware
    compiled: bool


def preflight(plan: Any, hardware: Hardware | None = None, *, folder: Path | None = None, machine: Machine | None = None) -> Preflight:
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
    return Preflight(machine=hardware.name, lines=tuple(lines))


def needs_of(plan: Any, hardware: Hardware) -> Needs:
    """What ``plan`` asks of a host of ``hardware``."""
    verdict = plan.verdict
    hbm, host = (None, None) if verdict is None else (verdict.hbm, verdict.host)
    standing = {place: sum(e.bytes_per_device for e in plan.entries if e.placement == place) for place in ("hbm", "host")}
    state = [e for e in plan.entries if e.role in ("parameter", "optimizer") and e.copy_of is None]
    return Needs(
        host_per_device=standing["host"] if host is None else host.total_bytes,
        hbm_per_device=standing["hbm"] if hbm is None else hbm.total_bytes,
        checkpoint=sum(math.prod(e.shape) * _item_bytes(e.dtype) for e in state),
        devices=hardware.devices_per_host, hardware=hardware, compiled=hbm is not None,
    )  # fmt: skip


def _item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def host_ram(needs: Needs, machine: Machine) -> Line:
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
        return Line(name="host RAM", outcome=OK, detail=detail)
    enough = math.ceil((wanted + (machine.ram_used_bytes or 0)) / GIB)
    container = "cgroup" in machine.ram_limit_source
    mend = f"docker run --memory={enough}g, or resources.limits.memory: {enough}Gi in Kubernetes" if container else (
        f"end what holds {show_bytes(machine.ram_used_bytes or 0)} now, or place {show_bytes(wanted - free)} less on the host"
    )  # fmt: skip
    return Line(name="host RAM", outcome=FAILED, detail=detail, mend=mend)


def locked_memory(needs: Needs, machine: Machine) -> Line:
    """RLIMIT_MEMLOCK: a TPU's driver counts mapped host memory against it; CUDA pins past it, RDMA does not."""
    limit, placed = machine.memlock_bytes, needs.host_per_device * needs.devices
    if limit is None or limit >= placed:
        return Line(
            name="locked memory", outcome=OK, detail=f"limit {'none' if limit is None else show_bytes(limit)} for {show_bytes(placed)}"
        )
    detail = f"limit {show_bytes(limit)} (RLIMIT_MEMLOCK) for {show_bytes(placed)} of pinned memory"
    mend = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    if needs.hardware.target.platform == "tpu":
        return Line(name="locked memory", outcome=FAILED, detail=detail, mend=mend)
    if needs.hardware.hosts == 1:
        return Line(name="locked memory", outcome=OK, detail=f"{detail}; CUDA does not count against it, and one host needs no RDMA")
    return Line(name="locked memory", outcome=WARNING, detail=f"{detail}; CUDA pins past it, RDMA registration does not", mend=mend)


def processes(needs: Needs, machine: Machine) -> Line:
    """How many processes share this host, as its launcher says."""
    count = machine.local_processes
    name, devices = "processes per host", needs.devices
    if count is None or count == 1:
        return Line(
            name=name,
            outcome=OK,
            detail=f"1 process for {devices} devices ({machine.local_processes_source or 'no launcher says otherwise'})",
        )
    detail = f"{count} processes for {devices} devices ({machine.local_processes_source}); RAM and each pool are counted over all of them"
    if devices % count:
        return Line(
            name=name,
            outcome=FAILED,
            detail=detail,
            mend=f"start a number of processes that divides {devices}: --ntasks-per-node=1 or {devices}",
        )
    return Line(name=name, outcome=OK, detail=detail)


def numa(needs: Needs, machine: Machine) -> Line:
    """Whether this process runs, and takes its memory, beside its accelerator."""
    if len(machine.nodes) < 2 or not machine.device_nodes:
        known = "no accelerator's node is known" if len(machine.nodes) > 1 else "one node"
        return Line(name="NUMA", outcome=OK, detail=f"{known} ({len(machine.nodes)} found)")
    wanted = frozenset(machine.device_nodes)
    running = frozenset(node.number for node in machine.nodes if node.cpus & machine.cpus)
    shown = lambda nodes: ",".join(map(str, sorted(nodes)))  # noqa: E731
    memory = shown(machine.memory_nodes or running)
    detail = f"accelerators at node {shown(wanted)}, CPUs of this process at {shown(running)}, memory from {memory}"
    if running <= wanted:
        return Line(name="NUMA", outcome=OK, detail=detail)
    if needs.host_per_device == 0 or (wanted == running and len(wanted) > 1):
        return Line(
            name="NUMA", outcome=OK, detail=f"{detail}; {'nothing stands on the host' if not needs.host_per_device else 'all are used'}"
        )
    room = sum(node.bytes for node in machine.nodes if node.number in wanted)
    bind = "--membind" if room > needs.host_per_device * needs.devices else "--preferred-many"
    mend = f"numactl --cpunodebind={shown(wanted)} {bind}={shown(wanted)} before the command; copies from the other node are slower"
    return Line(name="NUMA", outcome=WARNING, detail=detail, mend=mend)


def host_pool(needs: Needs, machine: Machine) -> Line:
    """XLA's pinned pool of each device against the plan."""
    text = machine.environment.get(HOST_LIMIT, "")
    limit_gib = int(text) if text.isdigit() else pool.DEFAULT_GIB
    wanted_gib = pool.preallocated_gib([needs.host_per_device]) if needs.host_per_device else 0
    said = f"{HOST_LIMIT}={text or f'{pool.DEFAULT_GIB}, unset'}"
    detail = f"{show_bytes(needs.host_per_device)} for each device of a pool of {show_bytes(limit_gib * GIB)} ({said})"
    if wanted_gib <= limit_gib:
        return Line(name="XLA's host pool", outcome=OK, detail=detail)
    return Line(name="XLA's host pool", outcome=FAILED, detail=detail, mend=f"export {HOST_LIMIT}={wanted_gib}")


def memory_fraction(needs: Needs, machine: Machine) -> Line:
    """jax's pool on the device against the plan's HBM and against the fraction that the plan's budget counts on."""
    hardware, name = needs.hardware, "memory fraction"
    fraction, source = _fraction(machine)
    taken, planned = int(hardware.hbm_bytes * fraction), hardware.memory_fraction
    detail = (
        f"{show_bytes(needs.hbm_per_device)} planned{' (compiled)' if needs.compiled else ''} of a pool of {show_bytes(taken)} "
        f"({fraction:g} of {show_bytes(hardware.hbm_bytes)}, {source}); the budget counts on {planned:g}"
    )
    mend = f"export {FRACTION}={planned:g}"
    if needs.hbm_per_device > taken:
        return Line(name=name, outcome=FAILED, detail=detail, mend=mend)
    if machine.environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "") == "platform":
        mend = "unset XLA_PYTHON_CLIENT_ALLOCATOR"
        return Line(name=name, outcome=WARNING, detail=f"{detail}; the platform allocator asks the driver for every buffer", mend=mend)
    if fraction + 0.005 < planned:
        return Line(name=name, outcome=WARNING, detail=detail, mend=mend)
    return Line(name=name, outcome=OK, detail=detail)


def environment(needs: Needs, machine: Machine) -> Line:
    """Whether variables that must be set can still be set."""
    wrong = [
        line.mend.removeprefix("export ") for line in (host_pool(needs, machine), memory_fraction(needs, machine)) if line.outcome != OK
    ]
    name = "environment"
    if not machine.backend_ready:
        return Line(name=name, outcome=OK, detail="jax has not started its backend: variables set now are read")
    if not wrong:
        return Line(name=name, outcome=OK, detail="jax has started its backend, and nothing needs to be set")
    detail = f"jax has started its backend in this process: {len(wrong)} settings come too late"
    return Line(name=name, outcome=FAILED, detail=detail, mend=f"start again with {' '.join(wrong)} before the command")


def disk(needs: Needs, machine: Machine) -> Line:
    """Room for one checkpoint more than is kept while it is written, and how long one takes."""
    free, rate, name = machine.disk_free_bytes or 0, machine.write_bytes_per_second, "checkpoint disk"
    seconds = needs.checkpoint / rate if rate else None
    took = f"; {show_bytes(rate)}/s measured, {show_seconds(seconds)} a checkpoint" if rate and seconds is not None else ""
    detail = f"{show_bytes(needs.checkpoint)} a checkpoint, {show_bytes(free)} free under {machine.folder}{took}"
    if free < needs.checkpoint:
        return Line(
            name=name, outcome=FAILED, detail=detail, mend=f"free {show_bytes(needs.checkpoint - free)} there, or choose another --out"
        )
    if free < 2 * needs.checkpoint:
        return Line(
            name=name,
            outcome=WARNING,
            detail=f"{detail}: no room for a second",
            mend=f"free {show_bytes(2 * needs.checkpoint - free)} there",
        )
    if seconds is not None and seconds > SLOW_CHECKPOINT_SECONDS:
        return Line(
            name=name, outcome=WARNING, detail=detail, mend="give --out a folder on a faster disk, or save less often (--checkpoint.every)"
        )
    return Line(name=name, outcome=OK, detail=detail)


def _fraction(machine: Machine) -> tuple[float, str]:
    for name in FRACTIONS:
        text = machine.environment.get(name, "")
        if re.fullmatch(r"\d*\.?\d+", text):
            return float(text), f"{name}={text}"
    return DEFAULT_FRACTION, f"{FRACTION} is unset"
