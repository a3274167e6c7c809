"""Which leaves a streaming loop takes together, so that what comes in is as large as what goes out beside it.

Idea: while one visit's slices are written, the next visit's are read; the turn lasts as long as the larger of the two. The leaves of a
layer differ in size (a key projection beside an MLP), so that one leaf a visit leaves the link half empty in one direction. Leaves are
dealt into packs of nearly equal bytes, largest first to the smallest pack, for each possible number of packs; the number whose turns add
up to the least wins:

    turns(packs) = sum over neighbours, the last beside the first of the next slice, of max(pack, next pack)

Cost: HBM holds the slices of two packs; none is larger than ``SLACK`` x the largest leaf. Two leaves or more never become one pack.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from forebay.runtime.streaming import Job

SLACK = 1.35


def packs(sizes: Sequence[int]) -> list[list[int]]:
    """The indices of leaves of these sizes, by pack: packs from the largest to the smallest, the leaves of one in their own order."""
    if len(sizes) < 3:
        return [[k] for k in range(len(sizes))]
    limit = SLACK * max(sizes)
    dealt = [_deal(sizes, count) for count in range(2, len(sizes) + 1)]
    allowed = [made for made in dealt if max(sum(sizes[k] for k in pack) for pack in made) <= limit]
    return min(allowed, key=lambda made: _turns([sum(sizes[k] for k in pack) for pack in made]))


def _deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in range(count)]
    weights = [0] * count
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        at = weights.index(min(weights))
        made[at].append(k)
        weights[at] += sizes[k]
    order = sorted(range(count), key=lambda at: -weights[at])
    return [sorted(made[at]) for at in order if made[at]]  # leaves in HBM weigh nothing, and may all lie in one pack


def _turns(weights: list[int]) -> int:
    return sum(max(a, b) for a, b in zip(weights, [*weights[1:], weights[0]], strict=True))


def slice_bytes(job: Job, arrays: dict[Any, Any]) -> int:
    """Bytes that cross the link for one slice of a job, the larger of both directions; over all devices."""

    def moved(ports):
        sizes = ((arrays[p.slot], p.axis) for p in ports if p.host)
        return sum(a.size * a.dtype.itemsize // a.shape[axis] * job.size for a, axis in sizes)

    return max(moved(job.reads), moved(job.writes))


def pack(jobs: Sequence[Job]) -> Job:
    """One job that does the work of several, which take slices of one size from one first position."""
    if len(jobs) == 1:
        return jobs[0]
    reads = [len(job.reads) for job in jobs]

    def compute(start, size, slices):
        new, sums, at = [], [], 0
        for job, count in zip(jobs, reads, strict=True):
            written, partial = job.compute(start, size, slices[at : at + count])
            new, sums, at = [*new, *written], [*sums, *partial], at + count
        return new, sums

    joined = {name: tuple(x for job in jobs for x in getattr(job, name)) for name in ("reads", "writes", "sums", "combine")}
    return dataclasses.replace(jobs[0], compute=compute, **joined)


def packed(jobs: Sequence[Job], arrays: dict[Any, Any]) -> list[list[int]]:
    """The indices of jobs to be taken together: packs of those whose slices lie alike; the others alone."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for k, job in enumerate(jobs):
        alike.setdefault((job.size, job.rest, job.first), []).append(k)
    made = []
    for members in alike.values():
        sizes = [slice_bytes(jobs[k], arrays) for k in members]
        made += [[members[at] for at in one] for one in packs(sizes)]
    return made
