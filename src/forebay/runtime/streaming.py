"""The in-place loop that streams host arrays through the device, leaf after leaf, copies running both ways at once.

Idea: every array that changes is a carry of one ``fori_loop``, on its own memory. An iteration visits the slices of each
leaf in turn; a barrier lets the next leaf's read begin once this leaf's update is done, so that it runs beside this leaf's
write, and once the write of the leaf before is done: left free, XLA:TPU reads all leaves first and then writes them all.
Reads and writes of one buffer never cross, so no host-to-host copy appears:

    loop i:   for each leaf k:  current = fetch(leaf k, i)                          <- runs beside the write of leaf k-1
                                new = barrier(update(current))
                                buffer[k] = write(buffer[k], put(new, host), i)
              fetch(leaf 0, i+1)                                                    <- runs beside the write of the last leaf

Cost: HBM holds the slices of two leaves; each host byte crosses the link once in each direction it is used.
Limits: a loop over a single leaf reads and writes in turns; where it is a stack, ``plan.halves`` makes two of it.
Evidence: 320 MiB against 768 MiB for whole-state offload, host temp 0 (docs/evidence.md).
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Port:
    """One array as a loop sees it: ``slot`` in the table of arrays, its streamed ``axis``, and whether it stands on the host.

    ``first``: the position at which the array begins, where it is only a part of what the loop runs over.
    ``copy_of``: the slot whose slices this one holds, cast to its own dtype. ``dtype``: what a slice is cast to behind its fetch.
    """

    slot: Any
    axis: int
    host: bool
    first: int = 0
    copy_of: Any = None
    dtype: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One leaf's work on a slice: ``compute(start, size, slices) -> (new slices of writes, partial sums)``.

    A slice has ``size`` positions; behind the last whole slice ``rest`` positions remain. The first slice begins at ``first``.
    """

    reads: tuple[Port, ...]
    writes: tuple[Port, ...]
    compute: Callable[[Any, int, list[Any]], tuple[list[Any], list[Any]]]
    sums: tuple[Any, ...] = ()
    combine: tuple[Callable, ...] = ()
    size: int = 1
    rest: int = 0
    first: int = 0


def run(jobs: list[Job], arrays: dict[Any, Any], count: int, into: dict[Any, Any] | None = None) -> list[list[Any]]:
    """Stream ``count`` slices, then what remains, of ``arrays`` through all jobs. The new arrays are put into ``into``.

    With two jobs or more, the first job's next slice is read beside the last job's write, so that no turn of the loop begins with a read
    alone; the last turn stands behind the loop, for it has no next slice. Returns the sums of each job over all slices.
    """
    slots = list(dict.fromkeys(p.slot for job in jobs for p in job.writes))
    early = tuple(port for port in jobs[0].reads if port.host) if len(jobs) > 1 and count > 1 else ()

    def turn(carry, i, after):
        buffers, sums, read = carry
        table = arrays | dict(zip(slots, buffers, strict=True))
        fetched = {port.slot: value for port, value in zip(early, read, strict=True)}
        sums = run_steps(steps(jobs, table, sums, i, after=after, fetched=fetched), len(jobs) + bool(after))
        return table, sums

    def body(i, carry):
        table, sums = turn(carry, i, early)
        return [table[s] for s in slots], sums, [_slice(jobs[0], port, table, _start(jobs[0], i + 1)) for port in early]

    first = [_slice(jobs[0], port, arrays, _start(jobs[0], 0)) for port in early]
    start = [arrays[s] for s in slots], [list(job.sums) for job in jobs], first
    carry = lax.fori_loop(0, count - bool(early), body, start)
    if early:
        table, sums = turn(carry, count - 1, ())
    else:
        table, sums = arrays | dict(zip(slots, carry[0], strict=True)), carry[1]
    left = [k for k, job in enumerate(jobs) if job.rest]
    if left:
        ends = [dataclasses.replace(jobs[k], size=jobs[k].rest) for k in left]
        last = visit(ends, table, [sums[k] for k in left], None, starts=[_start(jobs[k], count) for k in left])
        sums = [last[left.index(k)] if k in left else total for k, total in enumerate(sums)]
    if into is not None:
        into.update((s, table[s]) for s in slots)
    return sums


