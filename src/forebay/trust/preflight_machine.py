"""What preflight looks at, read once from /proc, /sys, the environment and the run's folder: a record of plain numbers.

The root of /proc and /sys can be given, so that a test shows any machine. Nothing here starts jax's backend or touches a device.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.hardware.memory import host_ram_bytes
from forebay.units import GIB, MIB

LOCAL_COUNTS = (*("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),)
"""Variables that say how many processes of a job run on a host: Open MPI, Intel MPI/Hydra, torchrun, Slurm."""
NVIDIA_VENDOR, GOOGLE_VENDOR = "0x10de", "0x1ae0"
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
WRITTEN_BYTES, PIECE_BYTES, WRITE_SECONDS = 128 * MIB, 8 * MIB, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node: its RAM and its CPUs."""

    number: int
    bytes: int
    cpus: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts of this host and this process. None where the system does not say.

    ``ram_limit_bytes`` is the kernel's total or the control group's limit, said by ``ram_limit_source``; ``ram_used_bytes`` is what is in
    use under that limit. ``memlock_bytes`` is None where locked memory is not limited. ``device_nodes`` are the NUMA nodes of the
    accelerators.
    """

    ram_limit_bytes: int
    ram_limit_source: str
    ram_used_bytes: int | None
    memlock_bytes: int | None
    nodes: tuple[Node, ...]
    cpus: frozenset[int]
    memory_nodes: frozenset[int]
    device_nodes: tuple[int, ...]
    local_processes: int | None
    local_processes_source: str
    environment: Mapping[str, str]
    backend_ready: bool
    folder: Path | None = None
    disk_free_bytes: int | None = None
    write_bytes_per_second: float | None = None


def read_machine(folder: Path | None = None, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Machine:
    """The facts of this host; with ``folder``, also the room and the write rate of the disk under it (writes and removes up to 128 MiB)."""
    environment = os.environ if environment is None else environment
    limit, source = host_ram_bytes(root)
    status = _fields(root / "proc/self/status")
    count, count_source = _local_processes(environment)
    free, rate = _disk(folder) if folder is not None else (None, None)
    return Machine(
        ram_limit_bytes=limit, ram_limit_source=source, ram_used_bytes=_used(root, source), memlock_bytes=_memlock(root),
        nodes=_nodes(root), cpus=_list(status.get("Cpus_allowed_list", "")), memory_nodes=_list(status.get("Mems_allowed_list", "")),
        device_nodes=_device_nodes(root), local_processes=count, local_processes_source=count_source, environment=dict(environment),
        backend_ready=_backend_ready(), folder=folder, disk_free_bytes=free, write_bytes_per_second=rate,
    )  # fmt: skip


def _fields(file: Path) -> dict[str, str]:
    rows = (line.partition(":") for line in file.read_text().splitlines()) if file.is_file() else ()
    return {name.strip(): value.strip() for name, _, value in rows}


def _used(root: Path, source: str) -> int | None:
    """Bytes in use under the limit that ``source`` names: of the control group, or of the whole machine."""
    limit_file = root / source.lstrip("/")
    used_file = limit_file.with_name(_USED.get(limit_file.name, "")) if limit_file.name in _USED else None
    if used_file is not None:
        stat = _stat(limit_file.with_name("memory.stat"))
        cached = stat.get("inactive_file", stat.get("total_inactive_file", 0))  # page cache that the kernel gives back
        return max(0, int(used_file.read_text()) - cached) if used_file.is_file() else None
    meminfo = _fields(root / "proc/meminfo")
    if "MemTotal" not in meminfo or "MemAvailable" not in meminfo:
        return None
    return 1024 * (int(meminfo["MemTotal"].split()[0]) - int(meminfo["MemAvailable"].split()[0]))


def _stat(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _memlock(root: Path) -> int | None:
    limits = root / "proc/self/limits"
    found = re.search(r"^Max locked memory\s+(\S+)", limits.read_text(), re.MULTILINE) if limits.is_file() else None
    return int(found.group(1)) if found and found.group(1).isdigit() else None


def _nodes(root: Path) -> tuple[Node, ...]:
    folder = root / "sys/devices/system/node"
    found = []
    for place in sorted(folder.glob("node[0-9]*"), key=lambda p: int(p.name.removeprefix("node"))):
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(place / "meminfo"))
        found.append(
            Node(
                number=int(place.name.removeprefix("node")),
                bytes=int(total.group(1)) * 1024 if total else 0,
                cpus=_list(_text(place / "cpulist")),
            )
        )
    return tuple(found)


def _device_nodes(root: Path) -> tuple[int, ...]:
    """NUMA nodes of the NVIDIA GPUs (PCI class 03xx) and Google TPUs; -1 (the firmware does not say) is left out."""
    devices = root / "sys/bus/pci/devices"
    found = []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        vendor, kind = _text(device / "vendor"), _text(device / "class")
        if (vendor == NVIDIA_VENDOR and kind.startswith("0x03")) or vendor == GOOGLE_VENDOR:
            node = _text(device / "numa_node")
            found += [int(node)] if node.isdigit() else []
    return tuple(found)


def _local_processes(environment: Mapping[str, str]) -> tuple[int | None, str]:
    for name in LOCAL_COUNTS:
        if count := re.match(r"\d+", environment.get(name, "")):
            return int(count.group()), f"{name}={environment[name]}"
    return None, ""


def _backend_ready() -> bool:
    """Whether jax has started its backend in this process: from then on it reads no variable again."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge is not None and bridge.backends_are_initialized())


def _disk(folder: Path) -> tuple[int, float | None]:
    """Free bytes and the rate of a short synchronous write, None where there is no room for it."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    if free < GIB:
        return free, None
    file, piece = place / f".forebay-write-{os.getpid()}", os.urandom(PIECE_BYTES)
    written, began = 0, time.perf_counter()
    try:
        with file.open("wb", buffering=0) as out:
            while written < WRITTEN_BYTES and time.perf_counter() - began < WRITE_SECONDS:
                written += out.write(piece)
                os.fsync(out.fileno())
    except OSError:
        return free, None  # a folder that cannot be written is found when the checkpoint's folder is made
    finally:
        file.unlink(missing_ok=True)
    return free, written / (time.perf_counter() - began)


def _list(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as ``0-15,32-47``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
