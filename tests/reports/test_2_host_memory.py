"""Reports of theme 2, "host memory ran out and it looked like the GPU": the pool is named, with the number to set."""

import dataclasses
import json
from pathlib import Path

import pytest

import forebay as fb
from forebay.compiler.detect import Evidence, hazards
from forebay.compiler.hlo import read_hlo
from forebay.compiler.judging import _weigh
from forebay.errors import InputError
from forebay.records import Memory, Verdict

pytestmark = pytest.mark.oldest
EMPTY = "HloModule m, is_scheduled=true, entry_computation_layout={()->f32[]}\n"


def met(host_bytes):
    evidence = Evidence(findings=read_hlo(EMPTY), host=Memory(argument_bytes=host_bytes), options={}, settings={})
    return {hazard.id: hazard for hazard in hazards(evidence, "0.12.0", "cuda")}


def test_xla_20633_the_pool_that_runs_out_is_named_with_the_size_to_set():
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=103 or more" in met(100 * 10**9)["host-pool-64gb"].message
    assert "Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before JAX starts" in met(100 * 10**9)["host-pool-64gb"].action
    assert met(10 * 10**9) == {}


def test_deepspeed_3000_host_memory_is_weighed_by_itself_and_named():
    verdict = Verdict(fits=None, reason="", hbm=None, host=None, hbm_budget_bytes=2**36, host_budget_bytes=2**33)
    fits, reason = _weigh(Memory(argument_bytes=2**30), Memory(argument_bytes=2**34), verdict)
    assert not fits
    assert "HBM 1.00 GiB is within the budget of 64.00 GiB per device" in reason
    assert "host memory 16.00 GiB is over the budget of 8.00 GiB per device" in reason


def test_deepspeed_4867_the_processes_of_a_host_share_its_memory_after_a_reserve():
    machine = fb.Hardware.named("h100-sxm:16", host_ram="1TiB")
    assert machine.host_budget_bytes < machine.host_ram_bytes == 2**40
    assert machine.host_budget_bytes_per_device == machine.host_budget_bytes // 8
    assert json.loads(json.dumps(machine.to_json()))["host_budget_bytes_per_device"] == machine.host_budget_bytes_per_device


def test_numpyro_forecast_99_a_size_of_host_memory_that_cannot_be_meant_is_refused():
    with pytest.raises(InputError, match="'lots' is not a size"):
        fb.Hardware.named("h100-sxm:8", host_ram="lots")


def test_a_plan_states_the_bytes_that_it_puts_on_each_host(stack):
    plan = fb.Plan.by_hand(stack(4, 256, 16), {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm:8"))
    assert sum(e.bytes_per_device for e in plan.entries if e.placement == "host") == 2 * 4 * 256 * 256 * 4 // 8


LOGS = Path(__file__).parents[1] / "trust" / "fixtures"


@pytest.fixture(scope="module")
def plan(stack):
    """100 GiB of optimizer state on the host of one H100."""
    return fb.Plan.by_hand(stack(50, 16384, 16), {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm", host_ram="1TiB"))


SHORT = {
    "a container": ({"ram_limit_bytes": 64 * 2**30, "ram_limit_source": "/sys/fs/cgroup/memory.max"}, "host RAM", "docker run --memory="),
    "processes": ({"local_processes": 3, "local_processes_source": "SLURM_NTASKS_PER_NODE=3"}, "processes per host", "divides 1"),
    "XLA's pool": ({}, "XLA's host pool", "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="),
    "the disk": ({"folder": Path("runs"), "disk_free_bytes": 2**30}, "checkpoint disk", "free 149.00 GiB there"),
    "NUMA": ({}, "NUMA", "numactl --cpunodebind=1"),
}


@pytest.mark.parametrize("what", SHORT)
def test_xla_20633_and_deepspeed_3000_what_will_be_short_is_said_before_the_start_with_the_command(plan, host, what):
    facts, name, mend = SHORT[what]
    line = fb.preflight(plan, machine=dataclasses.replace(host, **facts))[name]
    assert line.outcome in ("failed", "warning")
    assert mend in line.mend


def test_deepspeed_4867_a_locked_memory_limit_stops_a_tpu_before_the_start(plan, host):
    tpu = fb.Hardware.named("tpu-v5p:1x1x1")
    line = fb.preflight(plan, tpu, machine=dataclasses.replace(host, memlock_bytes=65536))["locked memory"]
    assert (line.outcome, line.mend) == ("failed", "ulimit -l unlimited, or docker run --ulimit memlock=-1")


def test_a_pool_grows_by_doubling_and_the_rounding_is_counted(plan, host):
    line = fb.preflight(plan, machine=host)["XLA's host pool"]
    assert "100.00 GiB for each device of a pool of 64.00 GiB" in line.detail
    assert int(line.mend.rpartition("=")[2]) > 110  # two stacks of 50 GiB leave the tail of a region of 64


def test_numpyro_forecast_99_after_it_happened_the_host_pool_is_named_and_not_the_gpu():
    said = str(fb.explain_oom((LOGS / "oom_host_pool.log").read_text()))
    assert said.startswith("out of memory: pinned host memory (XLA's host pool), not the device")
    assert "do: export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in said
