"""Scheduled HLO text to typed instructions.

One pass over the lines, no recursion: a computation opens with a header line, each line in it is one instruction ``[ROOT] %name =
SHAPE opcode(operands), key=value, ...``, a ``}`` closes it. In a scheduled module (``is_scheduled=true``) the order of the lines of
a computation is the order in which the device issues them. Attributes are split at commas outside brackets and quotes and kept as
text; what a stage needs it reads through the typed properties. Anything that does not fit this grammar is an ``HloSyntaxError``
with its line.

Cost: linear in the text (about 10 MB a second in CPython). Limits: 512 MiB of text, 4 million instructions.
"""

import functools
import graphlib
import json
import re
from dataclasses import dataclass, field

from forebay.records.reading import check_digits
from forebay.timeline.shapes import HloSyntaxError, Shape, parse_shape, read_shape

MAX_TEXT_BYTES = 512 * 2**20
MAX_INSTRUCTIONS = 4_000_000
MAX_NESTED = 200

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-$]+)(?: \(.*\) -> .*)? \{\Z")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-$]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[()\[\]{},]')
_TABLES = frozenset({"FileNames", "FunctionNames", "FileLocations", "StackFrames"})
_CALLEES = ("calls", "body", "condition", "to_apply", "called_computations", "branch_computations", "true_computation", "false_computation")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_REFERENCE = re.compile(r"%?([\w.\-$]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+),")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?\s*\}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One HLO instruction. ``arguments`` is the raw text between the parentheses (a parameter's number, a constant's value)."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    arguments: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    is_root: bool = False
    line: int = 0

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls, in the order of the attributes printed."""
        found: list[str] = []
        for key in _CALLEES:
            if key in self.attributes:
                found += _REFERENCE.findall(self.attributes[key])
        return tuple(found)

    @property
    def target(self) -> str:
        """``custom_call_target`` without quotes, or an empty string."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def op_name(self) -> str:
        """The traced name from the metadata (``jit(step)/while/body/dot_general``), or an empty string."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return match.group(1) if match else ""

    @property
    def backend_config(self) -> dict:
        """The backend's JSON; an empty dictionary where there is none or it is not JSON."""
        text = self.attributes.get("backend_config", "")
        try:
            return json.loads(text) if text.startswith("{") else {}
        except (ValueError, RecursionError):  # an MLIR dictionary of a foreign function call: nothing there that this package reads
            return {}

    @property
    def trip_count(self) -> int | None:
        """``known_trip_count`` of a while, None where the compiler does not know it."""
        match = _TRIP_COUNT.search(self.attributes.get("backend_config", ""))
        return int(match.group(1)) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Instructions in the order printed, which is the schedule in a scheduled module."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.is_root), self.instructions[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A parsed module. ``devices`` is num_partitions times replica_count as the header states them; ``aliases`` maps the index of
    an output to the argument whose buffer it reuses (donation)."""

    name: str
    scheduled: bool
    devices: int
    entry: str
    computations: dict[str, Computation]
    aliases: dict[int, int] = field(default_factory=dict)


def parse_hlo(text: str) -> Module:
    """The typed module of an HLO text. Raises HloSyntaxError with the line where the text does not follow the grammar."""
    if len(text) > MAX_TEXT_BYTES:
        raise HloSyntaxError(f"HLO text of {len(text)} bytes is over the limit of {MAX_TEXT_BYTES}; was it dumped with large constants?")
    check_digits(text)
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if start is None:
        raise HloSyntaxError("no 'HloModule' line: this is not HLO text (StableHLO cannot be replayed, it has no schedule)")
    header = _attributes(lines[start].partition(" ")[2].partition(",")[2], start + 1)
    computations, entry = _computations(lines, start + 1)
    if entry is None:
        raise HloSyntaxError("the module has no ENTRY computation; is the text cut short?")
    _check_calls(computations)
    return Module(
        name=lines[start].removeprefix("HloModule ").partition(",")[0].strip(),
        scheduled=header.get("is_scheduled") == "true",
        devices=_count(header, "num_partitions") * _count(header, "replica_count"),
        entry=entry,
        computations=computations,
        aliases={int(output or 0): int(argument) for output, argument in _ALIAS.findall(header.get("input_output_alias", ""))},
    )


def _count(header: dict[str, str], key: str) -> int:
    text = header.get(key, "1")
    if not text.isdigit() or int(text) < 1:
        raise HloSyntaxError(f"the HloModule line says {key}={text!r}; expected a count")
    return int(text)


def _computations(lines: list[str], first: int) -> tuple[dict[str, Computation], str | None]:
    computations: dict[str, Computation] = {}
    entry, name, body, total, in_table = None, None, [], 0, False
    for number in range(first, len(lines)):
        line = lines[number].strip()
        if not line or line.startswith("//"):
            in_table = in_table and bool(line)
        elif name is None and (in_table or line in _TABLES):
            in_table = True
        elif name is None:
            match = _HEADER.match(_COMMENT.sub("", line))
            if match is None:
                raise HloSyntaxError(f"HLO line {number + 1}: expected a computation header, found {line[:120]!r}")
            name, body = match.group(2), []
            entry = name if match.group(1) else entry
        elif line.startswith("}"):
            computations[name] = _computation(name, body, number + 1)
            total += len(body)
            name = None
        else:
            body.append(parse_instruction(line, number + 1))
        if total + len(body) > MAX_INSTRUCTIONS:
            raise HloSyntaxError(f"HLO line {number + 1}: more than {MAX_INSTRUCTIONS} instructions")
    if name is not None:
        raise HloSyntaxError(f"the computation {name!r} is not closed; is the text cut short?")
    return computations, entry


def _check_calls(computations: dict[str, Computation]) -> None:
    """Refuse a call of what the text does not hold, calls in a circle, and calls nested deeper than any program's."""
    calls = {name: {c for i in inside.instructions for c in i.callees} for name, inside in computations.items()}
    for name, callees in calls.items():
        if missing := callees - computations.keys():
            raise HloSyntaxError(f"the computation {name!r} calls {min(missing)!r}, which the module does not hold")
    depth: dict[str, int] = {}
    try:
        for name in graphlib.TopologicalSorter(calls).static_order():
            depth[name] = 1 + max((depth[c] for c in calls[name]), default=0)
            if depth[name] > MAX_NESTED:
                raise HloSyntaxError(f"computations are nested more than {MAX_NESTED} deep (at {name!r})")
    except graphlib.CycleError as error:
        raise HloSyntaxError(f"the computation {error.args[1][0]!r} calls itself") from None


