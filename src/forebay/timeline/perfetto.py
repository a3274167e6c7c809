"""A replayed step as a trace file that Perfetto and chrome://tracing open: one process, one track a lane, one slice an event.

The format is the JSON of the Chrome trace event profiler: complete events (``ph: X``) with microseconds, and metadata events that
name the tracks."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from forebay.timeline.costs import LANES
from forebay.timeline.replay import Event

_TITLES = {
    "compute": "compute", "to_device": "host to device", "to_host": "device to host", "device": "copies in HBM",
    "collective": "collectives", "side": "other streams", "disk": "disk",
}  # fmt: skip


def to_perfetto(events: Iterable[Event], title: str = "forebay forecast") -> dict:
    """The trace as plain values for json. Loops appear as their first, steady and last iterations with the skipped ones as one slice."""
    events = list(events)
    lanes = [lane for lane in LANES if any(e.lane == lane for e in events)]
    rows: list[dict] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": title}}]
    for number, lane in enumerate(lanes, start=1):
        rows.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": _TITLES[lane]}})
        rows.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for event in sorted(events, key=lambda e: (e.begin_seconds, -e.end_seconds)):
        rows.append(
            {
                "ph": "X", "pid": 1, "tid": lanes.index(event.lane) + 1, "name": event.name, "cat": event.kind,
                "ts": event.begin_seconds * 1e6, "dur": (event.end_seconds - event.begin_seconds) * 1e6,
                "args": {"traced as": event.detail} if event.detail else {},
            }
        )  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": rows}


def write_perfetto(events: Iterable[Event], path: str | Path, title: str = "forebay forecast") -> Path:
    """Write the trace to ``path`` (open it at ui.perfetto.dev); gzipped where the name ends in ``.gz``, which Perfetto reads too."""
    path = Path(path)
    data = json.dumps(to_perfetto(events, title)).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path
