"""The placement problem as a mixed-integer program, solved to its optimum by ``scipy.optimize.milp`` (HiGHS).

    minimise    constant + a rebuild.r + keep.k + b sum(e) + d, d' copies of values, of groups
    where       k, h      0 or 1    a value is kept in HBM, or on the host
                r         [0, 1]    a value is rebuilt; whole numbers by themselves once k and h are
                s         [0, 1]    a value is on the host, and something is rebuilt from it
                n, p      0 .. N, 0 or 1    parts of a group's state, and its parameters, on the host
                f         0 or 1    a group has all its state on the host (or none): it is updated in the backward pass, without gradients
                e         >= 0      exposed seconds of a phase, at least copies - compute - rebuilding, for each lane and each window
                w         >= 0      the values of one layer while they are rebuilt
    subject to  r + k + h >= 1                  for what the backward pass reads
                r_u + k_u + h_u >= r_v          for what a rebuilt value is made of: a shared chain is paid once
                r + k + h <= 1                  and r is at most the sum of r over what is made from it, where nothing else reads it
                s_u >= h_u + r_v - 1
                HBM and host bytes within their budgets

Cost: about forty values and a dozen groups for a transformer; some hundredths of a second.
"""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.search.problem import (
    HBM,
    HOST,
    LANES,
    RECOMPUTE,
    Choice,
    Correction,
    Group,
    Problem,
    copied_bytes,
    hosted_param_bytes,
    param_traffic,
    phase_of,
    state_traffic,
    value_traffic,
)

TIME_LIMIT_SECONDS = 10.0
GAP = 1e-4
UNCERTAIN = 0.5  # of a copy's time
_MIB = 2.0**20  # bytes enter the program in MiB: rows of like size keep the solver exact


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a solution may fill, in bytes per device."""

    hbm_bytes: float
    host_bytes: float


class _Rows:
    """Variables and rows, gathered before scipy is asked."""

    def __init__(self):
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.objective: dict[int, float] = defaultdict(float)
        self.rows: list[tuple[Mapping[int, float], float, float]] = []

    def variable(self, upper: float, whole: bool) -> int:
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def at_least(self, row: Mapping[int, float], bound: float) -> None:
        self.rows.append((row, bound, math.inf))

    def at_most(self, row: Mapping[int, float], bound: float) -> None:
        self.rows.append((row, -math.inf, bound))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Variables:
    kept: list[int]
    hosted: list[int]
    again: list[int]
    early: list[int]
    parts: list[int]
    params: list[int]
    full: list[int]
    none: list[int]
    exposed: list[int]
    room: int


def solve(problem: Problem, correction: Correction, limits: Limits, known: Choice | None = None) -> Choice | None:
    """The choice of the fewest seconds within ``limits``, or None where there is none. ``known`` was compiled: what differs from it is
    less certain, and must gain a share of the time of its copies more."""
    return _solve(problem, correction, limits, functools.partial(_time_objective, known=known))


def most_frugal(problem: Problem, correction: Correction, limits: Limits) -> Choice | None:
    """The choice of the least HBM with the host's bytes within ``limits``; None where the host cannot hold any."""
    return _solve(problem, correction, dataclasses.replace(limits, hbm_bytes=math.inf), _hbm_objective)


def _solve(problem: Problem, correction: Correction, limits: Limits, objective) -> Choice | None:
    rows = _Rows()
    at = _variables(problem, rows)
    _rebuilding(problem, rows, at)
    hbm, fixed = _hbm_row(problem, correction, at)
    if math.isfinite(limits.hbm_bytes):
        rows.at_most(hbm, limits.hbm_bytes / _MIB - fixed)
    rows.at_most(_host_row(problem, at), limits.host_bytes / _MIB)
    copies = _lanes(problem, correction, rows, at)
    objective(problem, correction, rows, at, hbm, copies)
    found = _milp(rows)
    return None if found is None else _choice(problem, at, found)


def _variables(problem: Problem, rows: _Rows) -> _Variables:
    link = problem.link is not None
    at = _Variables(
        kept=[rows.variable(HBM in v.places, True) for v in problem.values],
        hosted=[rows.variable(link and HOST in v.places, True) for v in problem.values],
        again=[rows.variable(1.0, False) for _ in problem.values],
        early=[rows.variable(1.0, False) for _ in problem.values],
        parts=[rows.variable(g.parts if link else 0, True) for g in problem.groups],
        params=[rows.variable(link and g.param_moves, True) for g in problem.groups],
        full=[rows.variable(link and g.fused, True) for g in problem.groups],
        none=[rows.variable(problem.fuses_all and g.fused, True) for g in problem.groups],
        exposed=[rows.variable(math.inf, False) for _ in problem.compute_seconds],
        room=rows.variable(math.inf, False),
    )
    for g, group in enumerate(problem.groups):  # parameters leave with their state
        rows.at_least({at.parts[g]: 1.0, at.params[g]: -float(group.parts)}, 0.0)
        _inside(rows, at, g, group, problem.fuses_all)
    return at


