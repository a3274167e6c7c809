"""Which of the known hazards (``records.hazards``) a compiled program meets: one small test for each row of the table."""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from forebay.compiler.hlo import Findings
from forebay.hardware import pool
from forebay.records.hazards import HAZARDS, WRONG_RESULTS, in_range
from forebay.records.verdict import HOST_TO_HOST, Hazard, Memory
from forebay.units import show_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the tests look at: the program's findings, its host memory, its compiler options and the jax settings."""

    findings: Findings
    host: Memory
    options: Mapping[str, object]
    settings: Mapping[str, object]


def hazards(evidence: Evidence, jaxlib: str, platform: str) -> tuple[Hazard, ...]:
    """The rows that exist in this jaxlib on this platform and that this program meets, each with its own numbers."""
    found = []
    for row in HAZARDS:
        if in_range(row, jaxlib, platform) and (detail := _TESTS[row.id](evidence)):
            found.append(Hazard(id=row.id, message=f"{row.message} Here: {detail}.", action=row.action))
    return tuple(found)


def avoided(options: Mapping[str, object], jaxlib: str, platform: str) -> tuple[str, ...]:
    """The rows with wrong results that exist here and that ``options`` keep away, each as a sentence."""
    rows = [row for row in HAZARDS if row.severity == WRONG_RESULTS and in_range(row, jaxlib, platform)]
    return tuple(
        f"compiled with {name}={value}, which keeps the hazard {row.id} of jaxlib {jaxlib} away"
        for row in rows
        for name, value in row.options.items()
        if str(value) in str(options.get(name, "")).split(",")
    )


def refused(found: tuple[Hazard, ...]) -> str:
    """Why a program that compiles must not run: the hazards with wrong results among ``found``; empty where there are none."""
    wrong = {row.id for row in HAZARDS if row.severity == WRONG_RESULTS}
    return "; ".join(f"refused: {hazard.id}, its results would be wrong. {hazard.action}" for hazard in found if hazard.id in wrong)


def _on(evidence: Evidence, option: str) -> bool:
    return str(evidence.options.get(option, "")).lower() in ("true", "1")


def _disabled(evidence: Evidence, hlo_pass: str) -> bool:
    return hlo_pass in str(evidence.options.get("xla_disable_hlo_passes", "")).split(",")


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reversed_host_slice(evidence: Evidence) -> str:
    return _names(evidence.findings.misplaced_slices)


def _two_in_flight(evidence: Evidence) -> str:
    limit = int(str(evidence.options.get("xla_gpu_experimental_parallel_async_compute_limit", 2)))
    loops = Counter(copy.loop for copy in evidence.findings.host_copies if copy.loop and copy.asynchronous)
    most = max(loops.values(), default=0)
    return f"{most} asynchronous host copies in one loop body, {limit} at a time" if limit < 8 and most > limit else ""


def _pipelined_host_offload(evidence: Evidence) -> str:
    chosen = _on(evidence, "xla_gpu_enable_pipelined_host_offloading") and evidence.findings.host_copies
    return f"{len(evidence.findings.host_copies)} host copies" if chosen else ""


def _host_counted_as_hbm(evidence: Evidence) -> str:
    corrected = _on(evidence, "xla_gpu_enable_host_memory_offloading") or _disabled(evidence, "rematerialization")
    count = evidence.findings.remat_instructions
    if corrected or not count or not evidence.host.total_bytes:
        return ""
    return f"{count} .remat instructions beside {show_bytes(evidence.host.total_bytes)} of host memory"


def _host_pool(evidence: Evidence) -> str:
    total = evidence.host.total_bytes
    needed = pool.preallocated_gib([total])
    said = f"{show_bytes(total)} per device; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={needed} or more (`forebay plan --env` knows its arrays)"
    return said if needed > pool.DEFAULT_GIB else ""


def _implicit_host_compute(evidence: Evidence) -> str:
    return _names(evidence.findings.host_compute)


def _host_to_host(evidence: Evidence) -> str:
    copies = [copy for copy in evidence.findings.host_copies if copy.direction == HOST_TO_HOST]
    moved = sum(copy.bytes * (copy.trip_count or 1) for copy in copies)
    return f"{_names(tuple(copy.name for copy in copies))}, {show_bytes(moved)} in all" if copies else ""


def _flat_copy_cost(evidence: Evidence) -> str:
    sizes = [copy.bytes for copy in evidence.findings.host_copies if copy.asynchronous]
    spread = len(sizes) > 1 and max(sizes) > 16 * min(sizes)
    return f"asynchronous copies from {show_bytes(min(sizes))} to {show_bytes(max(sizes))}" if spread else ""


def _remat3(evidence: Evidence) -> str:
    return "jax_remat3 is set" if evidence.settings.get("jax_remat3") else ""


_TESTS = {
    "reversed-host-slice": _reversed_host_slice,
    "two-in-flight": _two_in_flight,
    "pipelined-host-offload": _pipelined_host_offload,
    "host-counted-as-hbm": _host_counted_as_hbm,
    "host-pool-64gb": _host_pool,
    "implicit-host-compute": _implicit_host_compute,
    "host-to-host-copy": _host_to_host,
    "flat-copy-cost": _flat_copy_cost,
    "remat3": _remat3,
}
