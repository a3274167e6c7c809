"""What a verdict needs from scheduled HLO, line by line: host copies, host compute, rematerialised and attention instructions.

Host memory is ``S(5)`` in a layout. A copy shows as ``copy-start``, as ``fusion-start`` around a (dynamic) slice on the GPU, as
``dynamic-(update-)slice-start`` on the TPU, or without overlap as a plain ``copy``, slice or fusion of slices. The timeline stage has the
full parser; this one only has to be right about memory spaces.
"""

import dataclasses
import re
from collections import Counter

from forebay.compiler.indices import Loop, misplaced, read_loop
from forebay.compiler.lines import ARRAY, Instruction, array_bytes, closing, read_lines, split_type
from forebay.errors import InputError
from forebay.records.verdict import HOST_TO_HOST, TO_DEVICE, TO_HOST, HostCopy

HOST = "S(5)"
_CALLED = re.compile(r", (calls|body|to_apply|branch_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})")
_REMATERIALISED = re.compile(r"\.remat\d*(?=\.|$)")  # the pass's own suffix; ".rematerialized" is a cheap clone of a broadcast
_ATTENTION = re.compile(r"fmha|flash|splash|tpu_custom_call|triton_kernel_call|mosaic_gpu", re.IGNORECASE)
_MOVES = set("parameter constant bitcast copy slice dynamic-slice dynamic-update-slice tuple get-tuple-element".split())
_INDEX_WORK = _MOVES | set("add subtract multiply compare select convert clamp minimum maximum broadcast reshape".split())
_NO_WORK = set("parameter constant tuple get-tuple-element bitcast while call conditional opt-barrier after-all add-dependency".split())
_WITHOUT_TIME = _NO_WORK - {"while", "call", "conditional"}
_CUSTOM_CALLS_WITHOUT_WORK = ("AllocateBuffer", "MoveToHost", "MoveToDevice", "annotate_device_placement")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """``host_compute`` describes operations that work on host memory; ``misplaced_slices`` names host slices whose annotated bytes do not
    follow their index (hazard reversed-host-slice); ``parameters`` gives for each parameter of the module its bytes and whether it stands
    in host memory."""

    host_copies: tuple[HostCopy, ...]
    host_compute: tuple[str, ...]
    misplaced_slices: tuple[str, ...]
    remat_instructions: int
    attention: dict[str, int]
    parameters: tuple[tuple[int, bool], ...]


def read_hlo(text: str) -> Findings:
    """What ``text``, the scheduled HLO of one program, says of host memory, rematerialisation and attention.

    Raises:
        InputError: it is not HLO as XLA writes it.
    """
    try:
        return _Reader(text).findings()
    except RecursionError:
        raise InputError("this is not HLO as XLA writes it: a value or a computation of it leads back to itself") from None


def _arrays(type_text: str) -> list[tuple[int, bool, bool]]:
    """Each array of a type: its bytes, whether it is in host memory, whether it is a scalar."""
    found = ARRAY.findall(type_text)
    return [(array_bytes(dtype, shape), HOST in layout, not shape) for dtype, shape, layout in found]


