"""``predict``: a compiled program and a machine in, a Forecast out.

The schedule is parsed and classified once and replayed three times: with the constants as they are, and with every constant at the
fast and at the slow end of its band. Those two ends are the low and high; they treat all errors as pulling the same way, so they
are wider than one standard error."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.records.forecast import CopyTime, Forecast, LoopTime
from forebay.records.verdict import Verdict
from forebay.timeline.constants import Constants
from forebay.timeline.costs import Costs
from forebay.timeline.kinds import classify
from forebay.timeline.measured import constants_on
from forebay.timeline.origins import Origin, Origins
from forebay.timeline.parse import Module, parse_hlo
from forebay.timeline.picture import columns
from forebay.timeline.rates import Rates
from forebay.timeline.replay import Event, LoopTotals, Replay
from forebay.timeline.work import Program

BASELINE_SHARE = 0.70
"""The one constant of the baseline to beat: executed flops / (this x peak)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A parsed and classified schedule, to be replayed on any number of machines."""

    program: Program
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()

    @property
    def uses_host(self) -> bool:
        return any(w.traffic.host_bytes for works in self.program.computations.values() for w in works)


def read_schedule(source: Verdict | str) -> Schedule:
    """The schedule of a verdict or of HLO text. Raises InputError where there is no scheduled HLO."""
    module = parse_hlo(source if isinstance(source, str) else source.hlo)
    program = classify(module)
    notes = () if isinstance(source, str) else _assumed_limit(source)
    return Schedule(program=program, origins=_origins(module, program), notes=notes)


def _assumed_limit(verdict: Verdict) -> tuple[str, ...]:
    """XLA:GPU schedules for a memory limit, and a step can change by several per cent with it: the forecast says which was assumed."""
    if not verdict.target.startswith("cuda"):
        return ()
    slop = verdict.compiler_options.get("xla_gpu_memory_limit_slop_factor", 95)
    if isinstance(slop, int) and slop >= 125:  # 80 % x 125 %: all of the device's memory
        return ()
    return (f"scheduled for 80 % of the device's memory x {slop} % (xla_gpu_memory_limit_slop_factor); the job's own limit may differ",)


def _origins(module: Module, program: Program) -> dict[str, Origin]:
    finder, found = Origins(module), {}
    for name, works in program.computations.items():
        inside = module.computations[name]
        for work in works:
            if work.kind == "host_copy":
                found[work.name] = finder.of(inside.by_name[work.name], inside)
    return found


def predict(
    verdict_or_hlo: Verdict | str | Schedule,
    hardware: Hardware,
    *,
    tokens: float | None = None,
    flops_per_token: float | None = None,
    constants: Constants | None = None,
    trip_counts: Mapping[str, int] | None = None,
) -> Forecast:
    """Forecast one step of a compiled program on ``hardware``.

    ``tokens`` is the global number of tokens of a step and ``flops_per_token`` the model's own arithmetic for one (no
    recomputation; causal attention as the half that is done): with them the forecast states tokens_per_second and MFU.
    ``trip_counts`` gives counts of loops, by the name of the while, that the compiler does not know. Raises InputError for text
    without a schedule and for machine figures that are not known.

    Source: the replay of FACTS section 7; constants in ``constants.toml``.
    """
    began = time.perf_counter()
    schedule = verdict_or_hlo if isinstance(verdict_or_hlo, Schedule) else read_schedule(verdict_or_hlo)
    constants = constants or constants_on(hardware)
    trips = dict(trip_counts or {})
    middle = _replay(schedule, hardware, constants, trips, tracing=True)
    ends = [_replay(schedule, hardware, constants.bent(side), trips).now for side in (-1, 1)]
    forecast = _forecast(middle, schedule, hardware, tokens, flops_per_token)
    return _with_band(forecast, min(*ends, middle.now), max(*ends, middle.now), time.perf_counter() - began)


def step_seconds(schedule: Schedule, hardware: Hardware, *, constants: Constants | None = None) -> float:
    """The step's seconds alone, without the band: one replay instead of three."""
    return _replay(schedule, hardware, constants or constants_on(hardware), {}).now


def events(verdict_or_hlo: Verdict | str | Schedule, hardware: Hardware, *, constants: Constants | None = None) -> tuple[Event, ...]:
    """The bars of one replayed step, loops as their first, a steady and their last iteration; for ``perfetto`` and the lane picture."""
    schedule = verdict_or_hlo if isinstance(verdict_or_hlo, Schedule) else read_schedule(verdict_or_hlo)
    constants = constants or constants_on(hardware)
    return tuple(_replay(schedule, hardware, constants, {}, tracing=True).events)


def widened(forecast: Forecast, other: Forecast) -> Forecast:
    """``forecast`` with a band that holds ``other`` too: the same step compiled under another assumption, such as another memory
    limit."""
    low, high = min(forecast.low_seconds, other.low_seconds), max(forecast.high_seconds, other.high_seconds)
    return replace(forecast, low_seconds=low, high_seconds=high)


def _replay(schedule: Schedule, hardware: Hardware, constants: Constants, trips: dict[str, int], *, tracing: bool = False) -> Replay:
    communicates = any(w.collective and w.collective.groups.size > 1 for works in schedule.program.computations.values() for w in works)
    if communicates and schedule.program.devices != hardware.devices:
        raise InputError(
            f"the program is compiled for {schedule.program.devices} devices and {hardware.name} has {hardware.devices}: its collectives "
            "cannot be placed on that machine; name the machine it was compiled for, or judge it again"
        )
    costs = Costs(hardware, constants)
    rates = Rates(costs, schedule.uses_host)
    return Replay(schedule.program, costs, rates, tracing=tracing, trips=trips).run()


