"""Reports of theme 6, "nothing overlaps, or the link is slow": each copy's exposed time stands in the forecast, each way by itself."""

import gzip
from pathlib import Path

import pytest

import forebay as fb
from forebay.compiler.hlo import read_hlo
from forebay.compiler.validate import validate
from forebay.hardware import Link

pytestmark = pytest.mark.oldest
FIXTURES = Path(__file__).parents[1] / "timeline" / "fixtures"


def text(name):
    return gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()


def test_torchtune_2076_the_exposed_time_of_each_host_buffer_is_shown():
    forecast = fb.predict(text("stream_gpu_0.12.0.1"), fb.Hardware.named("h100-sxm:8"))
    assert forecast.copies
    assert {copy.direction for copy in forecast.copies} >= {"to_device", "to_host"}
    assert all(copy.exposed_seconds >= 0 and copy.moved_bytes > 0 for copy in forecast.copies)
    assert 0 <= forecast.exposed_copy_seconds <= forecast.step_seconds


def test_jax_21438_a_copy_that_nothing_runs_beside_is_named():
    body = """%body (c: (s32[], f32[8,4], f32[4])) -> (s32[], f32[8,4], f32[4]) {
  %c = (s32[], f32[8,4]{1,0:S(5)}, f32[4]{0}) parameter(0)
  %h = f32[8,4]{1,0:S(5)} get-tuple-element(%c), index=1
  %in = (f32[8,4]{1,0}, f32[8,4]{1,0:S(5)}, u32[]) copy-start(%h)
  %q = f32[8,4]{1,0} copy-done(%in)
  ROOT %t = (s32[], f32[8,4]{1,0:S(5)}, f32[4]{0}) tuple(%c)
}

"""
    whole = (
        "HloModule m, is_scheduled=true, entry_computation_layout={()->f32[]}\n\n"
        + body
        + """ENTRY %main () -> f32[] {
  %z = (s32[], f32[8,4]{1,0:S(5)}, f32[4]{0}) tuple()
  %w = (s32[], f32[8,4]{1,0:S(5)}, f32[4]{0}) while(%z), condition=%cond, body=%body
}
"""
    )
    facts = {fact.name: fact for fact in validate(read_hlo(whole), (), ())}
    fact = facts["host copies in loops run beside work"]
    assert not fact.held
    assert "in (to_device, 128 B)" in fact.found


def test_xla_21708_the_link_has_a_rate_each_way_and_one_for_both_at_once():
    for name in ("h100-sxm:8", "gh200:1"):
        link = fb.Hardware.named(name).link
        known = [rate for rate in Link.RATES if getattr(link, rate) is not None]
        assert {"to_device_bytes_per_second", "to_host_bytes_per_second"} <= set(known)
        assert all(getattr(link, rate).source for rate in known)


def test_deepspeed_7966_a_link_with_unequal_ways_is_kept_unequal():
    link = fb.Hardware.named("gh200:1").link
    assert float(link.to_device_bytes_per_second) > float(link.to_host_bytes_per_second)


def test_xla_12452_pools_are_taken_at_the_start_and_the_node_of_the_gpu_is_named(host):
    from forebay.hardware import environment

    machine = fb.Hardware.named("h100-sxm:8", host_ram="2TiB")
    said = {setting.name: setting.value for setting in environment.settings(machine, [90 * 2**30], {})}
    assert said["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert int(said["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) >= 90
    entry = fb.records.Entry(
        name="optimizer:m", role="optimizer", bytes_per_device=2**30, placement="host", shape=(2**28,), dtype="float32"
    )
    plan = fb.Plan(workload={}, signature={}, hardware=machine.to_json(), entries=(entry,), options={}, mesh=None)
    line = fb.preflight(plan, machine=host)["NUMA"]
    assert "accelerators at node 1" in line.detail
    assert "numactl" in line.mend
