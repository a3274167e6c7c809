"""Find the layers of an unrolled program: blocks of equations that repeat and feed one another.

Many models write their layers as a Python loop, and everything forebay does for memory needs a real loop (offloading unrolled
layers makes memory worse, FACTS section 2). This finds what ``roll`` can turn into a ``lax.scan``:

    program <- flatten(jaxpr)                                    # jit-ed blocks opened, values numbered
    repeat:
        for each order of the equations, for each tandem run of their keys (most coverage first):
            rotate to the cut that carries least; align by data flow; keep the one that settles the most parameter bytes
        until none is found
    a leaf is grouped only if all it is read by are loops that stack it in the same company
    say why the rest was refused

Known limits: blocks with a different number of equations are not matched; a value that skips a block is refused; a loop without a
carry (a map over independent branches) is not a layer stack and is left alone.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forebay.errors import InputError
from forebay.workload.alignment import Refused, align
from forebay.workload.facts import Facts, gather
from forebay.workload.flat import flatten
from forebay.workload.loop import Repeat, Stacked, schedule
from forebay.workload.refusals import differences, leaf_list
from forebay.workload.tandem import Run, offsets, orders, tandem_runs

_TRIED_RUNS = 12  # runs tried in one order: the right one is first unless its blocks do not feed one another
_TRIED_CUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The loops found, why others were not, which leaves stand alone (in no group), and which of those a loop copies into a stack."""

    repeats: tuple[Repeat, ...]
    reasons: tuple[str, ...]
    alone: tuple[int, ...]
    gathered: tuple[tuple[int, ...], ...]  # leaves that a loop stacks anew in every step: on the device, at the cost of their bytes


def find_repeats(jaxpr: Any, leaf_specs: Sequence[Hashable | None]) -> list[Repeat]:
    """The repeated blocks of a closed jaxpr. See ``survey`` for the arguments, and for the reasons of what is not found."""
    return list(survey(jaxpr, leaf_specs).repeats)


def survey(jaxpr: Any, leaf_specs: Sequence[Hashable | None], leaf_names: Sequence[str] | None = None) -> Survey:
    """Find repeated blocks and explain the rest.

    ``leaf_specs`` has one entry per input: None for an input that is not a parameter leaf (batch, key), else any hashable, such as its
    PartitionSpec: leaves are stored together only if their specs, shapes and dtypes are equal. ``leaf_names`` is for the reasons.
    Raises InputError where the number of specs is not the number of inputs.
    """
    program = flatten(jaxpr)
    if len(leaf_specs) != program.inputs:
        raise InputError(f"the program has {program.inputs} inputs, but {len(leaf_specs)} leaf specs were given")
    names = list(leaf_names) if leaf_names is not None else [f"input {i}" for i in range(program.inputs)]
    facts = gather(program, leaf_specs)
    found, refused = _search(facts)
    repeats, reasons = _settle(facts, found, names)
    taken = {equation for repeat in repeats for equation in repeat.equations}
    reasons += [text for text, blocks in refused if not taken.intersection(blocks)]
    reasons += differences(facts, taken)
    grouped = {leaf for repeat in repeats for group in repeat.groups for leaf in group}
    alone = tuple(i for i in range(program.inputs) if leaf_specs[i] is not None and i not in grouped)
    gathered = {item.values: None for repeat in repeats for item in repeat.stacked if item.kind == "value"}
    return Survey(
        repeats=tuple(repeats),
        reasons=tuple(dict.fromkeys(reasons)),
        alone=alone,
        gathered=tuple(values for values in gathered if any(facts.is_leaf(value) for value in values)),
    )


def _search(facts: Facts) -> tuple[list[Repeat], list[tuple[str, set[int]]]]:
    found: list[Repeat] = []
    refused: dict[str, set[int]] = {}
    views = orders(facts)
    while True:
        taken = {equation for repeat in found for equation in repeat.equations}
        best: Repeat | None = None
        for order in views:
            candidate = _best_in(facts, order, taken, found, refused)
            if candidate is not None and (best is None or _score(facts, candidate) > _score(facts, best)):
                best = candidate
        if best is None:
            return found, list(refused.items())
        found.append(best)


def _score(facts: Facts, repeat: Repeat) -> tuple[int, int, int]:
    """Parameter bytes that the loop settles, less those it would gather itself; then equations covered; then the shorter block."""
    leaves = [value for item in repeat.stacked for value in item.values if facts.is_leaf(value)]
    groups = dict.fromkeys(repeat.groups)
    homes = Counter(leaf for group in groups for leaf in group)
    settled = {leaf for group in groups if all(homes[member] == 1 for member in group) for leaf in group}
    loose = sum(facts.nbytes(leaf) for leaf in leaves if leaf not in settled)
    held = sum(facts.nbytes(leaf) for leaf in settled) + sum(facts.nbytes(base) for base in repeat.whole if facts.is_leaf(base))
    return held - loose, repeat.count * repeat.period, -repeat.period


