"""What compiled candidates teach about those that were not compiled.

Time: the forecasts of the compiled ones say apart what was work and what was exposed. The work is fitted by   constant + a rebuild + keep,
the exposed copies by   b exposed + d, d' copies,   ridge regressions with what ``Correction`` begins with as their prior. HBM: what the
compiler needed beyond the count is taken from the candidate that is most like the one asked about.
"""

import dataclasses
import math
from collections.abc import Sequence

from forebay.search.problem import Choice, Correction, Problem, estimate

PRIOR = 0.1  # weight of one prior beside one compiled candidate
FACTOR_LOW, FACTOR_HIGH = 0.2, 5.0
BESIDE_HIGH = 30.0  # times the slow-down: copies that hide beside nothing at all
_BEGIN = Correction()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A compiled candidate: the problem of its form, its forecast (None where there is none) in work and exposed copies, and its HBM."""

    problem: Problem
    choice: Choice
    seconds: float | None
    exposed_seconds: float
    hbm_bytes: float

    @property
    def work_seconds(self) -> float:
        """What the step would take if no copy were exposed."""
        return (self.seconds or 0.0) - self.exposed_seconds


def learn(problem: Problem, samples: Sequence[Sample], near: Choice) -> Correction:
    """The correction to be used around the choice ``near``: time from all samples, HBM from the nearest, of ``problem`` if there is one."""
    correction = Correction()
    timed = [s for s in samples if s.seconds is not None]
    for _ in range(2):  # what is exposed depends on the factors
        if timed:
            correction = _fit_time(timed, correction)
    if not samples:
        return correction
    alike = [s for s in samples if s.problem.form == problem.form] or samples
    closest = min(alike, key=lambda s: distance(s.problem, s.choice, near))
    return dataclasses.replace(correction, workspace_bytes=excess(closest, correction))


def excess(sample: Sample, correction: Correction) -> float:
    """HBM that the compiler needed beyond what the problem counts."""
    bare = dataclasses.replace(correction, workspace_bytes=0.0)
    return sample.hbm_bytes - estimate(sample.problem, sample.choice, bare).hbm_bytes


def distance(problem: Problem, one: Choice, other: Choice) -> float:
    """Bytes that stand in different places under two choices."""
    apart = sum(v.stack_bytes for v, a, b in zip(problem.values, one.places, other.places, strict=True) if a != b)
    for group, a, b, p, q in zip(problem.groups, one.state_parts, other.state_parts, one.params_on_host, other.params_on_host, strict=True):
        apart += group.state_bytes * abs(a - b) / max(1, group.parts) + (group.param_bytes + group.gradient_bytes) * (p != q)
    return apart


def _fit_time(samples: Sequence[Sample], correction: Correction) -> Correction:
    prices = [estimate(s.problem, s.choice, correction) for s in samples]
    beside = [p.value_copy_seconds + p.group_copy_seconds for p in prices]
    work = [s.work_seconds - p.keep_seconds - b for s, p, b in zip(samples, prices, beside, strict=True)]
    [rebuild] = _factors([(p.rebuild_seconds,) for p in prices], work, (_BEGIN.rebuild,), (FACTOR_HIGH,), constant=True)
    constant = math.fsum(w - rebuild * p.rebuild_seconds for w, p in zip(work, prices, strict=True)) / len(samples)
    copies = [(p.exposed_seconds, p.value_copy_seconds, p.group_copy_seconds) for p in prices]
    lost = [s.exposed_seconds + b for s, b in zip(samples, beside, strict=True)]
    begin = _BEGIN.exposed, _BEGIN.beside_values, _BEGIN.beside_groups
    exposed, of_values, of_groups = _factors(copies, lost, begin, (FACTOR_HIGH, BESIDE_HIGH, BESIDE_HIGH), constant=False)
    counted = sum(samples[0].problem.compute_seconds)
    scale = constant / counted if counted and constant > 0 else 1.0
    return dataclasses.replace(
        correction, constant_seconds=constant, compute=min(max(scale, FACTOR_LOW), FACTOR_HIGH), rebuild=rebuild, exposed=exposed,
        beside_values=of_values, beside_groups=of_groups,
    )  # fmt: skip


def _factors(features: Sequence[tuple[float, ...]], seconds: Sequence[float], begin, highest, *, constant: bool) -> list[float]:
    """Ridge regression of ``seconds`` on ``features`` with ``begin`` as the prior of the factors, and with a free constant or none."""
    import numpy as np

    table = np.array(features)
    highest_seen = table.max(axis=0)
    scale = np.where(highest_seen > 0, highest_seen, 1.0) * PRIOR**0.5
    free = [float(constant)]
    rows = np.vstack([np.hstack([np.tile(free, (len(table), 1)), table]), np.hstack([np.zeros((len(scale), 1)), np.diag(scale)])])
    _, *factors = np.linalg.lstsq(rows, np.concatenate([seconds, scale * begin]), rcond=None)[0]
    return np.clip(factors, FACTOR_LOW, highest).tolist()