def _inside(rows: _Rows, at: _Variables, g: int, group: Group, always: bool) -> None:
    """``full`` is 1 where all of a fused group's state (without any: its parameters) has left, ``none`` where nothing has."""
    parts, full, none, count = at.parts[g], at.full[g], at.none[g], float(group.parts)
    if not group.fused:
        return
    left, most = (parts, count) if count else (at.params[g], 1.0)
    rows.at_least({left: 1.0, full: -most}, 0.0)
    rows.at_most({left: 1.0, full: -1.0}, most - 1)
    if always:
        rows.at_least({left: 1.0, none: 1.0}, 1.0)
        rows.at_most({left: 1.0, none: most}, most)


def _rebuilding(problem: Problem, rows: _Rows, at: _Variables) -> None:
    in_loop: dict[int, dict[int, float]] = defaultdict(dict)
    for v, value in enumerate(problem.values):
        have = {at.again[v]: 1.0, at.kept[v]: 1.0, at.hosted[v]: 1.0}
        if value.needed:
            rows.at_least(have, 1.0)
        else:
            rows.at_most({at.again[v]: 1.0} | {at.again[w]: -1.0 for w in problem.users[v]}, 0.0)
        rows.at_most(have, 1.0)
        if value.places and RECOMPUTE not in value.places:
            rows.at_least({at.kept[v]: 1.0, at.hosted[v]: 1.0}, 1.0)
        for u in value.inputs:
            rows.at_least({at.again[u]: 1.0, at.kept[u]: 1.0, at.hosted[u]: 1.0, at.again[v]: -1.0}, 0.0)
            rows.at_least({at.early[u]: 1.0, at.hosted[u]: -1.0, at.again[v]: -1.0}, -1.0)
        in_loop[value.loop][at.again[v]] = value.slice_bytes / _MIB
    for row in in_loop.values():
        rows.at_most(row | {at.room: -1.0}, 0.0)


def _hbm_row(problem: Problem, correction: Correction, at: _Variables) -> tuple[dict[int, float], float]:
    """The HBM of a choice in MiB, as a row, and what no choice changes."""
    row, fixed = {at.room: 1.0}, problem.hbm_fixed_bytes + correction.workspace_bytes
    for v, value in enumerate(problem.values):
        row[at.kept[v]] = value.stack_bytes / _MIB
        row[at.hosted[v]] = 2 * value.slice_bytes / _MIB
    for g, group in enumerate(problem.groups):
        fixed += group.state_bytes + group.param_bytes + group.gradient_bytes
        if group.parts:
            row[at.parts[g]] = -group.state_bytes / group.parts / _MIB
        row[at.params[g]] = (group.slice_bytes - group.param_bytes - (0.0 if group.fused else group.gradient_bytes)) / _MIB
        row[at.full[g]] = row[at.none[g]] = -group.gradient_bytes / _MIB
    return row, fixed / _MIB


def _host_row(problem: Problem, at: _Variables) -> dict[int, float]:
    row = {at.hosted[v]: value.stack_bytes / _MIB for v, value in enumerate(problem.values)}
    for g, group in enumerate(problem.groups):
        row[at.parts[g]] = group.state_bytes / max(1, group.parts) / _MIB
        row[at.params[g]] = hosted_param_bytes(group) / _MIB
    return row


def _lanes(problem: Problem, correction: Correction, rows: _Rows, at: _Variables) -> dict[int, float]:
    """A row for each lane of each phase; what copies cost the compute beside them, by variable."""
    if problem.link is None:
        return {}
    moved: dict[tuple[int, str], dict[int, float]] = {(p, lane): defaultdict(float) for p in range(problem.update + 1) for lane in LANES}

    def add(variable: int, traffic, share: float = 1.0) -> None:
        for phase, lane, count in traffic:
            moved[phase, lane][variable] += share * count

    for v, value in enumerate(problem.values):
        add(at.hosted[v], value_traffic(problem, value))
    for g, group in enumerate(problem.groups):
        add(at.parts[g], state_traffic(problem, group, False), 1 / max(1, group.parts))
        if group.parts:
            add(at.full[g], state_traffic(problem, group, False), -1.0)
            add(at.full[g], state_traffic(problem, group, True))
        add(at.params[g], param_traffic(problem, group))
    link = problem.link
    for phase, compute in enumerate(problem.compute_seconds):
        device, host = moved[phase, "to_device"], moved[phase, "to_host"]
        both = {x: device.get(x, 0.0) + host.get(x, 0.0) for x in {*device, *host}}
        again = _again(problem, correction, at, phase)
        for row, rate in ((device, link.to_device), (host, link.to_host), (both, link.both)):
            if row:
                rows.at_least(
                    {at.exposed[phase]: 1.0} | again | {x: -count / rate for x, count in row.items()}, -compute * correction.compute
                )
    for window in problem.windows:
        again = _again(problem, correction, at, window.phase) if window.rebuilding else {}
        inside = {at.hosted[v]: v for v in window.values} | {at.early[v]: v for v in window.early}
        copies = {x: -copied_bytes(problem, problem.values[v]) / link.rate(window.lane) for x, v in inside.items()}
        rows.at_least({at.exposed[window.phase]: 1.0} | again | copies, -window.work_seconds * correction.compute)
    slow: dict[int, float] = defaultdict(float)
    values = set(at.hosted)
    for row in moved.values():
        for variable, count in row.items():
            slow[variable] += count * link.slow_down * (correction.beside_values if variable in values else correction.beside_groups)
    return slow


