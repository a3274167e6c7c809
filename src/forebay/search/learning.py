"""What compiled candidates teach about those that were not compiled.

Time: the forecasts of the compiled ones are fitted by   constant + a rebuild + keep + b exposed + d, d' copies,   a ridge regression
whose prior is 1 for each factor; with one candidate only the constant is learned. HBM: what the compiler needed beyond the count is
taken from the candidate that is most like the one asked about.
"""

import dataclasses
from collections.abc import Sequence

from forebay.search.problem import Choice, Correction, Estimate, Problem, estimate

PRIOR = 0.1  # weight of one prior beside one compiled candidate
FACTOR_LOW, FACTOR_HIGH = 0.2, 5.0
BESIDE_HIGH = 30.0  # times the slow-down: copies that hide beside nothing at all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A compiled candidate: its forecast (None where there is none) and its HBM, both of the program."""

    choice: Choice
    seconds: float | None
    hbm_bytes: float


def learn(problem: Problem, samples: Sequence[Sample], near: Choice) -> Correction:
    """The correction to be used around the choice ``near``."""
    correction = Correction()
    timed = [s for s in samples if s.seconds is not None]
    for _ in range(2):  # what is exposed depends on the factors
        if timed:
            correction = _fit_time(problem, timed, correction)
    if not samples:
        return correction
    closest = min(samples, key=lambda s: distance(problem, s.choice, near))
    return dataclasses.replace(correction, workspace_bytes=excess(problem, closest, correction))


def excess(problem: Problem, sample: Sample, correction: Correction) -> float:
    """HBM that the compiler needed beyond what the problem counts."""
    bare = dataclasses.replace(correction, workspace_bytes=0.0)
    return sample.hbm_bytes - estimate(problem, sample.choice, bare).hbm_bytes


def distance(problem: Problem, one: Choice, other: Choice) -> float:
    """Bytes that stand in different places under two choices."""
    apart = sum(v.stack_bytes for v, a, b in zip(problem.values, one.places, other.places, strict=True) if a != b)
    for group, a, b, p, q in zip(
        problem.groups, one.state_layers, other.state_layers, one.params_on_host, other.params_on_host, strict=True
    ):
        apart += group.state_bytes * abs(a - b) / max(1, group.layers) + (group.param_bytes + group.gradient_bytes) * (p != q)
    return apart


def _fit_time(problem: Problem, samples: Sequence[Sample], correction: Correction) -> Correction:
    import numpy as np

    prices = [estimate(problem, s.choice, correction) for s in samples]
    features = np.array([_features(p) for p in prices])
    seconds = np.array([(s.seconds or 0.0) - p.keep_seconds for s, p in zip(samples, prices, strict=True)])
    scale = np.maximum(features.max(axis=0), 1e-9) * PRIOR**0.5
    rows = np.vstack([np.hstack([np.ones((len(samples), 1)), features]), np.hstack([np.zeros((len(scale), 1)), np.diag(scale)])])
    _, *factors = np.linalg.lstsq(rows, np.concatenate([seconds, scale]), rcond=None)[0]
    highest = np.array([FACTOR_HIGH, FACTOR_HIGH, BESIDE_HIGH, BESIDE_HIGH])
    factors = np.clip(factors, FACTOR_LOW, highest)
    constant = float(np.mean(seconds - features @ factors))
    counted = sum(problem.compute_seconds)
    return dataclasses.replace(
        correction,
        constant_seconds=constant,
        compute=float(np.clip(constant / counted, FACTOR_LOW, FACTOR_HIGH)) if counted and constant > 0 else 1.0,
        **dict(zip(("rebuild", "exposed", "beside_values", "beside_groups"), map(float, factors), strict=True)),
    )


def _features(price: Estimate) -> tuple[float, ...]:
    return price.rebuild_seconds, price.exposed_seconds, price.value_copy_seconds, price.group_copy_seconds
