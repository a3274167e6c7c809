"""plan.json: a plan as people keep it. Read strictly (schema, types, limits), written atomically."""

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, PlanError
from forebay.records import Entry, Verdict
from forebay.units import show_bytes
from forebay.workload.sharding import MeshShape

SCHEMA = 1
LIMIT_BYTES = 64 * 2**20
LIMIT_DEPTH = 32


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
    path = Path(path)
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise PlanError(f"{path} has {show_bytes(path.stat().st_size)}; a plan.json has at most {show_bytes(LIMIT_BYTES)}")
        data = json.loads(path.read_text())
    except OSError as problem:
        raise PlanError(f"the plan {path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise PlanError(
            f"{path} is not a plan.json: {problem or 'it is nested too deeply'}; make it again with forebay plan --out"
        ) from None
    if not isinstance(data, dict):
        raise PlanError(f"{path} is not a plan.json: it holds a {type(data).__name__}, not an object")
    _check_depth(data, path)
    return data


def _check_depth(data, path) -> None:
    level = [data]
    for _ in range(LIMIT_DEPTH):
        level = [v for item in level for v in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())]
        if not level:
            return
    raise PlanError(f"{path} is not a plan.json: it is nested more than {LIMIT_DEPTH} deep")


def fields(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Arguments of ``Plan`` from plan.json.

    Raises:
        PlanError: another schema, or a field that is missing or of the wrong type, which is named.
    """
    if data.get("schema") != SCHEMA:
        raise PlanError(
            f"{path} has schema {data.get('schema')!r}; this forebay reads schema {SCHEMA}. Make the plan again with forebay plan --out"
        )
    for name, kind in (("workload", dict), ("signature", dict), ("entries", list), ("options", dict)):
        if not isinstance(data.get(name), kind):
            raise PlanError(f"{path}: the field {name!r} is missing or is not {'a list' if kind is list else 'an object'}")
    return {
        "workload": data["workload"],
        "signature": data["signature"],
        "hardware": _optional(data, "hardware", dict, path),
        "mesh": _mesh(data["workload"].get("mesh"), path),
        "entries": tuple(_entry(item, k, path) for k, item in enumerate(data["entries"])),
        "options": _options(data["options"], path),
        "verdict": _verdict(_optional(data, "verdict", dict, path), path),
        "forecast": data.get("forecast"),
        "candidates": tuple(_optional(data, "candidates", list, path) or ()),
    }


def _optional(data, name, kind, path):
    value = data.get(name)
    if value is not None and not isinstance(value, kind):
        raise PlanError(f"{path}: the field {name!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _mesh(value, path) -> MeshShape | None:
    if value is None:
        return None
    good = isinstance(value, dict) and value and all(type(n) is int and 0 < n < 10**7 for n in value.values())
    if not good:
        raise PlanError(f"{path}: workload.mesh must map axis names to positive sizes; it is {str(value)[:80]}")
    return MeshShape(sizes=tuple(value.values()), names=tuple(value))


def _options(value, path):
    if type(value.get("whole_below_bytes")) is not int or not isinstance(value.get("compiler", {}), dict):
        raise PlanError(f"{path}: options.whole_below_bytes must be a number of bytes and options.compiler an object")
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _entry(item, k, path) -> Entry:
    where = f"{path}: entry {k}"
    known = {f.name for f in dataclasses.fields(Entry)}
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or set(item) - known:
        raise PlanError(f"{where} is not an entry: it must be an object with a name and of the fields {', '.join(sorted(known))}")
    try:
        entry = Entry(**{name: _tuples(value) for name, value in item.items()})
    except (TypeError, AssertionError, KeyError) as problem:
        raise PlanError(f"{where}, {item['name']!r}, cannot be used: {problem}") from None
    if type(entry.bytes_per_device) is not int or not isinstance(entry.dtype, str) or not all(type(n) is int for n in entry.shape):
        raise PlanError(f"{where}, {item['name']!r}: bytes_per_device and shape must be whole numbers and dtype a text")
    return entry


def _verdict(value, path) -> Verdict | None:
    if value is None:
        return None
    try:
        return Verdict.from_json({k: v for k, v in value.items() if k not in ("by_role", "hbm_bytes", "host_bytes")})
    except (ForebayError, TypeError, ValueError, AttributeError, AssertionError) as problem:
        raise PlanError(f"{path}: the verdict cannot be read: {problem}") from None


def describe(plan: Any) -> str:
    """A plan in a few lines: bytes by role and place, then the verdict."""
    w = plan.workload
    lines = [
        f"plan for {w.get('model') or 'a model'} ({w['parameters']:,} parameters) on {(plan.hardware or {}).get('name', 'one device')}"
    ]
    for role, places in by_role(plan).items():
        parts = [f"{show_bytes(places[p])} on {p}" for p in ("hbm", "host") if places[p]]
        lines.append(f"  {role:12s} {', '.join(parts) or 'none kept'}")
    lines.append("no compiler has judged it yet" if plan.verdict is None else str(plan.verdict))
    return "\n".join(lines)
