"""Terminal tables of a plan: what each role holds in HBM and in host memory, the largest entries, and the compiler's word.

In: the record of a plan.json, nothing else, so that showing a plan loads no jax. Every size is per device. Sizes of roles are arithmetic on
the plan's entries (*planned*); totals are the compiler's (*compiled*); the two are never added up.
"""

import fnmatch
import io
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from forebay.errors import InputError, nearest
from forebay.records import ROLES, Forecast
from forebay.records.flags import LEFT
from forebay.report.lanes import exposed_table, lane_picture, step_table
from forebay.units import show_bytes, show_seconds

LARGEST = 10
NOTHING = "-"
# What is an argument of the step, and so part of the compiled arguments; the rest lives in its temporaries.
ARGUMENTS = ("parameter", "optimizer", "accumulator", "batch")
_PARTS = (("arguments", "argument_bytes"), ("outputs", "output_bytes"), ("donated outputs", "alias_bytes"), ("temporaries", "temp_bytes"))


def render_plan(record: Mapping, cached: bool = False) -> str:
    """The whole plan for a terminal. ``cached``: the answer was found on disk."""
    verdict = record.get("verdict")
    parts = [_title(record), _table_of_roles(record["entries"])]
    if verdict:
        parts.append(_table_of_sizes(verdict))
    parts.append(_table_of_entries("largest entries", record["entries"], LARGEST))
    if record.get("forecast"):
        forecast = Forecast.from_json(record["forecast"])
        parts += [part for part in (step_table(forecast), lane_picture(forecast), exposed_table(record["entries"])) if part]
    if record.get("candidates"):
        parts.append(_table_of_candidates(record["candidates"]))
    if reasons := record.get("options", {}).get("reasons"):
        parts.append("\n".join(_option_lines(reasons)))
    parts.append("\n".join(_verdict_lines(verdict, cached)) if verdict else "No verdict: the compiler has not been asked.")
    return "\n\n".join(parts)


def render_entries(record: Mapping, pattern: str) -> str:
    """The entries that ``pattern`` names, each with its reason.

    Raises:
        InputError: no entry has such a name, with the nearest.
    """
    names = [entry["name"] for entry in record["entries"]]
    found = [e for e in record["entries"] if fnmatch.fnmatchcase(e["name"], pattern) or pattern in (e["role"], e["name"].partition(":")[2])]
    if not found:
        raise InputError(f"no entry of this plan is called {pattern!r}; {nearest(pattern, names)}")
    return _table_of_entries(f"{len(found)} of {len(names)} entries", found, len(found))


def _title(record: Mapping) -> str:
    work, hardware, verdict = record["workload"], record["hardware"], record.get("verdict")
    said = {True: "fits (compiled)", False: "does not fit", None: "unknown"}[verdict["fits"]] if verdict else "not judged"
    sizes = [f"{_count(work['parameters'])} parameters" if work.get("parameters") else ""]
    sizes += [f"global batch {work['global_batch']}" if work.get("global_batch") else ""]
    sizes += [f"sequences of {work['sequence_length']}" if work.get("sequence_length") else ""]
    machine = f"{hardware['name']} ({hardware['devices']} devices)" if hardware else "one device"
    what = ", ".join(size for size in sizes if size)
    return f"{work.get('model') or 'model'} on {machine}: {said}\n{what}; sizes are per device"


def _table_of_roles(entries: Iterable[Mapping]) -> str:
    table = _table("role (planned)", ">HBM", ">host", "held in", "entries recomputed")
    sums: Counter = Counter()
    count: Counter = Counter()
    for entry in entries:
        sums[entry["role"], entry["placement"]] += entry["bytes_per_device"]
        count[entry["role"], entry["placement"] == "recompute"] += 1
    for role in ROLES:
        if count[role, True] or count[role, False]:
            where = "arguments" if role in ARGUMENTS else "temporaries"
            redone = f"{count[role, True]} of {count[role, True] + count[role, False]}" if count[role, True] else ""
            table.add_row(role, _size(sums[role, "hbm"]), _size(sums[role, "host"]), where, redone)
    return _text(table)


def _table_of_sizes(verdict: Mapping) -> str:
    hbm, host = verdict["hbm"], verdict["host"]
    table = _table("the step (compiled)", ">HBM", ">host")
    if hbm and host:
        for title, field in _PARTS:
            sign = "-" if field == "alias_bytes" and hbm[field] + host[field] else ""
            table.add_row(title, *(sign + _size(side[field]) if side[field] else NOTHING for side in (hbm, host)))
        total = "total" if hbm.get("allocated_bytes") is None else "allocated in all"
        table.add_row(total, show_bytes(hbm["total_bytes"]), show_bytes(host["total_bytes"]))
    table.add_row("budget", show_bytes(verdict["hbm_budget_bytes"]), show_bytes(verdict["host_budget_bytes"]))
    return _text(table)


