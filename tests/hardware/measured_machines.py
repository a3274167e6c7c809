"""Machines for the tests: readings that are written down here, of machines that are not."""

from dataclasses import replace

from forebay.hardware import Hardware
from forebay.hardware.machine import Machine
from forebay.hardware.reading import Reading
from forebay.units import GIB, MIB


def reading(group, kind, value, size=GIB, **more):
    """Three repetitions around ``value``."""
    return Reading(group=group, kind=kind, size=size, rates=(value * 0.99, value, value * 1.01), **more)


def link_readings():
    pinned = {"memory": "pinned_host"}
    return (
        reading("link", "to_device", 48e9, **pinned),
        reading("link", "to_host", 44e9, **pinned),
        reading("link", "to_device", 20e9, size=MIB, **pinned),
        reading("link", "to_device", 12e9, memory="pageable"),
        reading("link", "to_device", 30e9, beside="matmul", **pinned),
        reading("link", "to_device", 60e9, node=1, **pinned),
        reading("link", "both in one program", 70e9, size=2 * GIB, **pinned),
        reading("link", "both as two copies", 80e9, size=2 * GIB, **pinned),
    )


def h100_readings():
    sides = {256: 50e12, 1024: 300e12, 4096: 640e12, 8192: 600e12}
    matmuls = tuple(reading("matmul", "bf16", rate, size=side) for side, rate in sides.items())
    tf32 = (reading("matmul", "tf32", 300e12, size=2048), reading("matmul", "bf16", 400e12, size=4096, beside="to_device"))
    dram = reading("dram", "triad", 400e9, statistic="best")
    return (*link_readings(), dram, reading("hbm", "triad", 3.0e12, size=3 * GIB), *matmuls, *tf32)


def measured(name="mybox", of="h100-sxm:8", readings=None, hostname="node7", measured_at="2026-11-30T10:00:00"):
    """A machine that was measured; like ``Hardware.here()`` its base knows no DRAM rate and no network."""
    base = Hardware.named(of)
    base = replace(base, chip=replace(base.chip, nic=None, host=replace(base.chip.host, dram_bytes_per_second=None)))
    found = h100_readings() if readings is None else readings
    return Machine(name=name, measured_at=measured_at, hostname=hostname, base=base, readings=found, versions={"jax": "0"})
