"""How much RAM this process may use: what the kernel has, or the limit of its control group where that is smaller."""

import os
from pathlib import Path

UNLIMITED = 2**60
"""Version 1 of control groups writes an absurd number where there is no limit."""


def host_ram_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of RAM this process may use, and the file that says so."""
    total = _kernel_total(root)
    limit, limited_by = min(_limits(root), default=(UNLIMITED, ""))
    return (limit, limited_by) if limit < total[0] else total


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of RAM that can be taken now without swapping: what the kernel calls available, at most this process's limit."""
    limit, _ = host_ram_bytes(root)
    meminfo = root / "proc/meminfo"
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else []:
        if line.startswith("MemAvailable:"):
            return min(limit, int(line.split()[1]) * 1024)
    return limit // 2  # a kernel that does not say: half is a careful part


def _kernel_total(root: Path) -> tuple[int, str]:
    meminfo = root / "proc/meminfo"
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else []:
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024, "/proc/meminfo, MemTotal"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "sysconf, physical pages"


def _limits(root: Path) -> list[tuple[int, str]]:
    """Every limit on this process's control group and on the groups above it."""
    membership = root / "proc/self/cgroup"
    found = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _limits_above(root, root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits_above(root, root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return found


def _limits_above(root: Path, mount: Path, group: str, name: str) -> list[tuple[int, str]]:
    """Limits in file ``name`` from ``group`` up to the mount; in a container the group's own path is often hidden, the mount is not."""
    folder = mount / group.strip("/")
    found = []
    for place in (folder, *folder.parents):
        file = place / name
        if place.is_relative_to(mount) and file.is_file() and (text := file.read_text().strip()).isdigit():
            found.append((int(text), f"/{file.relative_to(root)}"))
    return found
