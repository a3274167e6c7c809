"""What machine this is, found from the system alone: starting a jax backend here would take the user's own accelerator.

In this order: an NVIDIA driver (``nvidia-smi``), a Google TPU (its PCI devices in sysfs), else the CPU. The chip's figures come
from the catalog; how many there are, their memory and the host's RAM are read from the machine and marked *measured*. Only this
host is seen: a job of several hosts is named (``Hardware.named("h100-sxm:2x8")``).
"""

import datetime
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import InputError, UnsupportedError
from forebay.hardware import budget
from forebay.hardware.catalog import catalog_names, find_by_description, lookup
from forebay.hardware.chip import Chip, Host, Link
from forebay.hardware.environment import FRACTIONS
from forebay.hardware.hardware import Hardware
from forebay.hardware.memory import host_ram_bytes
from forebay.hardware.quantity import Quantity
from forebay.units import MIB

TPU_VENDOR = "0x1ae0"
TPU_DEVICES = {"0x0062": "tpu-v5p", "0x0063": "tpu-v5e", "0x006f": "tpu-v6e", "0x0076": "tpu-7x"}
"""PCI identities, as jax itself tells TPUs apart (jax/_src/hardware_utils.py)."""
SAME_MEMORY = 0.03
"""The driver's size holds what it keeps for itself (0.7 % on an H100): within this, the catalog's figure is the better one."""


def _ask(words: list[str]) -> str | None:
    """What a command printed, or None where there is no such command or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The ways to look at a machine; tests give their own files, environment and commands."""

    root: Path = Path("/")
    environment: Mapping[str, str]
    ask: Callable[[list[str]], str | None] = _ask


def find_here(system: System | None = None) -> Hardware:
    """The machine this process runs on.

    Raises:
        UnsupportedError: an accelerator that the catalog does not know, or several kinds at once.
    """
    system = system or System(environment=os.environ)
    return _nvidia(system) or _tpu(system) or _cpu(system)


def _nvidia(system: System) -> Hardware | None:
    listing = system.ask(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    rows = [row.rsplit(",", 1) for row in (listing or "").splitlines() if "," in row]
    visible = _visible(rows, system.environment.get("CUDA_VISIBLE_DEVICES"))
    if not visible:
        return None
    names = sorted({name.strip() for name, _ in visible})
    if len(names) > 1:
        raise UnsupportedError(f"this machine has GPUs of {len(names)} kinds ({', '.join(names)}); choose one with CUDA_VISIBLE_DEVICES")
    chip = find_by_description(names[0])
    if chip is None:
        found, known = f"{len(visible)} x {names[0]!r}", ", ".join(catalog_names())
        raise UnsupportedError(f"this machine has {found}, which the catalog does not know; name one that is near it: {known}")
    sizes = [int(size) * MIB for _, size in visible if size.strip().isdigit()]
    chip = _with_memory(chip, min(sizes, default=int(chip.hbm_bytes)))
    return _on_this_host(system, chip, f"{chip.name}:{len(visible)}", len(visible), f"1x1x{len(visible)}")


def _visible(rows: list, chosen: str | None) -> list:
    """The rows that ``CUDA_VISIBLE_DEVICES`` leaves: as CUDA, up to the first entry that names no device."""
    if chosen is None:
        return rows
    kept = []
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        if entry.isdigit() and int(entry) < len(rows):
            kept.append(rows[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and rows:
            kept.append(rows[0])
        else:
            break
    return kept


def _with_memory(chip: Chip, seen_bytes: int) -> Chip:
    """``chip`` with the memory the driver names, where it is another board than the catalog's (a partition, a rarer size)."""
    if abs(seen_bytes - int(chip.hbm_bytes)) <= SAME_MEMORY * int(chip.hbm_bytes):
        return chip
    return replace(chip, hbm_bytes=_measured(seen_bytes, "nvidia-smi, memory.total"))


def _tpu(system: System) -> Hardware | None:
    devices = system.root / "sys/bus/pci/devices"
    found = []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        if _read(device / "vendor") == TPU_VENDOR and _read(device / "device") in TPU_DEVICES:
            found.append(TPU_DEVICES[_read(device / "device")])
    if not found:
        return None
    chip = lookup(found[0])
    grid = _host_grid(len(found), len(chip.host.bounds))
    written = "x".join(map(str, grid))
    count = len(found) * chip.devices_per_chip
    return _on_this_host(system, chip, f"{chip.name}:{written}", count, f"{chip.compiler_name}:{written}")


def _host_grid(chips: int, sides: int) -> tuple[int, ...]:
    """The shape of the chips of one host: 1x1, 2x2 or 2x4."""
    shapes = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 4)}
    if chips not in shapes:
        raise UnsupportedError(f"this host has {chips} TPU chips; forebay knows hosts of {', '.join(map(str, shapes))}: name the machine")
    return (*shapes[chips], 1)[:sides]


def _cpu(system: System) -> Hardware:
    ram, cores = _ram(system), _cores()
    unknown = Link(name="none: host and device memory are one", **dict.fromkeys(Link.RATES))
    chip = Chip(
        name="cpu",
        description=platform.processor() or platform.machine() or "cpu",
        vendor="cpu",
        platform="cpu",
        hbm_bytes=ram,
        hbm_bytes_per_second=None,
        peak_flops={},
        link=unknown,
        interconnect=None,
        nic=None,
        host=Host(chips=1, ram_bytes=ram, dram_bytes_per_second=None),
        cores=cores,
    )
    return _on_this_host(system, chip, "cpu", 1, "")


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_this_host(system: System, chip: Chip, name: str, devices: int, topology: str) -> Hardware:
    ram = _ram(system)
    # The DRAM rate and the network of the catalog's reference host say nothing about this one: unknown until probed.
    chip = replace(chip, nic=None, host=replace(chip.host, ram_bytes=ram, dram_bytes_per_second=None))
    proposed = budget.propose(chip, int(chip.hbm_bytes) // chip.devices_per_chip, int(ram))
    proposed = replace(proposed, memory_fraction=_fraction(system, proposed.memory_fraction, chip))
    return Hardware(name=name, chip=chip, hosts=1, devices_per_host=devices, topology=topology, budget=proposed)


def _fraction(system: System, proposed: Quantity, chip: Chip) -> Quantity:
    """The fraction of the environment, where this process's jax will obey one, else the proposed."""
    for variable in FRACTIONS if chip.platform == "cuda" else ():
        if text := system.environment.get(variable):
            return Quantity(_between_0_and_1(variable, text), f"the environment: {variable}={text}", kind="given")
    return proposed


def _between_0_and_1(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise InputError(f"{variable}={text!r} is not a part of the GPU's memory; set a number above 0 and up to 1, such as 0.92")
    return value


def _ram(system: System) -> Quantity:
    size, source = host_ram_bytes(system.root)
    return _measured(size, source)


def _measured(value: int, source: str) -> Quantity:
    return Quantity(value, source, datetime.date.today().isoformat(), "measured")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
