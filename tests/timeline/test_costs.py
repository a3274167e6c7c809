import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.timeline.constants import constants_of, table
from forebay.timeline.costs import Costs
from forebay.timeline.groups import parse_groups
from forebay.timeline.rates import Rates
from forebay.timeline.work import Collective, Product, Traffic, Work

pytestmark = pytest.mark.oldest


def costs(name):
    hardware = Hardware.named(name)
    return Costs(hardware, constants_of(hardware.chip.name, hardware.chip.vendor))


def matmul(side, dtype="bf16"):
    return Work(name="m", kind="matmul", opcode="dot", product=Product(flops=2.0 * side**3, dtype=dtype, m=side, n=side, k=side))


def gather(text, devices, size=1e9, operation="all-gather"):
    return Collective(operation=operation, full_bytes=size, groups=parse_groups(text, devices))


def test_every_constant_has_a_source_and_says_what_it_was_fitted_on():
    known = set(table()["source"])
    for family, body in table()["family"].items():
        for section, values in body.items():
            if isinstance(values, dict):
                named = values["source"] if isinstance(values["source"], list) else [values["source"]]
                assert set(named) <= known, (family, section)
                assert "fitted_on" in values, (family, section)


def test_every_gpu_and_tpu_of_the_catalog_has_constants():
    for name in ("h100-sxm:8", "h200:8", "gb200:8", "a100-sxm-80:8", "rtx-4090:1", "tpu-v5p:2x2x1", "tpu-v6e:2x2"):
        assert costs(name).compute_seconds(matmul(4096)) > 0


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_larger_matmuls_are_never_at_a_lower_rate(a, b):
    rate = constants_of("h100-sxm", "nvidia").matmul
    small, large = sorted((a, b))
    assert rate.efficiency("bf16", small) <= rate.efficiency("bf16", large) <= 1


def test_matmul_shape_factors():
    rate = constants_of("h100-sxm", "nvidia").matmul
    assert rate.efficiency("bf16", 4096) / rate.efficiency("bf16", 16384) == pytest.approx(0.88)
    with pytest.raises(InputError, match="no matmul efficiency of fp64"):
        rate.efficiency("fp64", 4096)


def test_memory_bound_work_is_a_ramp_and_bytes_over_rate():
    here = costs("h100-sxm:8")
    big = Work(name="w", kind="memory", opcode="fusion", traffic=Traffic(hbm_read=2e9, hbm_written=1e9))
    ramp = here.constants.kernel_ramp_seconds
    assert here.compute_seconds(big) == pytest.approx(ramp + 3e9 / (3.35232e12 * here.constants.memory_efficiency))
    assert here.compute_seconds(Work(name="w", kind="memory", opcode="fusion")) == ramp


def test_groups_that_fill_nodes_drive_every_port_of_the_node():
    here = costs("h100-sxm:64")
    inside = here.collective(gather("[8,8]<=[64]", 64))
    across = here.collective(gather("[1,64]<=[64]", 64))
    single = here.collective(gather("[8,8]<=[8,8]T(1,0)", 64))
    assert inside.seconds < across.seconds < single.seconds
    assert inside.domain != across.domain
    moved = 1e9 * 63 / 64
    rate = min(450e9 * here.constants.link_efficiency, 8 * 50e9 * here.constants.network_efficiency)
    assert across.seconds == pytest.approx(moved / rate, rel=0.05)
    assert single.seconds == pytest.approx(1e9 * 7 / 8 / (50e9 * here.constants.network_efficiency), rel=0.05)


def test_an_all_reduce_moves_twice_a_reduce_scatter():
    here = costs("h100-sxm:8")
    assert (
        here.collective(gather("{}", 8, operation="all-reduce")).bytes
        == 2 * here.collective(gather("{}", 8, operation="reduce-scatter")).bytes
    )
    assert here.collective(gather("{{0},{1}}", 2)).seconds == 0


def test_unpublished_figures_are_errors():
    here = costs("tpu-7x:2x2x1")
    copy = Work(name="c", kind="host_copy", opcode="copy", traffic=Traffic(host_read=1e6, hbm_written=1e6))
    with pytest.raises(InputError, match="forebay probe"):
        here.of(copy)


def test_devices_of_a_host_share_its_dram():
    whole, single = (Rates(costs(f"h100-sxm:{n}"), uses_host=True) for n in (8, 1))
    assert whole.binding["both"] == "host DRAM"
    assert single.binding["both"] == "link"
    busy = ["to_device", "to_host"]
    assert whole.transfer_rate("to_device", busy) < single.transfer_rate("to_device", busy)
    assert single.transfer_rate("to_device", ["to_device"]) == 1


def test_compute_slows_beside_transfers():
    rates = Rates(costs("h100-sxm:8"), uses_host=True)
    assert 1 == rates.slow_down([]) < rates.slow_down(["to_host"]) < rates.slow_down(["to_host", "collective"])


def test_bent_constants_are_faster_and_slower():
    hardware = Hardware.named("h100-sxm:8")
    middle = constants_of("h100-sxm", "nvidia")
    fast, slow = (Costs(hardware, middle.bent(side)) for side in (-1, 1))
    for work in (matmul(4096), Work(name="w", kind="memory", opcode="x", traffic=Traffic(hbm_read=1e9))):
        assert fast.compute_seconds(work) < Costs(hardware, middle).compute_seconds(work) < slow.compute_seconds(work)
    assert dataclasses.replace(middle) == middle


def test_a_type_without_a_known_peak_is_costed_by_bytes_and_said():
    here = costs("h100-sxm:8")
    odd = dataclasses.replace(matmul(4096, "s32"), traffic=Traffic(hbm_read=1e9))
    assert here.unknown(matmul(4096)) == ""
    assert here.unknown(odd) == "product of s32, whose peak on h100-sxm is not known"
    assert here.compute_seconds(odd) == here.memory_seconds(1e9)
    assert costs("tpu-v5p:2x2x1").unknown(matmul(4096, "f32")) == ""
