"""What is known about each value and equation of a flat program before repeats are sought: who makes it, who reads it, what it needs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from forebay.workload.flat import Equation, Program
from forebay.workload.sameness import Sameness, detail

EXTERNAL, PAD = -2, -3


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Tables over values and equations. ``operands[e]`` is padded with -1; ``owner`` tables get one more row for that."""

    program: Program
    specs: tuple[Hashable | None, ...]
    keys: np.ndarray
    coarse: np.ndarray
    details: tuple[Hashable, ...]
    operands: np.ndarray
    producer: tuple[int, ...]
    place: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    heavy: np.ndarray
    reads_leaf: np.ndarray
    free: np.ndarray
    leaf_only: np.ndarray

    def is_leaf(self, value: int) -> bool:
        """Whether a value is an input that may be stored stacked."""
        return value < self.program.inputs and self.specs[value] is not None

    def nbytes(self, value: int) -> int:
        """Bytes of one value; extended types such as PRNG keys count as one byte an element."""
        aval = self.program.avals[value]
        itemsize = getattr(aval.dtype, "itemsize", 1)
        return int(np.prod(aval.shape, dtype=np.int64)) * itemsize

    def read_outside(self, value: int, inside: frozenset[int] | set[int]) -> bool:
        """Whether anything but the given equations reads a value (the program's own result counts)."""
        return value in self.program.outputs or any(reader not in inside for reader in self.consumers[value])


def gather(program: Program, specs: Sequence[Hashable | None]) -> Facts:
    """Build the tables: one pass over the equations."""
    sameness = Sameness()
    kinds: dict[Hashable, int] = {}  # a computation, and the specs of the leaves it reads: blocks of other specs are other blocks
    equations = program.equations
    producer, place = [-1] * len(program.avals), [0] * len(program.avals)
    consumers: list[list[int]] = [[] for _ in program.avals]
    width = max((len(equation.operands) for equation in equations), default=1)
    operands = np.full((len(equations), max(width, 1)), -1, dtype=np.int64)
    for index, equation in enumerate(equations):
        operands[index, : len(equation.operands)] = equation.operands
        for value in dict.fromkeys(equation.inputs):
            consumers[value].append(index)
        for number, value in enumerate(equation.outputs):
            producer[value], place[value] = index, number
    leaves, data, inexact = _ancestry(program, specs)
    return Facts(
        program=program,
        specs=tuple(specs),
        keys=np.array(
            [kinds.setdefault((key, _specs(e, specs)), len(kinds)) for key, e in zip(sameness.keys(equations), equations, strict=True)],
            dtype=np.int64,
        ),
        coarse=np.array([sameness.coarse_key(equation) for equation in equations], dtype=np.int64),
        details=tuple(detail(equation) for equation in equations),
        operands=operands,
        producer=tuple(producer),
        place=tuple(place),
        consumers=tuple(tuple(readers) for readers in consumers),
        heavy=np.array([_is_heavy(equation) for equation in equations], dtype=bool),
        reads_leaf=np.array([any(_one(leaves[v]) and not data[v] for v in equation.inputs) for equation in equations], dtype=bool),
        free=np.array([not inexact[equation.outputs[0]] if equation.outputs else False for equation in equations], dtype=bool),
        leaf_only=np.array([bool(e.outputs) and _one(leaves[e.outputs[0]]) and not data[e.outputs[0]] for e in equations], dtype=bool),
    )


def _specs(equation: Equation, specs: Sequence[Hashable | None]) -> tuple[Hashable | None, ...]:
    return tuple(specs[value] if value < len(specs) else None for value in equation.inputs)


def _one(leaves: frozenset[int] | None) -> bool:
    return leaves is not None and len(leaves) == 1


def _ancestry(program: Program, specs: Sequence[Hashable | None]) -> tuple[list[Any], list[bool], list[bool]]:
    """For each value: the leaves it needs (None for two or more), whether it needs other inputs, whether any of those are inexact."""
    leaves: list[Any] = [frozenset()] * len(program.avals)
    data, inexact = [False] * len(program.avals), [False] * len(program.avals)
    for value in range(program.inputs):
        leaves[value] = frozenset([value]) if specs[value] is not None else frozenset()
        data[value] = specs[value] is None
        inexact[value] = jnp.issubdtype(program.avals[value].dtype, jnp.inexact)
    for equation in program.equations:
        needed: frozenset[int] | None = frozenset()
        for value in equation.inputs:
            needed = None if needed is None or leaves[value] is None else needed | leaves[value]
        needed = None if needed is not None and len(needed) > 1 else needed
        for value in equation.outputs:
            leaves[value] = needed
            data[value] = any(data[v] for v in equation.inputs)
            inexact[value] = any(inexact[v] for v in equation.inputs)
    return leaves, data, inexact


def _is_heavy(equation: Equation) -> bool:
    """Whether an equation is worth a loop by itself: a contraction, or anything that holds a program of its own."""
    if equation.name.startswith(("dot", "conv_", "ragged_dot")):
        return True
    return any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in equation.source.params.values())
