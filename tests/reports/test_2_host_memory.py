"""Reports of theme 2, "host memory ran out and it looked like the GPU": the pool is named, with the number to set."""

import json

import jax
import jax.numpy as jnp
import optax
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


def test_a_plan_states_the_bytes_that_it_puts_on_each_host():
    loss = lambda p, b: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b, p)[0] ** 2)  # noqa: E731
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    work = fb.trace(loss, optax.adam(0.1), shape(4, 256, 256), shape(16, 256))
    plan = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm:8"))
    assert sum(e.bytes_per_device for e in plan.entries if e.placement == "host") == 2 * 4 * 256 * 256 * 4 // 8