def _again(problem: Problem, correction: Correction, at: _Variables, phase: int) -> dict[int, float]:
    """Seconds of rebuilding in a phase, by variable."""
    mine = (v for v, value in enumerate(problem.values) if phase_of(value.loop, True) == phase)
    return {at.again[v]: correction.rebuild * problem.values[v].rebuild_seconds for v in mine}


def _time_objective(problem, correction, rows, at, hbm, copies, known: Choice | None = None) -> None:
    for variable, seconds in _doubts(problem, at, known).items() if known is not None else ():
        rows.objective[variable] += seconds
    for v, value in enumerate(problem.values):
        rows.objective[at.again[v]] += correction.rebuild * value.rebuild_seconds
        rows.objective[at.kept[v]] += value.keep_seconds
    for g, group in enumerate(problem.groups):
        rows.objective[at.none[g]] += group.fuse_seconds
    for variable in at.exposed:
        rows.objective[variable] += correction.exposed
    for variable, seconds in copies.items():
        rows.objective[variable] += seconds


def _doubts(problem: Problem, at: _Variables, known: Choice) -> dict[int, float]:
    """Seconds by variable for what stands elsewhere than in ``known``; state in some parts there may stand anywhere."""
    rate = problem.link.both / UNCERTAIN if problem.link else math.inf
    price: dict[int, float] = {}
    for v, (value, place) in enumerate(zip(problem.values, known.places, strict=True)):
        for variable, mine in ((at.kept[v], HBM), (at.hosted[v], HOST)):
            price[variable] = copied_bytes(problem, value) / rate * (-1 if place == mine else 1)
    for g, group in enumerate(problem.groups):
        parts, on_host = known.state_parts[g], known.params_on_host[g]
        if parts in (0, group.parts) and group.parts:
            price[at.parts[g]] = group.state_bytes / group.parts / rate * (-1 if parts else 1)
        price[at.params[g]] = group.param_bytes / rate * (-1 if on_host else 1)
    return price


def _hbm_objective(problem, correction, rows, at, hbm, copies) -> None:
    for variable, size in hbm.items():
        rows.objective[variable] += size


def _milp(rows: _Rows):
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    cells = [(r, c, x) for r, (row, _, _) in enumerate(rows.rows) for c, x in row.items()]
    at, columns, values = zip(*cells, strict=True)
    matrix = coo_array((values, (at, columns)), shape=(len(rows.rows), len(rows.upper))).tocsc()
    objective = np.zeros(len(rows.upper))
    limits: list[Any] = [np.array(rows.upper, float), *(np.array([row[k] for row in rows.rows], float) for k in (1, 2))]
    for variable, price in rows.objective.items():
        objective[variable] = price
    with unheard():
        answer = milp(
            objective,
            integrality=np.array(rows.whole),
            bounds=Bounds(0.0, limits[0]),
            constraints=LinearConstraint(matrix, limits[1], limits[2]),
            options={"mip_rel_gap": GAP, "time_limit": TIME_LIMIT_SECONDS},
        )
    return answer.x


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """HiGHS prints remarks of its own past Python on standard output, where ``--json`` puts a plan: within this they go nowhere."""
    library = ctypes.CDLL(None)
    library.fflush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _choice(problem: Problem, at: _Variables, found) -> Choice:
    places = []
    for v, value in enumerate(problem.values):
        if not value.places:
            places.append("")
        else:
            places.append(HBM if found[at.kept[v]] > 0.5 else HOST if found[at.hosted[v]] > 0.5 else RECOMPUTE)
    return Choice(
        places=tuple(places),
        state_parts=tuple(round(found[n]) for n in at.parts),
        params_on_host=tuple(bool(found[p] > 0.5) for p in at.params),
    )
