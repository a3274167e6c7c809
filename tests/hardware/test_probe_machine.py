"""A measured machine: kept whole, read back with care, found by name and by being here, and its figures in place of the catalog's."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import InputError, MeasurementError
from forebay.hardware import Hardware, machine, store
from forebay.hardware.reading import Reading

pytestmark = pytest.mark.oldest

_spec = importlib.util.spec_from_file_location("measured_machines", Path(__file__).with_name("measured_machines.py"))
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_MACHINES", str(tmp_path / "machines"))
    return tmp_path / "machines"


def test_the_median_the_best_and_what_is_steady():
    rates = (1.0, 2.0, 3.0, 4.0, 100.0)
    reading = Reading(group="dram", kind="triad", size=8, rates=rates)
    assert (reading.value, reading.low, reading.high, reading.steady) == (3.0, 1.0, 100.0, False)
    assert replace(reading, statistic="best").value == 100.0
    assert replace(reading, rates=(10.0, 10.1, 10.2, 10.3, 2.0)).steady, "one repetition that was disturbed is not unsteadiness"
    assert not replace(reading, rates=(10.0, 10.0)).steady, "two repetitions say nothing"
    assert Reading.from_json(json.loads(json.dumps(reading.to_json()))) == reading


@pytest.mark.parametrize("rates", [(), (0.0,), (-1.0,), (float("nan"),), (float("inf"),)])
def test_a_rate_that_is_none_is_no_reading(rates):
    with pytest.raises(AssertionError):
        Reading(group="dram", kind="triad", size=8, rates=rates)


def test_a_measured_machine_is_used_by_its_name():
    kept = made.measured()
    machine.save(kept)
    assert machine.load("mybox") == kept
    found = Hardware.named("MyBox")
    assert (found.name, found.chip.name, found.devices, found.topology) == ("mybox", "h100-sxm", 8, "1x1x8")
    link, chip = found.link, found.chip
    assert (link.to_device_bytes_per_second.value, link.to_host_bytes_per_second.value) == (48e9, 44e9)
    assert link.both_bytes_per_second.value == 80e9, "the better of one program and two copies"
    assert found.dram_bytes_per_second.value == 404e9, "the best repetition, as the reading says"
    assert chip.sustained.hbm_bytes_per_second.value == 3.0e12
    assert {side: rate.value for side, rate in chip.sustained.matmul_flops["bf16"].items()}[4096] == 640e12, "not the one beside a copy"
    assert chip.hbm_bytes_per_second == Hardware.named("h100-sxm").hbm_bytes_per_second, "a peak stays a peak"
    for figure in (link.to_device_bytes_per_second, found.dram_bytes_per_second, chip.sustained.hbm_bytes_per_second):
        assert (figure.kind, figure.date) == ("measured", "2026-11-30")
        assert "forebay probe on mybox" in figure.source
    assert "median of 3 from 47.52 to 48.48 GB/s" in link.to_device_bytes_per_second.source
    assert Hardware.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_measured_machine_takes_another_number_of_its_devices_and_sizes():
    machine.save(made.measured())
    found = Hardware.named("mybox:2x8", host_ram="1TiB")
    assert (found.name, found.hosts, found.devices_per_host, found.chip.name) == ("mybox:16", 2, 8, "h100-sxm")
    assert found.host_ram_bytes == 2**40 and found.link.to_device_bytes_per_second.value == 48e9
    assert found.nic is None, "the network of the catalog's reference host is not this machine's"
    with pytest.raises(InputError, match=r"'eight' in 'mybox:eight' is not a number of devices; write mybox:8"):
        Hardware.named("mybox:eight")


def test_a_rate_that_was_not_measured_stays_what_it_was():
    kept = made.measured(readings=made.link_readings()[:1])
    assert kept.hardware.link.to_host_bytes_per_second == Hardware.named("h100-sxm").link.to_host_bytes_per_second
    assert kept.hardware.dram_bytes_per_second is None and kept.hardware.chip.sustained.matmul_flops == {}


def test_a_link_that_is_none_is_never_taken_for_one():
    copies = tuple(replace(r, group="not a link") for r in made.link_readings())
    found = made.measured(of="tpu-7x:2x2x1", readings=copies).hardware
    assert found.link.to_device_bytes_per_second is None


def test_one_device_of_two_on_a_chip_says_nothing_of_the_chip():
    found = made.measured(of="tpu-7x:2x2x1").hardware
    assert found.link.to_device_bytes_per_second is None and found.chip.sustained.hbm_bytes_per_second is None
    assert found.dram_bytes_per_second.value == 404e9


def test_this_machine_uses_its_own_latest_measurement():
    here = made.measured().base
    machine.save(made.measured("old", readings=(made.reading("dram", "triad", 1e9),), measured_at="2026-11-30T09:59:59"))
    machine.save(made.measured("new", readings=(made.reading("dram", "triad", 2e9),)))
    machine.save(made.measured("other-host", hostname="node8", measured_at="2027-01-01T00:00:00"))
    machine.save(made.measured("other-chip", of="h200:8", measured_at="2027-01-01T00:00:00"))
    found = machine.with_measured(here, hostname="node7")
    assert found.name == here.name and found.dram_bytes_per_second.value == 2e9
    assert machine.with_measured(here, hostname="node9") == here


def test_a_mistyped_name_is_told_the_measured_ones():
    machine.save(made.measured("gpu-lab"))
    with pytest.raises(InputError, match="did you mean 'gpu-lab'"):
        Hardware.named("gpu-lob:8")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace('"rates"', '"speeds"'), "is damaged"),
        (lambda text: text.replace('"group": "dram"', '"group": "drum"'), "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: "{}", "is damaged"),
        (lambda text: text.replace('"hosts": 1', '"hosts": "one"'), "is damaged"),
        (lambda text: text.replace('"schema": 1', '"schema": 2', 1), "has schema 2 and this forebay reads 1"),
        (lambda text: "", "is damaged"),
    ],
)
def test_a_damaged_file_is_one_clear_error(damage, words, folder):
    machine.save(made.measured())
    file = folder / "mybox.json"
    file.write_text(damage(file.read_text()))
    for use in (lambda: Hardware.named("mybox"), Hardware.here):
        with pytest.raises(InputError, match=words) as error:
            use()
        assert str(file) in str(error.value) and "forebay probe --name mybox" in str(error.value)


def test_a_file_of_other_bytes_is_one_clear_error(folder):
    folder.mkdir()
    (folder / "mybox.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read from"):
        Hardware.named("mybox")


def test_a_measurement_is_written_whole_or_not_at_all(folder, monkeypatch):
    machine.save(made.measured())
    before = (folder / "mybox.json").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MeasurementError, match=r"No space left on device.*FOREBAY_MACHINES"):
        machine.save(made.measured(readings=()))
    assert [path.name for path in folder.iterdir()] == ["mybox.json"]
    assert (folder / "mybox.json").read_text() == before


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("FOREBAY_MACHINES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert store.machines_folder() == tmp_path / "forebay" / "machines"
    assert store.stored_names() == []


@pytest.mark.parametrize("name", ["", "my box", "a/b", "../up", "box:8", ".hidden", "x" * 64])
def test_a_name_that_cannot_be_a_file_is_refused(name):
    with pytest.raises(InputError, match="cannot name a machine"):
        store.check_name(name)


def test_a_cpu_machine_has_no_number_of_devices():
    base = Hardware.here()
    if base.chip.platform != "cpu":
        pytest.skip("this machine has an accelerator")
    kept = replace(made.measured("laptop", readings=(made.reading("dram", "triad", 40e9),)), base=base)
    machine.save(kept)
    assert Hardware.named("laptop").dram_bytes_per_second.value == 40e9
    with pytest.raises(InputError, match="write laptop alone"):
        Hardware.named("laptop:2")
