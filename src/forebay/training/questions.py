"""What `forebay plan` answers where no rule is given: the fastest plan that fits, the buyer's questions, what to change if nothing fits.

In: a `Question`, whose ``trace`` makes the workload of a size. Out: a `Plan` whose reasons say what was asked and what was found.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import forebay as fb
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.search.asking import Found, fewest, largest
from forebay.search.choosing import choose_from, frugal
from forebay.search.proving import Proven
from forebay.units import show_bytes

SEQ_STEP = 128  # tokens: attention kernels work on whole tiles
MOST_CHIPS = 4096
WAYS_OUT = 3  # a smaller batch, a shorter sequence, more devices: each may take a third of the budget


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
        InputError: a size is asked about that the question does not give, or that the model or the machine refuses.
    """
    if asked is None:
        plan = _chosen(question)
        return plan if plan.verdict.fits is not False else _with_ways_out(question, plan)
    began = time.monotonic()
    found = _found(question, asked, None, began + question.budget_seconds / 2)
    left = _within(question, question.budget_seconds - (time.monotonic() - began))
    if found.size is None or found.proven is None:
        what = "machine of this kind" if asked == "devices" else asked
        return _noting(_chosen(left), [f"no {what} was found that fits", *found.said])
    size = found.size.devices if asked == "devices" else found.size
    wanted = "fewest devices" if asked == "devices" else f"largest {asked}"
    answer = f"{wanted} that fit{'' if asked == 'devices' else 's'}: {size}"
    if not found.ended:
        answer += " so far: the search ended early"
    return _noting(_chosen_from(_at(left, asked, found.size), found.proven), [answer, *found.said])


def _within(question: Question, seconds: float) -> Question:
    return dataclasses.replace(question, budget_seconds=seconds)


def _chosen(question: Question) -> Any:
    began = time.monotonic()
    work = question.trace(question.seq, question.batch)
    done = question.work_done(question.seq, question.batch)
    left = question.budget_seconds - (time.monotonic() - began)
    return _described(question, fb.choose(work, question.hardware, budget_seconds=left, **done))


def _chosen_from(question: Question, proven: Proven) -> Any:
    done = question.work_done(question.seq, question.batch)
    return _described(question, choose_from(proven, question.hardware, question.budget_seconds, done))


def _described(question: Question, plan: Any) -> Any:
    return dataclasses.replace(plan, workload={**plan.workload, **question.described(question.seq, question.batch)})


def _at(question: Question, asked: str, size: Any) -> Question:
    return dataclasses.replace(question, **{"hardware" if asked == "devices" else asked: size})


def _found(question: Question, asked: str, over: int | None, deadline: float) -> Found:
    """``over``: a size that is known not to fit."""
    if asked == "devices":
        return fewest(question.trace(question.seq, question.batch), _machines(question, over or 0), deadline)
    start = getattr(question, asked)
    if start is None:
        raise InputError(f"--{asked} is missing: the search for the largest {asked} begins with it")
    step = question.hardware.devices if asked == "batch" else SEQ_STEP
    return largest(lambda size: _sized(question, asked, size), question.hardware, start, step, over, deadline)


def _sized(question: Question, asked: str, size: int) -> Any:
    return question.trace(*(size if asked == name else getattr(question, name) for name in ("seq", "batch")))


def _machines(question: Question, over: int) -> list[Hardware]:
    """Machines of the question's chip with more than ``over`` devices: parts of a host, then whole hosts; TPU slices by doubled sides."""
    hardware, chip = question.hardware, question.hardware.chip
    given = {"host_ram": hardware.host_ram_bytes, "hbm": int(chip.hbm_bytes)}
    if chip.platform == "tpu":
        grids = [[1] * len(chip.host.bounds)]
        while math.prod(grids[-1]) < min(chip.pod_chips, MOST_CHIPS):
            grids.append(_doubled(grids[-1], chip.host.bounds))
        names = ["x".join(map(str, grid)) for grid in grids]
    else:
        node = chip.host.chips
        names = [str(n) for n in (*range(1, node), *range(node, MOST_CHIPS + 1, node))]
    machines = [Hardware.named(f"{chip.name}:{name}", **given) for name in names]
    return [m for m in machines if m.devices > over]


def _doubled(grid: list[int], host: Sequence[int]) -> list[int]:
    """The next larger slice: its shortest side twice as long, within a host first."""
    inside = [k for k, side in enumerate(grid) if side < host[k]]
    short = min(inside or range(len(grid)), key=lambda k: (grid[k], -k))
    return [side * 2 if k == short else side for k, side in enumerate(grid)]


def _with_ways_out(question: Question, plan: Any) -> Any:
    """``plan``, which does not fit, with the smallest changes that would, each compiled; or the plan of the least HBM, if that one fits."""
    least = frugal(plan.bound, question.hardware)
    if least is not None and least.fits:
        return _chosen_from(_within(question, 0.0), least)
    notes = []
    for asked in ("batch", "seq", "devices"):
        now = question.hardware.devices if asked == "devices" else getattr(question, asked)
        if now is None or (asked != "devices" and now < 2):
            continue
        deadline = time.monotonic() + question.budget_seconds / WAYS_OUT
        found = _found(question if asked == "devices" else _halved(question, asked), asked, now, deadline)
        if found.size is None:
            notes.append(f"no {'larger machine' if asked == 'devices' else 'smaller ' + asked} was found to fit ({'; '.join(found.said)})")
            continue
        value = found.size.name if asked == "devices" else f"{asked} {found.size} in place of {now}"
        early = "" if found.ended else "; the search for this one ended early: a smaller change may do"
        notes.append(f"would fit: {value} ({_line(found)}{early})")
    if plan.verdict.host is not None and plan.verdict.host.total_bytes > plan.verdict.host_budget_bytes:
        notes.append(f"the host is short of {show_bytes(plan.verdict.host.total_bytes - plan.verdict.host_budget_bytes)} per device")
    return _noting(plan, notes)


def _halved(question: Question, asked: str) -> Question:
    return dataclasses.replace(question, **{asked: max(1, getattr(question, asked) // 2)})


def _line(found: Found) -> str:
    name = getattr(found.size, "name", found.size)
    return next(line for line in found.said if line.startswith(f"{name}: "))


def _noting(plan: Any, notes: list[str]) -> Any:
    return dataclasses.replace(plan, options={**plan.options, "reasons": [*plan.options.get("reasons", ()), *notes]})
