"""Trip counts of loops that the compiler does not state (TPU never does): read from the loop itself, or not at all.

Recognised is the counted loop ``i = init; while i OP bound: i += step`` with constant init, bound and step, where each may pass
through copies, casts to the same type, tuples, loop-invariant elements of the carry and wrapping fusions. Anything else stays
unknown; nothing is guessed."""

import math
import re

from forebay.timeline.parse import Computation, Instruction, Module

_THROUGH = frozenset({"copy", "bitcast", "reshape", "optimization-barrier", "opt-barrier"})
_STEPS = 1000


class TripCounts:
    """Trip counts of one module's loops."""

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode == "while":
                    self._callers.setdefault(instruction.attributes.get("body", "").strip("%"), []).append((computation, instruction))

    def of(self, loop: Instruction, inside: Computation) -> int | None:
        """How often the body of a ``while`` runs; None where the loop is not of the counted form."""
        if loop.trip_count is not None:
            return loop.trip_count
        body = self._module.computations.get(loop.attributes["body"].strip("%"))
        condition = self._module.computations.get(loop.attributes["condition"].strip("%"))
        if body is None or condition is None:
            return None
        test = _comparison(condition, self._module)
        if test is None:
            return None
        index, bound, direction = test
        limit = bound if isinstance(bound, int) else self._entering(loop, inside, body, bound[0])
        start, step = self._scalar(self._element(loop, inside, index), inside), _step(body, index, self._module)
        if isinstance(step, tuple):
            step = self._entering(loop, inside, body, step[0])
        return None if limit is None or start is None or not step else _count(start, limit, step, direction)

    def _element(self, loop: Instruction, inside: Computation, index: int) -> Instruction | None:
        source = inside.by_name[loop.operands[0]]
        return inside.by_name[source.operands[index]] if source.opcode == "tuple" else None

    def _entering(self, loop: Instruction, inside: Computation, body: Computation, index: int) -> int | None:
        """The constant that enters a loop at ``index`` and that no iteration changes."""
        kept = body.by_name[body.root.operands[index]] if body.root.opcode == "tuple" else None
        if kept is None or _carried(kept, body) != index:
            return None
        return self._scalar(self._element(loop, inside, index), inside)

    def _scalar(self, seen: Instruction | None, inside: Computation) -> int | None:
        """The constant integer that an instruction is, seen through copies and through invariant carries of outer loops."""
        for _ in range(_STEPS):
            if seen is None:
                return None
            if seen.opcode == "constant":
                return int(seen.arguments) if re.fullmatch(r"-?\d+", seen.arguments.strip()) else None
            if seen.opcode in _THROUGH:
                seen = inside.by_name[seen.operands[0]]
                continue
            index = _carried(seen, inside)
            callers = self._callers.get(inside.name, [])
            if index is None or len(callers) != 1:
                return None
            outer, loop = callers[0]
            if self._module.computations[inside.name].root.opcode != "tuple" or _carried_back(inside, index) != index:
                return None
            seen, inside = self._element(loop, outer, index), outer
        return None


def _carried(seen: Instruction, inside: Computation) -> int | None:
    """The index of the carry's element that an instruction is, or None."""
    while seen.opcode in _THROUGH:
        seen = inside.by_name[seen.operands[0]]
    if seen.opcode == "get-tuple-element" and inside.by_name[seen.operands[0]].opcode == "parameter":
        return int(seen.attributes["index"])
    return None


def _carried_back(body: Computation, index: int) -> int | None:
    return _carried(body.by_name[body.root.operands[index]], body)


def _constant_or_carried(seen: Instruction, inside: Computation) -> int | tuple[int] | None:
    while seen.opcode in _THROUGH:
        seen = inside.by_name[seen.operands[0]]
    if seen.opcode == "constant" and re.fullmatch(r"-?\d+", seen.arguments.strip()):
        return int(seen.arguments)
    index = _carried(seen, inside)
    return None if index is None else (index,)


def _unwrapped(seen: Instruction, inside: Computation, module: Module) -> tuple[Instruction, Computation, dict[str, Instruction]]:
    """An instruction, or the root of the small fusion that wraps it, with what its parameters stand for."""
    if seen.opcode != "fusion":
        return seen, inside, {}
    fused = module.computations[seen.callees[0]]
    arguments = {p.name: inside.by_name[seen.operands[int(p.arguments)]] for p in fused.instructions if p.opcode == "parameter"}
    return fused.root, fused, arguments


def _operand(name: str, holder: Computation, arguments: dict[str, Instruction], inside: Computation) -> int | tuple[int] | None:
    if name in arguments:
        return _constant_or_carried(arguments[name], inside)
    return _constant_or_carried(holder.by_name[name], holder)


def _comparison(condition: Computation, module: Module) -> tuple[int, int | tuple[int], str] | None:
    """(carry index, bound, direction) of ``i OP bound``; the bound is a constant or another carried element."""
    found, holder, arguments = _unwrapped(condition.root, condition, module)
    if found.opcode != "compare":
        return None
    left, right = (_operand(o, holder, arguments, condition) for o in found.operands)
    if not isinstance(left, tuple) or right is None:
        return None
    return left[0], right, found.attributes["direction"]


def _step(body: Computation, index: int, module: Module) -> int | tuple[int] | None:
    """What an iteration adds to the carried element: a constant, or another carried element."""
    if body.root.opcode != "tuple":
        return None
    seen = body.by_name[body.root.operands[index]]
    while seen.opcode in _THROUGH:
        seen = body.by_name[seen.operands[0]]
    found, holder, arguments = _unwrapped(seen, body, module)
    if found.opcode != "add":
        return None
    left, right = (_operand(o, holder, arguments, body) for o in found.operands)
    if left == (index,):
        return right
    return left if right == (index,) else None


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction == "NE":
        return (limit - start) // step if (limit - start) % step == 0 and (limit - start) // step >= 0 else None
    if direction in ("LT", "LE") and step > 0:
        return max(0, math.ceil((limit + (direction == "LE") - start) / step))
    if direction in ("GT", "GE") and step < 0:
        return max(0, math.ceil((start - limit + (direction == "GE")) / -step))
    return None
