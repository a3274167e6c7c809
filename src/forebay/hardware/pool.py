"""How large XLA's pool of pinned host memory must be for a list of arrays.

Each device has a pool of its own, up to ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` (in GiB; 64 unless set). It grows in regions, each the
last size doubled until the array fits and cut to what is left of the limit, and an array never crosses two regions. Few large arrays so
leave tails that nothing fits into: seven stacks of 70 GiB (490) take regions of 128, 128, 256 and 140 (652). ``needed_gib`` replays that
growth. Told to preallocate, the pool is one region of the whole limit and has no tails; all of it is then pinned at the start.

Source: xla/pjrt/gpu/gpu_helpers.cc (GetGpuHostAllocator) and xla/tsl/framework/bfc_allocator.cc (Extend). Limit: what is freed and taken
again while training is not replayed; ``MARGIN`` is for that and for staging buffers.
"""

from collections.abc import Sequence

from forebay.units import GIB

DEFAULT_GIB = 64
MARGIN = 10, 11
"""A tenth more than the arrays."""
FIRST_REGION_BYTES = 2**21


def needed_gib(sizes: Sequence[int]) -> int:
    """The smallest limit, in steps of 5 %, under which a growing pool takes arrays of ``sizes`` bytes, largest first."""
    limit = preallocated_gib(sizes)
    while not _fits(sizes, limit * GIB * MARGIN[0] // MARGIN[1]):
        limit += max(1, limit // 20)
    return limit


def preallocated_gib(sizes: Sequence[int]) -> int:
    """The limit of a pool that is one region from the start: the sum and the margin."""
    return max(1, -(-sum(sizes) * MARGIN[1] // (MARGIN[0] * GIB)))


def _fits(sizes: Sequence[int], limit_bytes: int) -> bool:
    region, taken, tails = FIRST_REGION_BYTES, 0, []
    for size in sorted(sizes, reverse=True):
        tail = min((t for t in tails if t >= size), default=None)
        if tail is not None:
            tails.remove(tail)
        else:
            doubled = region
            while doubled < size:
                doubled *= 2
            tail = min(doubled, limit_bytes - taken)
            if tail < size:
                return False
            taken += tail
            region = doubled if doubled > region else doubled * 2
        tails.append(tail - size)
    return True
