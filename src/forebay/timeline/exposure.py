"""Exposed copy time charged to the entries of a plan.

A copy belongs to the entry whose path its buffer's label ends with (``state.opt_state[0].mu['layers']['wq']`` is
``optimizer:0/mu/layers/wq``). Buffers that the runtime numbers (``state.stored_opt_state[7]``) and offloaded activations carry no
path: they are matched by role and by size, in the order of both lists. Entries of one role and one size may so be taken one for the
other; their sum is right."""

import dataclasses
import re
from collections.abc import Iterable

from forebay.records.entries import Entry
from forebay.records.forecast import CopyTime, Forecast
from forebay.units import GIB

_ROLE_HINTS = {"optimizer": "opt_state", "parameter": "params", "accumulator": "accum", "gradient": "grad", "batch": "batch"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Charged:
    """``entries`` with ``exposed_ms`` and ``ms_per_gib`` filled where copies were found; ``rest`` are the copies of no entry."""

    entries: tuple[Entry, ...]
    rest: tuple[CopyTime, ...]


def charge(forecast: Forecast, entries: Iterable[Entry]) -> Charged:
    """Share the forecast's exposed seconds among the entries that stand on the host; entries elsewhere are returned as they are."""
    entries = tuple(entries)
    free = [at for at, entry in enumerate(entries) if entry.placement == "host"]
    buffers: dict[str, list[CopyTime]] = {}
    for copy in forecast.copies:
        buffers.setdefault(copy.buffer, []).append(copy)
    taken: dict[int, str] = {}
    for matches in (_same_path, _same_size):
        for buffer in sorted(set(buffers) - set(taken.values()), key=_natural):
            found = next((at for at in free if at not in taken and matches(entries[at], buffers[buffer][0])), None)
            if found is not None:
                taken[found] = buffer
    filled = tuple(_filled(entry, buffers[taken[at]]) if at in taken else entry for at, entry in enumerate(entries))
    rest = tuple(copy for buffer, copies in buffers.items() if buffer not in taken.values() for copy in copies)
    return Charged(entries=filled, rest=rest)


def _filled(entry: Entry, copies: list[CopyTime]) -> Entry:
    milliseconds = 1e3 * sum(copy.exposed_seconds for copy in copies)
    return dataclasses.replace(entry, exposed_ms=milliseconds, ms_per_gib=milliseconds / (entry.bytes_per_device / GIB))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _natural(text: str) -> list:
    """Sorts ``a[2]`` before ``a[10]``."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in _words(text)]


def _same_path(entry: Entry, copy: CopyTime) -> bool:
    path, label = _words(entry.name.partition(":")[2]), _words(copy.buffer)
    return bool(path) and label[-len(path) :] == path and _ROLE_HINTS.get(entry.role, "") in copy.buffer


def _same_size(entry: Entry, copy: CopyTime) -> bool:
    if entry.bytes_per_device != copy.held_bytes:
        return False
    if entry.role == "activation":
        return copy.buffer.startswith("offloaded ")
    return _ROLE_HINTS.get(entry.role, "") in copy.buffer and not copy.buffer.startswith("offloaded ")
