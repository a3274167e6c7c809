"""The cheapest next plan that fits: the plan that ran out, with a little more moved or recomputed, asked of the compiler.

    rules of the plan as it stands + one more rule -> Plan.by_hand -> judge -> predict
    kept where it fits; in the order of the seconds that it adds

Cost: a compile for each try. Limit: a handful of changes by role, in the order in which they usually cost least; ``choose`` searches
further.
"""

import dataclasses
from typing import Any

from forebay.errors import ForebayError
from forebay.hardware import Hardware

CHANGES = (
    {"optimizer": "host"},
    {"activation": "host"},
    {"optimizer": "host", "activation": "host"},
    {"activation": "recompute"},
    {"parameter": "host", "optimizer": "host"},
    {"parameter": "host", "optimizer": "host", "activation": "host"},
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """``rule`` for people, ``flags`` for the command line; bytes per device (compiled); ``added_seconds`` forecast, None where unknown."""

    rule: str
    flags: str
    freed_bytes: int
    hbm_bytes: int
    host_bytes: int
    added_seconds: float | None
    plan: Any = dataclasses.field(repr=False, compare=False, default=None)


def next_plans(plan: Any, within_bytes: int, tries: int) -> tuple[tuple[NextPlan, ...], list[str]]:
    """Plans that need at most ``within_bytes`` of HBM and fit the host, cheapest first, and what was tried in vain."""
    from forebay.search.proving import judged

    machine = Hardware.from_json(plan.hardware)
    before = _seconds(plan.verdict, machine)
    found, notes, left = [], [], tries
    for change in CHANGES:
        if left == 0:
            break
        try:
            other = _changed(plan, change, machine)
            if other is None:
                continue
            left -= 1
            verdict: Any = judged(other, machine).verdict
        except ForebayError as refused:
            notes.append(f"{_rule(change)} was not possible: {refused}")
            continue
        if not verdict.compiled or not verdict.fits or verdict.hbm.total_bytes > within_bytes:
            notes.append(f"{_rule(change)} does not fit: {verdict.reason}")
            continue
        after = _seconds(verdict, machine)
        found.append(
            NextPlan(
                rule=_rule(change), flags=" ".join(f"--place {name}={place}" for name, place in change.items()),
                freed_bytes=plan.verdict.hbm.total_bytes - verdict.hbm.total_bytes, hbm_bytes=verdict.hbm.total_bytes,
                host_bytes=verdict.host.total_bytes, added_seconds=None if before is None or after is None else after - before,
                plan=dataclasses.replace(other, verdict=verdict),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda p: (p.added_seconds is None, p.added_seconds or 0.0))), notes


def _changed(plan: Any, change: dict[str, str], machine: Hardware) -> Any:
    """The plan with one more change; None where that changes nothing."""
    from forebay.plan import Plan
    from forebay.trust.twin import rules_of

    options = {name: plan.options[name] for name in ("prefetch", "microbatches", "fuse_update") if name in plan.options}
    work = plan.bound.uncut or plan.bound
    standing = {name: place for name, place in rules_of(plan, work).items() if name.partition(":")[0] not in change}
    other = Plan.by_hand(work, standing | change, hardware=machine, options=options)
    same = {(e.name, e.placement) for e in other.entries} == {(e.name, e.placement) for e in plan.entries}
    return None if same else other


def _rule(change: dict[str, str]) -> str:
    return ", ".join(f"{name}={place}" for name, place in change.items())


def _seconds(verdict: Any, machine: Hardware) -> float | None:
    """The forecast of a step; None where there is no schedule or the machine's figures are not known."""
    from forebay.search.proving import forecast_of

    forecast = None if machine.target.platform == "cpu" else forecast_of(verdict, machine, {})[0]
    return forecast and forecast.step_seconds
