"""Which buffer a host copy belongs to: the host side of the copy, followed back through loops and tuples to where it comes from.

An argument of the program answers with the user's own path from its metadata (``state.opt_state[0].mu['layers']['wq']``); a buffer
made inside the program (an offloaded activation's stack) answers with its shape and the instruction that makes it, the same for
copies out and back."""

from dataclasses import dataclass

from forebay.timeline.parse import Computation, Instruction, Module
from forebay.timeline.shapes import arrays

_THROUGH = frozenset({"bitcast", "copy", "opt-barrier", "reshape", "transpose"})
_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Origin:
    """``label`` for people, ``held_bytes`` of the host buffer per device."""

    label: str
    held_bytes: int


class Origins:
    """Answers for one module; remembers who calls whom."""

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in ("while", "call", "conditional"):
                    for callee in instruction.callees:
                        self._callers[callee] = (computation, instruction)

    def of(self, instruction: Instruction, inside: Computation) -> Origin:
        """The origin of the host buffer that a copy reads or writes."""
        side = next((o for o in instruction.operands if _on_host(inside, o)), None)
        if side is None:  # a whole copy out: its result is a host buffer of its own, named by what it copies
            held = sum(a.bytes for a in arrays(instruction.shape) if a.on_host)
            return Origin(self._donated(instruction, inside) or _traced(instruction) or instruction.name, held)
        held = sum(a.bytes for a in arrays(inside.by_name[side].shape) if a.on_host)
        return Origin(self._label(inside.by_name[side], inside, instruction), held)

    def _donated(self, copy: Instruction, inside: Computation) -> str:
        """The argument whose buffer a copy's result takes over as an output of the program; empty where there is none."""
        entry = self._module.computations[self._module.entry]
        if inside.name != entry.name:
            return ""
        results = {copy.name} | {i.name for i in entry.instructions if i.opcode.endswith("-done") and copy.name in i.operands}
        outputs = entry.root.operands if entry.root.opcode == "tuple" else (entry.root.name,)
        at = next((n for n, name in enumerate(outputs) if name in results), None)
        index = self._module.aliases.get(at) if at is not None else None
        parameters = (i for i in entry.instructions if i.opcode == "parameter" and index is not None and int(i.arguments) == index)
        return next((p.op_name or f"argument {index}" for p in parameters), "")

    def _label(self, seen: Instruction, inside: Computation, copy: Instruction) -> str:
        path: list[int] = []  # tuple indices still to be taken, innermost last
        for _ in range(_LIMIT):
            if seen.opcode == "get-tuple-element":
                path.append(int(seen.attributes["index"]))
                seen = inside.by_name[seen.operands[0]]
            elif seen.opcode == "tuple" and path:
                seen = inside.by_name[seen.operands[path.pop()]]
            elif seen.opcode == "while" and path:
                seen = inside.by_name[seen.operands[0]]
            elif seen.opcode == "parameter" and inside.name in self._callers:
                outer, caller = self._callers[inside.name]
                index = 0 if caller.opcode == "while" else int(seen.arguments)
                seen, inside = outer.by_name[caller.operands[index]], outer
            elif _same_buffer(seen, inside):
                seen = inside.by_name[seen.operands[0]]
            else:
                break
        if seen.opcode == "parameter":
            return seen.op_name or f"argument {seen.arguments}"
        array = next((a for a in arrays(seen.shape) if a.on_host), None) or next(a for a in arrays(copy.shape) if a.on_host)
        return f"offloaded {array.dtype}[{','.join(map(str, array.dimensions))}] ({seen.name})"


def _same_buffer(seen: Instruction, inside: Computation) -> bool:
    """Whether an instruction hands its first operand's buffer on: a view, the end of an async copy, an update in place of a host
    buffer."""
    if seen.opcode in _THROUGH or seen.opcode.endswith("-done"):
        return bool(seen.operands)
    return seen.opcode.endswith("-start") and bool(seen.operands) and _on_host(inside, seen.operands[0])


def _on_host(inside: Computation, name: str) -> bool:
    return name in inside.by_name and any(a.on_host for a in arrays(inside.by_name[name].shape))


def _traced(instruction: Instruction) -> str:
    """The traced name without the noise of control flow."""
    parts = [p for p in instruction.op_name.split("/") if p not in ("while", "body", "closed_call", "eval_jaxpr", "checkpoint", "cond")]
    return "/".join(p for p in parts if not p.startswith("jit("))
