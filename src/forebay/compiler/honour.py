"""What was asked onto the host against what the compiled program does: argument by argument, and entry by entry where there is a plan.

An entry of the state is honoured by a parameter of the module of its size that stands in host memory; an entry of the activations by a
copy to the host that writes its bytes over the turns of a loop, or by two where the compiler double-buffers the loop (one or two turns may
be taken out of it), or, where the program itself offloads a value outside its loops, all at once.
Each parameter and each copy serves one entry; the copies that write state and gradients back are set aside first. Gradients may be used
up where they arise, and recomputed activations leave no trace in memory: nothing is said of them.
"""

from collections import Counter

from forebay.compiler.hlo import Findings
from forebay.records.entries import Entry
from forebay.records.verdict import TO_HOST, HostCopy

_STATE = ("parameter", "optimizer", "accumulator", "batch")
_PEELED = (0, 1, 2)
_UNROLLED = 2


def compare(arguments: tuple[tuple[str, str | None], ...], findings: Findings, entries: tuple[Entry, ...]) -> tuple[tuple, tuple]:
    """The names that are honoured and those that are ignored: of ``entries``, or without any of the arguments asked onto the host."""
    if not entries:
        return _compare_arguments(arguments, findings)
    asked = Counter()
    for entry in entries:  # a stack may be split in layers; its parts have one name and stand in one buffer
        if entry.placement == "host":
            asked[entry.name] += entry.bytes_per_device
    state = [name for name in asked if name.partition(":")[0] in _STATE]
    activations = [name for name in asked if name.startswith("activation:")]
    others = [name for name in asked if name not in activations]
    found = _standing(state, asked, findings) | _written(activations, others, asked, findings)
    checked = (*state, *activations)
    return tuple(name for name in checked if name in found), tuple(name for name in checked if name not in found)


def _compare_arguments(arguments, findings: Findings) -> tuple[tuple, tuple]:
    if len(arguments) != len(findings.parameters):
        return (), ()  # ordered effects put tokens among the parameters; nothing can be told then
    asked = [(name, on_host) for (name, kind), (_, on_host) in zip(arguments, findings.parameters, strict=True) if kind == "pinned_host"]
    return tuple(name for name, on_host in asked if on_host), tuple(name for name, on_host in asked if not on_host)


def _standing(names: list[str], asked: Counter, findings: Findings) -> set[str]:
    there = Counter(size for size, on_host in findings.parameters if on_host)
    found = set()
    for name in names:
        if there[asked[name]]:
            there[asked[name]] -= 1
            found.add(name)
    return found


def _written(names: list[str], others: list[str], asked: Counter, findings: Findings) -> set[str]:
    free = sorted((copy for copy in findings.host_copies if copy.direction == TO_HOST), key=lambda copy: copy.loop is not None)
    for name in others:
        _take(free, asked[name])
    turning = [copy for copy in free if copy.loop]
    found = {name for name in names if _take(turning, asked[name])}
    at_once = Counter(copy.bytes for copy in free if not copy.loop)
    for name in (name for name in names if name not in found):
        if at_once[asked[name]]:
            at_once[asked[name]] -= 1
            found.add(name)
    return found


def _take(free: list[HostCopy], size: int) -> bool:
    """Take out of ``free`` the copies of one loop that write ``size`` bytes in all, if they are there: one, or two of a loop unrolled."""
    for copy in free:
        turns, left = divmod(size, copy.bytes) if copy.bytes else (0, 1)
        if left:
            continue
        same = [c for c in free if (c.loop, c.bytes, c.trip_count) == (copy.loop, copy.bytes, copy.trip_count)]
        for times in range(1, min(len(same), _UNROLLED) + 1):
            if copy.trip_count is None or turns - times * copy.trip_count in _PEELED:
                for taken in same[:times]:
                    free.remove(taken)
                return True
    return False
