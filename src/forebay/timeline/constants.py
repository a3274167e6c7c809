"""The constants of the forecast, read from ``constants.toml``: efficiencies, latencies and slow-downs, each with its source.

``Constants.bent(side)`` moves every constant to one end of its band; the forecast's low and high are replays with those.
"""

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from importlib import resources

from forebay.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """Share of the dense peak that a matmul reaches: ``limit[dtype]`` times a factor of the cube root of MNK, interpolated in its
    logarithm."""

    limit: dict[str, float]
    sides: tuple[float, ...]
    shape: tuple[float, ...]

    def __post_init__(self):
        assert len(self.sides) == len(self.shape) and list(self.sides) == sorted(self.sides), self
        assert list(self.shape) == sorted(self.shape), "a larger matmul is never at a lower rate"

    def efficiency(self, dtype: str, side: float) -> float:
        """The share of the peak of ``dtype`` at cube root ``side``."""
        if dtype not in self.limit:
            raise InputError(
                f"no matmul efficiency of {dtype} is known for this chip, only of {', '.join(sorted(self.limit))}; run `forebay probe`"
            )
        return self.limit[dtype] * _interpolated(self.sides, self.shape, side)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """One family's constants. Names as in constants.toml; seconds where the name says so, else dimensionless."""

    family: str
    matmul: MatmulRate
    attention_forward: float
    attention_backward: float
    attention_short_queries: float
    memory_efficiency: float
    memory_of_triad: float
    kernel_ramp_seconds: float
    gap_seconds: float
    link_efficiency: float
    network_efficiency: float
    collective_base_seconds: float
    collective_rank_seconds: float
    collective_host_seconds: float
    host_latency_seconds: float
    host_both_fraction: float
    host_dram_efficiency: float
    host_kernel_efficiency: float
    host_efficiency: float
    beside_collective: float
    beside_host_per_hbm_share: float
    beside_device_copy: float

    def bent(self, side: int) -> "Constants":
        """These constants with every band on one side: -1 the fast end, +1 the slow end."""
        bands = table()["bands"]
        slower = {key: 1 + side * bands[key] for key in ("matmul", "attention", "memory", "collective", "host", "contention")}
        limit = {dtype: min(1.0, rate / slower["matmul"]) for dtype, rate in self.matmul.limit.items()}
        return replace(
            self,
            matmul=replace(self.matmul, limit=limit),
            attention_forward=self.attention_forward / slower["attention"],
            attention_backward=self.attention_backward / slower["attention"],
            memory_efficiency=min(1.0, self.memory_efficiency / slower["memory"]),
            gap_seconds=self.gap_seconds * slower["memory"],
            link_efficiency=min(1.0, self.link_efficiency / slower["collective"]),
            network_efficiency=min(1.0, self.network_efficiency / slower["collective"]),
            host_efficiency=self.host_efficiency / slower["host"],
            beside_collective=self.beside_collective * slower["contention"],
            beside_host_per_hbm_share=self.beside_host_per_hbm_share * slower["contention"],
            beside_device_copy=self.beside_device_copy * slower["contention"],
        )


def _interpolated(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    if x <= xs[0]:
        return ys[0] * max(x, 1e-9) / xs[0]
    for low, high, y_low, y_high in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= high:
            return y_low + (y_high - y_low) * math.log(x / low) / math.log(high / low)
    return ys[-1]


@functools.lru_cache(maxsize=1)
def table() -> dict:
    """The whole of constants.toml."""
    return tomllib.loads(resources.files("forebay.timeline").joinpath("constants.toml").read_text(encoding="utf-8"))


def constants_of(chip: str, vendor: str) -> Constants:
    """Constants for a chip by its catalog name: its family's, or its vendor's where no family claims it."""
    families = table()["family"]
    name = next((f for f, body in families.items() if chip in body["chips"]), vendor)
    if name not in families:
        raise InputError(f"no timeline constants for {chip!r} of vendor {vendor!r}: a forecast needs a GPU or TPU target")
    sections = _sections(families, name)
    attention, memory, collective = sections["attention"], sections["memory"], sections["collective"]
    host, beside, matmul = sections["host"], sections["contention"], sections["matmul"]
    return Constants(
        family=name,
        matmul=MatmulRate(limit=matmul["limit"], sides=tuple(matmul["sides"]), shape=tuple(matmul["shape"])),
        attention_forward=attention["forward"],
        attention_backward=attention["backward"],
        attention_short_queries=attention["short_queries"],
        memory_efficiency=memory["efficiency"],
        memory_of_triad=memory["of_triad"],
        kernel_ramp_seconds=memory["kernel_ramp_seconds"],
        gap_seconds=memory["gap_seconds"],
        link_efficiency=collective["link_efficiency"],
        network_efficiency=collective["network_efficiency"],
        collective_base_seconds=collective["base_seconds"],
        collective_rank_seconds=collective["rank_seconds"],
        collective_host_seconds=collective["host_seconds"],
        host_latency_seconds=host["latency_seconds"],
        host_both_fraction=host["both_fraction"],
        host_dram_efficiency=host["dram_efficiency"],
        host_kernel_efficiency=host["kernel_efficiency"],
        host_efficiency=1.0,
        beside_collective=beside["beside_collective"],
        beside_host_per_hbm_share=beside["beside_host_per_hbm_share"],
        beside_device_copy=beside["beside_device_copy"],
    )


def _sections(families: dict, name: str) -> dict[str, dict]:
    """A family's sections over those that it inherits."""
    own = families[name]
    below = _sections(families, own["inherits"]) if "inherits" in own else {}
    merged = dict(below)
    for key, value in own.items():
        if isinstance(value, dict):
            merged[key] = below.get(key, {}) | value
    return merged
