"""Compiler options that could make a planned step better, by version: what each was seen to do, and whether plans set it. Data, no logic.

A row with ``chosen`` is set by ``plan.options``; the others are left alone, and the plan says why. Figures are of the compiled step and
its forecast (h100-sxm; docs/evidence.md has the table): the change of HBM, and of the forecast seconds of a step. Mitigations of
hazards stand in ``records.hazards``.
"""

import dataclasses
from collections.abc import Mapping

LEFT = "left alone: "
"""How the reason of an option that is not set begins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownOption:
    """One row. ``values`` is what was tried, and what is set where ``chosen``; ``versions`` is a half-open range of jaxlib.

    ``when`` says for which plans the row is considered: ``host`` (something stands in host memory), ``devices`` (several devices), of
    those ``node`` (all in one node) or ``nodes`` (in several), and ``always``.
    """

    id: str
    values: Mapping[str, object]
    chosen: bool
    when: str
    reason: str
    source: str
    platforms: tuple[str, ...] = ("cuda",)
    versions: tuple[str | None, str | None] = (None, None)

    def __post_init__(self):
        assert self.when in ("host", "devices", "node", "nodes", "always"), self.when


EVIDENCE = "docs/evidence.md, Compiler options"
BY_OLD_NAMES, BY_NEW_NAMES = (None, "0.11"), ("0.11", None)
PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")
OLD_PIPELINING = {f"xla_gpu_enable_pipelined_{kind}": True for kind in PIPELINED}
NEW_PIPELINING = {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in PIPELINED}
DOUBLE_BUFFERING = {"xla_gpu_enable_while_loop_double_buffering": True}
_PIPELINING = "within a node 0.4 to 1 GiB of HBM more, and steps from 3 % faster to 1 % slower: HBM is what a plan is short of"
_WITHIN = "within a node 0.4 to 1.2 GiB of HBM more for 0.6 to 1.8 % of a step: worth it by hand where HBM is to spare"
_ACROSS = "between nodes steps are 4 to 6 % faster: gathers and reductions of a layer cross the edge of its loop; 2.5 of 72 GiB of HBM more"

OPTIONS = (
    KnownOption(
        id="collective-kernels",
        values={"xla_gpu_experimental_use_collective_kernels": ""},
        chosen=True,
        when="nodes",
        reason="over several nodes the all-reduce of one number becomes a Triton kernel on which LLVM ends the compiler's process",
        source=EVIDENCE,
        versions=("0.12", None),
    ),
    KnownOption(
        id="latency-hiding-scheduler",
        values={"xla_gpu_enable_latency_hiding_scheduler": True},
        chosen=False,
        when="devices",
        reason="the same program with and without it: XLA:GPU already schedules so, by its analytical estimator",
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-host-offload",
        values={"xla_gpu_enable_pipelined_host_offloading": True},
        chosen=False,
        when="host",
        reason="steps change by -0.1 to +0.8 %, and a loss regression was reported with it",
        source=f"{EVIDENCE}; openxla/xla issues 37979 and 45393",
    ),
    KnownOption(
        id="memory-limit",
        values={"xla_gpu_memory_limit_slop_factor": 1000},
        chosen=True,
        when="always",
        reason="near 80 % of the device XLA:GPU makes copies and collectives take turns with compute, and recomputes and offloads by "
        "itself; the plan answers for memory, and its verdict is that of the program without the limit",
        source=EVIDENCE,
    ),
    KnownOption(
        id="command-buffers",
        values={"xla_gpu_enable_command_buffer": ""},
        chosen=False,
        when="host",
        reason="turning CUDA graphs off changes neither the schedule nor its memory; what they take lies outside the pool",
        source=EVIDENCE,
    ),
    KnownOption(
        id="combine-thresholds",
        values={
            "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
            "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
        },
        chosen=False,
        when="devices",
        reason="larger collectives start later: steps 1.1 to 2.4 % slower",
        source=f"{EVIDENCE}; the sizes of MaxText's recipes",
    ),
    KnownOption(
        id="while-loop-double-buffering",
        values=DOUBLE_BUFFERING,
        chosen=False,
        when="node",
        reason="the same HBM, steps 0.1 to 1 % faster, which is within what a forecast can tell; every loop body is compiled twice",
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-collectives",
        values=OLD_PIPELINING,
        chosen=False,
        when="node",
        versions=BY_OLD_NAMES,
        reason=_PIPELINING,
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-collectives",
        values=NEW_PIPELINING,
        chosen=False,
        when="node",
        versions=BY_NEW_NAMES,
        reason=_PIPELINING,
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-and-double-buffered",
        values=OLD_PIPELINING | DOUBLE_BUFFERING,
        chosen=False,
        when="node",
        versions=BY_OLD_NAMES,
        reason=_WITHIN,
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-and-double-buffered-across",
        values=OLD_PIPELINING | DOUBLE_BUFFERING,
        chosen=True,
        when="nodes",
        versions=BY_OLD_NAMES,
        reason=_ACROSS,
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-and-double-buffered",
        values=NEW_PIPELINING | DOUBLE_BUFFERING,
        chosen=False,
        when="node",
        versions=BY_NEW_NAMES,
        reason=_WITHIN,
        source=EVIDENCE,
    ),
    KnownOption(
        id="pipelined-and-double-buffered-across",
        values=NEW_PIPELINING | DOUBLE_BUFFERING,
        chosen=True,
        when="nodes",
        versions=BY_NEW_NAMES,
        reason=_ACROSS,
        source=EVIDENCE,
    ),
)
