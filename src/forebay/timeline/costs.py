"""Seconds that one piece of work takes when it runs alone, and the lane it runs on.

Compute is a roofline: the larger of arithmetic over (peak x efficiency at this shape) and bytes over (HBM rate x efficiency), never
under a kernel's floor. Collectives are latency plus bytes over the slower of NVLink and the network: a group that fills whole nodes
drives every network port of its nodes, so it is bound by min(link, devices per node x port). Host copies are bytes over the link,
behind a setup that does not hold the lane. What happens when several run at once is not here but in ``rates`` and ``replay``."""

import math
from dataclasses import dataclass

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.hardware.chip import Fabric
from forebay.timeline.collectives import moved_bytes
from forebay.timeline.constants import Constants
from forebay.timeline.work import Collective, Product, Work

LANES = ("compute", "to_device", "to_host", "device", "collective", "side", "disk")
"""Lanes in the order they are drawn. ``device``: copies inside HBM. ``collective``: all domains take turns. ``side``: asynchronous
kernels."""

_DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "s8": "int8", "u8": "int8", "f4e2m1fn": "fp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """``seconds`` alone on ``lane`` at its full rate; ``domain`` names the wires of a collective; ``bytes`` are those of the lane's own
    medium. ``pace`` is the share of the lane's rate that this work can take at most; ``setup_seconds`` pass between its issue and its first
    byte, also while the lane still moves what was issued before."""

    lane: str
    seconds: float
    bytes: float = 0.0
    domain: str = ""
    pace: float = 1.0
    setup_seconds: float = 0.0

    @property
    def alone_seconds(self) -> float:
        """Seconds with nothing else on the machine."""
        return self.setup_seconds + self.seconds / self.pace


class Costs:
    """Prices work for one machine. Raises InputError where the machine lacks a figure that the program needs."""

    def __init__(self, hardware: Hardware, constants: Constants):
        self.hardware, self.constants = hardware, constants
        if hardware.hbm_bytes_per_second is None:
            raise InputError(f"{hardware.name}: the HBM rate is not known; run `forebay probe` on the machine")
        self.hbm_peak = float(hardware.hbm_bytes_per_second)
        self.hbm_rate = self.hbm_peak * constants.memory_efficiency
        self.is_tpu = hardware.chip.platform == "tpu"

    def of(self, work: Work) -> Cost:
        """The price of a piece of work that is not control flow."""
        if work.collective is not None and work.product is None:
            return self.collective(work.collective)
        if work.kind == "host_copy":
            return self.host_copy(work)
        if work.kind == "device_copy":
            return Cost(lane="device", seconds=self.memory_seconds(work.traffic.hbm_bytes), bytes=work.traffic.hbm_bytes)
        seconds = self.compute_seconds(work)
        if work.collective is not None:  # a fusion that multiplies while it communicates takes as long as the longer of the two
            seconds = max(seconds, self.collective(work.collective).seconds)
        return Cost(lane="side" if work.asynchronous else "compute", seconds=seconds, bytes=work.traffic.hbm_bytes)

    def memory_seconds(self, hbm_bytes: float) -> float:
        """Seconds of a kernel that moves bytes through HBM: the time it takes to fill and drain the chip, then the bytes."""
        return self.constants.kernel_ramp_seconds + hbm_bytes / self.hbm_rate

    def compute_seconds(self, work: Work) -> float:
        """The roofline of a kernel, host memory included where it reads that directly."""
        seconds = self.memory_seconds(work.traffic.hbm_bytes)
        if work.traffic.host_bytes:
            read = self._host_seconds("to_device", work.traffic.host_read)
            seconds = max(
                seconds, (read + self._host_seconds("to_host", work.traffic.host_written)) / self.constants.host_kernel_efficiency
            )
        if work.product is not None and work.product.flops and not self.unknown(work):
            seconds = max(seconds, work.product.flops / self._flop_rate(work.kind, work.product))
        return seconds

    def unknown(self, work: Work) -> str:
        """Why work is costed by its bytes alone: classification's reason, or a type without a known peak. Empty where it is known."""
        if work.why_unknown or work.product is None or self.peak(work.product.dtype) is not None:
            return work.why_unknown
        return f"product of {work.product.dtype}, whose peak on {self.hardware.chip.name} is not known"

    def peak(self, dtype: str) -> tuple[str, float] | None:
        """(the catalog's name, dense peak) of an arithmetic type, or None. TPU multiplies wider types in bf16; one pass is assumed."""
        name = _DTYPES.get(dtype, "fp8" if dtype.startswith("f8") else dtype)
        peaks = self.hardware.peak_flops
        if self.is_tpu and name not in peaks and name in ("fp32", "tf32", "fp16"):
            name = "bf16"
        return (name, float(peaks[name])) if name in peaks and name in self.constants.matmul.limit else None

    def _flop_rate(self, kind: str, product: Product) -> float:
        constants, known = self.constants, self.peak(product.dtype)
        assert known is not None, product
        name, peak = known
        if kind.startswith("attention"):
            ramp = product.m / (product.m + constants.attention_short_queries)
            full = 4096 / (4096 + constants.attention_short_queries)  # the published rates are at 4k to 8k queries
            share = constants.attention_forward if kind == "attention_forward" else constants.attention_backward
            return peak * share * min(1.0, ramp / full)
        side = (max(1.0, product.m) * max(1.0, product.n) * max(1.0, product.k) * max(1.0, product.batch)) ** (1 / 3)
        return peak * constants.matmul.efficiency(name, side)

    def collective(self, collective: Collective) -> Cost:
        """Latency plus bytes over the slowest wire that the group must use."""
        size = collective.groups.size
        if size < 2:
            return Cost(lane="collective", seconds=0.0, domain="none")
        if self.is_tpu:
            return self._torus(collective)
        constants, fabric = self.constants, self._fabric()
        chips = fabric.domain_chips or self.hardware.devices_per_host // self.hardware.devices_per_chip
        hosts, per_host = collective.groups.span(min(self.hardware.devices, chips * self.hardware.devices_per_chip))
        sent = moved_bytes(collective)
        link = float(fabric.bytes_per_second) * constants.link_efficiency
        latency = constants.collective_base_seconds + constants.collective_rank_seconds * (per_host - 1)
        if hosts == 1:
            return Cost(lane="collective", seconds=latency + sent / link, bytes=sent, domain=fabric.name)
        network, name = self._network()
        latency += constants.collective_host_seconds * (hosts - 1)
        if collective.operation in ("all-to-all", "ragged-all-to-all"):
            far = sent * (size - per_host) / max(1, size - 1)
            return Cost(lane="collective", seconds=latency + max(far / network, (sent - far) / link), bytes=sent, domain=name)
        rate = min(link, per_host * network) if collective.operation != "collective-permute" else network
        return Cost(lane="collective", seconds=latency + sent / rate, bytes=sent, domain=name)

    def _fabric(self) -> Fabric:
        if self.hardware.interconnect is None:
            raise InputError(f"{self.hardware.name}: the program has collectives, but the link between its devices is not known")
        return self.hardware.interconnect

    def _network(self) -> tuple[float, str]:
        """(bytes per second of one device's port, the network's name)."""
        nic = self.hardware.nic
        if nic is None:
            raise InputError(f"{self.hardware.name}: a collective spans hosts, but the network between hosts is not known")
        return float(nic.bytes_per_second) * self.constants.network_efficiency, nic.name

    def _torus(self, collective: Collective) -> Cost:
        """TPU: the share of a chip's links that a group can use. Axes of two chips have one link where longer ones have two.

        Assumption: a group smaller than the slice uses log(size)/log(devices) of the axes, at least one; XLA's own mapping is not read.
        """
        fabric, size = self._fabric(), collective.groups.size
        axes = [int(a) for a in self.hardware.topology.split("x") if a.isdigit()]
        dimensions = 2 if len(axes) == 2 else 3
        links = sum(0 if a < 2 else 1 if a < 4 else 2 for a in axes) / (2 * dimensions)
        part = 1.0 if size >= self.hardware.devices else max(1 / dimensions, math.log(size) / math.log(self.hardware.devices))
        rate = float(fabric.bytes_per_second) * max(links, 0.5 / dimensions) * part * self.constants.link_efficiency
        sent = moved_bytes(collective)
        latency = self.constants.collective_base_seconds + self.constants.collective_rank_seconds * max(1.0, size ** (1 / dimensions))
        return Cost(lane="collective", seconds=latency + sent / rate, bytes=sent, domain=fabric.name)

    def host_copy(self, work: Work) -> Cost:
        """A copy over the host link, alone. Host to host crosses it twice; kernels drive the link less well than the copy engine."""
        traffic = work.traffic
        read, written = traffic.host_read, traffic.host_written
        seconds = self._host_seconds("to_device", read) + self._host_seconds("to_host", written)
        return Cost(
            lane="to_host" if written else "to_device", seconds=seconds, bytes=read + written,
            pace=self.constants.host_kernel_efficiency if work.by_kernel else 1.0, setup_seconds=self.constants.host_latency_seconds,
        )  # fmt: skip

    def _host_seconds(self, direction: str, count: float) -> float:
        return count / self.link_rate(direction) if count else 0.0

    def link_rate(self, direction: str) -> float:
        """Bytes per second of the host link in one direction, alone."""
        link = self.hardware.link
        rate = link.to_device_bytes_per_second if direction == "to_device" else link.to_host_bytes_per_second
        if rate is None:
            raise InputError(
                f"{self.hardware.name}: the rate of the host link ({direction}) is not published; run `forebay probe` on the machine"
            )
        return float(rate) * self.constants.host_efficiency

    def both_rate(self) -> float:
        """Bytes per second of both directions together."""
        both = self.hardware.link.both_bytes_per_second
        if both is not None:
            return float(both) * self.constants.host_efficiency
        return self.constants.host_both_fraction * (self.link_rate("to_device") + self.link_rate("to_host"))

    def dram_share(self) -> float:
        """Bytes per second of host DRAM that each device of a host has when all of them copy; infinite where the rate is not known."""
        dram = self.hardware.dram_bytes_per_second
        return float(dram) * self.constants.host_dram_efficiency / self.hardware.devices_per_host if dram is not None else math.inf
