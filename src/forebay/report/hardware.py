"""Machines for people: the catalog as one table, and one machine with every figure, its unit and its source.

In: names of the catalog, or one `Hardware`. Out: plain text, as wide as the terminal. A figure that nobody publishes is shown as unknown.
"""

import io
import shutil
import sys
from dataclasses import dataclass

import tyro
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forebay.hardware import Fabric, Hardware, Link, Quantity, catalog_names
from forebay.hardware.chip import Sustained
from forebay.hardware.machine import load_all
from forebay.units import show_bytes

PIPE_WIDTH = 160
"""Columns where the output is not a terminal."""
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareCommand:
    """Words of ``forebay hardware``."""

    name: tyro.conf.Positional[str | None] = None
    """A machine such as h100-sxm:8, h100-sxm:2x8 or tpu-v5p:2x2x1, or a measured one by its name; without it, all of them."""


def render_catalog() -> str:
    """The catalog and the measured machines as text: one row for each, with what decides whether a model fits and how fast it moves."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("machine", no_wrap=True)
    for heading in ("HBM", "HBM TB/s", "bf16 TFLOP/s", "to device GB/s", "to host GB/s", "per host", "host RAM"):
        table.add_column(heading, justify="right")
    table.add_column("between devices, GB/s each way")
    for name in catalog_names():
        table.add_row(*_catalog_row(Hardware.named(name)))
    for machine in load_all():
        hardware = machine.hardware
        table.add_row(f"{machine.name}, measured", *_catalog_row(hardware)[1:])
    notes = (
        "Per jax device, raw sizes; dense peaks. `forebay hardware NAME` gives every figure and its source. "
        "Write NAME:8 for 8 devices, NAME:2x8 for hosts x devices, and a TPU as its topology: tpu-v5p:2x2x1.\n"
        "* the compiler's figures are derived from the chip's family; XLA publishes none for it."
    )
    return to_text(Group(table, Text(notes)))


def _catalog_row(hardware: Hardware) -> list[str]:
    link, fabric = hardware.link, hardware.interconnect
    return [
        hardware.chip.name + (" *" if hardware.chip.derived else ""),
        show_bytes(hardware.hbm_bytes),
        _scaled(hardware.hbm_bytes_per_second, 1e12, 2),
        _scaled(hardware.peak_flops.get("bf16"), 1e12, 0),
        _scaled(link.to_device_bytes_per_second, 1e9, 0),
        _scaled(link.to_host_bytes_per_second, 1e9, 0),
        str(hardware.chip.host.chips * hardware.devices_per_chip),
        show_bytes(hardware.host_ram_bytes),
        f"{fabric.name}, {_scaled(fabric.bytes_per_second, 1e9, 0)}" if fabric else "none",
    ]


def render_hardware(hardware: Hardware) -> str:
    """One machine as text: its shape and budgets, every figure with its unit, and the sources that the figures cite by number."""
    sources: dict[str, int] = {}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("figure", "value", "unit", "kind", "source"):
        table.add_column(heading, justify="right" if heading in ("value", "source") else "left")
    for name, figure, unit in _figures(hardware):
        table.add_row(*_figure_row(name, figure, unit, sources))
    cited = Table(box=None, show_header=False, pad_edge=False, title="sources", title_justify="left", title_style="")
    cited.add_column(justify="right", no_wrap=True)
    cited.add_column(overflow="fold")
    for source, number in sources.items():
        cited.add_row(f"[{number}]", Text(source))
    return to_text(Group(Text("\n".join(_summary(hardware))), table, cited))


def _summary(hardware: Hardware) -> list[str]:
    chip, plural = hardware.chip, "s" if hardware.hosts > 1 else ""
    shape = f"{hardware.hosts} host{plural} x {hardware.devices_per_host} jax devices = {hardware.devices}"
    shared = f", {chip.devices_per_chip} devices a chip" if chip.devices_per_chip > 1 else ""
    derived = " (XLA's figures are derived from the chip's family)" if chip.derived else ""
    hbm, pool = show_bytes(hardware.hbm_bytes), f"x {hardware.memory_fraction:g}, less {show_bytes(hardware.hbm_reserve_bytes)}"
    ram, each = show_bytes(hardware.host_ram_bytes), show_bytes(hardware.host_budget_bytes_per_device)
    return [
        f"{hardware.name}: {chip.description}, {shape}{shared}",
        f"per device: {show_bytes(hardware.hbm_budget_bytes)} of {hbm} device memory may be filled ({pool})",
        f"per host: {show_bytes(hardware.host_budget_bytes)} of {ram} RAM may be filled, {each} for each device",
        f"compile target: {hardware.target.platform} {hardware.target.topology}".rstrip() + derived,
    ]


def _figures(hardware: Hardware) -> list[tuple[str, Quantity | None, str]]:
    """Every figure of ``hardware``: name, figure, unit."""
    chip, scope = hardware.chip, "device"
    rows = [("HBM", chip.hbm_bytes, "bytes/chip"), ("HBM rate", hardware.hbm_bytes_per_second, f"GB/s/{scope}")]
    rows += [(f"peak {dtype}, dense", peak, f"TFLOP/s/{scope}") for dtype, peak in hardware.peak_flops.items()]
    rows += _link_rows(hardware.link, scope)
    rows += _fabric_rows("between devices", hardware.interconnect, scope) + _fabric_rows("between hosts", hardware.nic, scope)
    rows += _sustained_rows(chip.sustained)
    rows += [("host RAM", chip.host.ram_bytes, "bytes/host"), ("host DRAM rate", hardware.dram_bytes_per_second, "GB/s/host")]
    rows += [
        ("memory fraction", hardware.budget.memory_fraction, "of HBM"),
        ("HBM reserve", hardware.budget.hbm_reserve_bytes, "bytes/device"),
        ("host reserve", hardware.budget.host_reserve_bytes, "bytes/host"),
    ]
    return rows + [(f"XLA {name}", figure, "") for name, figure in sorted(chip.xla.items())]


def _sustained_rows(sustained: Sustained) -> list[tuple[str, Quantity | None, str]]:
    """What was measured on the chip; nothing where nobody did."""
    hbm = sustained.hbm_bytes_per_second
    rows: list[tuple[str, Quantity | None, str]] = [("HBM rate of a triad", hbm, "GB/s/device")] if hbm else []
    for dtype, curve in sustained.matmul_flops.items():
        rows += [(f"matmul {dtype}, {side} x {side}", rate, "TFLOP/s/device") for side, rate in curve.items()]
    return rows


def _link_rows(link: Link, scope: str) -> list[tuple[str, Quantity | None, str]]:
    unit = f"GB/s/{scope}"
    return [
        (f"host to device, {link.name}", link.to_device_bytes_per_second, unit),
        ("device to host", link.to_host_bytes_per_second, unit),
        ("both ways at once, sum", link.both_bytes_per_second, unit),
    ]


def _fabric_rows(label: str, fabric: Fabric | None, scope: str) -> list[tuple[str, Quantity | None, str]]:
    if fabric is None:
        return [(label, None, f"GB/s/{scope}")]
    domain = f", {fabric.domain_chips} chips" if fabric.domain_chips else ""
    return [(f"{label}, {fabric.name}{domain}", fabric.bytes_per_second, f"GB/s/{scope} each way")]


def _figure_row(name: str, figure: Quantity | None, unit: str, sources: dict[str, int]) -> list[str]:
    if figure is None:
        return [name, UNKNOWN, unit, "measure it", ""]
    if unit.startswith("bytes/"):
        value, unit = show_bytes(figure.value), "per " + unit.removeprefix("bytes/")
    else:
        value = _scaled(figure, {"G": 1e9, "T": 1e12}.get(unit[:1], 1), 2) if unit else f"{figure.value:,}"
    source = figure.source + (f" ({figure.date})" if figure.date else "")
    return [name, value, unit, figure.kind, f"[{sources.setdefault(source, len(sources) + 1)}]"]


def _scaled(figure: Quantity | None, unit: float, digits: int) -> str:
    return UNKNOWN if figure is None else f"{figure.value / unit:,.{digits}f}"


def to_text(renderable) -> str:
    """What ``renderable`` prints, for a terminal of this width or for a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    written = io.StringIO()
    console = Console(file=written, width=max(width, 80), color_system=None, highlight=False, markup=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
