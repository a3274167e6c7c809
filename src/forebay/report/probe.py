"""A measured machine for people: every reading with its range, its repetitions and whether it was steady, and what was not measured.

In: a `Machine`. Out: plain text.
"""

from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from forebay.hardware.machine import Machine
from forebay.hardware.reading import STEADY, Reading
from forebay.hardware.store import path_of
from forebay.report.hardware import to_text
from forebay.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCommand:
    """Measure this machine: host link, host DRAM, device memory, matmuls. The figures are kept and used from then on, by name and for
    `Hardware.here()`. Takes under a minute; leave the machine alone meanwhile."""

    name: str | None = None
    """What to call this machine, as in `--hardware NAME`. Default: the host's name."""


def render_machine(machine: Machine) -> str:
    """The readings of ``machine`` as text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("measured", "size", "rate", "unit", "slowest to fastest"):
        table.add_column(heading, justify="left" if heading in ("measured", "unit") else "right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("")
    for reading in machine.readings:
        table.add_row(*_row(reading))
    notes = [f"not measured: {what}" for what in machine.absent]
    notes += [
        f"Rates are the median or the best of the repetitions, as said. Not steady: their middle half spreads over more than {STEADY:.0%}.",
        "GB/s: bytes of a copy; of a triad two arrays read and one written (STREAM's count, without the read that a write may cause).",
        f"kept in {path_of(machine.name)}; write --hardware {machine.name} to plan for it",
    ]
    head = f"{machine.name}: {machine.base.name}, {machine.base.chip.description}, measured {machine.measured_at.replace('T', ' ')}"
    return to_text(Group(Text(head), table, Text("\n".join(notes))))


def _row(reading: Reading) -> list[str]:
    matmul = reading.group == "matmul"
    unit, name = (1e9, "GB/s") if not matmul else (1e12, "TFLOP/s") if reading.value >= 1e12 else (1e9, "GFLOP/s")
    size = f"{reading.size} x {reading.size}" if matmul else show_bytes(reading.size)
    spread = f"{reading.low / unit:.3g} to {reading.high / unit:.3g}"
    steady = "" if reading.steady else "not steady"
    return [_label(reading), size, f"{reading.value / unit:.3g}", name, spread, f"{reading.statistic} of {len(reading.rates)}", steady]


def _label(reading: Reading) -> str:
    where = f", {reading.memory}" if reading.memory else ""
    beside = f", beside {reading.beside}" if reading.beside else ""
    node = f", NUMA node {reading.node}" if reading.node is not None else ""
    return f"{reading.group}: {reading.kind}{where}{beside}{node}"
