"""``choose``: one plan for every tensor that competes for HBM, found by a program over all placements and proved by the real compiler.

    formulate                     the placement problem, for each form: resident updates in the backward pass, numbers of microbatches
    prove(simple, optimum)        two candidates; simple: as written, or as it is counted to fit: state on the host, all recomputed
    until nothing is better:
        learn                     what the compiler needed beyond the count, and how copies and rebuilding came out in the forecasts
        solve                     the optimum under what was learned; a choice that did not fit tightens the budget by what it was over
        prove                     the new optimum, and beside it one near the fastest so far that leaves a margin of the HBM free, of
                                  another form if that is as good, or a simple one that is counted to be faster
    answer                        the fastest that fits, and why each other lost

The search ends when the program's optimum was compiled already, or is not forecast to gain more than ``WORTH`` of the step on the best:
two forecasts of one model err alike, so that their difference is better known than either. Cost: a handful of compiles.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.search import answering, choices, simple
from forebay.search.formulating import formulate
from forebay.search.learning import Sample, learn
from forebay.search.pricing import Prices
from forebay.search.problem import Choice, Correction, Estimate, Form, Problem, estimate
from forebay.search.program import Limits, most_frugal, solve
from forebay.search.proving import Candidate, Proven, at_once, forecast_of, prove
from forebay.units import show_seconds
from forebay.workload import Workload

BUDGET_SECONDS = 60.0
WORTH = 0.002
SAFE = 0.03  # of the HBM budget: what the second of two candidates leaves free, since a count misses by as much
CAREFUL = 0.10
NEAR = 0.03  # of seconds, or of HBM over the budget: what a forecast or a count may miss by
TIGHTER = 0.01  # of the HBM budget: the step by which a choice that did not fit makes room
SLOWER = 1.2  # times the longest round of compiles so far: what the next one may take, since the first places least on the host
ANSWERING = 0.05  # of the time budget: kept for the replay of what compiled last, and for the answer
ATTEMPTS = 12
FORMS: tuple[Form, ...] = ((), (("fuse_update", "always"),), *((("microbatches", n),) for n in (2, 4, 8, 16, 32)))


def choose(
    work: Workload,
    hardware: Hardware,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    tokens: float | None = None,
    flops_per_token: float | None = None,
) -> Plan:
    """The fastest plan for ``work`` on ``hardware`` that the compiler says fits.

    ``budget_seconds`` is wall time: no compile starts that is not thought to end within it, and one that does not is stopped, except the
    first ones; the plan says if it cut the search short. ``tokens`` (global, of a step) and ``flops_per_token`` give the forecast its
    tokens per second and MFU.

    The plan holds its verdict, its forecast, a reason and a runner-up for each entry, and the candidates that lost. Where nothing fits its
    verdict says so, and its candidates are what was tried.

    Raises:
        InputError: the mesh and the machine disagree, or the machine is a CPU, which has no device memory to plan for.
        CompilerError: the compiler of that hardware is not installed.
    """
    if hardware.target.platform == "cpu":
        raise InputError(f"{hardware.name} has no device memory to plan for; name the machine that is to train, such as h100-sxm:8")
    return _Search(work, hardware, budget_seconds, {"tokens": tokens, "flops_per_token": flops_per_token}).answer()


def choose_from(proven: Proven, hardware: Hardware, budget_seconds: float, work_done: Mapping[str, float | None]) -> Plan:
    """``choose`` for the workload of a plan that was compiled already, in place of the first compiles: the answer is at least as good."""
    search = _Search(proven.plan.bound, hardware, budget_seconds, work_done)
    forecast, why_not = forecast_of(proven.verdict, hardware, work_done)
    search.proven.append(dataclasses.replace(proven, forecast=forecast, no_forecast=why_not))
    search.longest_seconds = proven.verdict.compile_seconds or 0.0
    return search.answer()


def frugal(work: Workload, hardware: Hardware, deadline: float = math.inf) -> Proven | None:
    """The plan that does with the least HBM, compiled; None where the host's memory allows no plan. ``deadline`` ends the compile."""
    search = _Search(work, hardware, math.inf, {})
    found = search.least()
    if found is None:
        return None
    [proven] = prove(work, hardware, [search.candidate(search.plain, found)], {}, deadline if math.isfinite(deadline) else None)
    return proven


