"""The schedule replayed on lanes.

The compute lane runs instructions one after the other, in the order of the schedule. An asynchronous start puts a transfer at the
end of its lane's queue and costs nothing; its done blocks the compute lane until the transfer is over. Between two events every
lane moves at a constant rate (``rates``), so the replay goes from event to event:

    start:    queue[lane] += transfer
    compute:  until its seconds have passed: step to the next event at the current rates
    done:     while the transfer is not over: step to the next event; the time so spent is *exposed*, charged to that transfer
    loop:     replay the body until an iteration takes as long as the last one (the steady state); multiply it for as long as
              no outer transfer ends; replay the last one

A synchronous collective or copy is a start with its done at once. Conditionals take their longest branch (stated in the notes).
Cost: linear in the instructions replayed; nested calls use a stack of depth at most MAX_DEPTH. Known limits: lanes are first in,
first out, which is not how the hardware's queues share but has the same total; one device stands for all."""

from collections import deque
from dataclasses import dataclass, field

from forebay.errors import UnsupportedError
from forebay.timeline.costs import Cost, Costs
from forebay.timeline.rates import Rates
from forebay.timeline.work import Program, Work

MAX_DEPTH = 64
STEADY_AFTER = 64
"""Iterations after which a loop is taken as steady even if its iterations still differ (by their last duration)."""
_SAME = 1e-9
_INSTANT = 1e-12


@dataclass(slots=True)
class Transfer:
    """A transfer in a lane's queue. ``left`` is in seconds-alone; its first byte moves at ``ready`` at the earliest."""

    work: Work
    cost: Cost
    left: float
    ready: float
    begun: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One bar of the picture: seconds from the start of the step."""

    lane: str
    name: str
    kind: str
    begin_seconds: float
    end_seconds: float
    detail: str = ""
    share: float = 1.0
    """How much of the bar the lane is busy: less than 1 only where a bar stands for the skipped iterations of a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTotals:
    """One loop of the entry computation: what all of its iterations added to ``sums``."""

    name: str
    iterations: int
    seconds: float
    sums: dict[tuple, float]


