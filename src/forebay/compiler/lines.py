"""The lines of an HLO module: name, type, opcode and operands of each instruction, and which computation it stands in."""

import dataclasses
import math
import re

from forebay.errors import InputError
from forebay.records.reading import LARGEST_INTEGER, check_digits

ARRAY = re.compile(r"(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """A line of HLO, split as far as needed. ``result`` is the type's text; ``line`` is the whole of it."""

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    computation: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """``by_name`` and ``members`` (of each computation, in order) index ``instructions``; ``entry`` names the main computation."""

    text: str
    entry: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction]
    members: dict[str, list[Instruction]]

    def type_of(self, name: str) -> str:
        return self.by_name[name].result if name in self.by_name else ""

    def called_by(self, instruction: Instruction) -> list[Instruction]:
        """The instructions inside a fusion or call."""
        called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", instruction.line)
        return self.members.get(called.group(1), []) if called else []

    def described(self, instruction: Instruction) -> str:
        """The instruction's name, the JAX operation it came from and the line that wrote it, as far as the module tells."""
        operation = re.search(r'op_name="([^"]*)"', instruction.line)
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        parts = [operation.group(1).rpartition("/")[2]] if operation else []
        parts += [self._source(frame.group(1))] if frame else []
        return f"{instruction.name} ({' at '.join(parts)})" if parts else instruction.name

    def _source(self, frame: str) -> str:
        """``file.py:line`` of a stack frame, from the tables at the head of the module."""
        head = self.text[: self.text.find("{\n")]
        location = re.search(rf"^{frame} {{file_location_id=(\d+)", head[head.find("StackFrames") :], re.MULTILINE)
        place = location and re.search(
            rf"^{location.group(1)} {{file_name_id=(\d+) .*? line=(\d+)", head[head.find("FileLocations") :], re.MULTILINE
        )
        name = place and re.search(rf'^{place.group(1)} "(.*)"$', head[head.find("FileNames") :], re.MULTILINE)
        return f"{name.group(1).rpartition('/')[2]}:{place.group(2)}" if name and place else "an unknown line"


def read_lines(text: str) -> Module:
    """The lines of ``text``, one HLO module."""
    check_digits(text)
    computation, entry, instructions = "", "", []
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := _HEADER.match(line):
                computation = header.group(2)
                entry = computation if header.group(1) else entry
        elif found := _INSTRUCTION.match(line):
            name, result, opcode = found.group(2, 3, 4)
            instructions.append(Instruction(name, result, opcode, _operands(line, found.end()), computation, line))
    members: dict[str, list[Instruction]] = {}
    for instruction in instructions:
        members.setdefault(instruction.computation, []).append(instruction)
    return Module(text, entry, tuple(instructions), {item.name: item for item in instructions}, members)


def first_match(pattern: str, text: str) -> re.Match[str]:
    """The first match of ``pattern`` in a piece of HLO that always has one."""
    found = re.search(pattern, text)
    if found is None:
        raise InputError(f"this is not HLO as XLA writes it: there is no {pattern} in {text[:160]!r}")
    return found


def array_bytes(dtype: str, dimensions: str) -> int:
    """Bytes of one array type, such as ``f32`` and ``1,256``; 0 for tokens."""
    if dtype in ("token", "opaque"):
        return 0
    bits = 8 if dtype == "pred" else int(first_match(r"\d+", dtype).group())
    count = math.prod(int(part) for part in re.findall(r"\d+", dimensions))
    if bits * count > LARGEST_INTEGER:
        raise InputError(f"this is not HLO as XLA writes it: an array of {dimensions} elements is larger than any memory")
    return -(-bits * count // 8)


def shape_of(type_text: str) -> tuple[int, list[int]]:
    """Bytes of one element and the dimensions of an array type."""
    found = ARRAY.match(type_text)
    if found is None:
        raise InputError(f"this is not HLO as XLA writes it: {type_text[:160]!r} is not an array type")
    dtype, dimensions, _ = found.groups()
    return array_bytes(dtype, ""), [int(part) for part in re.findall(r"\d+", dimensions)]


def split_type(type_text: str) -> list[str]:
    """The members of a tuple type, or the type itself."""
    if not type_text.startswith("("):
        return [type_text]
    members, depth, current = [], 0, ""
    for character in type_text[1:-1]:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            members.append(current.strip())
            current = ""
        else:
            current += character
    return [*members, current.strip()] if current.strip() else members


def closing(text: str) -> int:
    """The position after the bracket that closes the one ``text`` starts with."""
    depth = 0
    for position, character in enumerate(text):
        depth += character in "([{"
        depth -= character in ")]}"
        if depth == 0:
            return position + 1
    return len(text)


def _operands(line: str, start: int) -> tuple[str, ...]:
    """The operand names of an instruction whose bracket opens just before ``start``."""
    return tuple(re.findall(r"%([\w.\-]+)", line[start : line.find(")", start)]))
