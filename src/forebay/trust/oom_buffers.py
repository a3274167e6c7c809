"""Which instructions of a scheduled program share a buffer: the alias rules of XLA that liveness needs.

    fresh buffer for each array that an instruction makes
    one buffer with its operand:  tuple, get-tuple-element, bitcast, while, the ends of asynchronous operations, an update in place
    one buffer with the caller's: parameters of a body, the root of a body (the loop's carry)
    one buffer with a donated argument: the output that takes it over

Each array leaf of each instruction has a number; numbers are joined (union-find) where the rules say that the memory is one. Cost: linear
in the program. Limits: sizes are logical, so the tiles of a TPU layout (at most a few per cent at real sizes) are not counted; a reuse that
XLA may or may not choose (an elementwise fusion that writes over an operand) is left to ``oom_peak``.
"""

import re
from dataclasses import dataclass, field

from forebay.timeline.parse import Computation, Instruction, Module
from forebay.timeline.shapes import Array, HloSyntaxError, Shape, arrays

_SAME = frozenset({"bitcast", "while", "optimization-barrier", "opt-barrier", "domain", "add-dependency", "copy-done", "all-reduce-done"})
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_CALLS = ("call", "while", "conditional", "async-start", "call-start")


@dataclass(slots=True)
class Buffers:
    """``leaves[computation][instruction]`` are the numbers of its array leaves; ``array[n]`` and ``maker[n]`` are those of number n;
    ``writers[n]`` is the instruction that writes n in place, slice by slice, where there is one."""

    module: Module
    leaves: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    array: list[Array] = field(default_factory=list)
    maker: list[tuple[str, Instruction]] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    writers: dict[int, Instruction] = field(default_factory=dict)

    def find(self, number: int) -> int:
        """The number that stands for the whole buffer."""
        while self.above[number] != number:
            self.above[number] = self.above[self.above[number]]
            number = self.above[number]
        return number

    def join(self, one: int, other: int) -> None:
        """The two are one memory; the lower number (made earlier) stands for it."""
        low, high = sorted((self.find(one), self.find(other)))
        self.above[high] = low

    def of(self, computation: str, name: str) -> tuple[int, ...]:
        """The buffers of an instruction, one for each array leaf."""
        return tuple(map(self.find, self.leaves[computation][name]))


def read_buffers(module: Module) -> Buffers:
    """The buffers of everything that the entry computation runs."""
    buffers = Buffers(module)
    _enter(buffers, module.computations[module.entry], {})
    _donations(buffers)
    return buffers


