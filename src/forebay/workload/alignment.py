"""From a run of look-alike equations to a loop: follow the data, not the order of the text.

Given blocks of equations with equal keys, every operand slot must play one part in all blocks:

    made in the same block                        -> internal
    made in the block before (block 0: outside)   -> carried
    made outside, the same value for all blocks   -> invariant
    made outside, another value for each block    -> stacked

    align(blocks):  keep the longest stretch of blocks whose slots agree
                    while something changes:
                        hoist   slices at other positions of outside values (``keys[i]``): they stay before the loop
                        absorb  the makers of stacked values, where all are the same computation and only their block reads them
                                (a leaf's cast to bfloat16 joins its block, so the leaf itself is what is stacked)

Cost: a few passes over an array of shape [count, period, operands]. Known limit: a value made two or more blocks earlier is refused.
"""

from dataclasses import dataclass

import numpy as np

from forebay.workload.facts import EXTERNAL, PAD, Facts
from forebay.workload.flat import array_key
from forebay.workload.loop import Carry, Repeat, Stacked

_FAR = -7
_WIDTH = 1 << 20  # room for result numbers in a place code


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why blocks that look alike are not a loop."""

    reason: str


def align(facts: Facts, blocks: np.ndarray, taken: set[int]) -> Repeat | Refused:
    """The loop that ``blocks`` [count, period] are, with what hoisting and absorbing made of them."""
    blocks = _longest_stretch(facts, blocks)
    while len(blocks) >= 2:
        hoisted = _hoist(facts, blocks)
        if isinstance(hoisted, Refused):
            return hoisted
        if hoisted.shape[1] == 0:
            return Refused(reason="nothing is left in the block")
        grown = _absorb(facts, hoisted, taken)
        if grown.shape == hoisted.shape or not _consistent(facts, grown):
            return _describe(facts, hoisted)
        blocks = grown
    return Refused(reason="each block takes its operands from other places than the one before")


def _origins(facts: Facts, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every slot [count, period, operands]: the value, the block that makes it (or EXTERNAL, PAD), its place in that block."""
    owner = np.full(len(facts.producer) + 1, EXTERNAL, dtype=np.int64)
    place = np.zeros(len(facts.producer) + 1, dtype=np.int64)
    owner[-1] = PAD
    equations = facts.program.equations
    for number, block in enumerate(blocks):
        for position, index in enumerate(block):
            for result, value in enumerate(equations[index].outputs):
                owner[value], place[value] = number, position * _WIDTH + result
    values = facts.operands[blocks]
    return values, owner[values], place[values]


def _codes(owner: np.ndarray, place: np.ndarray, first: int) -> np.ndarray:
    """One integer per slot for the part it plays, seen from a loop that begins at block ``first``."""
    number = np.arange(len(owner))[:, None, None]
    outside = (owner == EXTERNAL) | ((owner >= 0) & (owner < first))
    codes = np.full(owner.shape, _FAR)
    codes = np.where(owner == number, place * 2, codes)
    codes = np.where((owner == number - 1) & ~outside, place * 2 + 1, codes)
    codes = np.where(outside, EXTERNAL, codes)
    return np.where(owner == PAD, PAD, codes)


def _longest_stretch(facts: Facts, blocks: np.ndarray) -> np.ndarray:
    _, owner, place = _origins(facts, blocks)
    best = (0, 0)
    for first in range(len(blocks) - 1):
        if len(blocks) - first <= best[1] - best[0]:
            break
        codes = _codes(owner, place, first)
        carried = (codes[first + 1] >= 0) & (codes[first + 1] % 2 == 1)
        agrees = np.where(carried, codes[first] == EXTERNAL, codes[first] == codes[first + 1])
        if not agrees.all() or (codes[first + 1] == _FAR).any():
            continue
        stop = first + 2
        while stop < len(blocks) and (codes[stop] == codes[stop - 1]).all() and not (codes[stop] == _FAR).any():
            stop += 1
        if stop - first > best[1] - best[0]:
            best = (first, stop)
    return blocks[best[0] : best[1]]


def _hoist(facts: Facts, blocks: np.ndarray) -> np.ndarray | Refused:
    """Drop slices whose position differs from block to block; they must read values from outside the loop."""
    while True:
        differing = [j for j in range(blocks.shape[1]) if len({facts.details[e] for e in blocks[:, j]}) > 1]
        if not differing:
            return blocks
        _, owner, _ = _origins(facts, blocks)
        movable = [j for j in differing if np.isin(owner[:, j], (EXTERNAL, PAD)).all()]
        if not movable:
            return Refused(reason="a slice takes another part of what the block itself computes (a static index that differs)")
        blocks = np.delete(blocks, movable, axis=1)


