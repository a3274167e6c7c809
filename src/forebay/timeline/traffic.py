"""Bytes that an instruction moves, by memory space.

A fusion computes its result and reads only what the result needs, so demand is walked from the root back to the parameters, once,
in reverse order: a (dynamic) slice demands the slice and not the stack, an in-place dynamic-update-slice writes the update and does
not touch the rest, a broadcast demands its small operand, a reduction its large one. Demand is a count of elements and never
exceeds the array. Counted once per operand however often the kernel rereads it: caches are not modelled (a limit; large transposes
and gathers are then a little optimistic)."""

from forebay.timeline.parse import Computation, Instruction
from forebay.timeline.shapes import VECTOR_SPACE, Array, Shape, arrays, element_bits
from forebay.timeline.work import Traffic

_SLICES = frozenset({"slice", "dynamic-slice"})
_WHOLE = frozenset(
    {"dot", "convolution", "custom-call", "sort", "fft", "call", "while", "conditional", "fusion", "reduce-window", "scan", "ragged-dot"}
)
_ALIASES = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})


def array_traffic(array: Array, *, read: float = 0.0, written: float = 0.0) -> Traffic:
    """Traffic of one array at its memory space; vector, scalar and semaphore memories on the chip are free."""
    if array.on_host:
        return Traffic(host_read=read, host_written=written)
    return Traffic(hbm_read=read, hbm_written=written) if array.space == 0 else Traffic()


def shape_traffic(shape: Shape, *, read: bool) -> Traffic:
    """Traffic of touching every byte of a shape."""
    total = Traffic()
    for array in arrays(shape):
        total += array_traffic(array, read=array.bytes) if read else array_traffic(array, written=array.bytes)
    return total


def plain_traffic(instruction: Instruction, inside: Computation) -> Traffic:
    """Traffic of an unfused instruction: what a fusion of it alone would move."""
    opcode = instruction.opcode
    shapes = [inside.by_name[o].shape for o in instruction.operands if o in inside.by_name]
    written = shape_traffic(instruction.shape, read=False)
    if opcode in _SLICES or opcode == "gather":
        moved = arrays(instruction.shape)[0].bytes
        return written + (array_traffic(arrays(shapes[0])[0], read=moved) if shapes else Traffic())
    if opcode == "dynamic-update-slice" and len(shapes) > 1:
        update = arrays(shapes[1])[0]
        return array_traffic(update, read=update.bytes) + array_traffic(arrays(instruction.shape)[0], written=update.bytes)
    if opcode == "scatter" and len(shapes) > 2:
        update = arrays(shapes[-1])[0]
        return shape_traffic(shapes[1], read=True) + array_traffic(update, read=2 * update.bytes, written=update.bytes)
    if opcode in ("broadcast", "iota", "rng", "rng-bit-generator"):
        return written + sum((shape_traffic(s, read=True) for s in shapes), Traffic())
    return sum((shape_traffic(s, read=True) for s in shapes), written)


def fusion_traffic(outer: Instruction, inside: Computation, fused: Computation, result: Shape) -> Traffic:
    """Traffic of a fusion ``outer`` that calls ``fused``; ``result`` is its output shape (of an async start: the second of the tuple)."""
    demand, in_place = _demands(fused)
    total = _written(fused, arrays(result), in_place)
    for parameter in fused.instructions:
        if parameter.opcode != "parameter" or parameter.name not in demand:
            continue
        index = int(parameter.arguments)
        source = inside.by_name.get(outer.operands[index]) if index < len(outer.operands) else None
        shape = source.shape if source is not None else parameter.shape
        if isinstance(parameter.shape, Array) and isinstance(shape, Array):
            wanted = min(demand[parameter.name], parameter.shape.elements)
            total += array_traffic(shape, read=wanted * element_bits(parameter.shape.dtype) / 8)
        else:
            total += shape_traffic(shape, read=True)
    return total


def _roots(fused: Computation) -> list[Instruction]:
    root = fused.root
    return [fused.by_name[o] for o in root.operands] if root.opcode == "tuple" else [root]


def _update_behind(root: Instruction, fused: Computation) -> Instruction | None:
    """The in-place dynamic-update-slice or scatter that a fusion's result is, seen through casts and reshapes."""
    seen = root
    while seen.opcode in _ALIASES and seen.operands:
        seen = fused.by_name[seen.operands[0]]
    return seen if seen.opcode in ("dynamic-update-slice", "scatter") else None


def _written(fused: Computation, results: tuple[Array, ...], in_place: dict[str, Instruction]) -> Traffic:
    total = Traffic()
    for root, array in zip(_roots(fused), results, strict=False):
        if root.name in in_place:
            update = arrays(fused.by_name[in_place[root.name].operands[-1 if in_place[root.name].opcode == "scatter" else 1]].shape)[0]
            total += array_traffic(array, written=update.elements * element_bits(array.dtype) / 8)
        else:
            total += array_traffic(array, written=array.bytes)
    return total


def _demands(fused: Computation) -> tuple[dict[str, float], dict[str, Instruction]]:
    """Elements wanted of each instruction, and the roots that are updates in place."""
    demand: dict[str, float] = {}
    in_place: dict[str, Instruction] = {}
    updates: set[str] = set()
    for root in _roots(fused):
        update = _update_behind(root, fused)
        if update is not None:
            in_place[root.name] = update
            updates.add(update.name)
        demand[root.name] = sum(a.elements for a in arrays(root.shape))
    for instruction in reversed(fused.instructions):
        if instruction.name in demand and instruction.operands:
            for operand, wanted in _operand_demands(instruction, demand[instruction.name], fused, instruction.name in updates):
                size = sum(a.elements for a in arrays(fused.by_name[operand].shape))
                demand[operand] = min(size, demand.get(operand, 0.0) + wanted)
    return demand, in_place


def _operand_demands(instruction: Instruction, wanted: float, fused: Computation, in_place: bool) -> list[tuple[str, float]]:
    opcode, operands = instruction.opcode, instruction.operands
    sizes = [sum(a.elements for a in arrays(fused.by_name[o].shape)) for o in operands]
    if opcode == "dynamic-update-slice":
        rest = 0.0 if in_place else max(0.0, wanted - sizes[1])
        return [(operands[0], rest), (operands[1], sizes[1])]
    if opcode == "scatter":
        return [(operands[0], sizes[-1] if in_place else wanted), *zip(operands[1:], sizes[1:], strict=True)]
    if opcode in _SLICES:
        return [(operands[0], wanted)]
    if opcode == "gather":
        return [(operands[0], wanted), (operands[1], sizes[1])]
    if opcode == "reduce":
        scale = sizes[0] / max(1.0, sum(a.elements for a in arrays(instruction.shape)[:1]))
        half = max(1, len(operands) // 2)
        return [(o, wanted * scale / half) for o in operands[:half]]
    if opcode in _WHOLE:
        return list(zip(operands, map(float, sizes), strict=True))
    return [(o, min(wanted, size)) for o, size in zip(operands, sizes, strict=True)]


__all__ = ["VECTOR_SPACE", "array_traffic", "fusion_traffic", "plain_traffic", "shape_traffic"]
