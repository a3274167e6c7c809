"""The buyer's questions: the largest batch, the longest sequence, the fewest devices that still fit; each answer proved by compiles.

    frugal(n)        compile the plan of the least HBM of the size n: does it fit, and in how many bytes?
    largest          follow the line through the last two compiled sizes to the budget, between the largest that fits and the smallest
                     that does not, by halves where that comes no nearer, until they are neighbours
    fewest           begin where the count says it fits, then go down or up until one machine fits and the one below it does not

What is asked about is the plan of the least HBM, since a faster one may fit less; from it the answer's own plan is searched as any other.
A size that the model or the machine refuses is a line of the answer. If a coarser step of the sizes is accepted (a batch in twelves), the
search goes on in that step; otherwise nothing above it is tried.

Cost: three to six compiles, more where the bytes jump. Limits: HBM is taken to grow with the size; the neighbours of a length are 2 % of
it apart.
"""

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.search.choosing import SLOWER, frugal, least_hbm_bytes
from forebay.search.proving import Proven
from forebay.units import show_bytes
from forebay.workload import Workload

MOST_COMPILES = 12
MOST_REFUSALS = 24
FLAT = 32  # times the size so far, where it makes no difference to the bytes yet
NEIGHBOURS = 50  # a length and its neighbour are a fiftieth apart, or one step
ENDED = "{} ended the search here: {} may fit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best size (None where none that was tried fits), its compiled plan, a line for each size. ``ended``: nothing is left to try."""

    size: Any
    proven: Proven | None
    said: tuple[str, ...]
    ended: bool


