"""plan.json: a plan as people keep it. Read strictly (schema, types, limits), written atomically."""

import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware
from forebay.records import Entry, Forecast, Verdict, reading
from forebay.units import show_bytes, show_seconds
from forebay.workload.sharding import MeshShape

SCHEMA = 1
LARGEST = 8  # entries that a printed plan names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """The fields of ``workload`` in plan.json."""

    parameters: int
    model: str = ""
    fingerprint: str = ""
    global_batch: int = 0
    sequence_length: int = 0
    mesh: dict[str, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of a plan that this stage reads; others stand beside them."""

    whole_below_bytes: int
    microbatches: int = 1
    prefetch: int = 1
    compute_copy: str = "auto"
    fuse_update: str = "auto"
    accumulator_dtype: str | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    compiler: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)


_OBJECT = dict[str, Any]
_FIELDS = {
    "workload": _OBJECT, "signature": dict[str, str], "hardware": _OBJECT | None, "entries": list, "options": _OBJECT,
    "verdict": _OBJECT | None, "forecast": _OBJECT | None, "candidates": list[_OBJECT] | None,
}  # fmt: skip


def to_json(plan: Any) -> dict[str, Any]:
    """All of a plan but its workload's functions, in the fields of plan.json."""
    verdict = None
    if plan.verdict is not None:
        verdict = plan.verdict.to_json() | {"by_role": by_role(plan)}
        for space in ("hbm", "host"):
            total = verdict[space] and verdict[space]["total_bytes"]
            verdict[f"{space}_bytes"] = total
    return {
        "schema": SCHEMA,
        "workload": dict(plan.workload),
        "signature": dict(plan.signature),
        "hardware": None if plan.hardware is None else dict(plan.hardware),
        "entries": [dataclasses.asdict(e) for e in plan.entries],
        "options": dict(plan.options),
        "verdict": verdict,
        "forecast": plan.forecast,
        "candidates": list(plan.candidates),
    }


def by_role(plan: Any) -> dict[str, dict[str, int]]:
    """Bytes per device of each role in ``hbm`` and on the ``host``, as planned."""
    out: dict[str, dict[str, int]] = defaultdict(lambda: {"hbm": 0, "host": 0})
    for e in plan.entries:
        if e.placement in ("hbm", "host"):
            out[e.role][e.placement] += e.bytes_per_device
    return dict(out)


def write(path: str | Path, text: str) -> None:
    """Replace ``path`` in one step: a full disk or a kill leaves the old file as it was."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    except OSError as problem:
        scratch.unlink(missing_ok=True)
        raise PlanError(f"the plan could not be written to {path}: {problem.strerror}; what stood there before is untouched") from None


def read(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file, within limits of size and depth."""
    try:
        data = reading.read(path)
    except reading.Unreadable as problem:
        raise PlanError(f"{path} is not a plan.json: {problem}; make it again with forebay plan --out") from None
    if not isinstance(data, dict):
        raise PlanError(f"{path} is not a plan.json: it holds a {type(data).__name__}, not an object")
    return data


def fields(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Arguments of ``Plan`` from plan.json.

    Raises:
        PlanError: another schema, or a field that is missing or of the wrong type, which is named.
    """
    if data.get("schema") != SCHEMA:
        shown = str(data.get("schema"))[:60]
        raise PlanError(f"{path} has schema {shown}; this forebay reads schema {SCHEMA}. Make the plan again with forebay plan --out")
    made = {name: _field(data, name, kind, path) for name, kind in _FIELDS.items()}
    _known(_Summary, made["workload"], f"{path}: workload")
    _known(_Options, made["options"], f"{path}: options")
    if made["hardware"] is not None:
        made["hardware"] = Hardware.from_json(made["hardware"]).to_json()
    if made["forecast"] is not None:
        _whose(path, "forecast", lambda: Forecast.from_json(made["forecast"]))
    made["candidates"] = tuple(made["candidates"] or ())
    return made | {
        "mesh": _mesh(made["workload"].get("mesh"), path),
        "entries": tuple(_entry(item, k, path) for k, item in enumerate(made["entries"])),
        "verdict": _verdict(made["verdict"], path),
    }


def _field(data, name, kind, path):
    try:
        return reading.build(kind, data.get(name), name)
    except reading.Unreadable as problem:
        raise PlanError(f"{path}: {problem}") from None


def _known(kind, values, where) -> None:
    """Check those of ``values`` that ``kind`` has a field for; others are kept as they are."""
    known = {f.name for f in dataclasses.fields(kind)}
    try:
        reading.build(kind, {name: value for name, value in values.items() if name in known}, where)
    except reading.Unreadable as problem:
        raise PlanError(str(problem)) from None


def _whose(path, what, make):
    try:
        return make()
    except InputError as problem:
        raise PlanError(f"{path}: the {what} cannot be read: {problem}") from None


def _mesh(value, path) -> MeshShape | None:
    if value is None:
        return None
    if not value or not all(0 < n < 10**7 for n in value.values()):
        raise PlanError(f"{path}: workload.mesh must map axis names to positive sizes; it is {str(value)[:80]}")
    return MeshShape(sizes=tuple(value.values()), names=tuple(value))


def _entry(item, k, path) -> Entry:
    name = ascii(item["name"])[:80] if isinstance(item, dict) and isinstance(item.get("name"), str) else "without a name"
    try:
        return reading.build(Entry, item)
    except reading.Unreadable as problem:
        raise PlanError(f"{path}: entry {k}, {name}, cannot be used: {problem}") from None


def _verdict(value, path) -> Verdict | None:
    if value is None:
        return None
    plain = {k: v for k, v in value.items() if k not in ("by_role", "hbm_bytes", "host_bytes")}
    return _whose(path, "verdict", lambda: Verdict.from_json(plain))


def describe(plan: Any) -> str:
    """A plan in a few lines: bytes by role and place, the largest entries with their reasons, what was tried, and the verdict."""
    w = plan.workload
    lines = [
        f"plan for {w.get('model') or 'a model'} ({w['parameters']:,} parameters) on {(plan.hardware or {}).get('name', 'one device')}"
    ]
    for role, places in by_role(plan).items():
        parts = [f"{show_bytes(places[p])} on {p}" for p in ("hbm", "host") if places[p]]
        lines.append(f"  {role:12s} {', '.join(parts) or 'none kept'}")
    if plan.candidates:
        largest = sorted(plan.entries, key=lambda e: -e.bytes_per_device)[:LARGEST]
        lines += [f"  {e.name}: {e.placement}, {show_bytes(e.bytes_per_device)}; {e.reason}" for e in largest]
        lines += [f"  candidate {c['summary']}: {c['why_not'] or 'chosen'}" for c in plan.candidates]
    if plan.forecast:
        low, high = (show_seconds(plan.forecast[f"{end}_seconds"]) for end in ("low", "high"))
        lines.append(f"a step takes {show_seconds(plan.forecast['step_seconds'])} ({low} to {high}, forecast)")
    lines += [f"  {reason}" for reason in plan.options.get("reasons", ())]
    lines.append("no compiler has judged it yet" if plan.verdict is None else str(plan.verdict))
    return "\n".join(lines)
