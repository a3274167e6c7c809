"""Device groups of collectives, in every syntax that XLA prints.

Explicit ``{{0,1},{2,3}}``; iota ``[8,16]<=[128]`` and ``[8,16]<=[16,8]T(1,0)``; mesh ``mesh['data'=2,'fsdp'=4] {'fsdp'}`` with
sub-axes ``'x':(2)4`` and ``device_ids=([4,2]T(1,0))`` or ``device_ids=(0,2,1,3)``. Anything else is an error: a wrong guess here
costs 10 % of a step (FACTS section 7)."""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

from forebay.timeline.shapes import HloSyntaxError

_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?\Z")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*)\))?\s*\{([^{}]*)\}\Z")
_AXIS = re.compile(r"'?([^'=:,]+)'?\Z")
_SUB_AXIS = re.compile(r"'?([^'=:,]+)'?(?::\((\d+)\)(\d+))?\Z")
_IDS_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?\Z")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of device ids, all of one size."""

    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.members[0]) if self.members else 1

    def span(self, devices_per_host: int) -> tuple[int, int]:
        """(hosts of the widest group, most devices of that group on one host)."""
        counts = [Counter(device // devices_per_host for device in group) for group in self.members]
        return max(((len(hosts), max(hosts.values())) for hosts in counts), default=(1, 1))


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Groups of a ``replica_groups`` text on a machine of ``devices``; ``{}`` is one group of all."""
    text = text.strip()
    if text in ("{}", ""):
        return Groups((tuple(range(devices)),))
    if text.startswith("{{"):
        members = tuple(tuple(int(i) for i in part.split(",") if i.strip()) for part in text[2:-2].replace(" ", "").split("},{"))
        return _checked(members, text, devices)
    if match := _IOTA.match(text):
        shape, reshape, order = (_numbers(part) for part in match.groups())
        ids = _iota(reshape, order or tuple(range(len(reshape))))
        if len(shape) != 2 or math.prod(shape) != len(ids):
            raise HloSyntaxError(f"{text[:120]!r}: {list(shape)} is not a split of {len(ids)} devices into groups of one size")
        return _checked(_rows(ids, shape[-1]), text, devices)
    if match := _MESH.match(text):
        return _checked(_mesh_groups(match.group(1), match.group(2), match.group(3), text), text, devices)
    raise HloSyntaxError(f"unknown replica_groups syntax {text[:120]!r}; refusing to guess which devices take part")


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """``source_target_pairs={{0,1},{1,0}}`` as pairs."""
    if text.strip() == "{}":
        return ()
    found = re.findall(r"\{(\d+),\s*(\d+)\}", text)
    if not found:
        raise HloSyntaxError(f"unknown source_target_pairs syntax {text[:120]!r}")
    return tuple((int(a), int(b)) for a, b in found)


def _checked(members: tuple[tuple[int, ...], ...], text: str, devices: int) -> Groups:
    if not members or len({len(m) for m in members}) != 1 or not members[0]:
        raise HloSyntaxError(f"replica_groups must be non-empty and of one size, got {text[:120]!r}")
    if max(map(max, members)) >= devices:
        raise HloSyntaxError(f"replica_groups name device {max(map(max, members))} of a program for {devices}: {text[:120]!r}")
    return Groups(members)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(",") if i) if text else ()


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _iota(sizes: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Row-major values of iota(prod(sizes)).reshape(sizes).transpose(order)."""
    if sorted(order) != list(range(len(sizes))):
        raise HloSyntaxError(f"T({','.join(map(str, order))}) is no permutation of the {len(sizes)} dimensions {list(sizes)}")
    strides = _strides(sizes)
    ids = [0]
    for axis in order:
        ids = [base + i * strides[axis] for base in ids for i in range(sizes[axis])]
    return ids


def _rows(ids: list[int], width: int) -> tuple[tuple[int, ...], ...]:
    if width <= 0 or len(ids) % width:
        raise HloSyntaxError(f"{len(ids)} devices do not divide into groups of {width}")
    return tuple(tuple(ids[i : i + width]) for i in range(0, len(ids), width))


def _mesh_groups(mesh: str, ids: str | None, axes: str, text: str) -> tuple[tuple[int, ...], ...]:
    names, sizes = _mesh_axes(mesh, text)
    devices = _device_ids(ids, math.prod(sizes), text)
    split: list[tuple[int, int, int]] = []  # (axis, pre, size) of the grouped sub-axes, in the order printed
    for part in (p.strip() for p in axes.split(",") if p.strip()):
        match = _SUB_AXIS.match(part)
        if match is None or match.group(1) not in names:
            raise HloSyntaxError(f"replica_groups names the axis {part!r}, which mesh[{mesh}] lacks")
        axis = names.index(match.group(1))
        pre, size = (int(match.group(2)), int(match.group(3))) if match.group(2) else (1, sizes[axis])
        if size <= 0 or sizes[axis] % (pre * size):
            raise HloSyntaxError(f"sub-axis {part!r} does not divide axis of size {sizes[axis]} in {text[:120]!r}")
        split.append((axis, pre, size))
    strides = _strides(sizes)
    offsets = [0]
    for axis, pre, size in split:
        step = strides[axis] * (sizes[axis] // (pre * size))
        offsets = [base + i * step for base in offsets for i in range(size)]
    if len(set(offsets)) != len(offsets):
        raise HloSyntaxError(f"overlapping axes in {text[:120]!r}")
    grouped = set()
    members = []
    for start in range(len(devices)):
        if start not in grouped:
            positions = [start + o for o in offsets]
            if positions[-1] >= len(devices) or grouped.intersection(positions):
                raise HloSyntaxError(f"axes of {text[:120]!r} do not partition the mesh")
            grouped.update(positions)
            members.append(tuple(devices[p] for p in positions))
    return tuple(members)


def _mesh_axes(mesh: str, text: str) -> tuple[list[str], tuple[int, ...]]:
    names, sizes = [], []
    for part in (p for p in mesh.split(",") if p.strip()):
        name, equals, size = part.rpartition("=")
        match = _AXIS.match(name.strip())
        if not equals or match is None or not size.strip().isdigit():
            raise HloSyntaxError(f"unknown mesh axis {part!r} in {text[:120]!r}")
        names.append(match.group(1))
        sizes.append(int(size))
    return names, tuple(sizes)


def _device_ids(ids: str | None, count: int, text: str) -> list[int]:
    if ids is None:
        return list(range(count))
    if match := _IDS_IOTA.match(ids.strip()):
        sizes = _numbers(match.group(1))
        devices = _iota(sizes, _numbers(match.group(2)) or tuple(range(len(sizes))))
    else:
        devices = [int(i) for i in ids.split(",")]
    if len(devices) != count:
        raise HloSyntaxError(f"device_ids lists {len(devices)} devices for a mesh of {count} in {text[:120]!r}")
    return devices
