"""What `forebay plan` answers where no rule is given: the fastest plan that fits, the buyer's questions, what to change if nothing fits.

In: a `Question`, whose ``trace`` makes the workload of a size. Out: a `Plan` whose reasons say what was asked and what was found.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import forebay as fb
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.search.asking import Found, fewest, largest
from forebay.units import show_bytes

SEQ_STEP = 128  # tokens: attention kernels work on whole tiles


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model on a machine. ``trace(seq, batch)`` is its workload, ``work_done`` the forecast's tokens and flops, ``described`` what
    plan.json says of it."""

    trace: Callable[[int | None, int | None], Any]
    work_done: Callable[[int | None, int | None], dict[str, float]]
    described: Callable[[int | None, int | None], dict[str, Any]]
    hardware: Hardware
    seq: int | None
    batch: int | None
    budget_seconds: float


def searched(question: Question, asked: str | None) -> Any:
    """The plan for ``question``; ``asked`` is ``batch`` or ``seq`` (the largest), ``devices`` (the fewest), or None (as it stands).

    Raises:
        InputError: a size is asked about that the question does not give, or no size fits.
    """
    if asked is None:
        plan = _chosen(question)
        return plan if plan.verdict.fits is not False else _with_ways_out(question, plan)
    began = time.monotonic()
    found = _found(_within(question, question.budget_seconds / 2), asked, None)
    if found.size is None:
        raise InputError(f"no {asked} was found that fits {question.hardware.name}: {'; '.join(found.said)}")
    answer = f"largest {asked} that fits: {found.size}" if asked != "devices" else f"fewest devices that fit: {found.size.devices}"
    left = _within(_at(question, asked, found.size), question.budget_seconds - (time.monotonic() - began))
    return _noting(_chosen(left), [answer, *found.said])


def _within(question: Question, seconds: float) -> Question:
    return dataclasses.replace(question, budget_seconds=seconds)


def _chosen(question: Question) -> Any:
    began = time.monotonic()
    work = question.trace(question.seq, question.batch)
    done = question.work_done(question.seq, question.batch)
    left = question.budget_seconds - (time.monotonic() - began)
    plan = fb.choose(work, question.hardware, budget_seconds=left, **done)
    return dataclasses.replace(plan, workload={**plan.workload, **question.described(question.seq, question.batch)})


def _at(question: Question, asked: str, size: Any) -> Question:
    return dataclasses.replace(question, **{"hardware" if asked == "devices" else asked: size})


def _found(question: Question, asked: str, most: int | None) -> Found:
    deadline = time.monotonic() + question.budget_seconds
    if asked == "devices":
        return fewest(lambda: question.trace(question.seq, question.batch), _machines(question), deadline)
    start = getattr(question, asked)
    if start is None:
        raise InputError(f"--{asked} is missing: the search for the largest {asked} begins with it")
    step = question.hardware.devices if asked == "batch" else SEQ_STEP
    return largest(lambda size: _sized(question, asked, size), question.hardware, start, step, most, deadline)


def _sized(question: Question, asked: str, size: int) -> Any:
    return question.trace(*(size if asked == name else getattr(question, name) for name in ("seq", "batch")))


def _machines(question: Question) -> list[Hardware]:
    """Machines of the question's chip, from one device up, on which its batch divides: parts of a host, whole hosts, then more of them."""
    hardware, chip = question.hardware, question.hardware.chip
    given = {"host_ram": hardware.host_ram_bytes, "hbm": int(chip.hbm_bytes)}
    if chip.platform == "tpu":
        grids = [list(chip.host.bounds)]
        while math.prod(grids[-1]) < min(chip.pod_chips, 4096):
            grids.append(_doubled(grids[-1]))
        names = ["x".join(map(str, grid)) for grid in grids]
    else:
        node = chip.host.chips
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < node] + [node * 2**k for k in range(10)]
        names = [str(n) for n in counts]
    machines = [Hardware.named(f"{chip.name}:{name}", **given) for name in names]
    batch = question.batch
    return [m for m in machines if batch is None or batch % m.devices == 0]


def _doubled(grid: list[int]) -> list[int]:
    """The next larger slice: its shortest side twice as long."""
    short = min(range(len(grid)), key=lambda k: (grid[k], -k))
    return [side * 2 if k == short else side for k, side in enumerate(grid)]


def _with_ways_out(question: Question, plan: Any) -> Any:
    """``plan``, which does not fit, with the smallest changes that would, each compiled."""
    notes = []
    for asked in ("batch", "seq", "devices"):
        start = getattr(question, asked, None)
        if asked != "devices" and start is None:
            continue
        found = _found(question if asked == "devices" else _halved(question, asked), asked, start)
        if found.size is not None:
            value = found.size.name if asked == "devices" else f"{asked} {found.size} in place of {start}"
            notes.append(f"would fit: {value} ({found.said[-1] if asked == 'devices' else _line(found)})")
    if plan.verdict.host is not None and plan.verdict.host.total_bytes > plan.verdict.host_budget_bytes:
        notes.append(f"the host is short of {show_bytes(plan.verdict.host.total_bytes - plan.verdict.host_budget_bytes)} per device")
    return _noting(plan, notes or ["no smaller batch or sequence and no larger machine of this kind was found to fit"])


def _halved(question: Question, asked: str) -> Question:
    return dataclasses.replace(question, **{asked: max(1, getattr(question, asked) // 2)})


def _line(found: Found) -> str:
    return next(line for line in found.said if line.startswith(f"{found.size}: "))


def _noting(plan: Any, notes: list[str]) -> Any:
    return dataclasses.replace(plan, options={**plan.options, "reasons": [*plan.options.get("reasons", ()), *notes]})
