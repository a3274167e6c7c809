"""Stacks of optimizer state that are cut in two, so that one half is read while the other is written.

A buffer cannot be read and written at once: the compiler orders the two, or copies the whole buffer. A loop over several stacks
reads one while it writes another; a loop over a single stack would read and write in turns, and leave half of the link idle. Its
state is therefore kept as two arrays of half of the layers each (``workload.parts``), and the loop visits a layer of each half:

    mu [L, ...]   ->   mu[0:L/2], mu[L/2:L]        loop i = 0..L/2:   layer i, layer L/2 + i

Cost: the slices of a layer more in HBM; the option ``duplex="never"`` saves them. The user's tree and checkpoints do not change.
Limits: an unstacked leaf (an embedding that streams alone) and state that the update sums over stay whole, and take turns.
"""

from collections import defaultdict
from typing import Any

from forebay.errors import InputError, nearest
from forebay.workload.families import Family
from forebay.workload.parts import uncut_reason

CHOICES = ("auto", "never")


def halves(plan: Any) -> dict[int, set[int]]:
    """Stored parameters whose state is to be cut further, and the layers at which.

    Raises:
        InputError: the option ``duplex`` is none of its choices.
    """
    choice = plan.options.get("duplex", "auto")
    if choice not in CHOICES:
        raise InputError(f"duplex={choice!r} is not a choice; {nearest(str(choice), CHOICES)}")
    if choice == "never":
        return {}
    work, loops = plan.bound, defaultdict(list)
    for f, (family, stream) in enumerate(zip(work.families, plan.streams, strict=True)):
        if f not in plan.fused and stream.mode in ("slices", "items") and _on_host(plan, family):
            loops[stream.count].append((family, stream))
    found: dict[int, set[int]] = {}
    for [(family, stream), *others] in loops.values():
        layers = stream.count + stream.rest
        layered = stream.mode == "items" or stream.layered
        if not others and layered and layers > 1 and _state_on_host(plan, family) and not uncut_reason(work, family):
            first = family.window[0] if family.window else 0
            found.setdefault(family.params[0], set()).add(first + layers // 2)
    return found


def _on_host(plan: Any, family: Family) -> bool:
    placed = plan.role("parameter")
    trained = [p for p in family.params if not plan.bound.frozen[p]]
    return _state_on_host(plan, family) or any(placed[p].placement == "host" for p in trained)


def _state_on_host(plan: Any, family: Family) -> bool:
    return any(plan.role("optimizer")[j].placement == "host" for j in family.state)