def _enter(buffers: Buffers, computation: Computation, given: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Number a computation whose parameters stand in the buffers ``given``; the leaves of its root."""
    if computation.name in buffers.leaves:  # called from several places: its memory is that of the first
        return buffers.leaves[computation.name][computation.root.name]
    table = buffers.leaves[computation.name] = {}
    for instruction in computation.instructions:
        here = given.get(int(instruction.arguments)) if instruction.opcode == "parameter" else None
        try:
            table[instruction.name] = here if here is not None else _leaves(buffers, computation, instruction, table)
            if instruction.opcode in _CALLS:
                _call(buffers, instruction, table)
        except (KeyError, IndexError) as error:  # lacks what its opcode needs: not HLO as XLA writes it
            where = f"HLO line {instruction.line}: {instruction.opcode} {instruction.name!r}"
            raise HloSyntaxError(f"{where} lacks something that it needs ({type(error).__name__}: {error})") from error
    return table[computation.root.name]


def _leaves(buffers: Buffers, inside: Computation, instruction: Instruction, table: dict) -> tuple[int, ...]:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "tuple":
        return tuple(number for name in operands for number in table[name])
    if opcode == "get-tuple-element":
        first, last = _span(inside.by_name[operands[0]].shape, int(instruction.attributes["index"]))
        return table[operands[0]][first:last]
    if opcode in _SAME and operands:
        source = table[operands[0]]
        return source[: len(arrays(instruction.shape))] if opcode == "copy-done" else source
    if opcode.endswith(("-done", "-update")) and operands:
        handed = _end(inside, instruction, table)
        if len(handed) == len(arrays(instruction.shape)):  # an update that brings the operands itself makes its own
            return handed
    made = tuple(_fresh(buffers, inside, instruction, array) for array in arrays(instruction.shape))
    _share(buffers, instruction, made, table)
    return made


def _fresh(buffers: Buffers, inside: Computation, instruction: Instruction, array: Array) -> int:
    number = len(buffers.array)
    buffers.array.append(array)
    buffers.maker.append((inside.name, instruction))
    buffers.above.append(number)
    return number


def _end(inside: Computation, instruction: Instruction, table: dict) -> tuple[int, ...]:
    """The end of an asynchronous operation hands on the result, the second member of what its start made."""
    start = inside.by_name[instruction.operands[0]]
    own, wanted = table[start.name], len(arrays(instruction.shape))
    if instruction.opcode.endswith("-update"):
        return own
    elements = getattr(start.shape, "elements", ())
    if len(elements) < 2:
        return own[:wanted]
    skipped = len(arrays(elements[0]))
    return own[skipped : skipped + wanted]


def _share(buffers: Buffers, instruction: Instruction, made: tuple[int, ...], table: dict) -> None:
    """Join what an instruction makes with the operands that it only hands on or writes in place."""
    opcode = instruction.opcode
    given = [number for name in instruction.operands[opcode.endswith("-update") :] for number in table[name]]
    if opcode == "copy-start":  # (destination, source, context)
        buffers.join(made[1], given[0])
        return
    if opcode.endswith(("-start", "-update")) and opcode not in ("all-reduce-start", "send-start", "recv-start"):
        for own, operand in zip(made, given, strict=False):  # the first member repeats the operands
            if buffers.array[own].bytes == buffers.array[operand].bytes:
                buffers.join(own, operand)
        made = made[len(given) :]
    for at, operand in _in_place(buffers.module, instruction):
        if at < len(made) and operand < len(instruction.operands) and len(table[instruction.operands[operand]]) == 1:
            buffers.join(made[at], table[instruction.operands[operand]][0])
            buffers.writers[made[at]] = instruction


def _in_place(module: Module, instruction: Instruction) -> list[tuple[int, int]]:
    """(leaf of the result, operand) that are one buffer: updates of a slice, and what a fusion or a custom call states."""
    if instruction.opcode in _IN_PLACE:
        return [(0, 0)]
    stated = instruction.attributes.get("output_to_operand_aliasing", "")
    pairs = [(int(at.split(",")[-1] or 0), int(operand)) for at, operand, _ in _PAIR.findall(stated)]
    if instruction.opcode not in ("fusion", "fusion-start", "async-start"):
        return pairs
    for called in instruction.callees[:1]:
        pairs += _updates(module.computations[called])
    return pairs


def _updates(fused: Computation) -> list[tuple[int, int]]:
    roots = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    found = []
    for at, name in enumerate(roots):
        seen = _through(fused, name)
        if seen.opcode in _IN_PLACE:
            target = _through(fused, seen.operands[0])
            found += [(at, int(target.arguments))] if target.opcode == "parameter" else []
    return found


def _through(fused: Computation, name: str) -> Instruction:
    seen = fused.by_name[name]
    while (seen.opcode in ("bitcast", "copy", "convert") or _handed_on(seen)) and seen.operands:
        inner = fused.by_name[seen.operands[0]]
        if arrays(inner.shape)[0].bytes != arrays(seen.shape)[0].bytes:
            break
        seen = inner
    return seen


def _handed_on(seen: Instruction) -> bool:
    return seen.opcode == "fusion" and "output_to_operand_aliasing" in seen.attributes


def _call(buffers: Buffers, caller: Instruction, table: dict) -> None:
    """Enter what a loop, a call or a branch runs: its parameters and its root stand in the caller's buffers."""
    own = table[caller.name]
    for index, callee in enumerate(caller.callees):
        computation = buffers.module.computations[callee]
        if caller.opcode in ("async-start", "call-start"):
            continue  # runs on its own; what it makes is in the start's result
        operands = [table[name] for name in caller.operands]
        if caller.opcode == "conditional":
            operands = operands[index + 1 : index + 2]
        root = _enter(buffers, computation, dict(enumerate(operands)))
        if caller.opcode != "while" or callee == _body(caller):
            for one, other in zip(root, own, strict=False):
                buffers.join(one, other)


def _body(loop: Instruction) -> str:
    return loop.attributes["body"].lstrip("%")


def _span(shape: Shape, index: int) -> tuple[int, int]:
    """First leaf and the leaf after the last of one member of a tuple shape."""
    assert not isinstance(shape, Array), "get-tuple-element of an array"
    first = sum(len(arrays(element)) for element in shape.elements[:index])
    return first, first + len(arrays(shape.elements[index]))


def _donations(buffers: Buffers) -> None:
    entry = buffers.module.computations[buffers.module.entry]
    parameters = {int(i.arguments): i for i in entry.instructions if i.opcode == "parameter"}
    outputs = buffers.leaves[entry.name][entry.root.name]
    for at, argument in buffers.module.aliases.items():
        if at < len(outputs) and argument in parameters and len(own := buffers.leaves[entry.name][parameters[argument].name]) == 1:
            buffers.join(own[0], outputs[at])
