"""Where does a sequence of keys repeat? All tandem runs, and the orders of the program in which layers show as runs.

Idea: a run of period p is a stretch where ``keys[i] == keys[i + p]``. One vectorised comparison per period finds them all: n periods
of n comparisons, milliseconds for a model of a few thousand equations. No suffix structure is worth its code at that size.

A Python loop writes its layers one after another, so the program's own order nearly always shows them. What hides them is moved
or left out in further orders, never in the program itself:
    sunk     what prepares a single leaf for a single reader (a cast, a square) stands at that reader
    bound    what no floating-point input reaches (masks, PRNG bits, positions) is left out; alignment takes it in again
    useful   what no later weight depends on (auxiliary losses, statistics) is left out
"""

from dataclasses import dataclass

import numpy as np

from forebay.workload.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``order[start : start + length]`` has period ``period``."""

    start: int
    period: int
    length: int

    @property
    def count(self) -> int:
        """Whole blocks in the run."""
        return self.length // self.period

    @property
    def covered(self) -> int:
        """Equations in whole blocks."""
        return self.count * self.period

    def blocks(self, order: np.ndarray, offset: int) -> np.ndarray:
        """Equations [count, period] of the run's whole blocks, the first one ``offset`` into the run."""
        count = (self.length - offset) // self.period
        first = self.start + offset
        return order[first : first + count * self.period].reshape(count, self.period)


def tandem_runs(keys: np.ndarray) -> list[Run]:
    """Every maximal run with two whole blocks or more, the ones that cover most first, then the short periods."""
    runs = []
    for period in range(1, len(keys) // 2 + 1):
        same = np.concatenate([[False], keys[:-period] == keys[period:], [False]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(same)).reshape(-1, 2)
        for start, stop in edges[edges[:, 1] - edges[:, 0] >= period]:
            runs.append(Run(start=int(start), period=period, length=int(stop - start) + period))
    return sorted(runs, key=lambda run: (-run.covered, run.period, run.start))


def orders(facts: Facts) -> list[np.ndarray]:
    """The orders to search, without repetitions among them."""
    written = np.arange(len(facts.keys))
    sunk = _sunk(facts)
    bound = sunk[~facts.free[sunk]]
    useful = bound[_useful(facts)[bound]]
    found: dict[bytes, np.ndarray] = {}
    for order in (written, sunk, written[~facts.free[written]], bound, useful):
        found.setdefault(order.tobytes(), order)
    return list(found.values())


def _sunk(facts: Facts) -> np.ndarray:
    """The program's order with single-use preparations of one leaf moved to their reader."""
    equations = facts.program.equations
    waiting = set()
    for index, equation in enumerate(equations):
        readers = {reader for value in equation.outputs for reader in facts.consumers[value]}
        kept = any(value in facts.program.outputs for value in equation.outputs)
        if facts.leaf_only[index] and len(readers) == 1 and not kept:
            waiting.add(index)
    order: list[int] = []
    for index in range(len(equations)):
        if index in waiting:
            continue
        chain, stack = [], [index]
        while stack:
            current = stack.pop()
            chain.append(current)
            makers = [facts.producer[value] for value in equations[current].inputs]
            stack.extend(dict.fromkeys(maker for maker in makers if maker in waiting))
        order.extend(reversed(chain))
    return np.array(order, dtype=np.int64)


def _useful(facts: Facts) -> np.ndarray:
    """Equations on which a later meeting of data and weight depends."""
    useful = facts.reads_leaf & ~facts.leaf_only
    for index in range(len(useful) - 1, -1, -1):
        if useful[index]:
            for value in facts.program.equations[index].inputs:
                if facts.producer[value] >= 0:
                    useful[facts.producer[value]] = True
    return useful


def offsets(facts: Facts, order: np.ndarray, run: Run) -> list[int]:
    """Where the blocks of a run may begin: the cut that carries the fewest bytes first; of equal cuts, one before a contraction.

    A chain carries the same at every cut. Beginning with the contraction keeps a layer's weight, bias and activation together, where a
    first layer of another width would otherwise lend its bias to the loop.
    """
    spare = run.length - run.covered
    bytes_at = {offset: _carried_bytes(facts, run.blocks(order, offset)) for offset in range(spare + 1)}
    return sorted(bytes_at, key=lambda offset: (bytes_at[offset], not facts.heavy[order[run.start + offset]], offset))


def _carried_bytes(facts: Facts, blocks: np.ndarray) -> int:
    made = {value for index in blocks[0] for value in facts.program.equations[index].outputs}
    read = {value for index in blocks[1] for value in facts.program.equations[index].inputs}
    return sum(facts.nbytes(value) for value in made & read)