def _computation(name: str, body: list[Instruction], line: int) -> Computation:
    if not body:
        raise HloSyntaxError(f"HLO line {line}: the computation {name!r} is empty")
    by_name: dict[str, Instruction] = {}
    for instruction in body:
        for operand in instruction.operands:
            if operand not in by_name:
                at = f"HLO line {instruction.line}: {instruction.name!r}"
                raise HloSyntaxError(f"{at} uses {operand!r}, which {name!r} does not define before it")
        if instruction.name in by_name:
            raise HloSyntaxError(f"HLO line {line}: the computation {name!r} defines a name twice")
        by_name[instruction.name] = instruction
    return Computation(name=name, instructions=tuple(body), by_name=by_name)


def parse_instruction(line: str, number: int = 0) -> Instruction:
    """One instruction line, stripped. ``number`` is for the message of an error."""
    try:
        return _instruction(line, number)
    except (HloSyntaxError, IndexError, ValueError) as error:  # cut or damaged lines end where the grammar still expects something
        raise HloSyntaxError(f"HLO line {number}: {error} in {line[:160]!r}") from None


def _instruction(line: str, number: int) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise HloSyntaxError("expected '%name = shape opcode(...)'")
    shape, after = _shape(line, match.end())
    opcode = _OPCODE.match(line, after)
    if opcode is None:
        raise HloSyntaxError(f"expected an opcode at {line[after : after + 40]!r}")
    parts, close = _split(line, opcode.end())
    if line[close : close + 1] != ")":
        raise HloSyntaxError("the operand list is not closed")
    arguments = line[opcode.end() : close]
    rest = line[close + 1 :]
    literal = opcode.group(1) in ("constant", "parameter", "iota", "partition-id", "replica-id")
    operands = () if literal else tuple(_operand(p) for p in parts if p.strip())
    attributes = _attributes(rest[1:], number) if rest.startswith(",") else _no_rest(rest)
    if opcode.group(1) == "get-tuple-element" and not attributes.get("index", "").isdigit():
        raise HloSyntaxError("get-tuple-element without an index")
    if opcode.group(1) == "parameter" and not arguments.isdigit():
        raise HloSyntaxError("parameter without a number")
    if opcode.group(1) == "while" and not {"body", "condition"} <= attributes.keys():
        raise HloSyntaxError("while without a body and a condition")
    return Instruction(
        name=match.group(2), opcode=opcode.group(1), shape=shape, operands=operands, arguments=arguments, line=number,
        attributes=attributes, is_root=match.group(1) is not None,
    )  # fmt: skip