def least_hbm_bytes(work: Workload, hardware: Hardware) -> float:
    """What the plan of the least HBM is counted to need per device, without a compile; infinite where the host's memory allows no plan."""
    search = _Search(work, hardware, math.inf, {})
    found = search.least()
    return math.inf if found is None else estimate(search.plain, found, Correction()).hbm_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    seconds: float
    candidate: Candidate


class _Search:
    """The state of one search: the problems, what was compiled, and the time that is left."""

    def __init__(self, work: Workload, hardware: Hardware, budget_seconds: float, work_done: Mapping[str, float | None]):
        self.work, self.hardware, self.work_done = work, hardware, work_done
        self.began = time.monotonic()
        self.deadline = self.began + (1 - ANSWERING) * budget_seconds
        self.prices, self.at_once = Prices(hardware), at_once(hardware.target.platform)
        self.problems: dict[Form, Problem | None] = {}
        self.proven: list[Proven] = []
        self.longest_seconds = 0.0
        self.ended = ""

    def problem(self, form: Form = ()) -> Problem | None:
        """The problem of a form, None where the batch does not divide, nobody said how losses combine, or it changes nothing."""
        if form not in self.problems:
            try:
                problem = formulate(self.work, self.hardware, self.prices, form)
            except InputError:
                if not form:
                    raise
                problem = None
            empty = problem is not None and problem.fuses_all and not any(g.fused for g in problem.groups)
            self.problems[form] = None if empty else problem
        return self.problems[form]

    def answer(self) -> Plan:
        """Search to the end, and the plan."""
        while candidates := self.candidates():
            self.prove(candidates)
        return answering.answer(self.proven, self.outcome(), self.corrected())

    def least(self) -> Choice | None:
        """The choice of the plain problem that is counted to need the least HBM."""
        return most_frugal(self.plain, Correction(), Limits(hbm_bytes=math.inf, host_bytes=self.plain.host_budget_bytes))

    @functools.cached_property
    def simple_ones(self) -> dict[Choice, Candidate]:
        """The plans that a person would try first, by their choice in the plain problem."""
        return simple.plans(self.work, self.hardware, self.plain)

    @property
    def plain(self) -> Problem:
        """The problem without any option."""
        problem = self.problem()
        assert problem is not None, "the plain form is always a problem"
        return problem

    def _all_problems(self, forms: Sequence[Form] = FORMS) -> Iterator[Problem]:
        """The problem of each form that the workload allows."""
        return (problem for form in forms if (problem := self.problem(form)) is not None)

    def candidates(self) -> list[Candidate]:
        """What to compile next; nothing when the search has ended."""
        if not self.proven:
            return self._first()
        if self._late():
            self.ended = "the time budget ended the search: --budget (budget_seconds=) gives it more"
            return []
        best = min((p.seconds for p in self.proven if p.fits and p.seconds is not None), default=math.inf)
        bold, plainer = self._proposals(best), self._simple_left(best)
        careful = self._proposals(best, careful=True) if bold else []
        near = [p for p in careful if p.seconds < bold[0].seconds * (1 + NEAR) and p.candidate.form != bold[0].candidate.form]
        others = sorted([*careful, *plainer], key=lambda p: p.seconds)
        found = [*bold[:1], *near, *others, *bold[1:]] or ([] if math.isfinite(best) else self._frugal())
        if not found:
            self.ended = self._proof(best)
        different: dict[tuple[Form, Choice], Candidate] = {}
        for p in found:
            different.setdefault((p.candidate.form, p.candidate.choice), p.candidate)
        return list(different.values())[: self.at_once]

    def _first(self) -> list[Candidate]:
        first = self._simple()
        if self.at_once == 1:
            return [self._careful(first)]
        optima = [_Proposal(seconds=0.0, candidate=first)]
        for problem in self._all_problems(FORMS[:2]):
            found = solve(problem, Correction(), self._limits(problem)) or most_frugal(problem, Correction(), self._limits(problem))
            if found is not None and (problem.form or found != first.choice):
                optima.append(_Proposal(seconds=estimate(problem, found, Correction()).seconds, candidate=self.candidate(problem, found)))
        return [p.candidate for p in [optima[0], *sorted(optima[1:], key=lambda p: p.seconds)][: self.at_once]]

    def _careful(self, first: Candidate) -> Candidate:
        """Where a compile is dear, it must fit and gain: the simple ``first``, with more kept if it moves nothing and leaves room."""
        if first.rules:
            return first
        problem = dataclasses.replace(self.plain, link=None)
        found = solve(problem, Correction(), self._limits(problem, CAREFUL * problem.hbm_budget_bytes))
        return first if found is None or found == first.choice else self.candidate(self.plain, found)

    def _simple(self) -> Candidate:
        """The step as written where it is counted to fit, else the fastest simple one that is; where none is, that of the least HBM."""
        made = self.simple_ones
        prices = {choice: estimate(self.plain, choice, Correction()) for choice in made}
        fitting = [choice for choice, price in prices.items() if self._within(price)]
        first = next(iter(made))
        if first in fitting:
            return made[first]
        return made[min(fitting, key=lambda c: prices[c].seconds) if fitting else min(made, key=lambda c: prices[c].hbm_bytes)]

    def _simple_left(self, best: float) -> list[_Proposal]:
        """Simple ones not compiled yet that gain by what was learned around each; the program goes by what its own optimum taught."""
        found = []
        for choice, candidate in self.simple_ones.items():
            price = estimate(self.plain, choice, self._learned(self.plain, choice))
            if self._tried(self.plain, choice) is None and self._within(price) and price.seconds < best * (1 - WORTH):
                found.append(_Proposal(seconds=price.seconds, candidate=candidate))
        return found

    def _within(self, price: Estimate) -> bool:
        limits = self._limits(self.plain)
        return price.hbm_bytes <= limits.hbm_bytes and price.host_bytes <= limits.host_bytes

    def _late(self) -> bool:
        return time.monotonic() + SLOWER * self.longest_seconds > self.deadline

    def prove(self, candidates: list[Candidate]) -> None:
        """Compile them; the first ones may overrun the budget, for there must be an answer."""
        began = time.monotonic()
        deadline = self.deadline if self.proven and math.isfinite(self.deadline) else None
        self.proven += prove(self.work, self.hardware, candidates, self.work_done, deadline)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)

    def _proposals(self, best: float, careful: bool = False) -> list[_Proposal]:
        """The optimum of each form that is counted to gain on ``best``, the fastest first. ``careful``: with a margin of the HBM left free,
        and not far from the fastest step that was compiled."""
        found = [self._optimum(problem, careful) for problem in self._all_problems()]
        return sorted((p for p in found if p is not None and p.seconds < best * (1 - WORTH)), key=lambda p: p.seconds)

    def _optimum(self, problem: Problem, careful: bool) -> _Proposal | None:
        """The best choice that was not compiled yet, under what was learned around it; None where the best was compiled and fits.

        What the compiler needs beyond the count is known best near a compiled choice, so the choice is sought until it is the one
        around which was learned.
        """
        near, spare = self._start(problem), SAFE * problem.hbm_budget_bytes * careful
        known = self._known(problem) if careful else None
        for _ in range(ATTEMPTS):
            found = solve(problem, self._learned(problem, near), self._limits(problem, spare), known)
            if found is None:
                return None
            tried = self._tried(problem, found)
            if tried is not None and (tried.fits or not tried.verdict.compiled):
                return None
            if found == near and tried is None:
                break
            if tried is not None:  # it was counted to fit, and does not
                spare += TIGHTER * problem.hbm_budget_bytes
            near = found
        if self._tried(problem, near) is not None:
            return None
        seconds = estimate(problem, near, self._learned(problem, near)).seconds
        return _Proposal(seconds=seconds, candidate=self.candidate(problem, near))

    def _frugal(self) -> list[_Proposal]:
        """Where nothing fits and no choice is thought to: the least HBM that each form could do with."""
        made = []
        for problem in self._all_problems():
            found = most_frugal(problem, Correction(), self._limits(problem))
            if found is not None and self._tried(problem, found) is None:
                made.append(_Proposal(seconds=estimate(problem, found, Correction()).hbm_bytes, candidate=self.candidate(problem, found)))
        return sorted(made, key=lambda p: p.seconds)

    def _known(self, problem: Problem) -> Choice | None:
        """The choice of the fastest step of this form that was compiled and is not far over the budget."""
        most = (1 + NEAR) * problem.hbm_budget_bytes
        mine = [s for s in self._samples() if s.problem is problem and s.seconds is not None and s.hbm_bytes <= most]
        return min(mine, key=lambda s: s.seconds or math.inf).choice if mine else None

    def _start(self, problem: Problem) -> Choice:
        mine = [p for p in self.proven if p.candidate.form == problem.form]
        return mine[-1].candidate.choice if mine else self.proven[-1].candidate.choice

    def _samples(self) -> list[Sample]:
        return [
            Sample(
                problem=problem,
                choice=p.candidate.choice,
                seconds=p.seconds,
                exposed_seconds=p.forecast.exposed_copy_seconds if p.forecast else 0.0,
                hbm_bytes=p.verdict.hbm.total_bytes,
            )
            for p in self.proven
            if p.verdict.hbm is not None and (problem := self.problem(p.candidate.form)) is not None
        ]

    def _learned(self, problem: Problem, near: Choice) -> Correction:
        """What was learned around ``near``."""
        return learn(problem, self._samples(), near)

    def _limits(self, problem: Problem, spare: float = 0.0) -> Limits:
        return Limits(hbm_bytes=problem.hbm_budget_bytes - spare, host_bytes=problem.host_budget_bytes)

    def _tried(self, problem: Problem, choice: Choice) -> Proven | None:
        same = (p for p in self.proven if p.candidate.form == problem.form and p.candidate.choice == choice)
        return next(same, None)

    def candidate(self, problem: Problem, choice: Choice) -> Candidate:
        written = {t.name: t.written for t in self.work.tensors if t.role == "activation"}
        rules = choices.rules_of(problem, choice, written)
        return Candidate(summary=choices.in_words(problem, choice), choice=choice, rules=rules, form=problem.form)

    def _proof(self, best: float) -> str:
        if not math.isfinite(best) and any(p.fits for p in self.proven):
            return "what fits has no forecast on this machine, so nothing could be compared"
        if not math.isfinite(best):
            return "nothing that the program over all placements allows was found to fit"
        return f"no other placement is forecast to gain more than {WORTH:.1%} of the step"

    def outcome(self) -> str:
        """One line on how the search went."""
        compiled = sum(p.verdict.compiled for p in self.proven)
        noun = "candidate" if compiled == 1 else "candidates"
        return f"search: {compiled} {noun} compiled in {show_seconds(time.monotonic() - self.began)}; {self.ended}"

    def corrected(self) -> dict[Form, tuple[Problem, Correction]]:
        """Each problem of which something was compiled, with all that was learned."""
        samples = self._samples()
        return {s.problem.form: (s.problem, learn(s.problem, samples, s.choice)) for s in samples}
