"""Candidates before the real compiler: plan by rule, judge, replay, a few side by side; lowering takes turns."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.compiler import judge
from forebay.compiler.judging import TIME_LIMIT_SECONDS
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.records import Forecast, Verdict
from forebay.runtime import train_step
from forebay.search.problem import Choice, Form
from forebay.timeline import charge, predict
from forebay.workload import Workload

SIDE_BY_SIDE = 2


def at_once(platform: str) -> int:
    """How many candidates compile side by side: XLA:TPU keeps two cores busy with one (most of a minute for a step of 7B)."""
    return max(1, min(SIDE_BY_SIDE, (os.cpu_count() or 1) // 2)) if platform == "tpu" else SIDE_BY_SIDE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of the problem that the options in ``form`` leave open, with the rules that carry it out; not compiled yet."""

    summary: str
    choice: Choice
    rules: Mapping[str, str]
    form: Form


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
    plan = Plan.by_hand(work, candidate.rules, hardware=hardware, options=dict(candidate.form))
    limit = TIME_LIMIT_SECONDS if deadline is None else max(1.0, deadline - time.monotonic())
    plan = judged(plan, hardware, time_limit_seconds=limit)
    forecast, why_not = forecast_of(plan.verdict, hardware, work_done)
    return Proven(candidate=candidate, plan=plan, forecast=forecast, no_forecast=why_not)


def judged(plan: Plan, hardware: Hardware, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> Plan:
    """``plan``, which is bound, with the compiler's verdict on its whole train step."""
    step = train_step(plan.bound.loss_fn, plan.bound.optimizer, plan)
    args = plan.abstract_state(), plan.abstract_batch()
    return dataclasses.replace(plan, verdict=judge(step, args, hardware, plan=plan, time_limit_seconds=time_limit_seconds))


def forecast_of(verdict: Verdict | None, hardware: Hardware, work_done: Mapping[str, float | None]) -> tuple[Forecast | None, str]:
    """The forecast of a compiled step, or None and why there is none: nothing was compiled, or a figure of the machine is not known."""
    if verdict is None or not verdict.compiled:
        return None, verdict.reason if verdict else "the compiler was not asked"
    try:
        return predict(verdict, hardware, tokens=work_done.get("tokens"), flops_per_token=work_done.get("flops_per_token")), ""
    except InputError as unknown:
        return None, str(unknown)


def with_forecast(plan: Plan, forecast: Forecast) -> Plan:
    """``plan`` with a forecast of its step, and each host entry with the time that its copies expose."""
    return dataclasses.replace(plan, forecast=forecast.to_json(), entries=charge(forecast, plan.entries).entries)