def _absorb(facts: Facts, blocks: np.ndarray, taken: set[int]) -> np.ndarray:
    values, owner, _ = _origins(facts, blocks)
    inside = [set(block) for block in blocks.tolist()]
    everything = set().union(*inside)
    added: dict[tuple[int, ...], None] = {}
    for position, slot in zip(*np.nonzero((owner == EXTERNAL).all(axis=0)), strict=True):
        per_block = values[:, position, slot].tolist()
        makers = tuple(facts.producer[value] for value in per_block)
        if makers in added or len(set(makers)) < len(makers) or min(makers) < 0:
            continue
        if any(maker in everything or maker in taken for maker in makers):
            continue
        alike = len({(facts.keys[m], facts.details[m], facts.place[v]) for m, v in zip(makers, per_block, strict=True)}) == 1
        if alike and all(_read_by(facts, maker, inside[number]) for number, maker in enumerate(makers)):
            added[makers] = None
    if not added:
        return blocks
    grown = np.concatenate([blocks, np.array(list(added), dtype=np.int64).T], axis=1)
    return grown[:, np.argsort(grown[0], kind="stable")]


def _read_by(facts: Facts, maker: int, block: set[int]) -> bool:
    return not any(facts.read_outside(value, block) for value in facts.program.equations[maker].outputs)


def _describe(facts: Facts, blocks: np.ndarray) -> Repeat | Refused:
    values, owner, place = _origins(facts, blocks)
    carry: dict[tuple[int, int], None] = {}
    invariants: dict[int, None] = {}
    stacked: dict[tuple[int, ...], None] = {}
    for position, slot in np.ndindex(*values.shape[1:]):
        per_block, owners = tuple(values[:, position, slot].tolist()), owner[:, position, slot]
        if owners[1] == 0 and owners[0] == EXTERNAL:
            carry[per_block[0], int(place[1, position, slot])] = None
        elif (owners == EXTERNAL).all():
            if len(set(per_block)) == 1:
                invariants[per_block[0]] = None
            elif not _one_literal(facts, per_block):
                stacked[per_block] = None
    if not carry:
        return Refused(reason="the blocks do not feed one another: nothing is carried")
    inputs = tuple(_stacked(facts, per_block) for per_block in stacked)
    carries = tuple(Carry(start=start, update=divmod(update, _WIDTH)) for start, update in carry)
    collected, last = _read_after(facts, blocks, {item.update for item in carries})
    return Repeat(
        blocks=tuple(tuple(block) for block in blocks.tolist()),
        carry=carries,
        invariants=tuple(value for value in invariants if value not in facts.program.literals),
        stacked=inputs,
        collected=collected,
        last=last,
        groups=tuple(item.values for item in inputs if item.kind == "leaf"),
    )


def _consistent(facts: Facts, blocks: np.ndarray) -> bool:
    return len(_longest_stretch(facts, blocks)) == len(blocks)


def _one_literal(facts: Facts, values: tuple[int, ...]) -> bool:
    literals = facts.program.literals
    return all(value in literals for value in values) and len({array_key(np.asarray(literals[value].val)) for value in values}) == 1


def _stacked(facts: Facts, values: tuple[int, ...]) -> Stacked:
    program = facts.program
    if all(value in program.literals for value in values):
        return Stacked(values=values, kind="literal")
    if all(facts.is_leaf(value) for value in values):
        alike = len({(facts.specs[value], program.avals[value]) for value in values}) == 1
        return Stacked(values=values, kind="leaf" if alike and len(set(values)) == len(values) else "value")
    base = _whole(facts, values)
    if base is not None:
        return Stacked(values=values, kind="whole", base=base[0], kept_axis=base[1])
    return Stacked(values=values, kind="value")


def _whole(facts: Facts, values: tuple[int, ...]) -> tuple[int, bool] | None:
    """The value whose slices 0, 1, ... along axis 0 these values are, all of it; and whether they keep an axis of one."""
    makers = [facts.producer[value] for value in values]
    if min(makers) < 0:
        return None
    sources = [facts.program.equations[maker] for maker in makers]
    bases = {source.inputs[0] if source.inputs else -1 for source in sources}
    base = bases.pop()
    if bases or base < 0 or len({source.name for source in sources}) > 1:
        return None
    shape = facts.program.avals[base].shape
    if not shape or shape[0] != len(values):
        return None
    if sources[0].name in ("unstack", "split") and sources[0].source.params["axis"] == 0 and len(set(makers)) == 1:
        ordered = [facts.place[value] for value in values] == list(range(len(values))) and len(sources[0].outputs) == len(values)
        return (base, sources[0].name == "split") if ordered else None
    if sources[0].name != "slice":
        return None
    wanted = [((b, *(0 for _ in shape[1:])), (b + 1, *shape[1:])) for b in range(len(values))]
    strides = all(set(source.source.params["strides"] or (1,)) == {1} for source in sources)
    return (base, True) if strides and [facts.details[maker] for maker in makers] == wanted else None


def _read_after(facts: Facts, blocks: np.ndarray, updates: set[tuple[int, int]]) -> tuple[tuple, tuple]:
    inside = set(blocks.ravel().tolist())
    collected, last = [], []
    for position in range(blocks.shape[1]):
        for result in range(len(facts.program.equations[blocks[0, position]].outputs)):
            made = [facts.program.equations[index].outputs[result] for index in blocks[:, position]]
            read = [facts.read_outside(value, inside) for value in made]
            if any(read[:-1]):
                collected.append((position, result))
            elif read[-1] and (position, result) not in updates:
                last.append((position, result))
    return tuple(collected), tuple(last)
