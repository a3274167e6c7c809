"""Does the offset that XLA wrote on a slice agree with its index? The scalar instructions of the loop are worked out to see.

XLA:GPU turns an asynchronous slice of host memory into a plain copy from ``byte_offset + turn * byte_stride`` where the pass
dynamic-slice-annotator wrote such a line (openxla/xla 46231: jaxlib 0.10.2 and 0.11.0 write offset 0 and one row per turn on every slice
of host memory, whatever its index). Loop counters, constants and integer arithmetic are followed; anything else is unknown.
"""

import dataclasses
import math
import operator
import re

from forebay.compiler.lines import Instruction, Module, first_match, shape_of

_SAME = ("copy", "bitcast", "convert", "reshape")
_TWO = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max, "and": operator.and_,
        "or": operator.or_}  # fmt: skip
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}
_OPERANDS = dict.fromkeys(_SAME, 1) | dict.fromkeys(_TWO, 2) | {"negate": 1, "compare": 2, "select": 3, "clamp": 3}
_MOST_STEPS, _DEEPEST = 2000, 100


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A while body: where its counter stands in the carry, the counter's first value and step, and the trip count if known."""

    body: str
    position: int
    first: int
    step: int
    trips: int | None


def read_loop(body: str, while_line: str) -> Loop:
    """The loop of ``body`` as the backend configuration of its ``while`` tells; a counter from 0 by 1 where it does not."""
    number = lambda pattern, default: int(found.group(1)) if (found := re.search(pattern, while_line)) else default  # noqa: E731
    return Loop(
        body=body,
        position=number(r'"known_induction_variable":\{"tuple_index":"(\d+)"', 0),
        first=number(r'"init":"(-?\d+)"', 0),
        step=number(r'"step":"(-?\d+)"', 1),
        trips=number(r'"known_trip_count":\{"n":"(\d+)"', None),
    )


def misplaced(module: Module, started: Instruction, loop: Loop) -> bool:
    """Whether a slice inside ``started`` carries a line of bytes that its index does not follow, or whose index is unknown."""
    inside = module.called_by(started)
    numbers = _parameters(inside)
    turns = [0, 1] if loop.trips is None or loop.trips > 1 else [0]
    turns += [loop.trips - 1] if loop.trips else []
    for item in inside:
        line = _annotation(item)
        if line is None:
            continue
        for turn in turns:
            scalars = _Scalars(module, (loop.position, loop.first + turn * loop.step))
            given = {
                name: scalars.value(started.operands[number], {}) for name, number in numbers.items() if number < len(started.operands)
            }
            if _offset(scalars, item, given) != line[0] + turn * line[1]:
                return True
    return False


def _parameters(inside: list[Instruction]) -> dict[str, int]:
    """Which operand each parameter of a computation is, by the parameter's name."""
    return {item.name: int(first_match(r"parameter\((\d+)\)", item.line).group(1)) for item in inside if item.opcode == "parameter"}


def _annotation(item: Instruction) -> tuple[int, int] | None:
    """Byte offset and byte stride of the slice's annotation; newer versions write them under ``linear``."""
    found = re.search(r'"dynamic_slice_config":\{(.*)', item.line)
    if not found or item.opcode not in ("dynamic-slice", "dynamic-update-slice"):
        return None
    text = found.group(1).partition('"linear":{')[2] or found.group(1)
    numbers = re.search(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"', text)
    return (int(numbers.group(1)), int(numbers.group(2))) if numbers else None


def _offset(scalars: "_Scalars", item: Instruction, given: dict) -> int | None:
    """The first byte that the slice touches: each index times the bytes of one step along its axis."""
    update = item.opcode == "dynamic-update-slice"
    if len(item.operands) <= update:
        return None
    types = scalars.module.type_of
    item_bytes, dimensions = shape_of(types(item.operands[0]))
    indices = item.operands[2:] if update else item.operands[1:]
    sizes = shape_of(types(item.operands[1]) if update else item.result)[1]
    if not len(indices) == len(dimensions) == len(sizes):
        return None
    total = 0
    for axis, name in enumerate(indices):
        value = scalars.value(name, given)
        if value is None:
            return None
        within = min(max(value, 0), dimensions[axis] - sizes[axis])  # a dynamic slice never leaves its array
        total += within * item_bytes * math.prod(dimensions[axis + 1 :])
    return total


class _Scalars:
    """Values of the scalar instructions of a loop's body in one turn. ``counter`` is the place of the loop's counter in the carry, and
    its value. What takes too long to follow, or leads back to itself, is unknown."""

    def __init__(self, module: Module, counter: tuple[int, int]):
        self.module, self.counter, self.left = module, counter, _MOST_STEPS

    def value(self, name: str, known: dict, depth: int = 0):
        """The value of ``name``, None where it is unknown. ``known``: the computation's parameters and what was worked out already."""
        self.left -= 1
        if name not in known:
            known[name] = None  # while it is worked out
            found = self.module.by_name.get(name)
            value = None if found is None or depth > _DEEPEST or self.left < 0 else self._work_out(found, known, depth + 1)
            known[name] = value if value is not None and abs(value) < 2**63 else None
        return known[name]

    def _work_out(self, found: Instruction, known: dict, depth: int):
        if found.opcode == "constant":
            return _constant(found)
        if not found.operands:
            return None
        if found.opcode == "get-tuple-element":
            source = self.module.by_name.get(found.operands[0])
            if source is None or source.opcode != "parameter":
                return None
            return self.counter[1] if int(first_match(r"index=(\d+)", found.line).group(1)) == self.counter[0] else None
        values = [self.value(operand, known, depth) for operand in found.operands]
        if None in values or len(values) != _OPERANDS.get(found.opcode, len(values)):
            return None
        return self._inside(found, values, depth) if found.opcode in ("fusion", "call") else _apply(found, values)

    def _inside(self, found: Instruction, values: list, depth: int):
        inside = self.module.called_by(found)
        root = next((item for item in inside if item.line.lstrip().startswith("ROOT ")), None)
        if root is None:
            return None
        numbers = _parameters(inside)
        return self.value(root.name, {name: values[number] for name, number in numbers.items() if number < len(values)}, depth)


def _apply(found: Instruction, values: list):
    if found.opcode in _SAME:
        return values[0]
    if found.opcode in _TWO:
        return _TWO[found.opcode](*values)
    if found.opcode == "negate":
        return -values[0]
    if found.opcode == "compare":
        return _COMPARE[first_match(r"direction=(EQ|NE|LT|LE|GT|GE)", found.line).group(1)](*values)
    if found.opcode == "select":
        return values[1] if values[0] else values[2]
    return min(max(values[0], values[1]), values[2]) if found.opcode == "clamp" else None


def _constant(found: Instruction):
    text = first_match(r"constant\(([^)]*)\)", found.line).group(1)
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else None
