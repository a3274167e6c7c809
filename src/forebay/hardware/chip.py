"""What is known about one chip: its memory, its arithmetic, its links, and the host it usually sits in. Figures are per *chip*.

``Hardware`` divides them by ``devices_per_chip`` where jax sees more than one device a chip (TPU 7x). An unknown figure is None:
who needs it raises an error or asks for a probe, and never guesses.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from forebay.hardware.quantity import Quantity
from forebay.records.reading import build


def _json(value):
    return value.to_json() if value is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between one chip and its host's memory, pinned, in bytes per second; ``both`` is the sum of the two directions at once."""

    RATES: ClassVar[tuple[str, ...]] = ("to_device_bytes_per_second", "to_host_bytes_per_second", "both_bytes_per_second")

    name: str
    to_device_bytes_per_second: Quantity | None
    to_host_bytes_per_second: Quantity | None
    both_bytes_per_second: Quantity | None

    def per(self, count: int) -> "Link":
        """The share of one of ``count`` devices that use the link at the same time."""
        shares = {name: rate.per(count) if rate else None for name, rate in self._rates().items()}
        return Link(name=self.name, **shares)

    def _rates(self) -> dict[str, Quantity | None]:
        return {name: getattr(self, name) for name in self.RATES}

    def to_json(self) -> dict:
        """A dict of plain values."""
        return {"name": self.name} | {name: _json(rate) for name, rate in self._rates().items()}

    @classmethod
    def from_json(cls, record: dict) -> "Link":
        """The link that ``to_json`` wrote."""
        return build(cls, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A network between chips: bytes per second that one chip sends (and at the same time receives), and how many chips it joins.

    ``domain_chips`` is None for a network that joins whole hosts without a limit of its own (InfiniBand, Ethernet).
    """

    name: str
    bytes_per_second: Quantity
    domain_chips: int | None = None

    def per(self, count: int) -> "Fabric":
        """The share of one of ``count`` devices of a chip."""
        return Fabric(name=self.name, bytes_per_second=self.bytes_per_second.per(count), domain_chips=self.domain_chips)

    def to_json(self) -> dict:
        """A dict of plain values."""
        return {"name": self.name, "bytes_per_second": self.bytes_per_second.to_json(), "domain_chips": self.domain_chips}

    @classmethod
    def from_json(cls, record: dict | None) -> "Fabric | None":
        """The fabric that ``to_json`` wrote; None stays None."""
        return build(cls | None, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host that this chip usually sits in: chips at most, RAM in bytes, and the rate of its DRAM over all sockets."""

    chips: int
    ram_bytes: Quantity
    dram_bytes_per_second: Quantity | None
    bounds: tuple[int, ...] = ()
    """TPU only, else empty: the block of the chip grid that one host holds, such as (2, 2, 1)."""

    def to_json(self) -> dict:
        """A dict of plain values."""
        record = {"chips": self.chips, "ram_bytes": self.ram_bytes.to_json(), "dram_bytes_per_second": _json(self.dram_bytes_per_second)}
        return record | {"bounds": list(self.bounds)}

    @classmethod
    def from_json(cls, record: dict) -> "Host":
        """The host that ``to_json`` wrote."""
        return build(cls, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """What one chip was measured to reach (``forebay probe``), beside its peaks; empty where nobody measured.

    ``hbm_bytes_per_second`` is a triad's, two arrays read and one written. ``matmul_flops`` holds operations per second of square
    products by dtype and then by side.
    """

    hbm_bytes_per_second: Quantity | None = None
    matmul_flops: dict[str, dict[int, Quantity]] = field(default_factory=dict)

    def to_json(self) -> dict:
        """A dict of plain values."""
        curves = {d: {str(side): rate.to_json() for side, rate in curve.items()} for d, curve in self.matmul_flops.items()}
        return {"hbm_bytes_per_second": _json(self.hbm_bytes_per_second), "matmul_flops": curves}

    @classmethod
    def from_json(cls, record: dict) -> "Sustained":
        """The rates that ``to_json`` wrote."""
        return build(cls, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip of the catalog, or the one found on this machine. Rates are bytes or floating-point operations per second, dense, per chip."""

    name: str
    description: str
    vendor: str
    platform: str
    hbm_bytes: Quantity
    hbm_bytes_per_second: Quantity | None
    peak_flops: dict[str, Quantity]
    link: Link
    interconnect: Fabric | None
    nic: Fabric | None
    host: Host
    derived: bool = False
    """True where the compiler's figures are not published for this chip and were taken from its family."""
    devices_per_chip: int = 1
    driver_names: tuple[str, ...] = ()
    """Names by which the driver of a real machine calls this chip, beside ``description``."""
    cores: int | None = None
    """CPU only: cores that this process may use."""
    compiler_name: str | None = None
    """TPU only: the name by which libtpu knows it."""
    pod_chips: int = 0
    """TPU only, else 0: the chips of one pod."""
    xla: dict[str, Quantity] = field(default_factory=dict)
    """GPU only: the figures of XLA's description of the device, by XLA's names."""
    sustained: Sustained = Sustained()

    def __post_init__(self):
        assert self.vendor in ("nvidia", "google", "cpu") and self.platform in ("cuda", "tpu", "cpu"), self
        assert self.devices_per_chip >= 1, self

    def to_json(self) -> dict:
        """A dict of plain values, enough to rebuild the chip without the catalog."""
        plain = ("name", "description", "vendor", "platform", "derived", "devices_per_chip", "compiler_name", "pod_chips", "cores")
        record = {name: getattr(self, name) for name in plain} | {"driver_names": list(self.driver_names)}
        for name in ("hbm_bytes", "hbm_bytes_per_second", "link", "interconnect", "nic", "host", "sustained"):
            record[name] = _json(getattr(self, name))
        for name in ("peak_flops", "xla"):
            record[name] = {key: figure.to_json() for key, figure in getattr(self, name).items()}
        return record

    @classmethod
    def from_json(cls, record: dict) -> "Chip":
        """The chip that ``to_json`` wrote."""
        return build(cls, record)
