"""The placement problem: what may stand where, what each place takes of the memories and the lanes, and the price of a choice.

    values   what the backward pass of a layer loop reads, and what those are made of       hbm | host | recompute
    groups   parameters with their gradients and optimizer state, as the update takes them  state: by parts; parameters: hbm | host

Time is counted in phases: the forward and the backward pass of each loop, then the update. In a phase the copies run beside the
compute, and what does not fit beside it is *exposed*:

    exposed(phase) = max(0, max(to_device / rate, to_host / rate, both / both_rate) - compute(phase) - rebuilding(phase),
                         copies / rate - work for each ``Window`` of the phase)
    seconds        = constant + rebuilding + keeping + exposed + slow-down x copies, each with its factor of ``Correction``

No copy crosses the edge of an iteration: a value can leave only beside the work that follows its birth, and must be back before the
backward pass first reads it, or at once where something is rebuilt from it. Copies of values and of groups have a factor each, since the
compiler hides the former beside a layer's work better than the latter.

A value that is not kept is rebuilt, and what it is made of too unless that is kept: a chain that two values share is paid once.
HBM is what stands there through the step plus what the backward pass reads of one layer while that is rebuilt. All of it is linear, so
``program`` solves it exactly; ``estimate`` prices one given choice, and is the definition that the program is tested against.

Limits: the phases' compute, the room the compiler needs beside it all (``Correction``) and the overlap it reaches are learned from
compiled candidates, not known here.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

HBM, HOST, RECOMPUTE = "hbm", "host", "recompute"
LANES = ("to_device", "to_host")


Form = tuple[tuple[str, Any], ...]  # options of ``Plan.by_hand``, sorted by name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of a loop's body. ``places`` are those it may have; none for a step on the way, which exists only while it is rebuilt.

    ``needed``: the backward pass reads it. ``inputs`` are positions in ``Problem.values``, all before its own. Bytes are per device:
    ``stack_bytes`` of all layers, ``slice_bytes`` of one. Seconds are those of all layers of a step; ``after_seconds``: the forward work
    of its loop behind its birth; ``ahead_seconds``: the backward work of the loop before it is first read there.
    """

    name: str
    loop: int
    inputs: tuple[int, ...]
    needed: bool
    places: tuple[str, ...]
    stack_bytes: float
    slice_bytes: float
    rebuild_seconds: float
    keep_seconds: float = 0.0
    after_seconds: float = 0.0
    ahead_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Work of a phase beside which the copies of some values must run: of ``values`` (positions in ``Problem.values``), and of those of
    ``early`` from which something is rebuilt. ``rebuilding``: all that is rebuilt in the phase is work of the window too.
    """

    phase: int
    lane: str
    work_seconds: float
    values: tuple[int, ...]
    early: tuple[int, ...] = ()
    rebuilding: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A family of the update. ``state`` and ``params`` are entry names; bytes are per device.

    ``parts``: in how many equal parts, each of ``part_layers`` layers, its state can move; 0: not at all. ``loop`` is None for parameters
    outside the loops. ``travel_bytes`` is what one pass over the parameters fetches, ``copy_bytes`` that of a compute copy, 0 without one.
    ``fused``: with all its state on the host, or its parameters, it is updated inside the backward pass, and no gradient of it stands
    anywhere; ``fuse_seconds`` is what that costs where all of it stands in HBM. ``passes``: how often a step goes forward and back.
    """

    params: tuple[str, ...]
    state: tuple[str, ...]
    param_moves: bool
    parts: int
    loop: int | None
    param_bytes: float
    gradient_bytes: float
    state_bytes: float
    travel_bytes: float
    copy_bytes: float = 0.0
    slice_bytes: float = 0.0
    fused: bool = False
    fuse_seconds: float = 0.0
    passes: int = 1
    part_layers: int = 1

    def updated_inside(self, parts: int, on_host: bool, always: bool) -> bool:
        """Whether the backward pass updates it, with ``parts`` of its state on the host and, or not, its parameters."""
        return self.fused and (on_host or 0 < parts == self.parts or (always and parts == 0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes per second of one device's host link, by direction and of both at once, shared DRAM included."""

    to_device: float
    to_host: float
    both: float
    slow_down: float = 0.0

    def rate(self, lane: str) -> float:
        """Bytes per second of a lane alone."""
        return self.to_device if lane == "to_device" else self.to_host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What compiled candidates taught: seconds = ``constant_seconds`` + the features x their factors; ``workspace_bytes`` of HBM beside
    what the problem counts; ``compute`` scales the phases, beside which copies hide.

    As it begins, before anything is compiled, a hidden copy costs some times the slow-down of what runs beside it: few hide wholly
    (llama-3.1-70b on h100-sxm:8 taught 3 to 6 for values, 5 to 8 for groups).
    """

    constant_seconds: float = 0.0
    compute: float = 1.0
    rebuild: float = 1.0
    exposed: float = 1.0
    beside_values: float = 3.0
    beside_groups: float = 5.0
    workspace_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that the options in ``form`` leave open. ``compute_seconds`` has two phases for each loop and the update last."""

    values: tuple[Value, ...]
    groups: tuple[Group, ...]
    compute_seconds: tuple[float, ...]
    link: Link | None
    hbm_fixed_bytes: float
    hbm_budget_bytes: float
    host_budget_bytes: float
    form: Form = ()

    def __post_init__(self):
        assert len(self.compute_seconds) % 2 == 1, "two phases for each loop, and the update"
        assert all(u < v for v, value in enumerate(self.values) for u in value.inputs), "values stand behind what they are made of"

    @property
    def fuses_all(self) -> bool:
        """Whether what stands in HBM is updated inside the backward pass too."""
        return dict(self.form).get("fuse_update") == "always"

    @property
    def passes(self) -> int:
        """How often a step goes forward and back."""
        return dict(self.form).get("microbatches", 1)

    @functools.cached_property
    def windows(self) -> tuple[Window, ...]:
        """Of each loop: for each birth what must leave behind it, and for each first use what must be back before it."""
        return tuple(window for loop in range(len(self.compute_seconds) // 2) for window in _windows(self.values, loop))

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value, what is made from it."""
        return tuple(tuple(w for w, other in enumerate(self.values) if v in other.inputs) for v in range(len(self.values)))

    @property
    def update(self) -> int:
        """The phase of the update."""
        return len(self.compute_seconds) - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One place for each value ("" where it has none), how many parts of each group's state and whether its parameters are on the host."""

    places: tuple[str, ...]
    state_parts: tuple[int, ...]
    params_on_host: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The price of a choice, by what ``Correction`` weighs: a model's figures, never shown as compiled. ``value_copy_seconds`` and
    ``group_copy_seconds`` are what compute loses beside copies."""

    seconds: float
    hbm_bytes: float
    host_bytes: float
    rebuild_seconds: float
    keep_seconds: float
    exposed_seconds: float
    value_copy_seconds: float
    group_copy_seconds: float


def phase_of(loop: int, backward: bool) -> int:
    """The phase in which a loop runs forward, or back."""
    return 2 * loop + backward


def _windows(values: Sequence[Value], loop: int) -> Iterator[Window]:
    mine = [v for v, value in enumerate(values) if value.loop == loop and HOST in value.places]
    for work in sorted({values[v].after_seconds for v in mine}):
        late = tuple(v for v in mine if values[v].after_seconds <= work)
        yield Window(phase=phase_of(loop, False), lane="to_host", work_seconds=work, values=late)
    for work in sorted({0.0, *(values[v].ahead_seconds for v in mine)} if mine else ()):
        soon, later = ([v for v in mine if (values[v].ahead_seconds <= work) == now] for now in (True, False))
        yield Window(
            phase=phase_of(loop, True), lane="to_device", work_seconds=work, values=tuple(soon), early=tuple(later), rebuilding=work > 0
        )  # fmt: skip


def value_traffic(problem: Problem, value: Value) -> Iterator[tuple[int, str, float]]:
    """(phase, lane, bytes) of a value on the host: out in the forward pass, back in the backward pass."""
    yield phase_of(value.loop, False), "to_host", copied_bytes(problem, value)
    yield phase_of(value.loop, True), "to_device", copied_bytes(problem, value)


def copied_bytes(problem: Problem, value: Value) -> float:
    """What a value on the host moves each way in a step."""
    return value.stack_bytes * problem.passes


def state_traffic(problem: Problem, group: Group, inside: bool) -> Iterator[tuple[int, str, float]]:
    """(phase, lane, bytes) of all of a group's state on the host, ``inside``: updated in the backward pass."""
    phase = phase_of(group.loop, True) if inside and group.loop is not None else problem.update
    for lane in LANES:
        yield phase, lane, group.state_bytes


def param_traffic(problem: Problem, group: Group) -> Iterator[tuple[int, str, float]]:
    """(phase, lane, bytes) of a group on the host, parameters and state, beyond those of its state alone."""
    update, back = problem.update, problem.update
    if group.loop is not None:
        back = phase_of(group.loop, True)
        yield phase_of(group.loop, False), "to_device", group.travel_bytes * group.passes
    else:
        yield update, "to_device", group.travel_bytes * group.passes
    yield back, "to_device", group.travel_bytes * group.passes
    if group.fused:
        yield back, "to_device", group.param_bytes if group.copy_bytes else 0.0
        yield back, "to_host", group.param_bytes + group.copy_bytes
    else:
        yield back, "to_host", group.gradient_bytes * group.passes
        yield back, "to_device", group.gradient_bytes * (group.passes - 1)
        yield update, "to_device", group.param_bytes + group.gradient_bytes
        yield update, "to_host", group.param_bytes + group.copy_bytes


def hosted_param_bytes(group: Group) -> float:
    """Host memory of a group's parameters: masters, compute copy, and gradients where a stack of them exists."""
    return group.param_bytes + group.copy_bytes + (0.0 if group.fused else group.gradient_bytes)


def rebuilt(problem: Problem, places: Sequence[str]) -> frozenset[int]:
    """The values that the backward pass makes again under ``places``."""
    again: set[int] = set()
    stack = [v for v, value in enumerate(problem.values) if value.needed]
    while stack:
        v = stack.pop()
        if places[v] in (HBM, HOST) or v in again:
            continue
        again.add(v)
        stack.extend(problem.values[v].inputs)
    return frozenset(again)


def estimate(problem: Problem, choice: Choice, correction: Correction) -> Estimate:
    """Price one choice."""
    phases = range(len(problem.compute_seconds))
    of_values, of_groups = ({(phase, lane): 0.0 for phase in phases for lane in LANES} for _ in range(2))
    hbm, host, keep = problem.hbm_fixed_bytes + correction.workspace_bytes, 0.0, 0.0
    for value, place in zip(problem.values, choice.places, strict=True):
        if place == HBM:
            hbm, keep = hbm + value.stack_bytes, keep + value.keep_seconds
        elif place == HOST:
            hbm, host = hbm + 2 * value.slice_bytes, host + value.stack_bytes
            _add(of_values, value_traffic(problem, value), 1.0)
    for group, parts, on_host in zip(problem.groups, choice.state_parts, choice.params_on_host, strict=True):
        share = parts / group.parts if group.parts else 0.0
        inside = group.updated_inside(parts, on_host, problem.fuses_all)
        hbm, host = hbm + group.state_bytes * (1 - share), host + group.state_bytes * share
        _add(of_groups, state_traffic(problem, group, inside), share)
        if on_host:
            hbm, host = hbm + group.slice_bytes, host + hosted_param_bytes(group)
            _add(of_groups, param_traffic(problem, group), 1.0)
        else:
            hbm += group.param_bytes + (0.0 if inside else group.gradient_bytes)
            keep += group.fuse_seconds if inside and not parts else 0.0
    again = rebuilt(problem, choice.places)
    again_in, at_once = _rebuilding(problem, again)
    hbm += at_once
    exposed = [0.0 for _ in phases]
    for phase in phases:
        lanes = lane_seconds(problem, *(of_values[phase, lane] + of_groups[phase, lane] for lane in LANES))
        hidden = correction.compute * problem.compute_seconds[phase] + correction.rebuild * again_in[phase]
        exposed[phase] = max(0.0, max(lanes) - hidden)
    for window in problem.windows:
        hidden = correction.compute * window.work_seconds + correction.rebuild * again_in[window.phase] * window.rebuilding
        exposed[window.phase] = max(exposed[window.phase], _in_window(problem, window, choice.places, again) - hidden)
    slow_down = problem.link.slow_down if problem.link else 0.0
    beside_values, beside_groups = (slow_down * sum(moved.values()) for moved in (of_values, of_groups))
    seconds = correction.constant_seconds + correction.rebuild * sum(again_in) + keep + correction.exposed * sum(exposed)
    seconds += correction.beside_values * beside_values + correction.beside_groups * beside_groups
    return Estimate(
        seconds=seconds, hbm_bytes=hbm, host_bytes=host, rebuild_seconds=sum(again_in), keep_seconds=keep, exposed_seconds=sum(exposed),
        value_copy_seconds=beside_values, group_copy_seconds=beside_groups,
    )  # fmt: skip


def _in_window(problem: Problem, window: Window, places: Sequence[str], again: frozenset[int]) -> float:
    """The seconds of the copies that must run within a window."""
    asked = [*window.values, *(v for v in window.early if not again.isdisjoint(problem.users[v]))]
    moved = sum(copied_bytes(problem, problem.values[v]) for v in asked if places[v] == HOST)
    return moved / problem.link.rate(window.lane) if moved and problem.link else 0.0


def _rebuilding(problem: Problem, again: frozenset[int]) -> tuple[list[float], float]:
    """The seconds that each phase spends on making values again, and the bytes of one layer's that stand together at most."""
    at_once: dict[int, float] = {}
    seconds = [0.0 for _ in problem.compute_seconds]
    for v in again:
        value = problem.values[v]
        at_once[value.loop] = at_once.get(value.loop, 0.0) + value.slice_bytes
        seconds[phase_of(value.loop, True)] += value.rebuild_seconds
    return seconds, max(at_once.values(), default=0.0)


def lane_seconds(problem: Problem, to_device: float, to_host: float) -> tuple[float, ...]:
    """Seconds that copies of these bytes need alone: each direction, and both together."""
    if problem.link is None:
        assert not to_device and not to_host, "copies on a machine whose link is not known"
        return (0.0,)
    link = problem.link
    return (to_device / link.to_device, to_host / link.to_host, (to_device + to_host) / link.both)


def _add(moved: dict[tuple[int, str], float], traffic, share: float) -> None:
    for phase, lane, count in traffic:
        moved[phase, lane] += share * count
