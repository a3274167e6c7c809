"""What the schedule asks of the machine: one ``Work`` per instruction, grouped by computation into a ``Program``. Data only."""

from dataclasses import dataclass, field

from forebay.timeline.groups import Groups

COMPUTE_KINDS = ("matmul", "attention_forward", "attention_backward", "convolution", "memory", "kernel", "unknown")
"""Kinds that occupy the compute lane by themselves; the flops of a forecast are given for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one instruction reads and writes, by memory: HBM and pinned host memory. On-chip memory is not counted."""

    hbm_read: float = 0.0
    hbm_written: float = 0.0
    host_read: float = 0.0
    host_written: float = 0.0

    @property
    def hbm_bytes(self) -> float:
        return self.hbm_read + self.hbm_written

    @property
    def host_bytes(self) -> float:
        return self.host_read + self.host_written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            hbm_read=self.hbm_read + other.hbm_read,
            hbm_written=self.hbm_written + other.hbm_written,
            host_read=self.host_read + other.host_read,
            host_written=self.host_written + other.host_written,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix products of one instruction: ``flops`` in all, and the extents of the largest one (``m n k`` of one of ``batch``
    products)."""

    flops: float
    dtype: str
    m: float
    n: float
    k: float
    batch: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """``full_bytes`` is the large side per device: gathered, unreduced, exchanged. ``pairs`` only for a permute."""

    operation: str
    full_bytes: float
    groups: Groups
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One instruction as the machine sees it.

    ``kind`` is one of COMPUTE_KINDS, ``host_copy``, ``device_copy``, ``collective``, ``loop``, ``conditional``, ``call``, ``done``
    or ``free``. ``asynchronous`` work is started here and awaited by the ``done`` whose ``awaits`` names it."""

    name: str
    kind: str
    opcode: str
    op_name: str = ""
    traffic: Traffic = Traffic()
    product: Product | None = None
    collective: Collective | None = None
    asynchronous: bool = False
    by_kernel: bool = False
    """A host copy done by the chip's cores instead of its copy engine."""
    awaits: str = ""
    callees: tuple[str, ...] = ()
    trip_count: int | None = None
    operands: tuple[str, ...] = ()
    why_unknown: str = ""

    @property
    def flops(self) -> float:
        return self.product.flops if self.product else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The computations that run in sequence on the device, by name, from ``entry``."""

    entry: str
    devices: int
    computations: dict[str, tuple[Work, ...]] = field(default_factory=dict)
