"""Options of the compiler: stable for a version, each with a reason, each known to the compiler of its version, none that costs HBM."""

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay.plan.options import compiler_options
from forebay.records.flags import LEFT, OPTIONS
from forebay.records.hazards import HAZARDS, in_range

JAXLIB = jax.lib.__version__
VERSIONS = ("0.10.2", "0.11.0", "0.12.0.1")
LIMIT = "xla_gpu_experimental_parallel_async_compute_limit"
UNLIMITED = {"xla_gpu_memory_limit_slop_factor": 1000}


@pytest.mark.oldest
@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_question_gets_the_same_options(version):
    asked = [compiler_options("cuda", hosted=True, devices=8, jaxlib=version) for _ in range(2)]
    assert asked[0] == asked[1]
    assert asked[0][0][LIMIT] == 16
    assert asked[0][0]["xla_gpu_enable_host_memory_offloading"] is True
    assert ("xla_disable_hlo_passes" in asked[0][0]) == (version < "0.11.1")


@pytest.mark.oldest
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_is_set_or_left_with_a_reason(version, hosts):
    options, reasons = compiler_options("cuda", hosted=True, devices=16, hosts=hosts, jaxlib=version)
    rows = [row for row in OPTIONS if in_range(row, version, "cuda") and row.when != ("nodes" if hosts == 1 else "node")]
    for row in rows:
        said = [line for line in reasons if line.endswith(row.reason) and all(f"{name}=" in line for name in row.values)]
        assert len(said) == 1, row.id
        assert said[0].startswith(LEFT) != row.chosen
    set_lines = [line for line in reasons if not line.startswith(LEFT)]
    assert all(any(f"{name}={value}" in line for line in set_lines) for name, value in options.items())
    names = [name for row in rows if not row.chosen for name in row.values]
    assert not set(names) & set(options)


@pytest.mark.oldest
def test_options_follow_what_the_plan_has():
    least, why = compiler_options("cuda", hosted=False, devices=1, jaxlib="0.12.0")
    assert least == UNLIMITED
    assert len(why) == 1
    alone = compiler_options("cuda", hosted=True, devices=1, jaxlib="0.12.0")[1]
    assert not any("all_gather" in line for line in alone)
    many = compiler_options("cuda", hosted=False, devices=8, jaxlib="0.12.0")[1]
    assert any("all_gather" in line for line in many)
    assert not any("host" in line for line in many)
    for platform in ("tpu", "cpu"):
        assert compiler_options(platform, hosted=True, devices=8, hosts=2, jaxlib="0.12.0") == ({}, ())


@pytest.mark.oldest
@pytest.mark.parametrize("version", VERSIONS)
def test_pipelining_is_for_several_nodes_and_goes_by_the_names_of_its_version(version):
    within = compiler_options("cuda", hosted=False, devices=8, jaxlib=version)[0]
    across = compiler_options("cuda", hosted=False, devices=16, hosts=2, jaxlib=version)[0]
    assert within == UNLIMITED
    assert across["xla_gpu_enable_while_loop_double_buffering"] is True
    assert (across.get("xla_gpu_enable_pipelined_all_gather") is True) == (version < "0.11")
    assert (across.get("xla_gpu_pipeline_all_gather") == "COLLECTIVE_PIPELINING_MODE_ON") == (version >= "0.11")


H100 = fb.Hardware.named("h100-sxm:1")
ROWS = [row for row in OPTIONS if in_range(row, JAXLIB, "cuda")]
MITIGATIONS = [row for row in HAZARDS if row.options and in_range(row, JAXLIB, "cuda")]


@pytest.mark.compiler
@pytest.mark.oldest
@pytest.mark.parametrize(
    "values", [row.values for row in ROWS] + [row.options for row in MITIGATIONS], ids=[row.id for row in ROWS + MITIGATIONS]
)
def test_the_compiler_of_this_version_takes_each_row(values):
    verdict = fb.judge(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),), H100, donate_argnums=(), compiler_options=dict(values))
    assert verdict.compiled, verdict.reason


@pytest.mark.compiler
@pytest.mark.oldest
def test_the_options_of_a_streamed_step_cost_no_memory_and_keep_its_structure():
    shapes = {name: jax.ShapeDtypeStruct((8, 512, 512), jnp.float32) for name in ("a", "b")}

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"], None), batch, params)
        return jnp.mean(x**2)

    work = fb.trace(loss_fn, optax.adamw(1e-3), shapes, jax.ShapeDtypeStruct((64, 512), jnp.float32))
    plan = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=H100, options={"whole_below_bytes": 0})
    step, args = fb.train_step(loss_fn, optax.adamw(1e-3), plan), (plan.abstract_state(), plan.abstract_batch())
    safe = {
        name: value for name, value in plan.compiler_options.items() if name == "xla_disable_hlo_passes"
    }  # without it 0.10.2 goes wrong
    least = fb.judge(step, args, H100, compiler_options=safe)
    full = fb.judge(step, args, H100, plan=plan)
    assert least.compiled
    assert full.compiled
    assert full.compiler_options[LIMIT] == 16
    layer_bytes = 512 * 512 * 4
    assert full.hbm.total_bytes <= least.hbm.total_bytes + 16 * layer_bytes, "at most the slices that are now in flight together"
    assert full.host.total_bytes == least.host.total_bytes
    assert full.host.temp_bytes == 0
    moved = [sum(c.bytes * (c.trip_count or 1) for c in v.host_copies) for v in (least, full)]
    assert moved[0] == moved[1], "the same bytes cross the link"
    assert full.remat_instructions == least.remat_instructions
    assert not {hazard.id for hazard in full.hazards} & {"two-in-flight", "reversed-host-slice", "host-to-host-copy"}
