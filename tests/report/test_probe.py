"""A measured machine as text: every reading, its spread, and what was not measured; and its row among the machines."""

import pytest

from forebay.hardware import Hardware
from forebay.hardware.machine import Machine, save
from forebay.hardware.reading import Reading
from forebay.report.hardware import render_catalog, render_hardware
from forebay.report.probe import render_machine

pytestmark = pytest.mark.oldest


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_MACHINES", str(tmp_path))
    readings = (
        Reading(group="link", kind="to_device", size=2**30, rates=(50e9, 51e9, 52e9), memory="pinned_host", beside="matmul", node=1),
        Reading(group="link", kind="to_device", size=2**30, rates=(50e9, 51e9, 52e9), memory="pinned_host"),
        Reading(group="dram", kind="triad", size=2**30, rates=(100e9, 200e9, 300e9), statistic="best"),
        Reading(group="matmul", kind="bf16", size=4096, rates=(6e14, 6e14, 6e14)),
        Reading(group="matmul", kind="fp32", size=512, rates=(6e10, 6e10, 6e10)),
    )
    now = "2026-12-01T10:00:00"
    base = Hardware.named("h100-sxm:8")
    return Machine(name="lab", measured_at=now, hostname="h", base=base, readings=readings, absent=("HBM: out of time",), versions={})


def _row(text: str, *words: str) -> str:
    return next(line for line in text.splitlines() if all(word in line for word in words))


def test_every_reading_has_its_spread_and_says_how_it_was_taken(machine):
    text = render_machine(machine)
    assert "lab: h100-sxm:8" in text and "measured 2026-12-01 10:00:00" in text
    link = _row(text, "link: to_device, pinned_host, beside matmul, NUMA node 1")
    assert all(word in link for word in ("1.00 GiB", "51", "GB/s", "50 to 52", "median of 3"))
    assert "not steady" not in link
    assert all(word in _row(text, "dram: triad") for word in ("300", "100 to 300", "best of 3", "not steady"))
    assert all(word in _row(text, "matmul: bf16") for word in ("4096 x 4096", "600", "TFLOP/s"))
    assert all(word in _row(text, "matmul: fp32") for word in ("512 x 512", "60", "GFLOP/s"))
    assert "not measured: HBM: out of time" in text
    assert "--hardware lab" in text


def test_measured_machines_are_listed_and_shown(machine):
    save(machine)
    row = _row(render_catalog(), "lab, measured")
    assert "51" in row and "79.11 GiB" in row
    shown = render_hardware(Hardware.named("lab"))
    assert "lab: NVIDIA H100" in shown
    assert "measured" in _row(shown, "host DRAM rate")
    assert all(word in _row(shown, "matmul bf16, 4096 x 4096") for word in ("600.00", "TFLOP/s", "measured"))
    assert "forebay probe on lab" in shown