class _Reader:
    def __init__(self, text: str):
        self.module = read_lines(text)
        self.loops: dict[str, Loop] = {}
        self.scheduled: dict[str, tuple[str | None, int | None]] = {}
        self._walk(self.module.entry, None, 1)

    def _walk(self, computation: str, loop: str | None, trips: int | None) -> None:
        """Mark ``computation`` and what it runs (not what its fusions hold) with the loop around it and how often it runs."""
        self.scheduled[computation] = (loop, trips)
        for instruction in self.module.members.get(computation, ()):
            if instruction.opcode not in ("while", "call", "conditional", "async-start"):
                continue
            for kind, one, several in _CALLED.findall(instruction.line):
                for called in re.findall(r"[\w.\-]+", one or several):
                    if called not in self.module.members or called in self.scheduled:
                        continue
                    if kind != "body":
                        self._walk(called, loop, trips)
                        continue
                    loop_here = self.loops[called] = read_loop(called, instruction.line)
                    known = None if trips is None or loop_here.trips is None else trips * loop_here.trips
                    self._walk(called, called, known)

    def findings(self) -> Findings:
        copies, compute, misplaced_slices = [], [], []
        for instruction in self.module.instructions:
            if instruction.computation not in self.scheduled:
                continue
            if '_xla_compute_type="host"' in instruction.line or "HostExecute" in instruction.line:
                compute += [] if instruction.opcode.endswith("-done") else [self.module.described(instruction)]
                continue
            if instruction.opcode in _NO_WORK or not self._touches_host(instruction):
                continue
            if copy := self._copy(instruction):
                copies.append(copy)
                if copy.loop and misplaced(self.module, instruction, self.loops[copy.loop]):
                    misplaced_slices.append(instruction.name)
            elif self._computes(instruction):
                compute.append(self.module.described(instruction))
        return Findings(
            host_copies=tuple(copies), host_compute=tuple(compute), misplaced_slices=tuple(misplaced_slices),
            remat_instructions=sum(bool(_REMATERIALISED.search(instruction.name)) for instruction in self.module.instructions),
            attention=self._attention(), parameters=self._parameters(),
        )  # fmt: skip

    def _touches_host(self, instruction: Instruction) -> bool:
        return HOST in instruction.result or any(HOST in self.module.type_of(name) for name in instruction.operands)

    def _copy(self, instruction: Instruction) -> HostCopy | None:
        opcode = instruction.opcode
        if opcode.endswith("-start"):
            sides = self._sides_of_start(instruction)
        elif opcode in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
            sides = self._sides(instruction.operands, instruction.result, opcode == "dynamic-update-slice")
        elif opcode == "fusion" and self._only_moves(instruction):
            sides = self._sides(instruction.operands, instruction.result, self._updates(instruction))
        else:
            return None
        if sides is None:
            return None
        loop, trips = self.scheduled[instruction.computation]
        asynchronous = opcode.endswith("-start") and '"is_sync":true' not in instruction.line
        return HostCopy(
            name=instruction.name, direction=sides[0], bytes=sides[1], asynchronous=asynchronous, loop=loop, trip_count=trips,
            work_between=self._work_between(instruction) if opcode.endswith("-start") else None,
        )  # fmt: skip

    def _work_between(self, start: Instruction) -> int:
        """Instructions with work of their own between a start and the first that waits for it, in the order of the schedule."""
        scheduled = self.module.members[start.computation]
        behind = scheduled[scheduled.index(start) + 1 :]
        done = next((k for k, item in enumerate(behind) if start.name in item.operands), len(behind))
        return sum(item.opcode not in _WITHOUT_TIME and not item.opcode.endswith(("-start", "-done")) for item in behind[:done])

    def _sides_of_start(self, instruction: Instruction) -> tuple[str, int] | None:
        members = split_type(instruction.result)
        if instruction.opcode in ("send-start", "recv-start") or len(members) < 2:
            return None
        if instruction.opcode == "copy-start":
            return _direction(_arrays(members[1]), _arrays(members[0]))
        if instruction.opcode in ("fusion-start", "async-start") and not self._only_moves(instruction):
            return None
        update = "update" in instruction.opcode or self._updates(instruction)
        return self._sides_of_arrays(_arrays(members[0]), _arrays(members[1]), update)

    def _sides(self, operands: tuple[str, ...], result: str, update: bool) -> tuple[str, int] | None:
        sources = [array for name in operands for array in _arrays(self.module.type_of(name))]
        return self._sides_of_arrays(sources, _arrays(result), update)

    def _sides_of_arrays(self, sources: list, results: list, update: bool) -> tuple[str, int] | None:
        if update:  # one operand is the buffer that is written in place; what moves is the update
            moved = [array for array in sources if not array[2]]
            if not moved or not results:
                return None
            moved.remove(next((array for array in moved if array[0] == results[0][0]), moved[0]))
            return _direction(moved, [(size, results[0][1], False) for size, _, _ in moved])
        return _direction([array for array in sources if not array[2]], results)

    def _only_moves(self, instruction: Instruction) -> bool:
        """Whether a fusion only moves data. Arithmetic on scalars is the index of a slice."""
        inside = self.module.called_by(instruction)
        scalar = lambda item: all(size <= 8 for size, _, _ in _arrays(item.result))  # noqa: E731
        moves = all(item.opcode in _MOVES or (item.opcode in _INDEX_WORK and scalar(item)) for item in inside)
        return bool(inside) and moves

    def _updates(self, instruction: Instruction) -> bool:
        return any(item.opcode == "dynamic-update-slice" for item in self.module.called_by(instruction))

    def _computes(self, instruction: Instruction) -> bool:
        if instruction.opcode.endswith("-done") or instruction.opcode.endswith("-start"):
            return False
        if instruction.opcode == "custom-call":
            return not any(f'custom_call_target="{target}"' in instruction.line for target in _CUSTOM_CALLS_WITHOUT_WORK)
        return True

    def _attention(self) -> dict[str, int]:
        targets = re.findall(r'custom_call_target="([^"]+)"', self.module.text)
        return dict(sorted(Counter(target for target in targets if _ATTENTION.search(target)).items()))

    def _parameters(self) -> tuple[tuple[int, bool], ...]:
        start = self.module.text.find("entry_computation_layout={(")
        if start < 0:
            return ()
        line = self.module.text[start + len("entry_computation_layout={") : self.module.text.find("\n", start)]
        parameters = split_type(line[: closing(line)])
        if len(parameters) == 1:  # a program of very many arguments takes them as one tuple
            parameters = split_type(parameters[0])
        return tuple((sum(size for size, _, _ in _arrays(parameter)), HOST in parameter) for parameter in parameters)


def _direction(sources: list, results: list) -> tuple[str, int] | None:
    """Which way ``results`` travel, and their bytes; ``None`` where neither side is host memory."""
    from_host = any(host for _, host, _ in sources)
    to_host = any(host for _, host, _ in results)
    size = sum(size for size, _, _ in results)
    if from_host and to_host:
        return HOST_TO_HOST, size
    if from_host or to_host:
        return (TO_DEVICE if from_host else TO_HOST), size
    return None