def _table_of_entries(title: str, entries: Iterable[Mapping], count: int) -> str:
    entries = list(entries)
    timed = any(entry.get("exposed_ms") is not None for entry in entries)
    rival = any(entry.get("runner_up") for entry in entries)
    columns = ((">exposed (forecast)", ">ms/GiB") if timed else (), ("runner-up",) if rival else ())
    table = _table(title, ">bytes", *columns[0], "placement", "reason", *columns[1])
    for entry in sorted(entries, key=lambda entry: -entry["bytes_per_device"])[:count]:
        layers = entry.get("layers")
        name = entry["name"] if not layers or entry["name"].endswith("]") else f"{entry['name']}[{layers[0]}:{layers[1]}]"
        exposed = entry.get("exposed_ms")
        shown = (NOTHING, NOTHING) if exposed is None else (show_seconds(exposed / 1e3), f"{entry['ms_per_gib']:.2f}")
        other = (entry.get("runner_up") or "",) if rival else ()
        row = (*(shown if timed else ()), entry["placement"], entry["reason"], *other)
        table.add_row(name, show_bytes(entry["bytes_per_device"]), *row)
    return _text(table)


def _table_of_candidates(candidates: Iterable[Mapping]) -> str:
    table = _table("candidates (compiled)", ">HBM", ">step (forecast)", "why not")
    for c in candidates:
        hbm = NOTHING if c["hbm_bytes"] is None else show_bytes(c["hbm_bytes"])
        seconds = NOTHING if c["step_seconds"] is None else show_seconds(c["step_seconds"])
        table.add_row(c["summary"], hbm, seconds, c["why_not"] or "chosen")
    return _text(table)


def _option_lines(reasons: Iterable[str]) -> Iterable[str]:
    """The options that were set, each with its reason, and the names of those that were not (their reasons stand in plan.json)."""
    left = []
    for reason in reasons:
        if reason.startswith(LEFT):
            left.append(reason.removeprefix(LEFT).partition(": ")[0].partition("=")[0])
        else:
            yield f"compiler option {reason}" if re.match(r"\w+=", reason) else reason
    if left:
        yield f"compiler options left alone, for reasons in plan.json (options.reasons): {', '.join(dict.fromkeys(left))}"


def _verdict_lines(verdict: Mapping, cached: bool) -> Iterable[str]:
    word = {True: "compiled: fits", False: "compiled: does not fit" if verdict["hbm"] else "not compiled", None: "unknown"}[verdict["fits"]]
    yield f"{word}: {verdict['reason']}"
    if verdict["attention"]:
        yield "compiled: attention kernels " + ", ".join(f"{count} x {name}" for name, count in verdict["attention"].items())
    if verdict["host_copies"]:
        yield "compiled: host copies in one step: " + ", ".join(_moved(verdict["host_copies"]))
    if verdict["ignored"]:
        yield "compiled: asked onto the host and not there: " + ", ".join(verdict["ignored"])
    for fact in verdict["facts"]:
        if not fact["held"] and fact["name"] != "host memory where asked":  # the line above
            yield f"compiled: not held: {fact['name']}: {fact['found']}"
    for hazard in verdict["hazards"]:
        yield f"hazard {hazard['id']}: {hazard['message']} -> {hazard['action']}"
    yield from (f"note: {message}" for message in verdict["messages"])
    versions = ", ".join(f"{name} {version}" for name, version in verdict["versions"].items())
    how = "found on disk, compiled before in" if cached or verdict["cached"] else "compiled in"
    yield f"{how} {show_seconds(verdict['compile_seconds'])} for {verdict['target']}, with {versions}"


def _moved(copies: Iterable[Mapping]) -> Iterable[str]:
    sums: Counter = Counter()
    for copy in copies:
        sums[copy["direction"]] += copy["bytes"] * (copy["trip_count"] or 1)
    return (f"{show_bytes(count)} {direction.replace('_', ' ')}" for direction, count in sums.items())


def _count(number: int) -> str:
    """A number of parameters as people say it: 8.03 billion, 242,000."""
    for factor, word in ((10**9, "billion"), (10**6, "million")):
        if number >= factor:
            return f"{number / factor:.3g} {word}"
    return f"{number:,}"


def _size(count: int) -> str:
    return show_bytes(count) if count else NOTHING


def _table(*columns: str) -> Table:
    """A plain table; a column whose name starts with ``>`` is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _text(table: Table) -> str:
    page = io.StringIO()
    Console(file=page, width=max(shutil.get_terminal_size((120, 40)).columns, 80), highlight=False).print(table, markup=False)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())
