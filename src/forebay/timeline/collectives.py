"""Collectives: which operation, how many bytes, between which devices."""

import dataclasses
import math

from forebay.timeline.groups import Groups, parse_groups, parse_pairs
from forebay.timeline.parse import Computation, Instruction
from forebay.timeline.shapes import HloSyntaxError, arrays
from forebay.timeline.work import Collective

COLLECTIVES = frozenset(
    {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "ragged-all-to-all"}
)


def collective_of(operation: str, instruction: Instruction, inside: Computation, devices: int) -> Collective:
    """The collective of an instruction, plain or ``-start``. Bytes come from the operands, so both print forms agree."""
    if operation not in COLLECTIVES:
        raise HloSyntaxError(f"{instruction.name}: {operation!r} is not a collective that is known here")
    sizes = [sum(a.bytes for a in arrays(inside.by_name[o].shape)) for o in instruction.operands]
    if operation == "collective-permute":
        pairs = parse_pairs(instruction.attributes.get("source_target_pairs", ""))
        return Collective(operation=operation, full_bytes=sum(sizes), groups=_of_pairs(pairs), pairs=pairs)
    groups = parse_groups(instruction.attributes.get("replica_groups", "{}"), devices)
    if operation == "all-gather":
        return Collective(operation=operation, full_bytes=sum(sizes) * groups.size, groups=groups)
    if operation == "ragged-all-to-all":  # operands: data, output, then four arrays of offsets and sizes
        return Collective(operation=operation, full_bytes=float(min(sizes[:2])), groups=groups)
    return Collective(operation=operation, full_bytes=sum(sizes), groups=groups)


def scattered(collective: Collective, fused: Computation) -> Collective:
    """An all-reduce whose fusion keeps only this device's slice is a reduce-scatter: the form that libtpu gives it."""
    if collective.operation == "all-reduce" and fused.root.opcode in ("dynamic-slice", "bitcast") and _slices(fused):
        return dataclasses.replace(collective, operation="reduce-scatter")
    return collective


def _slices(fused: Computation) -> bool:
    return any(i.opcode == "dynamic-slice" and fused.by_name[i.operands[0]].opcode in ("all-reduce", "bitcast") for i in fused.instructions)


def _of_pairs(pairs: tuple[tuple[int, int], ...]) -> Groups:
    return Groups(tuple(tuple(sorted({a, b})) for a, b in pairs if a != b) or ((0,),))


def moved_bytes(collective: Collective) -> float:
    """Bytes that each device must send by the least algorithm: (n-1)/n of the large side, twice that for an all-reduce."""
    n = collective.groups.size
    if collective.operation == "collective-permute":
        return 0.0 if n < 2 else collective.full_bytes
    if collective.operation == "collective-broadcast":
        return collective.full_bytes if n > 1 else 0.0
    return math.prod((collective.full_bytes, (n - 1) / n, 2 if collective.operation == "all-reduce" else 1))
