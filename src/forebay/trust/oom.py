"""``explain_oom``: from an out-of-memory error, a saved log or an HLO dump to what a person needs to go on.

    message      -> which memory, what was asked, what its limit was          (oom_text)
    scheduled HLO -> what is alive at the peak of the compiled program        (oom_peak)
    plan         -> the entries' names for those buffers, and plans that fit  (oom_next)

Sizes from the HLO are *compiled*, sizes from the message are the runtime's, times are *forecast*; the text keeps them apart.
"""

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.errors import CompilerError, InputError
from forebay.hardware import Hardware, pool
from forebay.hardware.environment import HOST_LIMIT
from forebay.trust.oom_next import NextPlan, next_plans
from forebay.trust.oom_peak import HBM, HOST, Live, Peak, find_peak
from forebay.trust.oom_text import DISK, OUTSIDE, POOL, RAM, VMEM, Shortage, looks_like_oom, read_shortage
from forebay.trust.oom_text import HBM as DEVICE
from forebay.units import GIB, show_bytes, show_seconds

SHOWN = 10
MOST_BYTES_OF_A_LOG = 512 * 2**20
_STORED = re.compile(r"stored_(params|opt_state|copies)\[(\d+)\]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A buffer, or several alike, alive at the peak. ``entry`` is the plan's name for it, empty where it has none."""

    bytes: int
    copies: int
    kind: str
    shape: str
    what: str
    source: str
    entry: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """``shortage`` is what the message says (None: only HLO was given); ``peak`` the compiled program's; ``nexts`` plans that fit."""

    shortage: Shortage | None
    peak: Peak | None
    rows: tuple[Row, ...]
    budget_bytes: int | None
    nexts: tuple[NextPlan, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*_head(self), *_needs(self), *_largest(self), *_next_lines(self), *(f"note: {note}" for note in self.notes)]
        return "\n".join([*lines, *(f"do: {line}" for line in _advice(self))])


def explain_oom(error_or_text: BaseException | str, plan: Any = None, *, hlo: str | None = None, tries: int = 4) -> OomReport:
    """What ran out of memory, what was alive, and the cheapest plan that fits.

    Args:
        error_or_text: the exception that XLA raised, a saved log, or the text of a scheduled HLO module.
        plan: the plan that the step ran under; where it is bound to its workload, the compiler is asked for its peak and for what fits.
        hlo: scheduled HLO of the step, where it is at hand.
        tries: how many other plans the compiler is asked about, each some seconds to a minute; 0 for none.

    Raises:
        InputError: the text is neither an out-of-memory message nor HLO.
    """
    text = str(error_or_text)
    is_hlo = hlo is None and _is_hlo(text)
    hlo = text if is_hlo else hlo
    shortage = None if is_hlo else read_shortage(text)
    notes: list[str] = []
    on_cpu = _platform(plan) == "cpu"
    if on_cpu and shortage is not None and shortage.pool == DEVICE:
        shortage = dataclasses.replace(shortage, pool=RAM, device=None)  # a CPU has no memory of its own
    bound = plan is not None and _platform(plan) in ("cuda", "tpu") and plan.work is not None
    if plan is not None and bound and (hlo is None or (tries and plan.verdict is None)):
        plan, said = _judged(plan)
        notes += said
    if hlo is None and plan is not None and plan.verdict is not None and plan.verdict.hlo_gzip:
        hlo = plan.verdict.hlo
    ran_out = shortage.pool if shortage else DEVICE
    space = HOST if ran_out in (POOL, RAM) else HBM
    peak = find_peak(hlo, space) if hlo is not None and ran_out not in (DISK, VMEM) else None
    nexts: tuple[NextPlan, ...] = ()
    if plan is not None and bound and tries and ran_out in (DEVICE, OUTSIDE) and plan.verdict is not None and plan.verdict.compiled:
        nexts, said = next_plans(plan, _target(plan, shortage), tries)
        notes += said
    return OomReport(
        shortage=shortage, peak=peak, rows=_rows(peak, shortage, plan), budget_bytes=_budget(plan, space), nexts=nexts, notes=tuple(notes)
    )  # fmt: skip


def explain_file(path: Path, plan: Any = None) -> OomReport:
    """``explain_oom`` of a saved log or an HLO dump.

    Raises:
        InputError: no such file, one too large, or one that says nothing of memory.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}; give a saved log of the run or an HLO dump (*.after_optimizations.txt)")
    if (size := path.stat().st_size) > MOST_BYTES_OF_A_LOG:
        raise InputError(f"{path} has {show_bytes(size)}; the most that is read is {show_bytes(MOST_BYTES_OF_A_LOG)}")
    return explain_oom(path.read_text(errors="replace"), plan)


def is_oom(error: BaseException) -> bool:
    """Whether an exception of jax says that memory ran out."""
    return looks_like_oom(str(error))


def _is_hlo(text: str) -> bool:
    return any(line.startswith("HloModule ") for line in text[:200_000].splitlines())


def _platform(plan: Any) -> str | None:
    return None if plan is None or plan.hardware is None else Hardware.from_json(plan.hardware).target.platform


def _judged(plan: Any) -> tuple[Any, list[str]]:
    """The plan with the compiler's verdict on its own step; as it is, with a note, where that compiler cannot be asked."""
    from forebay.search.proving import judged

    try:
        return judged(plan, Hardware.from_json(plan.hardware)), []
    except (CompilerError, InputError) as problem:
        return plan, [f"the step was not compiled again for its peak: {problem}"]


def _target(plan: Any, shortage: Shortage | None) -> int:
    """Bytes of HBM that a next plan must stay within: the budget, or what the runtime really had where that is less."""
    budget = plan.verdict.hbm_budget_bytes
    limit = shortage.limit_bytes if shortage and shortage.pool == DEVICE else None
    ran_out_within = min(budget, plan.verdict.hbm.total_bytes - 1)  # it ran out, whatever the budget says
    return min(ran_out_within, limit) if limit else ran_out_within


def _budget(plan: Any, space: int) -> int | None:
    if plan is None or plan.hardware is None:
        return None
    machine = Hardware.from_json(plan.hardware)
    return machine.host_budget_bytes_per_device if space == HOST else machine.hbm_budget_bytes


# ---- what was alive


def _rows(peak: Peak | None, shortage: Shortage | None, plan: Any) -> tuple[Row, ...]:
    if peak is not None:
        names = _Names(plan)
        alike: Counter = Counter()
        for live in peak.live:
            alike[live.kind, live.shape, live.operation, live.source, names.of(live), live.bytes] += 1
        rows = [
            Row(bytes=size, copies=count, kind=kind, shape=shape, what=what, source=source, entry=entry)
            for (kind, shape, what, source, entry, size), count in alike.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes * row.copies))
    buffers = shortage.buffers if shortage else ()
    return tuple(Row(bytes=b.bytes, copies=1, kind="", shape=b.shape, what=b.operation, source=b.source) for b in buffers)


