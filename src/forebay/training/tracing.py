"""A profiler's trace of some steps, read back: how long each kind of lane was busy.

In: the folder that ``jax.profiler`` wrote (``plugins/profile/TIME/HOST.trace.json.gz``, the Chrome trace format). Out: seconds by kind,
of all the traced steps together. On a GPU the rows are CUDA streams: an event's name says what it is (MemcpyH2D, MemcpyD2H, NCCL's
kernels, else compute), and a lane is busy for the union of its events, averaged over the devices. On a CPU there are no lanes: what is
summed is each thunk's time over all threads, loops and calls left out because what they hold is counted itself. Other traces are
refused with the reason.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import InputError

COLLECTIVES = ("nccl", "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
HOLDERS = ("while", "call", "conditional")
Interval = tuple[float, float]


def read_trace(folder: Path) -> dict[str, Any]:
    """The newest trace below ``folder``.

    Raises:
        InputError: there is none, or it is not readable as one.
    """
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not found:
        raise InputError(f"the profiler left no trace.json.gz below {folder}")
    try:
        trace = json.loads(gzip.decompress(found[-1].read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as problem:
        raise InputError(f"{found[-1]} cannot be read as a trace: {problem}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise InputError(f"{found[-1]} cannot be read as a trace: it holds no traceEvents")
    return trace


def busy_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Busy seconds by kind: ``compute``, ``collective``, and of a GPU ``to_device``, ``to_host`` and ``device``.

    Raises:
        InputError: the trace has neither CUDA streams nor thunks of a CPU.
    """
    events = [e for e in trace["traceEvents"] if isinstance(e, dict)]
    named = [e for e in events if e.get("ph") == "M" and isinstance(e.get("args"), dict)]
    processes = {e.get("pid"): str(e["args"].get("name")) for e in named if e.get("name") == "process_name"}
    streams = {(e.get("pid"), e.get("tid")) for e in named if e.get("name") == "thread_name" and "Stream" in str(e["args"].get("name"))}
    done = [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]
    on_gpu = [e for e in done if processes.get(e.get("pid"), "").startswith("/device:GPU") and (e.get("pid"), e.get("tid")) in streams]
    if on_gpu:
        return _lanes(on_gpu)
    thunks = [e for e in done if "hlo_op" in (e.get("args") or {})]
    if not thunks:
        rows = ", ".join(sorted(set(processes.values()))) or "nothing"
        raise InputError(f"the trace holds no CUDA streams and no thunks of a CPU; it has rows of {rows}")
    return _thunks(thunks)


def _lanes(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    spans: dict[tuple[str, Any], list[Interval]] = defaultdict(list)
    devices = set()
    for event in events:
        devices.add(event["pid"])
        spans[kind_of(str(event.get("name"))), event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    total: dict[str, float] = defaultdict(float)
    for (kind, _), intervals in spans.items():
        total[kind] += covered(intervals) * 1e-6 / len(devices)
    return dict(total)


def _thunks(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for event in events:
        name = str(event["args"]["hlo_op"])
        if name.split(".")[0] not in HOLDERS:
            total["collective" if name.startswith(COLLECTIVES) else "compute"] += event["dur"] * 1e-6
    return dict(total)


def kind_of(name: str) -> str:
    """The lane of an event on a CUDA stream, by its name."""
    plain = name.lower().replace(" ", "")
    for mark, kind in (("memcpyh2d", "to_device"), ("memcpyd2h", "to_host"), ("memcpyd2d", "device"), ("memcpyp2p", "collective")):
        if mark in plain:
            return kind
    return "collective" if plain.startswith(COLLECTIVES) else "compute"


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of ``intervals``."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