class _Asked:
    """What was compiled so far, and the time that is left."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.said: list[str] = []
        self.compiles, self.longest_seconds = 0, 0.0

    @property
    def late(self) -> bool:
        """Whether a further compile is not thought to end in time; the first one always may begin."""
        return self.compiles > 0 and time.monotonic() + SLOWER * self.longest_seconds > self.deadline

    def frugal(self, name: Any, work: Workload, hardware: Hardware) -> Proven | None:
        """Compile; a line says what came of it."""
        began = time.monotonic()
        proven = frugal(work, hardware, self.deadline if self.compiles else math.inf)
        self.compiles, self.longest_seconds = self.compiles + 1, max(self.longest_seconds, time.monotonic() - began)
        self.said.append(_said(name, proven))
        return proven


def _said(size: Any, proven: Proven | None) -> str:
    if proven is None:
        return f"{size}: no placement keeps within the memory of the host"
    if proven.verdict.hbm is None or proven.verdict.host is None:
        return f"{size}: {proven.verdict.reason}"
    word = "fits" if proven.fits else "does not fit"
    hbm, host = proven.verdict.hbm.total_bytes, proven.verdict.host.total_bytes
    return f"{size}: {word} (compiled), {show_bytes(hbm)} of HBM, {show_bytes(host)} of host"


def largest(make: Callable[[int], Workload], hardware: Hardware, start: int, step: int, over: int | None, deadline: float) -> Found:
    """The largest size for which ``make(size)`` fits on ``hardware``: ``start``, which is tried first, or a multiple of ``step``.

    ``over``: a size that is known not to fit. ``deadline``, of ``time.monotonic``: no compile but the first one goes beyond it.

    Raises:
        InputError: ``start`` is refused by the model or by the machine, and so is the multiple of ``step`` below it.
    """
    return _Largest(make, hardware, start, step, over, deadline).found()


class _Largest(_Asked):
    """The bracket: ``low`` fits, ``over`` does not; all sizes after the first are multiples of ``grain``."""

    def __init__(self, make, hardware: Hardware, start: int, step: int, over: int | None, deadline: float):
        super().__init__(deadline)
        self.make, self.hardware, self.start, self.grain, self.over = make, hardware, start, step, over
        self.low, self.best = 0, None
        self.refusals, self.refused, self.ceiling = 0, None, []
        self.points: list[tuple[int, float]] = []
        self.width, self.halve = math.inf, False

    def found(self) -> Found:
        size: int | None = self.start
        cut = False
        while size is not None and not cut:
            size = self._ask(size)
            if size is not None and (self.late or self.compiles == MOST_COMPILES or self.refusals >= MOST_REFUSALS):
                between = f"a size between {self.low} and {self.over}" if self.over else f"a size above {self.low}"
                why = "the time budget" if self.late else f"the limit of {MOST_COMPILES} compiles or {MOST_REFUSALS} refused sizes"
                self.said.append(ENDED.format(why, between))
                cut = True
        return Found(size=self.low or None, proven=self.best, said=(*self.said, *self.ceiling), ended=not cut)

    def _ask(self, size: int) -> int | None:
        """Try ``size``; the one to try next, None where the neighbours are known."""
        try:
            proven = self.frugal(size, self.make(size), self.hardware)
        except InputError as refused:
            return self._refused(size, refused)
        if proven is not None and proven.verdict.hbm is None and self.late:
            return size  # it was stopped: nothing is known of it
        if proven is not None and proven.verdict.hbm is not None:
            self.points.append((size, proven.verdict.hbm.total_bytes))
        if proven is not None and proven.fits:
            self.low, self.best = size, proven
        else:
            self.over = size
        return self._next()

    def _refused(self, size: int, refused: InputError) -> int | None:
        self.refusals += 1
        below = size // self.grain * self.grain
        if not self.compiles:
            if self.refusals > 1 or below in (0, size):
                raise self.refused or refused
            self.start, self.refused = below, refused
            return below
        for grain in self._coarser():
            at = size // grain * grain
            if self.low < at != size and self._accepts(at):
                self.grain = grain
                return at
        self.ceiling, self.over = [f"{size}: refused: {refused}"], size
        return self._next()

    def _coarser(self) -> list[int]:
        """Steps, larger than the one so far, that lead to the first size, which was accepted."""
        return [g for g in range(self.grain + 1, self.start + 1) if self.start % g == 0]

    def _accepts(self, size: int) -> bool:
        try:
            self.make(size)
        except InputError:
            return False
        return True

    def _next(self) -> int | None:
        low, over, grain = self.low, self.over, self.grain
        near = max(grain, low // NEIGHBOURS // grain * grain)
        if over is not None and over - low <= near:
            return None
        width = math.inf if over is None else over - low
        self.halve, self.width = width > self.width / 2 and not self.halve and math.isfinite(self.width), width
        guess = 2 * low if over is None else (low + over) // 2
        if len(self.points) > 1 and not self.halve:
            (a, x), (b, y) = self.points[-2:]
            if x != y:
                guess = round(b + (self.hardware.hbm_budget_bytes - y) * (b - a) / (y - x))
            elif over is None:
                guess = FLAT * low
        if over is not None:
            guess = min(guess, over - 1)
        return max(guess, low + near) // grain * grain


def fewest(work: Workload, machines: Sequence[Hardware], deadline: float) -> Found:
    """The first of ``machines``, which go from few to many devices, on which ``work`` fits. Its ``size`` is the machine."""
    ladder = [m for m in machines if _takes(m, work)]
    if not ladder:
        return Found(size=None, proven=None, said=("no such machine divides the batch, or is as large as the mesh",), ended=True)
    asked = _Asked(deadline)
    at = min(bisect.bisect_left(ladder, True, key=lambda m: _counted(work, m)), len(ladder) - 1)
    best: tuple[Hardware, Proven] | None = None
    climbs = ended = False
    while 0 <= at < len(ladder) and not ended:
        if asked.late:
            asked.said.append(ENDED.format("the time budget", "a smaller machine" if best else "a larger machine"))
            return _of(best, asked, ended=False)
        proven = asked.frugal(ladder[at].name, work, ladder[at])
        fits = proven is not None and proven.fits
        ended = climbs if fits else best is not None
        if proven is not None and fits:
            best = ladder[at], proven
        climbs |= not fits
        at += 1 if climbs else -1
    return _of(best, asked, ended=True)


def _takes(machine: Hardware, work: Workload) -> bool:
    """Whether the workload's own mesh has as many devices, or, without one, the rows of its batch divide among them."""
    if work.mesh is not None:
        return work.mesh.devices == machine.devices
    return not any(t.shape[0] % machine.devices for t in work.tensors if t.role == "batch" and t.shape)


def _counted(work: Workload, machine: Hardware) -> bool:
    """Whether the count, without a compile, says that the plan of the least HBM fits."""
    return least_hbm_bytes(work, machine) <= machine.hbm_budget_bytes


def _of(best: tuple[Hardware, Proven] | None, asked: _Asked, ended: bool) -> Found:
    machine, proven = best or (None, None)
    return Found(size=machine, proven=proven, said=tuple(asked.said), ended=ended)
