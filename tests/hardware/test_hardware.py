"""A machine: per device against per chip, what may be filled, overrides that reach the compiler, and JSON."""

import dataclasses
import json
import subprocess
import sys

import pytest

from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware, catalog_names
from forebay.units import GIB, TIB

pytestmark = pytest.mark.oldest


def test_the_budget_is_the_raw_size_times_the_fraction_less_the_reserve():
    machine = Hardware.named("h100-sxm:8")
    assert machine.hbm_bytes == 84942979072
    assert machine.hbm_budget_bytes == int(machine.hbm_bytes * machine.memory_fraction) - machine.hbm_reserve_bytes
    assert 0.75 < machine.memory_fraction < 1
    outside = machine.hbm_bytes * (1 - machine.memory_fraction)
    assert outside > 2 * GIB, "the CUDA context, NCCL and CUDA graphs live outside the pool"


@pytest.mark.parametrize("name", catalog_names())
def test_every_machine_leaves_something_and_holds_something_back(name):
    machine = Hardware.named(name)
    assert 0.8 * machine.hbm_bytes < machine.hbm_budget_bytes < machine.hbm_bytes
    assert 0.8 * machine.host_ram_bytes < machine.host_budget_bytes < machine.host_ram_bytes


def test_the_host_budget_is_per_host_and_shared_evenly():
    one, eight, many = (Hardware.named(name) for name in ("h100-sxm:1", "h100-sxm:8", "h100-sxm:64"))
    assert one.host_budget_bytes == eight.host_budget_bytes == many.host_budget_bytes
    assert eight.host_budget_bytes_per_device == one.host_budget_bytes_per_device // 8 == many.host_budget_bytes_per_device


def test_a_tpu_of_two_devices_a_chip_is_shared_between_them():
    machine = Hardware.named("tpu-7x:2x2x1")
    chip = machine.chip
    assert (machine.devices_per_chip, machine.devices) == (2, 8)
    assert machine.hbm_bytes == int(chip.hbm_bytes) // 2
    assert machine.peak_flops["bf16"].value == chip.peak_flops["bf16"].value / 2
    assert machine.hbm_bytes_per_second.value == chip.hbm_bytes_per_second.value / 2
    assert machine.interconnect.bytes_per_second.value == chip.interconnect.bytes_per_second.value / 2
    assert "over 2 devices" in machine.peak_flops["bf16"].source


def test_an_unknown_figure_is_none_and_never_a_guess():
    assert Hardware.named("tpu-7x").link.to_device_bytes_per_second is None
    assert Hardware.named("gh200").link.both_bytes_per_second is None
    assert Hardware.named("rtx-4090").dram_bytes_per_second is None


def test_given_sizes_replace_the_catalog_s_and_say_so():
    machine = Hardware.named("h100-sxm:8", host_ram="1.5TiB", hbm="24GiB")
    assert (machine.host_ram_bytes, machine.hbm_bytes) == (TIB * 3 // 2, 24 * GIB)
    assert machine.chip.hbm_bytes.kind == machine.chip.host.ram_bytes.kind == "given"
    assert f"device_memory_size: {24 * GIB}\n" in machine.target.target_config


def test_a_small_hbm_still_leaves_a_budget():
    machine = Hardware.named("h100-sxm", hbm="512MiB")
    assert 0 < machine.hbm_budget_bytes < machine.hbm_bytes


@pytest.mark.parametrize("size", ["", "lots", "-3GiB", "0GiB", "12 parsecs"])
@pytest.mark.parametrize("which", ["hbm", "host_ram"])
def test_a_size_that_is_none_is_refused(which, size):
    with pytest.raises(InputError):
        Hardware.named("h100-sxm:8", **{which: size})


@pytest.mark.parametrize("name", ["h100-sxm:16", "tpu-7x:4x4x4", "rtx-4090:1", "gb300:8"])
def test_json_gives_the_same_machine_back(name):
    machine = Hardware.named(name, host_ram="777GiB")
    record = json.loads(json.dumps(machine.to_json()))
    assert Hardware.from_json(record) == machine
    assert Hardware.from_json(record).target == machine.target
    assert {"name", "devices", "hbm_bytes", "host_bytes_per_device"} <= set(record)
    assert record["host_bytes_per_device"] == machine.host_ram_bytes // machine.devices_per_host


@pytest.mark.parametrize("broken", [{}, {"name": "h100-sxm"}, {"name": "x", "hosts": 1, "devices_per_host": 1, "topology": "", "chip": 3}])
def test_a_broken_record_is_a_plan_error(broken):
    with pytest.raises(PlanError, match="make the plan again"):
        Hardware.from_json(broken)


def test_a_record_with_a_figure_of_no_known_kind_is_a_plan_error():
    record = json.loads(json.dumps(Hardware.named("h100-sxm").to_json()).replace('"datasheet"', '"hearsay"'))
    with pytest.raises(PlanError, match="hearsay"):
        Hardware.from_json(record)


def test_a_machine_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hardware.named("h100-sxm").hosts = 2


def test_no_jax_no_scipy_no_numpy():
    code = "import sys; from forebay.hardware import Hardware; Hardware.named('h100-sxm:8').to_json(); Hardware.here(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not set(done.stdout.split()) & {"jax", "jaxlib", "scipy", "numpy"}
