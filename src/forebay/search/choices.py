"""Between a choice of the placement problem and the rules of a plan, and a choice in words."""

import glob
from collections import Counter

from forebay.plan import Plan
from forebay.search.problem import HBM, HOST, RECOMPUTE, Choice, Problem


def rules_of(problem: Problem, choice: Choice, written: dict[str, str]) -> dict[str, str]:
    """The rules of ``Plan.by_hand`` that carry ``choice`` out; ``written`` is where the program has each activation by itself."""
    rules = {}
    for value, place in zip(problem.values, choice.places, strict=True):
        if value.name and place != written[value.name]:
            rules[glob.escape(value.name)] = place
    for group, layers, params in zip(problem.groups, choice.state_parts, choice.params_on_host, strict=True):
        if params:
            rules |= {glob.escape(name): HOST for name in group.params}
        if layers:
            whole = layers == group.parts
            rules |= {glob.escape(name): HOST if whole else f"{HOST}[0:{layers * group.part_layers}]" for name in group.state}
    return rules


def choice_of(problem: Problem, plan: Plan) -> Choice:
    """The choice that a plan by rule has made."""
    place = {e.name: e.placement for e in plan.entries}
    hosted = {e.name.partition("[")[0] for e in plan.role("optimizer") if e.placement == HOST}
    return Choice(
        places=tuple(place[v.name] if v.name else "" for v in problem.values),
        state_parts=tuple(g.parts if g.state and set(g.state) <= hosted else 0 for g in problem.groups),
        params_on_host=tuple(bool(g.params) and all(place[name] == HOST for name in g.params) for g in problem.groups),
    )


def in_words(problem: Problem, choice: Choice) -> str:
    """A line that tells one candidate from another."""
    said = []
    count = Counter(place for value, place in zip(problem.values, choice.places, strict=True) if value.name)
    words = {HBM: "kept", HOST: "on host", RECOMPUTE: "recomputed"}
    parts = [f"{count[p]} {words[p]}" for p in (HBM, HOST, RECOMPUTE) if count[p]]
    said += [f"activations: {', '.join(parts)}"] if parts else []
    state = sum(g.state_bytes for g in problem.groups)
    moved = sum(g.state_bytes * n / g.parts for g, n in zip(problem.groups, choice.state_parts, strict=True) if g.parts)
    if moved:
        said.append(f"{moved / state:.0%} of the optimizer state on host")
    params = sum(g.param_bytes for g in problem.groups)
    away = sum(g.param_bytes for g, p in zip(problem.groups, choice.params_on_host, strict=True) if p)
    if away:
        said.append(f"{away / params:.0%} of the parameters on host")
    if problem.fuses_all:
        said.append("layers updated inside the backward pass")
    if (count := dict(problem.form).get("microbatches", 1)) > 1:
        said.append(f"{count} microbatches")
    return "; ".join(said) or "everything resident"
