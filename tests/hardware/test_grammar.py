"""How machines are written: every form, every way to get it wrong, and that an error names the numbers and a form that works."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InputError
from forebay.hardware import Hardware

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize(
    ("text", "name", "hosts", "per_host", "topology"),
    [
        ("h100-sxm", "h100-sxm:1", 1, 1, "1x1x1"),
        ("h100-sxm:8", "h100-sxm:8", 1, 8, "1x1x8"),
        ("h100-sxm:3", "h100-sxm:3", 1, 3, "1x1x3"),
        ("h100-sxm:16", "h100-sxm:16", 2, 8, "1x2x8"),
        ("h100-sxm:16x8", "h100-sxm:128", 16, 8, "1x16x8"),
        ("h100-sxm:2x4", "h100-sxm:2x4", 2, 4, "1x2x4"),
        (" H100_SXM:8 ", "h100-sxm:8", 1, 8, "1x1x8"),
        ("gb200:64", "gb200:64", 16, 4, "1x16x4"),
        ("gh200:4", "gh200:4", 4, 1, "1x4x1"),
        ("tpu-v5p", "tpu-v5p:2x2x1", 1, 4, "v5p:2x2x1"),
        ("tpu-v5p:4x4x4", "tpu-v5p:4x4x4", 16, 4, "v5p:4x4x4"),
        ("tpu-v5e:1x1", "tpu-v5e:1x1", 1, 1, "v5e:1x1"),
        ("tpu-v6e:16x16", "tpu-v6e:16x16", 64, 4, "v6e:16x16"),
        ("tpu-7x:2x2x1", "tpu-7x:2x2x1", 1, 8, "tpu7x:2x2x1"),
        ("tpu7x:2x2x2", "tpu-7x:2x2x2", 2, 8, "tpu7x:2x2x2"),
    ],
)
def test_a_machine_is_read(text, name, hosts, per_host, topology):
    machine = Hardware.named(text)
    assert (machine.name, machine.hosts, machine.devices_per_host, machine.topology) == (name, hosts, per_host, topology)
    assert machine.devices == hosts * per_host
    assert Hardware.named(machine.name) == machine


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["h100-sxm:8"]),
        (":8", ["''"]),
        ("h100-sxm:", ["colon", "h100-sxm:8"]),
        ("h100-sxm:0", ["'0'", "at least one device"]),
        ("h100-sxm:-8", ["'-8'", "at least one device"]),
        ("h100-sxm:2x0", ["at least one device"]),
        ("h100-sxm:eight", ["'eight'", "h100-sxm:8"]),
        ("h100-sxm:8x", ["'8x'"]),
        ("h100-sxm:8.5", ["'8.5'"]),
        ("h100-sxm:8:8", ["'8:8'"]),
        ("h100-sxm:١", ["not a number"]),
        ("h100-sxm:1x2x8", ["3 numbers", "h100-sxm:2x8"]),
        ("h100-sxm:12", ["12", "8", "h100-sxm:16", "2x6"]),
        ("h100-sxm:13", ["13", "13x1"]),
        ("h100-sxm:2x9", ["9 devices", "holds 8"]),
        ("h100-sxm:99999999999", ["99999999999", "131072"]),
        ("tpu-v5p:8", ["'8'", "3 numbers", "tpu-v5p:2x2x1"]),
        ("tpu-v5e:2x2x1", ["2 numbers", "tpu-v5e:2x2"]),
        ("tpu-v5p:3x3x3", ["whole hosts", "2x2x1"]),
        ("tpu-v5e:32x32", ["1024 chips", "at most 256"]),
        ("h100-sxn:8", ["did you mean 'h100-sxm'"]),
    ],
)
def test_a_machine_that_cannot_be_is_refused_with_the_numbers(text, words):
    with pytest.raises(InputError) as error:
        Hardware.named(text)
    for word in words:
        assert word in str(error.value)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_no_text_after_the_colon_raises_anything_but_an_input_error(shape):
    with contextlib.suppress(InputError):
        assert Hardware.named(f"h100-sxm:{shape}").devices >= 1


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=16384))
def test_whole_nodes_hold_every_device(count):
    try:
        machine = Hardware.named(f"b200:{count}")
    except InputError:
        assert count > 8 and count % 8
    else:
        assert machine.devices == count and machine.devices_per_host <= 8
