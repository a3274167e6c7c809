"""Why blocks that look alike are not the same: the first difference of each, in words a person can act on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.source_info_util import summarize

from forebay.workload.facts import Facts
from forebay.workload.flat import Equation
from forebay.workload.sameness import refused_effects
from forebay.workload.tandem import tandem_runs

_SHOWN = 8


def leaf_list(leaves: Sequence[int], names: Sequence[str]) -> str:
    """Names of a few leaves, and how many more."""
    unique = list(dict.fromkeys(leaves))
    shown = ", ".join(names[leaf] for leaf in unique[:3])
    return shown + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


def differences(facts: Facts, taken: set[int]) -> list[str]:
    """For stretches whose primitives repeat but whose equations do not: the first place where a block differs from the one before."""
    reasons: list[str] = []
    seen: set[int] = set()
    worth = facts.heavy | (facts.reads_leaf & ~facts.leaf_only)
    order = np.flatnonzero(~facts.free)
    for run in tandem_runs(facts.coarse[order])[:64]:
        blocks = run.blocks(order, 0)
        stretch = set(blocks.ravel().tolist())
        if len(reasons) >= _SHOWN or not worth[blocks].any() or stretch & seen or stretch <= taken:
            continue
        seen |= stretch
        reasons += _first_differences(facts, blocks, taken)
    return reasons[:_SHOWN]


def _first_differences(facts: Facts, blocks: np.ndarray, taken: set[int]) -> list[str]:
    reasons: dict[tuple[int, str], str] = {}
    for number in range(1, len(blocks)):
        unlike = np.flatnonzero(facts.keys[blocks[number]] != facts.keys[blocks[number - 1]])
        if not len(unlike) or taken.issuperset(blocks[number].tolist()):
            continue
        before, here = (facts.program.equations[blocks[n][unlike[0]]] for n in (number - 1, number))
        where = summarize(here.source.source_info)
        text = f"block {number} of {len(blocks)} differs at {here.name} ({where}): {_difference(facts, before, here)}"
        reasons.setdefault((int(unlike[0]), here.name), text)  # one for each place in the block, not one for each block
    return list(reasons.values())


def _difference(facts: Facts, before: Equation, here: Equation) -> str:
    for equation in (here, before):
        if refused_effects(equation.source):
            return f"it has an effect that a loop must not repeat or reorder ({', '.join(sorted(map(str, equation.source.effects)))})"
    for kind, olds, news in (
        ("operand", before.source.invars, here.source.invars),
        ("result", before.source.outvars, here.source.outvars),
    ):
        for place, (old, new) in enumerate(zip(olds, news, strict=False)):
            if old.aval.str_short() != new.aval.str_short():
                return f"{kind} {place} is {new.aval.str_short()}, was {old.aval.str_short()}"
    for old, new in zip(before.inputs, here.inputs, strict=False):
        if facts.is_leaf(old) and facts.is_leaf(new) and facts.specs[old] != facts.specs[new]:
            return f"the leaf's sharding spec is {facts.specs[new]}, was {facts.specs[old]}"
    for name, new in here.source.params.items():
        old = before.source.params.get(name)
        if _short(old) != _short(new):
            return f"{name} is {_short(new)}, was {_short(old)}"
    return "its body, its derivative rule or its tracing context differs"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
