"""What was measured on a machine enters its forecast: rates of matmuls, device memory, DRAM and link."""

from dataclasses import replace

import pytest

from forebay.hardware import Hardware, Quantity
from forebay.hardware.chip import Sustained
from forebay.timeline.constants import constants_of
from forebay.timeline.costs import Costs
from forebay.timeline.measured import constants_on
from forebay.timeline.predicting import predict

pytestmark = pytest.mark.oldest
H100 = Hardware.named("h100-sxm:1")
FAMILY = constants_of("h100-sxm", "nvidia")


def rate(value):
    return Quantity(value, "measured by the test", "2026-12-01", "measured")


def with_chip(**changes):
    return replace(H100, chip=replace(H100.chip, **changes))


def with_matmuls(**curves):
    return with_chip(sustained=Sustained(matmul_flops={d: {side: rate(v) for side, v in curve.items()} for d, curve in curves.items()}))


def test_a_machine_that_nobody_measured_has_its_family_s_constants():
    assert constants_on(H100) == FAMILY


def test_a_measured_triad_scales_the_efficiency_of_device_memory():
    published = float(H100.hbm_bytes_per_second) * 0.886
    same = constants_on(with_chip(sustained=Sustained(hbm_bytes_per_second=rate(published))))
    assert same.memory_efficiency == pytest.approx(FAMILY.memory_efficiency, rel=0.01), "the triad that the family rests on changes nothing"
    half = constants_on(with_chip(sustained=Sustained(hbm_bytes_per_second=rate(published / 2))))
    assert half.memory_efficiency == pytest.approx(same.memory_efficiency / 2)


def test_measured_matmuls_are_the_rates_of_the_forecast():
    curve = {256: 50e12, 1024: 300e12, 4096: 640e12, 8192: 600e12}
    hardware = with_matmuls(bf16=curve, tf32={2048: 250e12})
    rates, peaks = constants_on(hardware).matmul, {dtype: float(peak) for dtype, peak in hardware.peak_flops.items()}
    for side in (256, 1024):
        assert rates.efficiency("bf16", side) * peaks["bf16"] == pytest.approx(curve[side] * 600 / 640)
    assert rates.efficiency("bf16", 8192) * peaks["bf16"] == pytest.approx(600e12), "the largest side is met exactly"
    assert rates.efficiency("bf16", 4096) == rates.efficiency("bf16", 8192), "a larger matmul is never at a lower rate"
    assert rates.efficiency("tf32", 2048) * peaks["tf32"] == pytest.approx(250e12)
    assert rates.limit["fp8"] == FAMILY.matmul.limit["fp8"], "a dtype that was not measured keeps its family's limit"


def test_a_curve_of_few_sides_moves_the_limit_alone():
    rates = constants_on(with_matmuls(bf16={8192: 700e12})).matmul
    assert rates.shape == FAMILY.matmul.shape
    assert rates.efficiency("bf16", 8192) * float(H100.peak_flops["bf16"]) == pytest.approx(700e12)


def test_nothing_comes_off_a_measured_dram_rate():
    host = H100.chip.host
    measured = with_chip(host=replace(host, dram_bytes_per_second=rate(100e9)))
    assert Costs(measured, constants_on(measured)).dram_share() == 100e9
    given = with_chip(host=replace(host, dram_bytes_per_second=Quantity(100e9, "a datasheet")))
    assert Costs(given, constants_on(given)).dram_share() < 100e9


COPY = """HloModule m, is_scheduled=true, entry_computation_layout={(f32[268435456]{0:S(5)})->f32[268435456]{0}}

ENTRY main {
  p = f32[268435456]{0:S(5)} parameter(0)
  s = (f32[268435456]{0}, f32[268435456]{0:S(5)}, u32[]) copy-start(p)
  ROOT d = f32[268435456]{0} copy-done(s)
}
"""


def test_a_forecast_uses_the_measured_link():
    rates = dict.fromkeys(("to_device_bytes_per_second", "to_host_bytes_per_second", "both_bytes_per_second"), rate(25e9))
    measured = with_chip(link=replace(H100.chip.link, **rates))
    assert predict(COPY, measured).step_seconds == pytest.approx(2**30 / 25e9, rel=0.01)
    assert predict(COPY, H100).step_seconds == pytest.approx(2**30 / 51e9, rel=0.01)
