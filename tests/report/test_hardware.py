"""The catalog and a machine as text: nothing missing, nothing invented, and every citation resolved."""

import re

import pytest

from forebay.hardware import Hardware, catalog_names
from forebay.report.hardware import render_catalog, render_hardware

pytestmark = pytest.mark.oldest


def test_the_catalog_names_every_machine_and_marks_the_derived():
    text = render_catalog()
    for name in catalog_names():
        row = next(line for line in text.splitlines() if line.split()[:1] == [name])
        assert ("*" in row) == Hardware.named(name).chip.derived
    assert "unknown" in next(line for line in text.splitlines() if line.startswith(" tpu-7x"))


@pytest.mark.parametrize("name", ["h100-sxm:16", "l40s:1", "tpu-7x:2x2x1", "gh200"])
def test_a_machine_is_shown_with_every_figure_its_unit_and_its_source(name):
    machine = Hardware.named(name, host_ram="1TiB")
    text = render_hardware(machine)
    table, sources = text.split("\nsources\n")
    numbers = [int(number) for number in re.findall(r"^ *\[(\d+)\]", sources, flags=re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {int(number) for number in re.findall(r"\[(\d+)\]$", table, flags=re.M)} == set(numbers)
    assert "given: host_ram=1TiB" in sources
    for figure in machine.peak_flops.values():
        assert f"{figure.value / 1e12:,.2f}" in table
    for name in machine.chip.xla:
        assert f"XLA {name}" in table
    assert ("derived from the chip's family" in text) == machine.chip.derived


def test_an_unknown_figure_is_shown_as_unknown():
    row = next(line for line in render_hardware(Hardware.named("tpu-7x")).splitlines() if "device to host" in line)
    assert "unknown" in row and "measure it" in row


def test_this_machine_can_be_shown():
    assert "compile target" in render_hardware(Hardware.here())
