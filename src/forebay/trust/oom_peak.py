"""The peak of a compiled program: which buffers are alive together where the scheduled HLO needs most memory, and whose they are.

    for each computation, inner ones first:
        a buffer lives from the instruction that makes it to the last that reads any alias of it
        bytes at an instruction = live buffers made here + the peak of what it calls
    peak of the program = arguments + outputs of their own + the highest point of the entry computation

Arguments and outputs hold their memory for the whole call, as XLA counts them; what it calls *temp* is the rest. An elementwise fusion
writes over an operand of its size that dies there, as XLA does. Cost: linear in the program. The true temp is that of an allocator: it
can be higher by what does not fit into gaps (see tests/trust/test_oom_peak.py for how far the two are apart on whole train steps).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.timeline.parse import Computation, Instruction, Module, parse_hlo
from forebay.timeline.shapes import HOST_SPACE, Array, HloSyntaxError
from forebay.trust.oom_buffers import Buffers, read_buffers
from forebay.trust.oom_source import Frames, read_frames

HBM, HOST = 0, HOST_SPACE
_NOT_A_USE = frozenset({"tuple", "get-tuple-element", "bitcast"})
_WRITES_OVER = frozenset("add subtract multiply divide maximum minimum convert negate tanh exponential select all-reduce".split())
_WRAPPED = re.compile(r"jit\(.*\)|while|body|cond|closed_call|eval_jaxpr|checkpoint|rematted_computation|(?:transpose\()?(?:jvp\()*\)*")
_FILLED = frozenset({"broadcast", "custom-call"})
_NO_MEMORY = frozenset({"constant"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A buffer that is alive at the peak. ``kind`` is argument, output or temp; ``source`` the user's line, empty where none is known;
    ``copies`` counts buffers of this size, name and source."""

    bytes: int
    kind: str
    shape: str
    operation: str
    source: str
    instruction: str
    argument: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes per device of one memory space at its highest point. ``temp_bytes`` is to be held against the compiler's own temp size."""

    space: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    at: str
    live: tuple[Live, ...]

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs that take over no argument, and temporaries."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def find_peak(source: str | Module, space: int = HBM) -> Peak:
    """The peak of a scheduled program (HLO text, or parsed) in one memory space: ``HBM`` or ``HOST``.

    Raises:
        HloSyntaxError: text that is not HLO, or HLO without a schedule.
    """
    module = parse_hlo(source) if isinstance(source, str) else source
    if not module.scheduled:
        raise HloSyntaxError("this HLO has no schedule (is_scheduled=true): liveness needs the text after optimizations")
    frames = read_frames(source) if isinstance(source, str) else read_frames("")
    return _Liveness(module, space, frames).peak()


