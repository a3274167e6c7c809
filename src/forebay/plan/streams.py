"""How each family of the optimizer's update runs under given placements: resident, streamed along an axis, item by item, or whole.

slices of a stack the loop scans    axis 0, one layer at a time
an unstacked leaf (embedding, head) chunks along its first unsharded axis that the update allows
a small leaf                        whole: a copy of it costs less than a trip round a loop
"""

import dataclasses
import math

from forebay.workload import slicing
from forebay.workload.families import Family
from forebay.workload.sharding import local_shape
from forebay.workload.update import Sliced, slice_component

# A TPU updates its two minor axes in whole tiles only: 128 lanes, and 8 sublanes of 4 bytes (16 of 2 bytes, 32 of 1 byte).
LANES, SUBLANES = (128,), (32, 16, 8)
CHUNK_BYTES = 64 * 2**20
WHOLE_BELOW_BYTES = 64 * 2**10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """``mode``: ``resident`` (nothing on the host), ``slices``, ``items`` or ``whole``.

    For ``slices``: ``count`` slices of ``size`` positions along ``axis`` of ``sliced``, then ``rest`` positions. ``layered``: the
    slices are the layers of a stack that a loop scans. ``tiles``: sizes of which a chunk should be a multiple, the largest first.
    """

    mode: str
    reason: str
    axis: int = 0
    size: int = 1
    count: int = 1
    rest: int = 0
    sliced: Sliced | None = None
    layered: bool = False
    tiles: tuple[int, ...] = ()

    @property
    def along(self) -> Sliced:
        """The update along the streamed axis; only ``slices`` have one."""
        assert self.sliced is not None, f"a stream of mode {self.mode} has no slices"
        return self.sliced


def choose_stream(work, family: Family, spec: tuple, mesh, hosted: bool, whole_below_bytes: int, unsliced=frozenset()) -> Stream:
    """The stream of one family. ``spec`` is its parameter's; ``hosted``: any of its arrays stands on the host; ``unsliced``: axes, counted
    from the last (-1), of which the machine's compiler cannot update a part."""
    if family.window is not None:
        return _window(work, family, *family.window)
    if not hosted:
        return Stream(mode="resident", reason="")
    if family.kind == "joint":
        why = "its layers are updated in different ways" if len(family.items) > 1 else "the update of these arrays is joint"
        return Stream(mode="whole", reason=f"{why}, so they move whole, one after the other")
    tensor = next(t for t in work.tensors if t.name == work_param_name(work, family))
    local = local_shape(tensor.shape, spec, mesh)
    itemsize = tensor.bytes // max(1, math.prod(tensor.shape))
    if family.kind == "stack":
        return Stream(mode="items", reason=f"streamed layer by layer, {tensor.shape[0]} layers", count=tensor.shape[0])
    if math.prod(local) * itemsize < max(1, whole_below_bytes):
        return Stream(mode="whole", reason="moved whole: smaller than a useful slice")
    return _slices(work, family, tensor, spec, local, itemsize, unsliced)


def _window(work, family: Family, start: int, stop: int) -> Stream:
    """State kept in parts always runs layer by layer, whichever memory its part stands in.

    A part with one layer more than another of the same stack shares its loop; the last layer follows the loop.
    """
    reason = f"layers {start} to {stop - 1}, one at a time"
    count = stop - start
    rest = int(any(f.window and f.items is family.items and f.window[1] - f.window[0] == count - 1 > 0 for f in work.families))
    if family.kind == "stack":
        return Stream(mode="items", reason=reason, count=count - rest, rest=rest)
    sliced = slice_component(work.update, family.items[0].component, 0)
    return Stream(mode="slices", reason=reason, count=count - rest, rest=rest, sliced=sliced, layered=True)


def work_param_name(work, family: Family) -> str:
    """The entry name of a family's stored parameter."""
    return [t.name for t in work.tensors if t.role == "parameter"][family.params[0]]


def _slices(work, family, tensor, spec, local, itemsize, unsliced) -> Stream:
    stack = work.program.streams(family.params[0])
    axes = [k for k in range(len(local)) if spec[k] is None and local[k] > 1 and k - len(local) not in unsliced]
    refused = (
        "" if axes else "every axis is sharded or of length one" + (", or one of which this compiler updates no part" if unsliced else "")
    )
    for axis in axes:
        try:
            sliced = slice_component(work.update, family.items[0].component, axis)
        except slicing.NotSeparable as why:
            refused = refused or str(why)
            continue
        if axis == 0 and stack:
            return Stream(
                mode="slices",
                reason=f"streamed layer by layer, {local[0]} layers",
                axis=0,
                size=1,
                count=local[0],
                sliced=sliced,
                layered=True,
            )
        per_position = math.prod(local) * itemsize // local[axis]
        size = chunk(local[axis], max(1, CHUNK_BYTES // per_position))
        reason = f"streamed in {math.ceil(local[axis] / size)} chunks along axis {axis}"
        tiles = {1: LANES, 2: SUBLANES}.get(len(local) - axis, ()) if len(local) > 1 else ()
        return Stream(
            mode="slices",
            reason=reason,
            axis=axis,
            size=size,
            count=local[axis] // size,
            rest=local[axis] % size,
            sliced=sliced,
            tiles=tiles,
        )
    return Stream(mode="whole", reason=f"moved whole: {refused}")


def align(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """The streams with one number of slices where possible: leaves that share a loop read beside each other's writes.

    Unstacked leaves are cut into as many slices as there are layers, or into as many as the largest of them needs.
    """
    layered = {s.count for s in streams if s.mode == "items" or (s.mode == "slices" and s.layered)}
    cut = [s for s in streams if s.mode == "slices" and not s.layered]
    if not cut:
        return streams
    needed = max(s.count + bool(s.rest) for s in cut)
    count = next((n for n in sorted(layered) if n >= needed), max(needed, 2))
    return tuple(_recut(s, count) if s in cut else s for s in streams)


def _recut(stream: Stream, count: int) -> Stream:
    length = stream.along.size
    if length < count:
        return stream
    size = length // count
    size -= size % next((tile for tile in stream.tiles if size >= tile), 1)
    chunks = count + bool(length % count)
    reason = f"streamed in {chunks} chunks along axis {stream.axis}"
    return dataclasses.replace(stream, size=size, count=count, rest=length - size * count, reason=reason)


def chunk(length: int, limit: int) -> int:
    """A chunk of at most ``limit`` positions: a divisor of ``length`` if one is at least half as large, else ``limit`` (a rest remains)."""
    limit = min(limit, length)
    return next((n for n in range(limit, limit // 2, -1) if length % n == 0), limit)