def _shape(line: str, at: int) -> tuple[Shape, int]:
    if line[at] != "(":
        end = line.find(" ", at)
        return parse_shape(line[at:end]), end
    parts_end = _close(line, at)
    return parse_shape(line[at:parts_end]), parts_end


def _close(line: str, at: int) -> int:
    """The position after the bracket that closes the one at ``at``."""
    depth = 0
    for token in _TOKEN.finditer(line, at):
        character = token.group()
        if character in ("(", "[", "{"):
            depth += 1
        elif character in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return token.end()
    raise HloSyntaxError(f"unbalanced brackets from {line[at : at + 40]!r}")


def _split(text: str, at: int) -> tuple[list[str], int]:
    """Pieces between commas at bracket depth 0 from ``at``, and where the list ends: the closing bracket or the end of the text."""
    depth, start, pieces = 0, at, []
    for token in _TOKEN.finditer(text, at):
        character = token.group()
        if character == ",":
            if depth == 0:
                pieces.append(text[start : token.start()])
                start = token.end()
        elif character in ("(", "[", "{"):
            depth += 1
        elif character in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                pieces.append(text[start : token.start()])
                return pieces, token.start()
    if depth:
        raise HloSyntaxError("unbalanced brackets")
    pieces.append(text[start:])
    return pieces, len(text)


@functools.lru_cache(maxsize=65536)
def _operand(text: str) -> str:
    """The operand's name: the last word, whether or not the text prints its shape before it."""
    name = _COMMENT.sub("", text).strip().rpartition(" ")[2]
    match = _REFERENCE.fullmatch(name)
    if match is None:
        raise HloSyntaxError(f"unknown operand {text.strip()!r}")
    return match.group(1)


def _no_rest(rest: str) -> dict[str, str]:
    if rest.strip():
        raise HloSyntaxError(f"unexpected text after the operands: {rest[:60]!r}")
    return {}


def _attributes(text: str, number: int) -> dict[str, str]:
    pieces, end = _split(text, 0)
    if end != len(text):
        raise HloSyntaxError(f"HLO line {number}: unbalanced brackets in the attributes")
    attributes: dict[str, str] = {}
    for piece in pieces:
        key, equals, value = piece.strip().partition("=")
        if not equals:
            if key:
                raise HloSyntaxError(f"attribute without a value: {piece.strip()[:60]!r}")
            continue
        if key == "device_ids" and attributes.get("replica_groups", "").startswith("mesh["):
            attributes["replica_groups"] += f", device_ids={value}"  # one value that holds a comma outside brackets
        else:
            attributes[key] = value
    return attributes


__all__ = ["Computation", "HloSyntaxError", "Instruction", "Module", "parse_hlo", "parse_instruction", "read_shape"]
