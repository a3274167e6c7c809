"""The answer of a search: the fastest plan that fits, with a reason and a runner-up for each entry, and why each other candidate lost."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.plan import Plan
from forebay.records import Entry
from forebay.search.problem import HBM, HOST, RECOMPUTE, Choice, Correction, Estimate, Form, Problem, estimate
from forebay.search.proving import Proven, with_forecast
from forebay.units import GIB, show_bytes, show_seconds

_VERB = {HBM: "kept in HBM", HOST: "on the host", RECOMPUTE: "recomputed"}


def answer(proven: Sequence[Proven], outcome: str, problems: Mapping[Form, tuple[Problem, Correction]]) -> Plan:
    """The plan of the best candidate, with all that a person may ask about it."""
    best = min(proven, key=_rank)
    plan = best.plan
    if best.forecast is not None:
        plan = with_forecast(plan, best.forecast)
    if best.candidate.form in problems:
        problem, correction = problems[best.candidate.form]
        plan = dataclasses.replace(plan, entries=_explained(plan.entries, problem, best.candidate.choice, correction))
    unheard = [f"asked onto the host and not there: {', '.join(best.verdict.ignored)}"] if best.verdict.ignored else []
    options = {**plan.options, "reasons": [*plan.options.get("reasons", ()), *unheard, outcome]}
    return dataclasses.replace(plan, options=options, candidates=tuple(_record(p, best) for p in proven))


def _rank(p: Proven) -> tuple:
    """Fitting first, then fast; where nothing fits, the least HBM."""
    hbm = p.verdict.hbm.total_bytes if p.verdict.hbm else math.inf
    return (not p.fits, p.seconds if p.fits and p.seconds is not None else math.inf, hbm)


def _record(p: Proven, best: Proven) -> dict[str, Any]:
    """A candidate as plan.json keeps it."""
    return {
        "summary": p.candidate.summary,
        "rules": dict(p.candidate.rules),
        "fits": p.verdict.fits,
        "hbm_bytes": p.verdict.hbm and p.verdict.hbm.total_bytes,
        "host_bytes": p.verdict.host and p.verdict.host.total_bytes,
        "step_seconds": p.seconds,
        "executed_flops": sum(p.forecast.flops.values()) if p.forecast else None,
        "compile_seconds": p.verdict.compile_seconds,
        "ignored": list(p.verdict.ignored),
        "why_not": "" if p is best and p.fits else _why_not(p, best),
    }


def _why_not(p: Proven, best: Proven) -> str:
    if not p.fits:
        return p.verdict.reason
    if p.seconds is None or best.seconds is None:
        return p.no_forecast or "no forecast"
    return f"forecast {show_seconds(p.seconds - best.seconds)} slower ({p.seconds / best.seconds - 1:+.1%})"


def _explained(entries: Sequence[Entry], problem: Problem, choice: Choice, correction: Correction) -> tuple[Entry, ...]:
    now = estimate(problem, choice, correction)
    said: dict[str, tuple[str, str]] = {}
    for v, value in enumerate(problem.values):
        if value.name:
            said[value.name] = _value_words(problem, choice, correction, now, v)
    for g in range(len(problem.groups)):
        said |= _group_words(problem, choice, correction, now, g)
    out = []
    for e in entries:
        reason, runner_up = said.get(e.name.partition("[")[0] if e.layers else e.name, (e.reason, e.runner_up))
        out.append(dataclasses.replace(e, reason=reason, runner_up=runner_up))
    return tuple(out)


def _value_words(problem: Problem, choice: Choice, correction: Correction, now: Estimate, v: int) -> tuple[str, str]:
    value, place = problem.values[v], choice.places[v]
    others = [other for other in value.places if other != place and (other != HOST or problem.link)]
    if not others:
        return f"{_VERB[place]}: it can stand nowhere else", ""
    prices = {
        other: estimate(problem, dataclasses.replace(choice, places=(*choice.places[:v], other, *choice.places[v + 1 :])), correction)
        for other in others
    }
    return _words(place, prices, now)


def _group_words(problem: Problem, choice: Choice, correction: Correction, now: Estimate, g: int) -> dict[str, tuple[str, str]]:
    group, layers, on_host = problem.groups[g], choice.state_parts[g], choice.params_on_host[g]
    out = {}
    if group.parts and problem.link:
        place = HOST if layers else HBM
        price = _with_group(problem, choice, correction, g, 0 if layers else group.parts, False)
        words = _words(place, {HBM if layers else HOST: price}, now)
        out |= dict.fromkeys(group.state, words)
    if group.param_moves and problem.link:
        price = _with_group(problem, choice, correction, g, layers if on_host else group.parts, not on_host)
        out |= dict.fromkeys(group.params, _words(HOST if on_host else HBM, {HBM if on_host else HOST: price}, now))
    return out


def _with_group(problem: Problem, choice: Choice, correction: Correction, g: int, layers: int, on_host: bool) -> Estimate:
    counts = (*choice.state_parts[:g], layers, *choice.state_parts[g + 1 :])
    hosted = (*choice.params_on_host[:g], on_host, *choice.params_on_host[g + 1 :])
    return estimate(problem, dataclasses.replace(choice, state_parts=counts, params_on_host=hosted), correction)


def _words(place: str, prices: Mapping[str, Estimate], now: Estimate) -> tuple[str, str]:
    """(reason, runner-up) of a place, against the prices of the others with all else as it is."""
    other = min(prices, key=lambda p: prices[p].seconds)
    gain = now.seconds - prices[other].seconds
    if gain > 0:
        room = show_bytes(max(0.0, prices[other].hbm_bytes - now.hbm_bytes))
        reason = f"{_VERB[place]}: {_VERB[other]} it would save {show_seconds(gain)} (forecast), and {room} of HBM is wanted elsewhere"
    else:
        reason = f"{_VERB[place]}: it would not be faster {_VERB[other]} (forecast)"
    return reason, f"{other}: {_change(prices[other], now)}"


def _change(price: Estimate, now: Estimate) -> str:
    seconds, room = price.seconds - now.seconds, price.hbm_bytes - now.hbm_bytes
    words = [f"{'+' if seconds >= 0 else '-'}{show_seconds(abs(seconds))}", f"{'+' if room >= 0 else '-'}{show_bytes(abs(room))} of HBM"]
    if room and seconds * room < 0:
        words.append(f"{abs(seconds) * 1e3 / (abs(room) / GIB):.2f} ms/GiB")
    return ", ".join(words)
