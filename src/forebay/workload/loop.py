"""What a rolled loop is: which equations repeat, what is carried, what is stacked, and how the arguments are stored.

Everything is plain integers: equations count along the flat program (``flat.flatten``), values are numbers of that program,
and values below the number of inputs are the program's inputs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from forebay.errors import InputError
from forebay.workload.flat import Program
from forebay.workload.sameness import refused_effects

Kind = Literal["leaf", "whole", "value", "literal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """A value passed from block to block: ``start`` enters block 0, ``update`` is the (position, result) that enters the next."""

    start: int
    update: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """A value that differs from block to block, one number per block.

    ``leaf``: parameter leaves, stored stacked. ``whole``: slices 0, 1, ... of a value ``base`` that is stacked already (``kept_axis``: the
    block sees a leading axis of one). ``value``: computed before the loop and stacked there. ``literal``: constants in the program's text.
    """

    values: tuple[int, ...]
    kind: Kind
    base: int | None = None
    kept_axis: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A block of equations that repeats: ``blocks[b][j]`` is equation ``j`` of block ``b``."""

    blocks: tuple[tuple[int, ...], ...]
    carry: tuple[Carry, ...]
    invariants: tuple[int, ...]
    stacked: tuple[Stacked, ...]
    collected: tuple[tuple[int, int], ...]  # (position, result) read after the loop, from blocks other than the last
    last: tuple[tuple[int, int], ...]  # (position, result) read after the loop, from the last block alone
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert self.count >= 2, "a loop of length one drops the offload"
        assert all(len(block) == self.period for block in self.blocks)

    @property
    def start(self) -> int:
        """The first equation of the first block."""
        return min(self.blocks[0])

    @property
    def period(self) -> int:
        """Equations per block."""
        return len(self.blocks[0])

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def whole(self) -> tuple[int, ...]:
        """Stacked values that the user's program reads slice by slice; those below the number of inputs are stored that way already."""
        return tuple(sorted({stacked.base for stacked in self.stacked if stacked.kind == "whole" and stacked.base is not None}))

    @property
    def equations(self) -> frozenset[int]:
        """Every equation in the loop."""
        return frozenset(equation for block in self.blocks for equation in block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a rolled program takes its arguments: each slot is one original input, or a group of inputs stacked on a new axis 0.

    Example: ``Storage(slots=((0,), (1, 3, 5), (2,), (4,)), inputs=6)``: inputs 1, 3 and 5 are one array of shape ``[3, ...]``.
    """

    slots: tuple[tuple[int, ...], ...]
    inputs: int

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The slots that hold more than one input."""
        return tuple(slot for slot in self.slots if len(slot) > 1)

    def require(self, stored: Sequence[Any]) -> None:
        """Raise InputError unless there is one stored argument per slot."""
        if len(stored) != len(self.slots):
            raise InputError(f"the rolled program takes {len(self.slots)} stored arguments, {len(stored)} were given")

    def stack(self, arguments: Sequence[Any]) -> list[Any]:
        """Original arguments to stored ones: groups are stacked with ``jnp.stack``. Raises InputError on a wrong count."""
        if len(arguments) != self.inputs:
            raise InputError(f"the program takes {self.inputs} arguments, {len(arguments)} were given")
        return [jnp.stack([arguments[i] for i in slot]) if len(slot) > 1 else arguments[min(slot)] for slot in self.slots]

    def unstack(self, stored: Sequence[Any]) -> list[Any]:
        """Stored arguments (or their gradients) back to one per original input. Raises InputError on a wrong count."""
        self.require(stored)
        arguments: list[Any] = [None] * self.inputs
        for slot, value in zip(self.slots, stored, strict=True):
            for place, index in enumerate(slot):
                arguments[index] = value[place] if len(slot) > 1 else value
        return arguments


def storage_of(inputs: int, repeats: Sequence[Repeat]) -> Storage:
    """The slots in the order of their first input: a group stands where its first leaf stood."""
    first = {group[0]: group for repeat in repeats for group in repeat.groups}
    grouped = {index for group in first.values() for index in group}
    slots = [first.get(index, (index,)) for index in range(inputs) if index in first or index not in grouped]
    return Storage(slots=tuple(slots), inputs=inputs)


def schedule(program: Program, producer: Sequence[int], loops: Sequence[frozenset[int]]) -> list[int] | None:
    """An order of execution: equation ``e`` as ``e``, loop ``r`` as ``-1 - r``; None where a loop would wait for itself."""
    node = list(range(len(program.equations)))
    for number, loop in enumerate(loops):
        for equation in loop:
            node[equation] = -1 - number
    waits: dict[int, set[int]] = {n: set() for n in node}
    feeds: dict[int, set[int]] = {n: set() for n in node}
    rank: dict[int, int] = {}
    effectful: int | None = None
    for index, equation in enumerate(program.equations):
        here = node[index]
        rank.setdefault(here, index)
        for value in equation.inputs:
            made = producer[value]
            if made >= 0 and node[made] != here:
                waits[here].add(node[made])
                feeds[node[made]].add(here)
        if refused_effects(equation.source):  # never in a loop, and never past one another
            if effectful is not None:
                waits[here].add(effectful)
                feeds[effectful].add(here)
            effectful = here
    ready = [(rank[n], n) for n in waits if not waits[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, done = heapq.heappop(ready)
        order.append(done)
        for follower in feeds[done]:
            waits[follower].discard(done)
            if not waits[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    return order if len(order) == len(waits) else None
