"""What the compiler is told about the machine: for a GPU, XLA's description of the device as a text proto; for a TPU, libtpu's topology.

The text is written from the catalog's figures alone (XLA's ``GpuTargetConfigProto``). Two rules of XLA's shape it: the text must parse
on the oldest supported jaxlib, so only fields known there are written; and ``device_memory_size`` is what the scheduler and the
rematerialisation pass take as the chip's memory, so an ``hbm`` override must reach it.
"""

from dataclasses import dataclass

from forebay.hardware.chip import Chip

CUDNN_VERSION = (9, 10, 0)
CUDA_VERSION = (12, 8, 0)
"""The versions that XLA's own published descriptions name; compiling needs neither library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Arguments of ``jax.experimental.topologies.get_topology_desc``.

    ``topology`` is SLICESxHOSTSxDEVICES on a GPU, libtpu's name such as ``v5p:2x2x1`` on a TPU, and empty on a CPU.
    """

    platform: str
    topology: str
    target_config: str | None = None

    def to_json(self) -> dict:
        """A dict of plain values."""
        return {"platform": self.platform, "topology": self.topology, "target_config": self.target_config}


def target_of(chip: Chip, topology: str) -> Target:
    """The compile target of ``topology`` made of ``chip``."""
    config = gpu_target_config(chip) if chip.platform == "cuda" and chip.xla else None
    return Target(platform=chip.platform, topology=topology, target_config=config)


def tpu_host_bounds(topology: str) -> tuple[int, int, int] | None:
    """Chips of one host, x by y by z, of a libtpu topology that is smaller than a whole host of 2x2x1, such as ``v5p:1x1x1``; else None.

    libtpu before 0.0.50 takes every host for a whole one and refuses such a topology unless it is told.
    """
    x, y, *_ = (int(n) for n in topology.partition(":")[2].split("x"))
    return (min(x, 2), min(y, 2), 1) if x < 2 or y < 2 else None


def gpu_target_config(chip: Chip) -> str:
    """XLA's description of ``chip`` as a text proto; ``chip.hbm_bytes``, given or the catalog's, is its memory."""
    figures = {name: figure.value for name, figure in chip.xla.items()}
    nested = [f"cuda_compute_capability {{ {_compute_capability(figures)} }}"]
    if "active_links" in figures:
        # NVLinks in use: XLA's cost model of collectives reads them, and so does the schedule (jaxlib 0.12 overlaps more with them).
        nested.append(f"device_interconnect_info {{ active_links: {figures.pop('active_links')} }}")
    figures["device_memory_size"] = int(chip.hbm_bytes)
    lines = [f"  {name}: {_number(value)}" for name, value in sorted(figures.items())]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            *(f"  {line}" for line in nested),
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ {_version(CUDNN_VERSION)} }}",
            f"runtime_version {{ {_version(CUDA_VERSION)} }}",
            f'device_description_str: "{chip.description}"',
            "",
        ]
    )


def _compute_capability(figures: dict) -> str:
    """Takes the capability out of ``figures`` and writes it, with the ``a`` of sm_90a where the chip has it."""
    major, minor = figures.pop("compute_capability_major"), figures.pop("compute_capability_minor")
    accelerated = figures.pop("accelerated_features", 0)
    return f"major: {major} minor: {minor}" + (" feature_extension: ACCELERATED_FEATURES" if accelerated else "")


def _version(numbers: tuple[int, int, int]) -> str:
    return " ".join(f"{part}: {number}" for part, number in zip(("major", "minor", "patch"), numbers, strict=True))


def _number(value) -> str:
    """Whole figures are written as integers: the proto's integer fields refuse ``8.64e11``."""
    return str(int(value)) if float(value).is_integer() and not isinstance(value, bool) else repr(float(value))
