"""The buyer's questions: the largest batch, the longest sequence, the fewest devices that still fit; each answer proved by compiles.

    whether(n)       compile the most frugal plan of the size n: does it fit, and in how many bytes?
    largest          follow the line through the last two compiled sizes to the budget, between the largest that fits and the smallest
                     that does not, until they are neighbours

What is asked about is the most frugal plan, since a faster one may fit less; the answer's own plan is then searched as any other.
Cost: three to six compiles. Limits: HBM is taken to grow with the size; the neighbours of a length are 2 % of it apart.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from forebay.hardware import Hardware
from forebay.search.choosing import frugal
from forebay.search.proving import Proven
from forebay.units import show_bytes
from forebay.workload import Workload

MOST_COMPILES = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best size, None where no size that was tried fits, and a line for each size that was compiled."""

    size: Any
    said: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Bracket:
    fits: int | None = None
    over: int | None = None
    points: list[tuple[int, float]] = dataclasses.field(default_factory=list)


def largest(make: Callable[[int], Workload], hardware: Hardware, start: int, step: int, most: int | None, deadline: float) -> Found:
    """The largest multiple of ``step`` for which ``make(size)`` fits on ``hardware``, from ``start`` on; at most ``most``.

    ``deadline``, of ``time.monotonic``: no compile begins behind it, and the line about the last size says that it was not the end.
    """
    bracket, said, size = _Bracket(), [], _whole(start, step)
    while len(said) < MOST_COMPILES:
        proven = frugal(make(size), hardware)
        said.append(_said(size, proven))
        if proven is not None and proven.verdict.hbm is not None:
            bracket.points.append((size, proven.verdict.hbm.total_bytes))
        if proven is not None and proven.fits:
            bracket.fits = max(size, bracket.fits or 0)
        else:
            bracket.over = min(size, bracket.over or size)
        following = _next(bracket, hardware.hbm_budget_bytes, step, most)
        if following is None:
            break
        if time.monotonic() > deadline:
            said.append("the budget of time ended the search here: a size between may fit")
            break
        size = following
    return Found(size=bracket.fits, said=tuple(said))


def _next(bracket: _Bracket, budget: float, step: int, most: int | None) -> int | None:
    """The next size to compile, or None where the neighbours are known."""
    low, high = bracket.fits or 0, bracket.over
    if (most is not None and low >= most) or (high is not None and high - low <= max(step, low // 50)):
        return None
    guess = 2 * low if high is None else (low + high) // 2
    if len(bracket.points) > 1:
        (a, x), (b, y) = bracket.points[-2:]
        guess = round(b + (budget - y) * (b - a) / (y - x)) if x != y else guess
    if high is not None:
        guess = min(guess, high - step)
    guess = max(guess, low + step, step)
    return _whole(min(guess, most) if most is not None else guess, step)


def _whole(size: int, step: int) -> int:
    return max(step, size // step * step)


def fewest(make: Callable[[], Workload], machines: Sequence[Hardware], deadline: float) -> Found:
    """The first of ``machines``, from small to large, on which ``make()`` fits. Its ``size`` is the machine."""
    said: list[str] = []
    for hardware in machines:
        proven = frugal(make(), hardware)
        said.append(_said(hardware.name, proven))
        if proven is not None and proven.fits:
            return Found(size=hardware, said=tuple(said))
        if time.monotonic() > deadline:
            said.append("the budget of time ended the search here: a larger machine may do")
            break
    return Found(size=None, said=tuple(said))


def _said(size: Any, proven: Proven | None) -> str:
    if proven is None:
        return f"{size}: no placement keeps within the memory of the host"
    if proven.verdict.hbm is None or proven.verdict.host is None:
        return f"{size}: {proven.verdict.reason}"
    word = "fits" if proven.fits else "does not fit"
    hbm, host = proven.verdict.hbm.total_bytes, proven.verdict.host.total_bytes
    return f"{size}: {word} (compiled), {show_bytes(hbm)} of HBM, {show_bytes(host)} of host"