@dataclass(slots=True)
class Replay:
    """A replay in progress and, once ``run`` returned, its result: ``now`` is the step time and ``sums`` holds every total by key."""

    program: Program
    costs: Costs
    rates: Rates
    tracing: bool = False
    trips: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    sums: dict[tuple, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    loops: list[LoopTotals] = field(default_factory=list)
    queues: dict[str, deque] = field(default_factory=dict)
    prices: dict[str, Cost] = field(default_factory=dict)

    def run(self) -> "Replay":
        """Replay the entry computation; transfers still in flight at its end are waited for."""
        self._computation(self.program.entry, 0)
        for queue in list(self.queues.values()):
            while queue:
                self._wait(queue[-1])
        return self

    def _add(self, key: tuple, amount: float) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + amount

    def _computation(self, name: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"computations nested more than {MAX_DEPTH} deep (at {name!r}) are not replayed")
        started: dict[str, Transfer] = {}
        for work in self.program.computations[name]:
            if work.kind == "free":
                continue
            if work.kind == "done":
                self._finish(work, started)
            elif work.kind == "loop":
                self._whole_loop(work, depth)
            elif work.kind == "call":
                for callee in work.callees:
                    self._computation(callee, depth + 1)
            elif work.kind == "conditional":
                self._conditional(work, depth)
            else:
                self._issue(work, f"{name}/{work.name}", started)
        for transfer in started.values():  # started, never awaited here: it must be over before the computation ends
            self._wait(transfer)

    def _finish(self, work: Work, started: dict[str, Transfer]) -> None:
        transfer = started.pop(work.awaits, None)
        if transfer is not None:
            self._wait(transfer)

    def _issue(self, work: Work, key: str, started: dict[str, Transfer]) -> None:
        cost = self.prices.get(key)
        if cost is None:
            cost = self.prices[key] = self.costs.of(work)
        self._count(work, cost)
        if cost.lane == "compute":
            self._compute(work, cost)
            return
        transfer = Transfer(work, cost, left=cost.seconds, ready=self.now + cost.setup_seconds)
        self.queues.setdefault(cost.lane, deque()).append(transfer)
        if work.asynchronous:
            started[work.name] = transfer
        else:
            self._wait(transfer)

    def _count(self, work: Work, cost: Cost) -> None:
        self._add(("launches",), 1)
        self._add(("bytes", cost.lane), cost.bytes)
        if work.product is not None:
            self._add(("flops", work.kind), work.product.flops)
            self._add(("flops", work.kind, work.product.dtype), work.product.flops)
        if why := self.costs.unknown(work):
            self._add(("unknown", why), cost.seconds)
            self._add(("unknown count", why), 1)
        if work.by_kernel and work.kind == "host_copy":
            self.notes.add("some host slices are copied by kernels, not by the copy engine: slower, and they take cores")
        if work.kind in ("host_copy", "collective"):
            self._add((work.kind, work.name, "bytes"), cost.bytes)
            self._add((work.kind, work.name, "count"), 1)
            self._add((work.kind, work.name, "busy"), cost.alone_seconds)

    def _compute(self, work: Work, cost: Cost) -> None:
        begin, left, gap = self.now, cost.seconds, self.costs.constants.gap_seconds
        while left > 0:
            busy = self._busy()
            slow = self.rates.slow_down(busy)
            span = min(left * slow, self._next_end(busy))
            self._pass(span, busy)
            left -= span / slow
            if left <= cost.seconds * 1e-12:
                left = 0.0
        self._add(("path", work.kind), cost.seconds)
        self._add(("path", "contention"), max(0.0, self.now - begin - cost.seconds))
        self._add(("lane", "compute"), self.now - begin)
        self._event("compute", work, begin)
        self._elapse(gap)
        self._add(("path", "launch gaps"), gap)

    def _elapse(self, seconds: float) -> None:
        """Time that passes on the compute lane without work of its own."""
        while seconds > 0:
            busy = self._busy()
            span = min(seconds, self._next_end(busy))
            self._pass(span, busy)
            seconds -= span
            if seconds < 1e-15:
                return

    def _wait(self, transfer: Transfer) -> None:
        begin = self.now
        while transfer.left > 0:
            busy = self._busy()
            self._pass(self._next_end(busy), busy)
        exposed = self.now - begin
        if exposed > 0:
            self._add(("path", f"wait for {transfer.cost.lane}"), exposed)
            self._add((transfer.work.kind, transfer.work.name, "exposed"), exposed)

    def _busy(self) -> list[str]:
        """The lanes that move bytes now; the head of another may still be set up."""
        return [lane for lane, queue in self.queues.items() if queue and queue[0].ready <= self.now + _INSTANT]

    def _next_end(self, busy: list[str]) -> float:
        """Seconds until the head of a lane ends, or begins."""
        ends = [self.queues[lane][0].left / self._rate(lane, busy) for lane in busy]
        begins = [queue[0].ready - self.now for lane, queue in self.queues.items() if queue and lane not in busy]
        return min((*ends, *begins), default=float("inf"))

    def _rate(self, lane: str, busy: list[str]) -> float:
        """Seconds-alone that pass per second for the head of ``lane``: what its lane has, or what it can take."""
        return min(self.queues[lane][0].cost.pace, self.rates.transfer_rate(lane, busy))

    def _pass(self, span: float, busy: list[str]) -> None:
        """Let ``span`` seconds pass: the head of every busy lane moves on, and leaves its queue when it is over."""
        start, self.now = self.now, self.now + span
        if "to_device" in busy and "to_host" in busy:
            self._add(("both ways",), span)
        for lane in busy:
            head = self.queues[lane][0]
            head.begun = start if head.begun is None else head.begun
            head.left -= span * self._rate(lane, busy)
            self._add(("lane", lane), span)
            if head.cost.domain:
                self._add(("domain", head.cost.domain), span)
            if head.left <= head.cost.seconds * 1e-9 + 1e-15:
                head.left = 0.0
                self.queues[lane].popleft()
                self._event(lane, head.work, head.begun)

    def _event(self, lane: str, work: Work, begin: float) -> None:
        if self.tracing:
            self.events.append(
                Event(lane=lane, name=work.name, kind=work.kind, begin_seconds=begin, end_seconds=self.now, detail=work.op_name)
            )  # fmt: skip

    def _whole_loop(self, work: Work, depth: int) -> None:
        before, begin = dict(self.sums), self.now
        count = self._loop(work, depth)
        if depth == 0:
            added = {
                key: total - before.get(key, 0.0) for key, total in self.sums.items() if key[0] in ("path", "lane", "bytes", "both ways")
            }
            self.loops.append(LoopTotals(name=work.name, iterations=count, seconds=self.now - begin, sums=added))

    def _loop(self, work: Work, depth: int) -> int:
        count = self.trips.get(work.name, work.trip_count)
        if count is None:
            self._add(("unknown count", f"trip count of {work.name}: one iteration assumed"), 1)
            self._add(("unknown", f"trip count of {work.name}: one iteration assumed"), 0.0)
            count = 1
        body, last, done = work.callees[0], None, 0
        while done < count:
            before, begin, heads = dict(self.sums), self.now, self._heads()
            self._computation(body, depth + 1)
            done, duration = done + 1, self.now - begin
            steady = last is not None and abs(duration - last) <= _SAME * duration
            skipped = min(count - done - 1, self._skippable(heads)) if steady or done >= STEADY_AFTER else 0
            if skipped > 0:
                self._multiply(before, duration, skipped, work)
                self._advance(heads, skipped)
                done += skipped
            last = duration
        return count

    def _heads(self) -> dict[str, tuple[Transfer, float]]:
        """What is in flight on each lane, and how much of it is left: between iterations, transfers of outer computations."""
        return {lane: (queue[0], queue[0].left) for lane, queue in self.queues.items() if queue}

    def _skippable(self, heads: dict[str, tuple[Transfer, float]]) -> float:
        """How many more iterations like the last pass before an outer transfer ends; none when one has just begun or ended."""
        now = self._heads()
        if {lane: id(head) for lane, (head, _) in now.items()} != {lane: id(head) for lane, (head, _) in heads.items()}:
            return 0
        moved = [(left, heads[lane][1] - left) for lane, (_, left) in now.items()]
        return min((left // step for left, step in moved if step > 0), default=float("inf"))

    def _advance(self, heads: dict[str, tuple[Transfer, float]], times: float) -> None:
        for head, left in heads.values():
            head.left = max(0.0, head.left - (left - head.left) * times)

    def _multiply(self, before: dict[tuple, float], duration: float, times: float, work: Work) -> None:
        for key, total in list(self.sums.items()):
            self.sums[key] = total + (total - before.get(key, 0.0)) * times
        begin, self.now = self.now, self.now + duration * times
        for lane in ("compute", *self.queues) if self.tracing else ():
            share = (self.sums.get(("lane", lane), 0.0) - before.get(("lane", lane), 0.0)) / (duration * (times + 1))
            if share > 0:
                title = f"{work.name}: {times:.0f} more iterations like the last"
                self.events.append(
                    Event(lane=lane, name=title, kind="loop", begin_seconds=begin, end_seconds=self.now, share=min(1.0, share))
                )  # fmt: skip

    def _conditional(self, work: Work, depth: int) -> None:
        """The longest branch, told by its work alone; the others are not replayed."""
        self.notes.add("conditionals are costed by their longest branch")
        longest = max(work.callees, key=lambda callee: self._alone(callee, depth + 1))
        self._computation(longest, depth + 1)

    def _alone(self, name: str, depth: int) -> float:
        """Seconds of a computation's work without overlap."""
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"computations nested more than {MAX_DEPTH} deep (at {name!r}) are not replayed")
        total = 0.0
        for work in self.program.computations[name]:
            if work.kind in ("free", "done"):
                continue
            if work.callees:
                inner = [self._alone(c, depth + 1) for c in (work.callees[:1] if work.kind == "loop" else work.callees)]
                total += max(inner) * (work.trip_count or 1)
            else:
                total += self.costs.of(work).alone_seconds
        return total
