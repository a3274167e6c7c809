"""Candidates before the real compiler: plan by rule, judge, replay. Two compile side by side; lowering takes turns."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forebay.compiler import judge
from forebay.compiler.judging import TIME_LIMIT_SECONDS
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.records import Forecast, Verdict
from forebay.runtime import train_step
from forebay.search.problem import Choice
from forebay.timeline import predict
from forebay.workload import Workload

SIDE_BY_SIDE = 2
_DISABLE = "xla_disable_hlo_passes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice with the rules and options that carry it out, not compiled yet."""

    summary: str
    choice: Choice
    rules: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def microbatches(self) -> int:
        return self.options.get("microbatches", 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A compiled candidate: ``plan`` holds its verdict, ``forecast`` is None where the machine or the compile allows none."""

    candidate: Candidate
    plan: Plan
    forecast: Forecast | None
    no_forecast: str = ""

    @property
    def verdict(self) -> Verdict:
        assert self.plan.verdict is not None, "a proven candidate was judged"
        return self.plan.verdict

    @property
    def fits(self) -> bool:
        """Whether it fits; a program that a known fault of this compiler makes wrong is refused by the verdict itself."""
        return bool(self.verdict.fits)

    @property
    def seconds(self) -> float | None:
        return self.forecast.step_seconds if self.forecast else None


def prove(
    work: Workload, hardware: Hardware, candidates: Sequence[Candidate], work_done: Mapping[str, float | None], deadline: float | None
) -> list[Proven]:
    """Compile ``candidates``, side by side. ``deadline``, of ``time.monotonic``, ends a compile; None: each may take its time."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(lambda c: _prove(work, hardware, c, work_done, deadline), candidates))


def _prove(work, hardware, candidate: Candidate, work_done, deadline: float | None) -> Proven:
    plan = _as_planned(Plan.by_hand(work, candidate.rules, hardware=hardware, options=candidate.options), hardware)
    step = train_step(work.loss_fn, work.optimizer, plan)
    limit = TIME_LIMIT_SECONDS if deadline is None else max(1.0, deadline - time.monotonic())
    verdict = judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan, time_limit_seconds=limit)
    plan = dataclasses.replace(plan, verdict=verdict)
    if not verdict.compiled:
        return Proven(candidate=candidate, plan=plan, forecast=None, no_forecast=verdict.reason)
    try:
        forecast = predict(verdict, hardware, **work_done)
    except InputError as unknown:
        return Proven(candidate=candidate, plan=plan, forecast=None, no_forecast=str(unknown))
    return Proven(candidate=candidate, plan=plan, forecast=forecast)


def _as_planned(plan: Plan, hardware: Hardware) -> Plan:
    """``plan`` without XLA:GPU's own rematerialisation: over its memory limit that pass recomputes and offloads as it likes, and the
    program is no longer the one that was planned (a 70B step that was 0.5 GiB over came back twice as slow, and still over)."""
    if hardware.target.platform != "cuda":
        return plan
    options = plan.compiler_options
    passes = [name for name in str(options.get(_DISABLE, "")).split(",") if name]
    compiler = options | {_DISABLE: ",".join(dict.fromkeys([*passes, "rematerialization"]))}
    reason = f"{_DISABLE}=rematerialization: what is recomputed is the plan's own choice"
    return dataclasses.replace(plan, options={**plan.options, "compiler": compiler, "reasons": [*plan.options.get("reasons", ()), reason]})
