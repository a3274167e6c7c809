"""The machine a plan is made for: a chip, how many of it on how many hosts, and what each device and each host may hold.

Sizes and rates on ``Hardware`` are per jax *device*; those on ``Hardware.chip`` are per *chip*. They differ on TPU 7x, which has two
devices on a chip, and nowhere else.
"""

from dataclasses import dataclass, fields, replace

from forebay.errors import InputError, PlanError
from forebay.hardware import budget, grammar, store, targets
from forebay.hardware.budget import Budget
from forebay.hardware.chip import Chip, Fabric, Link
from forebay.hardware.quantity import Quantity
from forebay.hardware.targets import Target
from forebay.records.reading import build
from forebay.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine. Made by ``Hardware.named("h100-sxm:8")``, ``Hardware.here()`` or ``Hardware.from_json(record)``.

    Example:
        >>> machine = Hardware.named("h100-sxm:16", host_ram="1TiB")
        >>> machine.hosts, machine.devices_per_host, machine.devices
        (2, 8, 16)
    """

    name: str
    chip: Chip
    hosts: int
    devices_per_host: int
    topology: str
    budget: Budget

    def __post_init__(self):
        assert self.hosts >= 1 and self.devices_per_host >= 1, self
        if self.hbm_budget_bytes <= 0:
            raise InputError(f"{self.name}: {self.hbm_bytes} bytes of HBM leave nothing after the reserve of {self.hbm_reserve_bytes}")

    @classmethod
    def named(cls, name: str, *, host_ram: str | int | None = None, hbm: str | int | None = None) -> "Hardware":
        """The machine ``name`` of the catalog, or one that ``forebay probe`` measured; the RAM of each host and the raw HBM of each *chip*
        are replaced where given.

        ``name`` is a chip or a measured machine, and after a colon devices (``h100-sxm:16``), hosts x devices (``h100-sxm:2x8``) or a TPU
        topology in chips (``tpu-v5p:2x2x1``). ``host_ram`` and ``hbm`` are sizes such as ``"2TiB"`` or bytes.

        Raises:
            InputError: the name or a size cannot be read, with the nearest name or the numbers.
        """
        measured = store.find_name(name)
        if measured:
            from forebay.hardware.machine import load

            request = load(measured).request(name.strip())
        else:
            request = grammar.parse(name)
        chip = _with_sizes(request.chip, hbm, host_ram)
        device_bytes = int(chip.hbm_bytes) // chip.devices_per_chip
        return cls(
            name=request.name,
            chip=chip,
            hosts=request.hosts,
            devices_per_host=request.devices_per_host,
            topology=request.topology,
            budget=budget.propose(chip, device_bytes, int(chip.host.ram_bytes)),
        )

    @classmethod
    def here(cls) -> "Hardware":
        """The machine this process runs on, found without starting a jax backend; the CPU where there is no accelerator.

        Figures that ``forebay probe`` measured on it are taken in place of the catalog's.
        """
        from forebay.hardware.here import find_here
        from forebay.hardware.machine import with_measured

        return with_measured(find_here())

    @property
    def devices(self) -> int:
        """jax devices over all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def devices_per_chip(self) -> int:
        """jax devices on a chip: 2 on TPU 7x, else 1."""
        return self.chip.devices_per_chip

    @property
    def hbm_bytes(self) -> int:
        """Raw device memory of one device."""
        return int(self.chip.hbm_bytes) // self.chip.devices_per_chip

    @property
    def memory_fraction(self) -> float:
        """The part of a device's memory that the job's pool takes."""
        return float(self.budget.memory_fraction)

    @property
    def hbm_reserve_bytes(self) -> int:
        """Bytes of one device's pool that no plan may fill."""
        return int(self.budget.hbm_reserve_bytes)

    @property
    def hbm_budget_bytes(self) -> int:
        """Bytes of one device that a program may fill: raw x memory fraction - reserve."""
        return int(self.hbm_bytes * self.memory_fraction) - self.hbm_reserve_bytes

    @property
    def host_ram_bytes(self) -> int:
        """Raw RAM of one host."""
        return int(self.chip.host.ram_bytes)

    @property
    def host_budget_bytes(self) -> int:
        """Bytes of one host's RAM that a plan may fill: raw - reserve."""
        return self.host_ram_bytes - int(self.budget.host_reserve_bytes)

    @property
    def host_budget_bytes_per_device(self) -> int:
        """Each device's even share of its host's budget."""
        return self.host_budget_bytes // self.devices_per_host

    @property
    def hbm_bytes_per_second(self) -> Quantity | None:
        """The rate of one device's memory."""
        rate = self.chip.hbm_bytes_per_second
        return rate.per(self.devices_per_chip) if rate else None

    @property
    def peak_flops(self) -> dict[str, Quantity]:
        """Dense peak operations per second of one device, by dtype: bf16 fp16 tf32 fp32 fp8 fp4 int8, those that exist."""
        return {dtype: peak.per(self.devices_per_chip) for dtype, peak in self.chip.peak_flops.items()}

    @property
    def link(self) -> Link:
        """One device's link to its host's memory."""
        return self.chip.link.per(self.devices_per_chip)

    @property
    def interconnect(self) -> Fabric | None:
        """The network between devices: NVLink, ICI, or PCIe; rate of one device, one direction."""
        return self.chip.interconnect.per(self.devices_per_chip) if self.chip.interconnect else None

    @property
    def nic(self) -> Fabric | None:
        """The network between hosts: one device's share, one direction."""
        return self.chip.nic.per(self.devices_per_chip) if self.chip.nic else None

    @property
    def dram_bytes_per_second(self) -> Quantity | None:
        """The rate of one host's DRAM, over all sockets and shared by all of its devices."""
        return self.chip.host.dram_bytes_per_second

    @property
    def target(self) -> Target:
        """What the compiler is told: platform, topology and, for a GPU, XLA's description of the device with this machine's HBM."""
        return targets.target_of(self.chip, self.topology)

    def to_json(self) -> dict:
        """A dict of plain values: the summary that plan.json shows, and every figure with its source."""
        summary = ("name", "devices", "hosts", "devices_per_host", "devices_per_chip", "topology", "hbm_bytes", "hbm_budget_bytes")
        host = ("host_ram_bytes", "host_budget_bytes", "host_budget_bytes_per_device")
        record = {name: getattr(self, name) for name in summary + host}
        record["host_bytes_per_device"] = self.host_ram_bytes // self.devices_per_host
        return record | {"budget": self.budget.to_json(), "chip": self.chip.to_json()}

    @classmethod
    def from_json(cls, record: dict) -> "Hardware":
        """The machine that ``to_json`` wrote, from the record alone: the catalog may have changed since.

        Raises:
            PlanError: the record is not one that ``to_json`` wrote.
        """
        known = {field.name for field in fields(cls)}  # the rest is the summary that people read
        try:
            return build(cls, {name: value for name, value in record.items() if name in known} if isinstance(record, dict) else record)
        except InputError as error:
            raise PlanError(f"the record of the machine cannot be read: {error}; make the plan again") from None


def _with_sizes(chip: Chip, hbm: str | int | None, host_ram: str | int | None) -> Chip:
    """``chip`` with the sizes that the user gave."""
    if hbm is not None:
        size = Quantity(parse_bytes(hbm), f"given: hbm={hbm}", kind="given")
        chip = replace(chip, hbm_bytes=size)
    if host_ram is not None:
        host = replace(chip.host, ram_bytes=Quantity(parse_bytes(host_ram), f"given: host_ram={host_ram}", kind="given"))
        chip = replace(chip, host=host)
    return chip
