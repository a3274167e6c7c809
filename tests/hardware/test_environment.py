"""What must be set before jax starts: values, reasons with numbers, and text that a shell takes as it is."""

import subprocess

import pytest

from forebay.hardware import Hardware, environment
from forebay.units import GIB

pytestmark = pytest.mark.oldest
H100 = Hardware.named("h100-sxm:8", host_ram="2TiB")


def values(hardware, arrays, around=None):
    return {s.name: s.value for s in environment.settings(hardware, arrays, around or {})}


def test_the_fraction_is_that_of_the_budget_the_plan_was_held_against():
    chosen = {s.name: s for s in environment.settings(H100, [], {})}
    fraction = chosen["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    assert float(fraction.value) == H100.memory_fraction
    assert "71.78 GiB is 0.92 of 79.11 GiB" in fraction.reason
    assert chosen["XLA_PYTHON_CLIENT_PREALLOCATE"].value == "true"
    assert chosen["XLA_FLAGS"].value is None


def test_a_pool_below_the_default_is_left_alone_where_the_host_can_hold_it():
    assert values(H100, [])["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] is None
    assert values(H100, [8 * GIB] * 2)["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] is None


def test_a_small_host_is_not_filled_by_eight_default_pools():
    small = Hardware.named("h100-sxm:8", host_ram="256GiB")
    assert values(small, [8 * GIB])["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "9"


def test_a_large_pool_is_named_with_its_size():
    chosen = values(H100, [8 * GIB] * 15)
    assert chosen["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "132"
    assert "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE" not in chosen


def test_where_the_tails_of_a_growing_pool_have_no_room_it_is_one_region():
    one = Hardware.named("h100-sxm:1", host_ram="1.2TiB")
    chosen = {s.name: s for s in environment.settings(one, [70 * GIB] * 13, {})}
    assert chosen["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"].value == "1001"
    assert chosen["XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"].value == "true"
    assert "910.00 GiB in 13 arrays" in chosen["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"].reason


def test_the_newer_name_of_the_fraction_is_not_joined_by_the_older():
    # jax refuses to start with both
    fraction = environment.settings(H100, [], {"XLA_CLIENT_MEM_FRACTION": "0.5"})[0]
    assert fraction.value is None
    assert "XLA_CLIENT_MEM_FRACTION=0.5 stands already" in fraction.reason


@pytest.mark.parametrize("name", ["tpu-v5p:2x2x1", "tpu-v6e:2x2"])
def test_on_a_tpu_nothing_is_set(name):
    assert set(values(Hardware.named(name), [GIB]).values()) == {None}


def test_the_text_is_evaluated_by_a_shell():
    text = environment.render(environment.settings(H100, [8 * GIB] * 15, {}), ["a note with `ticks`, $HOME and\na second line"])
    assert all(line.startswith(("# ", "export ")) for line in text.splitlines())
    shown = subprocess.run(
        ["sh", "-c", 'eval "$1"; echo $XLA_PYTHON_CLIENT_MEM_FRACTION $XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB', "sh", text],
        capture_output=True, text=True, check=True, env={},
    )  # fmt: skip
    assert shown.stdout.split() == ["0.92", "132"]
    assert not shown.stderr


def test_training_fills_what_is_missing_and_keeps_what_is_there():
    around = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    environment.fill(around, H100)
    assert around["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert int(around["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) == H100.host_budget_bytes_per_device // GIB
    newer = {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    environment.fill(newer, H100)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in newer
    elsewhere = {}
    environment.fill(elsewhere, Hardware.named("tpu-v5p:2x2x1"))
    assert not elsewhere


def test_what_is_too_small_is_named_with_both_numbers():
    around = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}
    fraction, host = environment.too_small(H100, [8 * GIB] * 15, around)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION is '0.5': 39.55 GiB of each device; the plan counts on 72.78 GiB. Set it to 0.92" in fraction
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is '100': 100 GiB of pinned memory for each device; the plan keeps 120.00 GiB there" in host
    assert "needs 132 GiB. Set it to 132" in host
    enough = {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "200"}
    assert environment.too_small(H100, [8 * GIB] * 15, enough) == ()


def test_what_is_not_set_counts_as_the_defaults():
    said = environment.too_small(H100, [8 * GIB] * 15, {})
    assert ["is not set" in line for line in said] == [True, True]


def test_a_text_that_is_no_number_is_too_small():
    assert (
        "is 'lots'" in environment.too_small(H100, [GIB], {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "lots", "XLA_CLIENT_MEM_FRACTION": "1"})[0]
    )


def entry(role, size, placement="host"):
    return {"role": role, "bytes_per_device": size, "placement": placement}


def test_arrays_are_those_of_the_entries_and_the_rest_that_the_compiler_found():
    entries = [entry("optimizer", 5), entry("parameter", 3), entry("parameter", 9, "hbm"), entry("activation", 4)]
    assert environment.host_arrays({"entries": entries, "verdict": None}) == (5, 3, 4)
    assert environment.host_arrays({"entries": entries, "verdict": {"host_bytes": None}}) == (5, 3, 4)
    assert environment.host_arrays({"entries": entries, "verdict": {"host_bytes": 20}}) == (5, 3, 12)
    assert environment.host_arrays({"entries": entries, "verdict": {"host_bytes": 8}}) == (5, 3)