class _Liveness:
    def __init__(self, module: Module, space: int, frames: Frames):
        self.module, self.space, self.frames = module, space, frames
        self.buffers: Buffers = read_buffers(module)
        self.writers = {self.buffers.find(number): instruction for number, instruction in self.buffers.writers.items()}
        self.done: dict[str, tuple[int, tuple[int, ...], str]] = {}
        entry = module.computations[module.entry]
        named = [i for i in entry.instructions if i.opcode == "parameter"]
        self.arguments = {n: i for i in named for n in self.buffers.of(entry.name, i.name)}
        self.outputs = [n for n in dict.fromkeys(self.buffers.of(entry.name, entry.root.name)) if n not in self.arguments]

    def peak(self) -> Peak:
        for computation in self._inner_first():
            self.done[computation.name] = self._highest(computation)
        temp, live, at = self.done[self.module.entry]
        arguments = sum(self.size(n) for n in self.arguments)
        outputs = sum(self.size(n) for n in self.outputs)
        found = [self._live(n, "argument") for n in self.arguments] + [self._live(n, "output") for n in self.outputs]
        found += [self._live(n, "temp") for n in live]
        return Peak(
            space=self.space, argument_bytes=arguments, output_bytes=outputs, temp_bytes=temp, at=at,
            live=tuple(sorted((x for x in found if x.bytes), key=lambda x: -x.bytes)),
        )  # fmt: skip

    def size(self, number: int) -> int:
        """Bytes of a buffer in this space."""
        array = self.buffers.array[number]
        return array.bytes if array.space == self.space else 0

    def _inner_first(self) -> list[Computation]:
        order: dict[str, Computation] = {}
        stack = [(self.module.entry, False)]
        while stack:
            name, ready = stack.pop()
            if name in order or name not in self.buffers.leaves:
                continue
            if ready:
                order[name] = self.module.computations[name]
                continue
            stack.append((name, True))
            stack += [(callee, False) for i in self.module.computations[name].instructions for callee in i.callees]
        return list(order.values())

    def _highest(self, computation: Computation) -> tuple[int, tuple[int, ...], str]:
        """Most bytes of buffers made in ``computation`` and below it, those buffers, and the instruction where they are alive."""
        born, last = self._ranges(computation)
        dies: dict[int, list[int]] = {}
        for number, at in last.items():
            dies.setdefault(at, []).append(number)
        held: dict[int, None] = {}
        now, best = 0, (0, (), "")
        for at, instruction in enumerate(computation.instructions):
            for number in born.get(at, ()):
                over = self._written_over(computation, instruction, number, last, at, held)
                if over is not None:
                    now -= self.size(over)
                    del held[over]
                held[number] = None
                now += self.size(number)
            below = max((self.done[c] for c in instruction.callees if c in self.done), default=(0, (), ""), key=lambda x: x[0])
            if now + below[0] > best[0]:
                best = (now + below[0], (*held, *below[1]), below[2] or instruction.name)
            for number in dies.get(at, ()):
                if number in held:
                    del held[number]
                    now -= self.size(number)
        return best

    def _ranges(self, computation: Computation) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Where each buffer that is made in ``computation`` begins, and its last use by position."""
        table, own = self.buffers.leaves[computation.name], self._made_here(computation)
        born: dict[int, list[int]] = {}
        last: dict[int, int] = {}
        for at, instruction in enumerate(computation.instructions):
            mine = [n for n in map(self.buffers.find, table[instruction.name]) if n in own]
            for number in mine:
                if number not in last:
                    born.setdefault(at, []).append(number)
                    last[number] = at
            if instruction.opcode in _NOT_A_USE:
                continue
            for name in instruction.operands:
                last.update({n: at for n in map(self.buffers.find, table[name]) if n in last})
        return born, last

    def _made_here(self, computation: Computation) -> set[int]:
        """Buffers whose memory belongs to this computation: not a caller's carry, not an argument or output of the program."""
        outside = set(self.arguments) | set(self.outputs)
        found = set()
        for numbers in self.buffers.leaves[computation.name].values():
            for number in map(self.buffers.find, numbers):
                maker, instruction = self.buffers.maker[number]
                if maker == computation.name and number not in outside and instruction.opcode not in _NO_MEMORY and self.size(number):
                    found.add(number)
        return found

    def _written_over(self, computation, instruction: Instruction, number: int, last: dict, at: int, held: Mapping) -> int | None:
        """The operand of its size that a fusion writes over, where that operand dies here."""
        if instruction.opcode not in _WRITES_OVER and not self._elementwise(instruction):
            return None
        for name in instruction.operands:
            for operand in map(self.buffers.find, self.buffers.leaves[computation.name][name]):
                if operand != number and operand in held and last[operand] == at and self.size(operand) == self.size(number):
                    return operand
        return None

    def _elementwise(self, instruction: Instruction) -> bool:
        return instruction.opcode == "fusion" and instruction.attributes.get("kind") in ("kLoop", "kOutput")

    def _live(self, number: int, kind: str) -> Live:
        _, instruction = self.buffers.maker[number]
        if kind == "argument":
            instruction = self.arguments[number]
        elif number in self.writers and (instruction.opcode in _FILLED or not instruction.op_name or "broadcast" in instruction.name):
            instruction = self.writers[number]  # made empty, and filled slice by slice: what fills it says what it is
        array = self.buffers.array[number]
        return Live(
            bytes=self.size(number), kind=kind, shape=_shown(array), operation=_plain(instruction.op_name) or instruction.name,
            source="" if kind == "argument" else self.frames.source(instruction.attributes.get("metadata", "")),
            instruction=instruction.name, argument=int(instruction.arguments) if kind == "argument" else None,
        )  # fmt: skip


def _shown(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.dimensions))}]"


def _plain(op_name: str) -> str:
    """The traced name without what jax wraps around it: ``jit(step)/jvp()/while/body/dot_general`` is ``dot_general``."""
    parts = [part for part in op_name.split("/") if not _WRAPPED.fullmatch(part)]
    return "/".join(parts) or op_name
