"""The known traps of XLA's host offloading, by version: one row each, as data. FACTS and issues stand at each row."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

WRONG_RESULTS = "wrong-results"
GPU, TPU, EVERY = ("cuda",), ("tpu",), ("cuda", "tpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownHazard:
    """One row. ``versions`` is the half-open range ``(first, fixed)`` of jaxlib; ``None`` leaves an end open.

    ``severity`` is ``wrong-results``, ``memory``, ``speed`` or ``setting``. ``options`` are compiler options that forebay sets
    by itself in the plans it makes. ``message`` and ``action`` are complete sentences for a person.
    """

    id: str
    severity: str
    message: str
    action: str
    platforms: tuple[str, ...] = EVERY
    versions: tuple[str | None, str | None] = (None, None)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    source: str = ""


HAZARDS = (
    KnownHazard(
        id="reversed-host-slice",
        severity=WRONG_RESULTS,
        platforms=GPU,
        versions=("0.10.2", "0.11.1"),
        message="A stack in host memory is read or written at an index that is not the loop's own count from 0: reversed, as in every "
        "backward pass of an offloaded scan, or ahead, as in a prefetch. This XLA marks every such slice with byte offset 0 and one row "
        "per turn: another layer is touched, and the gradients or the state are silently wrong.",
        action="Compile with xla_disable_hlo_passes=dynamic-slice-annotator (same memory; the copies become kernels), or use jaxlib "
        "0.11.1 or later.",
        options={"xla_disable_hlo_passes": "dynamic-slice-annotator"},
        source="openxla/xla issue 46231, fixed by 46308",
    ),
    KnownHazard(
        id="two-in-flight",
        severity="speed",
        platforms=GPU,
        versions=("0.10.2", None),
        message="Only two host slices are in flight at once; the others show no overlap with compute.",
        action="Compile with xla_gpu_experimental_parallel_async_compute_limit=16.",
        options={"xla_gpu_experimental_parallel_async_compute_limit": 16},
        source="the option's default of 2; on 0.12.0.1 the reads of a 70B backward loop take turns with it, not with 8",
    ),
    KnownHazard(
        id="pipelined-host-offload",
        severity="setting",
        platforms=GPU,
        message="xla_gpu_enable_pipelined_host_offloading is on: host copies move by one iteration and overlap more compute, at the "
        "price of memory. A loss regression was reported with it.",
        action="Keep it only if the numerics check passes on the machine that trains.",
        source="openxla/xla issues 37979 and 45393",
    ),
    KnownHazard(
        id="host-counted-as-hbm",
        severity="speed",
        platforms=GPU,
        message="XLA's own rematerialisation pass counts host buffers as HBM and recomputes more than the memory asks for.",
        action="Compile with xla_gpu_enable_host_memory_offloading=true, or with xla_disable_hlo_passes=rematerialization.",
        options={"xla_gpu_enable_host_memory_offloading": True},
        source="a published log of a 14 s step, 0.633 s of it in .remat instructions",
    ),
    KnownHazard(
        id="host-pool-64gb",
        severity="setting",
        platforms=GPU,
        message="Pinned host memory is a pool of 64 GiB per device by default, and running out of it reads like running out of HBM.",
        action="Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before JAX starts.",
        source="the default of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    ),
    KnownHazard(
        id="implicit-host-compute",
        severity="speed",
        message="An operation works on an array that stands in host memory: a kernel over PCIe on a GPU, a call to the CPU on a TPU.",
        action="Bring the array to the device with jax.device_put inside the loop, before anything else touches it; on a GPU compile "
        "with xla_disable_automatic_host_compute_offload=true to make it an error.",
        source="XLA's host compute offload passes",
    ),
    KnownHazard(
        id="host-to-host-copy",
        severity="speed",
        message="The program copies host memory to host memory; inside a loop that is a whole stack for each layer.",
        action="Write slice i-1 before reading slice i+1, or order the leaves with jax.lax.optimization_barrier; donate the stack and "
        "carry it in place instead of giving it to a scan as xs and ys.",
        source="compiled probes: a read and a write of one host buffer in one loop body",
    ),
    KnownHazard(
        id="flat-copy-cost",
        severity="setting",
        platforms=GPU,
        message="XLA's scheduler gives every asynchronous copy the same cost, whatever its size, so large copies are started late.",
        action="Trust forebay's forecast, which replays the schedule with the bytes of each copy.",
        source="the GPU latency estimator",
    ),
    KnownHazard(
        id="remat3",
        severity="memory",
        message="jax_remat3 is on and ignores policies that are plain callables: what they offload stays on the device.",
        action="Use the named policies of jax.checkpoint_policies, or turn jax_remat3 off.",
        source="the flag jax_remat3",
    ),
)


def version_key(version: str) -> tuple[int, ...]:
    """``"0.10.2"`` as ``(0, 10, 2)``; what follows the first part that is not a number (``.dev``, ``rc``) is dropped."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


class Ranged(Protocol):
    """A row that holds for some platforms and a half-open range of versions."""

    @property
    def platforms(self) -> tuple[str, ...]: ...
    @property
    def versions(self) -> tuple[str | None, str | None]: ...


def in_range(row: Ranged, jaxlib: str, platform: str) -> bool:
    """Whether ``row`` exists at all in this version of jaxlib on this platform."""
    first, fixed = row.versions
    at_least = first is None or version_key(jaxlib) >= version_key(first)
    return platform in row.platforms and at_least and (fixed is None or version_key(jaxlib) < version_key(fixed))