def visit(
    jobs: list[Job], table: dict[Any, Any], sums: list[list[Any]], at, given: dict[Any, Any] | None = None, live=None, starts=None
) -> list[list[Any]]:
    """One iteration: every job on its slice number ``at`` (or at ``starts``), the next job's reads ordered behind this one's update.

    ``table`` is changed. ``given``: slices that are on the device already, by slot. Where ``live`` is False, what stands there is
    written back.
    """
    return run_steps(steps(jobs, table, sums, at, given, live, starts), len(jobs))


def run_steps(chain: Generator[Any, Any, Any], count: int) -> Any:
    """The result of a chain of ``count`` steps, each behind the one before it."""
    try:
        held = next(chain)
        while True:
            count -= 1
            held = chain.send(lax.optimization_barrier(held) if count else held)
    except StopIteration as end:
        return end.value


def steps(
    jobs: list[Job],
    table: dict[Any, Any],
    sums: list[list[Any]],
    at,
    given: dict[Any, Any] | None = None,
    live=None,
    starts=None,
    after: tuple[Port, ...] = (),
    fetched: dict[Any, Any] | None = None,
) -> Generator[Any, Any, list[list[Any]]]:
    """``visit`` as a generator, with a step for each job.

    A step yields what its update made, the host stacks that the next job reads and those that the job before wrote, and is sent the same
    behind a barrier: the write and the next reads start behind that, side by side. Behind the last job those are the reads ``after``. The
    barrier stands on the stacks, not on the index: XLA does not see through an index behind a barrier, and makes the read a kernel over
    the link instead of a copy.
    ``fetched``: what the first job reads from the host, fetched by the turn before; another job may read other slices of these arrays.
    """
    out = []
    given = given or {}
    starts = starts or [_start(job, at) for job in jobs]
    for k, job in enumerate(jobs):
        here = given if k or not fetched else given | fetched
        current, start = _fetch(job, table, starts[k], here), starts[k]
        new, partial = job.compute(start, job.size, current)
        if live is not None:
            new, partial = _unless(live, job, current, new, partial)
        last = k + 1 == len(jobs)
        following = [port for port in jobs[k + 1].reads if port.host and port.slot not in given] if not last else after
        written = [port for port in jobs[k - 1].writes if port.host] if k and not last else []
        slots = list(dict.fromkeys(port.slot for port in (*following, *written)))
        (new, partial), stacks = yield (new, partial), [table[slot] for slot in slots]
        table.update(zip(slots, stacks, strict=True))
        for port, value in zip(job.writes, new, strict=True):
            value = jax.device_put(value, HOST) if port.host else value
            begins = start - port.first if port.first else start
            table[port.slot] = lax.dynamic_update_slice_in_dim(table[port.slot], value, begins, port.axis)
        out.append([combine(a, b) for combine, a, b in zip(job.combine, sums[k], partial, strict=True)])
    return out


def _start(job: Job, at):
    """Where slice number ``at`` of a job begins; written so that a loop over whole layers indexes by its own counter."""
    start = at * job.size if job.size > 1 else at
    return start + job.first if job.first else start


def _unless(live, job: Job, current, new, partial):
    """The old slices and no sums where ``live`` is False."""
    old = {port.slot: value for port, value in zip(job.reads, current, strict=True)}
    before = lambda port, value: old[port.slot if port.copy_of is None else port.copy_of].astype(value.dtype)  # noqa: E731
    new = [jnp.where(live, value, before(port, value)) for port, value in zip(job.writes, new, strict=True)]
    return new, [jnp.where(live, value, zero) for value, zero in zip(partial, job.sums, strict=True)]


def _fetch(job: Job, table: dict[Any, Any], start, given: dict[Any, Any]) -> list[Any]:
    return [given[port.slot] if port.slot in given else _slice(job, port, table, start) for port in job.reads]


def _slice(job: Job, port: Port, table: dict[Any, Any], start):
    value = lax.dynamic_slice_in_dim(table[port.slot], start - port.first if port.first else start, job.size, port.axis)
    value = jax.device_put(value, DEVICE) if port.host else value
    return value if port.dtype in (None, value.dtype) else value.astype(port.dtype)