def _with_band(forecast: Forecast, low: float, high: float, seconds: float) -> Forecast:
    return replace(forecast, low_seconds=low, high_seconds=high, replay_seconds=seconds)


def _table(replay: Replay, key: str) -> dict[str, float]:
    return {k[1]: v for k, v in replay.sums.items() if k[0] == key and len(k) == 2}


def _forecast(replay: Replay, schedule: Schedule, hardware: Hardware, tokens: float | None, flops_per_token: float | None) -> Forecast:
    step, flops, lanes = replay.now, _table(replay, "flops"), _table(replay, "lane")
    if step <= 0:
        raise InputError("the program does nothing that takes time: there is no instruction to cost in its schedule")
    copies = _copies(replay, schedule)
    unknown = _table(replay, "unknown")
    counts = _table(replay, "unknown count")
    notes = {*replay.notes, *schedule.notes}
    if replay.costs.is_tpu:
        notes.add("TPU: collectives use an even share of the torus; XLA's mapping of groups to links is not read")
    return Forecast(
        hardware=hardware.name,
        step_seconds=step,
        low_seconds=step,
        high_seconds=step,
        path=_table(replay, "path"),
        lanes=lanes,
        domains=_table(replay, "domain"),
        bytes=_table(replay, "bytes"),
        flops=flops,
        copies=copies,
        exposed_copy_seconds=sum(v for k, v in replay.sums.items() if k[0] == "host_copy" and k[-1] == "exposed"),
        exposed_collective_seconds=sum(v for k, v in replay.sums.items() if k[0] == "collective" and k[-1] == "exposed"),
        baseline_seconds=_baseline(replay),
        unknown_share=min(1.0, sum(unknown.values()) / step),
        unknowns=tuple((what, int(counts[what]), unknown.get(what, 0.0)) for what in sorted(counts)),
        launches=int(replay.sums.get(("launches",), 0)),
        loops=tuple(_loop_time(loop, replay) for loop in replay.loops),
        tokens_per_second=tokens / step if tokens else None,
        mfu=_mfu(hardware, step, tokens, flops_per_token),
        notes=tuple(sorted(notes)),
        picture=columns(replay.events, step),
    )


def _copies(replay: Replay, schedule: Schedule) -> tuple[CopyTime, ...]:
    """Copies grouped by host buffer and direction, the most exposed first."""
    groups: dict[tuple[str, str], list[float]] = {}
    works = {w.name: w for works in schedule.program.computations.values() for w in works if w.kind == "host_copy"}
    for name, origin in schedule.origins.items():
        totals = [replay.sums.get(("host_copy", name, what), 0.0) for what in ("bytes", "count", "busy", "exposed")]
        if totals[1]:
            direction = "to_host" if works[name].traffic.host_written else "to_device"
            row = groups.setdefault((origin.label, direction), [0.0] * 5)
            row[0] = max(row[0], origin.held_bytes)
            row[1:] = [a + b for a, b in zip(row[1:], totals, strict=True)]
    rows = [
        CopyTime(
            buffer=label,
            direction=direction,
            held_bytes=int(held),
            moved_bytes=moved,
            count=int(count),
            busy_seconds=busy,
            exposed_seconds=exposed,
        )
        for (label, direction), (held, moved, count, busy, exposed) in groups.items()
    ]
    return tuple(sorted(rows, key=lambda c: (-c.exposed_seconds, c.buffer, c.direction)))


def _baseline(replay: Replay) -> float:
    """Executed flops over one constant x the peak of their type: what a person would compute on the back of an envelope."""
    total = 0.0
    for key, flops in replay.sums.items():
        if key[0] == "flops" and len(key) == 3:  # (flops, kind, dtype)
            peak = replay.costs.peak(key[2])
            total += flops / (BASELINE_SHARE * peak[1]) if peak else 0.0
    return total


def _loop_time(loop: LoopTotals, replay: Replay) -> LoopTime:
    path = {k[1]: v for k, v in loop.sums.items() if k[0] == "path" and v > 0}
    link_use = {}
    for lane in ("to_device", "to_host"):
        moved = loop.sums.get(("bytes", lane), 0.0)
        if moved:
            link_use[lane] = moved / (replay.costs.link_rate(lane) * loop.seconds)
    return LoopTime(
        name=loop.name, iterations=loop.iterations, seconds=loop.seconds, path=path, link_use=link_use, bound=_bound(loop, path, replay)
    )  # fmt: skip


def _bound(loop: LoopTotals, path: dict[str, float], replay: Replay) -> str:
    """What sets a loop's pace: what the compute lane spends most of its time on, and for copies the resource that they fill."""
    copies = sum(path.get(f"wait for {lane}", 0.0) for lane in ("to_device", "to_host"))
    collectives = path.get("wait for collective", 0.0)
    if max(copies, collectives) < loop.seconds / 2:
        return "compute"
    if collectives > copies:
        return "collectives"
    both = loop.sums.get(("both ways",), 0.0)
    lanes = [lane for lane in ("to_device", "to_host") if loop.sums.get(("lane", lane), 0.0) > 0]
    if len(lanes) == 2 and both < 0.5 * min(loop.sums[("lane", lane)] for lane in lanes):
        return "link, one way at a time"
    return replay.rates.binding["both" if len(lanes) == 2 else lanes[0]]


def _mfu(hardware: Hardware, step: float, tokens: float | None, flops_per_token: float | None) -> float | None:
    """Model flops over the bf16 peak of all devices."""
    if not tokens or not flops_per_token or "bf16" not in hardware.peak_flops:
        return None
    return tokens * flops_per_token / (step * hardware.devices * float(hardware.peak_flops["bf16"]))
