"""What Linux says of the processor: cores that this process may use, NUMA nodes, and the size of the last-level cache."""

import os
import re
from pathlib import Path

_SIZE = {"K": 2**10, "M": 2**20, "G": 2**30}


def cores() -> list[int]:
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def nodes(usable: list[int], root: Path = Path("/")) -> dict[int, list[int]]:
    """Usable cores of each NUMA node that has any; empty where the system does not say."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        listed = folder / "cpulist"
        mine = sorted(set(_numbers(listed.read_text())) & set(usable)) if listed.is_file() else []
        if mine:
            found[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(found.items()))


def _numbers(text: str) -> list[int]:
    """The numbers of ``0-3,8,10-11``."""
    pairs = [part.partition("-") for part in text.strip().split(",") if part]
    return [n for low, dash, high in pairs for n in range(int(low), int(high if dash else low) + 1)]


def last_level_cache_bytes(usable: list[int], root: Path = Path("/")) -> int | None:
    """Bytes of all last-level caches that the usable cores share; None where the system does not say."""
    caches: dict[tuple[int, str], int] = {}
    for core in usable:
        for folder in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index[0-9]*"):
            text = {name: _read(folder / name) for name in ("level", "size", "type", "shared_cpu_list")}
            size = re.fullmatch(r"([0-9]+)([KMG])", text["size"])
            if size and text["level"].isdigit() and text["type"] != "Instruction":
                caches[(int(text["level"]), text["shared_cpu_list"])] = int(size.group(1)) * _SIZE[size.group(2)]
    last = max((level for level, _ in caches), default=None)
    return sum(size for (level, _), size in caches.items() if level == last) if caches else None


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
