"""A machine that was measured: what it is, what was read on it, and the ``Hardware`` that has the measured figures in place of others.

What is taken from the readings, and what is only shown: the host link's rates are those of pinned memory at the largest size, unbound;
both directions at once are the better of one program and two copies. Host DRAM is a triad over all cores. Device memory and matmuls go to
``chip.sustained``, beside the peaks. The rest (curves of small copies, pageable memory, copies beside a matmul, single NUMA nodes) is kept
and shown. Every figure taken is a ``Quantity`` of kind *measured* that says when, how often and how far the repetitions lie apart.
"""

import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace

from forebay.errors import InputError, PlanError
from forebay.hardware import store
from forebay.hardware.chip import Chip, Link, Sustained
from forebay.hardware.grammar import Request, parse_shape
from forebay.hardware.hardware import Hardware
from forebay.hardware.quantity import Quantity
from forebay.hardware.reading import Reading
from forebay.records.reading import Unreadable, parse

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``base`` is the machine as it was found, ``readings`` what was measured on it, ``absent`` what was not and why."""

    name: str
    measured_at: str
    hostname: str
    base: Hardware
    readings: tuple[Reading, ...]
    absent: tuple[str, ...] = ()
    versions: dict[str, str]

    @property
    def date(self) -> str:
        """The day of the measurement."""
        return self.measured_at.partition("T")[0]

    @property
    def hardware(self) -> Hardware:
        """The machine with what was measured, under its own name."""
        return replace(self.measured(self.base), name=self.name)

    def measured(self, hardware: Hardware) -> Hardware:
        """``hardware``, the same machine, with the measured figures in place of those that it has."""
        return replace(hardware, chip=self._chip(hardware.chip))

    def request(self, text: str) -> Request:
        """The machine that ``text`` names: this one, or after a colon another number of its devices.

        Raises:
            InputError: what stands behind the colon cannot be made of this machine's devices.
        """
        hardware = self.hardware
        if ":" not in text:
            shape = {"hosts": hardware.hosts, "devices_per_host": hardware.devices_per_host, "topology": hardware.topology}
            return Request(chip=hardware.chip, name=self.name, **shape)
        return replace(parse_shape(replace(hardware.chip, name=self.name), text), chip=hardware.chip)

    def _chip(self, chip: Chip) -> Chip:
        if dram := self._largest("dram", "triad"):
            chip = replace(chip, host=replace(chip.host, dram_bytes_per_second=self._figure(dram)))
        if chip.devices_per_chip > 1:
            return chip  # one device was measured: what the chip does with all of its devices busy is not known
        curves: dict[str, dict[int, Quantity]] = {}
        for reading in sorted(self._alone("matmul"), key=lambda r: r.size):
            curves.setdefault(reading.kind, {})[reading.size] = self._figure(reading)
        hbm = self._largest("hbm", "triad")
        sustained = Sustained(hbm_bytes_per_second=self._figure(hbm) if hbm else None, matmul_flops=curves)
        return replace(chip, link=self._link(chip.link), sustained=sustained)

    def _link(self, link: Link) -> Link:
        ways = {
            "to_device_bytes_per_second": ["to_device"],
            "to_host_bytes_per_second": ["to_host"],
            "both_bytes_per_second": ["both in one program", "both as two copies"],
        }
        figures = {}
        for field, kinds in ways.items():
            found = [r for kind in kinds if (r := self._largest("link", kind))]
            if found:
                figures[field] = self._figure(max(found, key=lambda r: r.value))
        return replace(link, **figures)

    def _alone(self, group: str) -> list[Reading]:
        """Readings with nothing beside them, of pinned memory where there are several kinds, and of the unbound process."""
        return [r for r in self.readings if r.group == group and not r.beside and r.memory in ("", "pinned_host") and r.node is None]

    def _largest(self, group: str, kind: str) -> Reading | None:
        return max((r for r in self._alone(group) if r.kind == kind), key=lambda r: r.size, default=None)

    def _figure(self, reading: Reading) -> Quantity:
        unit = (1e12, "TFLOP/s") if reading.group == "matmul" else (1e9, "GB/s")
        spread = f"{reading.low / unit[0]:.4g} to {reading.high / unit[0]:.4g} {unit[1]}"
        what = f"{reading.kind}, {reading.statistic} of {len(reading.rates)} from {spread}{'' if reading.steady else ', not steady'}"
        return Quantity(reading.value, f"forebay probe on {self.name}: {reading.group} {what}", self.date, "measured")

    def to_json(self) -> dict:
        """A dict of plain values."""
        plain = {name: getattr(self, name) for name in ("name", "measured_at", "hostname")}
        found = {"base": self.base.to_json(), "readings": [r.to_json() for r in self.readings]}
        return {"schema": SCHEMA} | plain | found | {"absent": list(self.absent), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, record: dict) -> "Machine":
        """The machine that ``to_json`` wrote; KeyError, TypeError, ValueError or AssertionError for another record."""
        plain = {name: record[name] for name in ("name", "measured_at", "hostname")}
        assert all(isinstance(value, str) for value in plain.values()), plain
        return cls(
            **plain,
            base=Hardware.from_json(record["base"]),
            readings=tuple(Reading.from_json(r) for r in record["readings"]),
            absent=tuple(record["absent"]),
            versions=dict(record["versions"]),
        )


def load(name: str) -> Machine:
    """The stored machine ``name``.

    Raises:
        InputError: its file cannot be read, is damaged, or is of another schema.
    """
    path = store.path_of(name)
    text = store.read_text(name)
    try:
        record = parse(text)
        if record["schema"] != SCHEMA:
            raise InputError(
                f"{path} has schema {record['schema']!r} and this forebay reads {SCHEMA}; run `forebay probe --name {name}` again"
            )
        return Machine.from_json(record)
    except (PlanError, Unreadable, KeyError, TypeError, AttributeError, ValueError, AssertionError) as problem:
        reason = f"{type(problem).__name__}: {problem}"[:200]
        raise InputError(
            f"the measured machine {path} is damaged ({reason}); delete it, or measure again with `forebay probe --name {name}`"
        ) from problem


def save(machine: Machine) -> None:
    """Keep ``machine`` under its name, in place of an older measurement of that name.

    Raises:
        MeasurementError: it cannot be written.
    """
    store.write_record(machine.name, machine.to_json())


def load_all() -> list[Machine]:
    """Every stored machine, by name."""
    return [load(name) for name in store.stored_names()]


def with_measured(found: Hardware, hostname: str | None = None) -> Hardware:
    """``found``, which is this machine, with the figures of its latest measurement: the same host name and the same chip."""
    hostname = hostname or platform.node()
    latest = _latest(m for m in load_all() if m.hostname == hostname and m.base.chip.name == found.chip.name)
    return latest.measured(found) if latest else found


def _latest(machines: Iterable[Machine]) -> Machine | None:
    return max(machines, key=lambda m: m.measured_at, default=None)