def _best_in(facts: Facts, order: np.ndarray, taken: set[int], found: list[Repeat], refused: dict[str, set[int]]) -> Repeat | None:
    keys = facts.keys[order].copy()
    gone = np.isin(order, list(taken))
    keys[gone] = -1 - np.arange(gone.sum())  # never equal to anything
    best: Repeat | None = None
    for run in _worth_trying(facts, order, tandem_runs(keys)):
        for offset in offsets(facts, order, run)[:_TRIED_CUTS]:
            blocks = run.blocks(order, offset)
            candidate = _accepted(facts, blocks, taken, found)
            if isinstance(candidate, Refused):
                if facts.heavy[blocks].any():
                    text = f"{run.count} blocks of {run.period} equations were not rolled: {candidate.reason}"
                    refused.setdefault(text, set(blocks.ravel().tolist()))
                continue
            if best is None or _score(facts, candidate) > _score(facts, best):
                best = candidate
            break
    return best


def _worth_trying(facts: Facts, order: np.ndarray, runs: list[Run]) -> list[Run]:
    """The first runs that touch a parameter or hold a contraction; of one stretch only its three shortest periods."""
    worth = np.concatenate([[0], np.cumsum((facts.heavy | facts.reads_leaf)[order])])
    seen: dict[tuple[int, int], int] = {}
    chosen = []
    for run in runs:
        if worth[run.start + run.covered] == worth[run.start]:
            continue
        stretch = (run.start, run.start + run.length)
        seen[stretch] = seen.get(stretch, 0) + 1
        if seen[stretch] <= 3:
            chosen.append(run)
        if len(chosen) == _TRIED_RUNS:
            break
    return chosen


def _accepted(facts: Facts, blocks: np.ndarray, taken: set[int], found: list[Repeat]) -> Repeat | Refused:
    repeat = align(facts, blocks, taken)
    if isinstance(repeat, Refused):
        return repeat
    if not _worthwhile(facts, repeat):
        return Refused(reason="the block holds neither a parameter of its own nor a contraction")
    loops = [*(other.equations for other in found), repeat.equations]
    if schedule(facts.program, facts.producer, loops) is None:
        return Refused(reason="something computed between the blocks reads one block and feeds the next")
    return repeat


def _worthwhile(facts: Facts, repeat: Repeat) -> bool:
    return bool(repeat.groups or repeat.whole or facts.heavy[list(repeat.blocks[0])].any())


def _settle(facts: Facts, found: list[Repeat], names: list[str]) -> tuple[list[Repeat], list[str]]:
    """Decide which leaves are stored stacked: those whose every reader is a loop that stacks them in the same company."""
    repeats = list(found)
    while True:
        reasons: dict[str, None] = {}
        loose = {group for repeat in repeats for group in repeat.groups if _conflict(facts, repeats, group, names, reasons)}
        settled = [_loosen(repeat, loose) for repeat in repeats]
        kept = [repeat for repeat in settled if _worthwhile(facts, repeat)]
        if len(kept) == len(settled):
            for repeat in kept:
                _explain_values(facts, repeat, loose, names, reasons)
            return sorted(kept, key=lambda repeat: repeat.start), list(reasons)
        # A loop that lost its leaves is given up; its equations read those leaves alone again, which may loosen further groups.
        repeats = [repeat for repeat, now in zip(repeats, settled, strict=True) if _worthwhile(facts, now)]


def _conflict(facts: Facts, repeats: list[Repeat], group: tuple[int, ...], names: list[str], reasons: dict[str, None]) -> bool:
    members = set(group)
    homes = [repeat for repeat in repeats if group in repeat.groups]
    inside = frozenset().union(*(repeat.equations for repeat in homes))
    for repeat in repeats:
        others = {item.values for item in repeat.stacked if members.intersection(item.values)} - {group}
        if others or members.intersection(repeat.invariants) or members.intersection(carry.start for carry in repeat.carry):
            text = "are read by several blocks, or by two loops in different company: not stored stacked"
            reasons[f"{leaf_list(group, names)} {text}"] = None
            return True
    outside = [leaf for leaf in group if facts.read_outside(leaf, inside)]
    if outside:
        reasons[f"{leaf_list(group, names)} are not stored stacked: {leaf_list(outside, names)} used outside the loop too"] = None
    return bool(outside)


def _loosen(repeat: Repeat, loose: set[tuple[int, ...]]) -> Repeat:
    stacked = tuple(Stacked(values=item.values, kind="value") if item.values in loose else item for item in repeat.stacked)
    return replace(repeat, stacked=stacked, groups=tuple(group for group in repeat.groups if group not in loose))


def _explain_values(facts: Facts, repeat: Repeat, loose: set, names: list[str], reasons: dict[str, None]) -> None:
    """Leaves that a loop must gather for itself: shared by some blocks, or values in others."""
    for item in repeat.stacked:
        if item.kind != "value" or item.values in loose or not any(facts.is_leaf(value) for value in item.values):
            continue
        leaves = [value for value in item.values if facts.is_leaf(value)]
        if len(set(leaves)) < len(leaves):
            reasons[f"{leaf_list(leaves, names)} shared by several blocks but not all: not stored stacked, gathered in every step"] = None
        else:
            reasons[f"{leaf_list(leaves, names)} share their part with computed values: not stored stacked"] = None