class _Names:
    """The plan's entries for the buffers of its program: arguments by their place in the state, temporaries by role and size."""

    def __init__(self, plan: Any):
        self.stored = {}
        self.free = []
        if plan is not None:
            copies = [entry for entry in plan.entries if entry.copy_of is not None]
            self.stored = {"params": plan.role("parameter"), "opt_state": plan.role("optimizer"), "copies": copies}
            self.free = [entry for entry in plan.entries if entry.role in ("activation", "gradient") and entry.bytes_per_device]

    def of(self, live: Live) -> str:
        if found := _STORED.search(live.operation):
            entries = self.stored.get(found.group(1), ())
            at = int(found.group(2))
            return entries[at].name if at < len(entries) else ""
        if live.kind != "temp" or live.bytes < 2**20:
            return ""
        dtype = live.shape.partition("[")[0]
        match = next((e for e in self.free if e.bytes_per_device == live.bytes and _hlo_dtype(e.dtype) == dtype), None)
        if match is None:
            return ""
        self.free.remove(match)
        return match.name


def _hlo_dtype(name: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


# ---- the text


def _head(report: OomReport) -> list[str]:
    shortage = report.shortage
    if shortage is None:
        return ["the program's peak (compiled)"]
    where = f"HBM of device {shortage.device}" if shortage.pool == DEVICE and shortage.device is not None else _POOLS[shortage.pool]
    lines = [f"out of memory: {where}, at {shortage.when}"]
    figures = (("asked", shortage.asked_bytes), ("the program needs", shortage.needed_bytes), ("in use", shortage.in_use_bytes))
    said = [f"{word} {show_bytes(size)}" for word, size in figures if size is not None]
    if (limit := _limit(shortage)) is not None:
        said.append(f"limit {show_bytes(limit)}")
    return [*lines, "  " + (", ".join(said) if said else "the message gives no size"), f"  said: {shortage.message}"]


_POOLS = {
    DEVICE: "HBM",
    POOL: "pinned host memory (XLA's host pool), not the device",
    RAM: "host RAM, not an accelerator's memory",
    DISK: "the disk, not memory",
    OUTSIDE: "device memory outside jax's pool (CUDA context, kernels, CUDA graphs, NCCL, cuDNN)",
    VMEM: "on-chip memory of the TPU (vmem or smem), not HBM",
}


def _limit(shortage: Shortage) -> int | None:
    if shortage.pool == POOL and shortage.limit_bytes is None:
        return (int(os.environ.get(HOST_LIMIT, 0) or 0) or pool.DEFAULT_GIB) * GIB
    return shortage.limit_bytes


def _needs(report: OomReport) -> list[str]:
    peak = report.peak
    if peak is None:
        return []
    space = "host memory" if peak.space == HOST else "HBM"
    over = ""
    if report.budget_bytes is not None:
        rest = report.budget_bytes - peak.total_bytes
        over = f"; the budget is {show_bytes(report.budget_bytes)}: " + (
            f"{show_bytes(rest)} left" if rest >= 0 else f"{show_bytes(-rest)} over"
        )
    parts = (
        f"arguments {show_bytes(peak.argument_bytes)}, outputs {show_bytes(peak.output_bytes)}, temporaries {show_bytes(peak.temp_bytes)}"
    )
    return [f"  {space} at the peak (compiled): {show_bytes(peak.total_bytes)} per device ({parts}){over}", f"  the peak is at {peak.at}"]


def _largest(report: OomReport) -> list[str]:
    if not report.rows:
        return ["  no list of buffers: give the plan, or an HLO dump (XLA_FLAGS=--xla_dump_to=FOLDER)"]
    lines = ["largest at the peak" + (" (compiled)" if report.peak else " (from the message)")]
    for row in report.rows[:SHOWN]:
        count = f"{row.copies} x " if row.copies > 1 else ""
        what = row.entry or row.what
        lines.append(f"  {show_bytes(row.bytes * row.copies):>11s}  {count}{row.shape}  {row.kind}  {what}  {row.source}".rstrip())
    if rest := report.rows[SHOWN:]:
        lines.append(f"  {show_bytes(sum(row.bytes * row.copies for row in rest)):>11s}  {len(rest)} more")
    return lines


def _next_lines(report: OomReport) -> list[str]:
    if not report.nexts:
        return []
    lines = ["plans that fit, cheapest first (memory compiled, time forecast)"]
    for plan in report.nexts:
        time = (
            "" if plan.added_seconds is None else f" for {'+' if plan.added_seconds >= 0 else '-'}{show_seconds(abs(plan.added_seconds))}"
        )
        lines.append(
            f"  {plan.rule}: +{show_bytes(plan.freed_bytes)} of HBM{time}; HBM {show_bytes(plan.hbm_bytes)}, "
            f"host {show_bytes(plan.host_bytes)}"
        )
    return lines


def _advice(report: OomReport) -> list[str]:
    shortage = report.shortage
    if report.nexts:
        return [f"run again with {report.nexts[0].flags} beside the rules that the plan has"]
    if shortage is not None and shortage.pool == POOL:
        needed = report.peak.total_bytes if report.peak else 2 * (_limit(shortage) or pool.DEFAULT_GIB * GIB)
        limit = pool.preallocated_gib([needed])
        return [f"export {HOST_LIMIT}={limit}, before jax starts; the host needs as much free RAM for each device"]
    return [_ADVICE[shortage.pool if shortage else DEVICE]]


_ADVICE = {
    DEVICE: "move more to the host: --place optimizer=host, then --place activation=host or parameter=host; `forebay plan` says what fits",
    RAM: "raise the container's memory limit, or place less on the host; `forebay train` prints the host's budget before it starts",
    DISK: "free space where the run's folder and checkpoints are, or choose another --out",
    OUTSIDE: "leave more outside jax's pool: export XLA_PYTHON_CLIENT_MEM_FRACTION with a smaller value than now (jax's default is 0.75)",
    VMEM: "a kernel's own blocks are too large: smaller blocks in that kernel, or XLA_FLAGS without a raised scoped vmem limit",
}

__all__ = ["OomReport", "Row", "explain_file", "explain_oom", "is_oom"]
