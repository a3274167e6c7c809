"""Reports of theme 7, "the numbers are wrong": a version known to be wrong gets the safe option, or the program is refused."""

import jax
import numpy as np
import optax
import pytest
from programs import scanned
from resident import assert_equal, planned, resident

import forebay as fb
from forebay.compiler.detect import Evidence, avoided, hazards, refused
from forebay.compiler.hlo import Findings
from forebay.plan.options import compiler_options
from forebay.records import Memory

pytestmark = pytest.mark.oldest
SAFE = {"xla_disable_hlo_passes": "dynamic-slice-annotator"}


def test_xla_46231_plans_set_the_safe_option_where_gradients_would_be_wrong_and_say_so():
    for jaxlib in ("0.10.2", "0.11.0"):
        options, reasons = compiler_options("cuda", hosted=True, devices=1, jaxlib=jaxlib)
        assert options.items() >= SAFE.items()
        assert any("reversed-host-slice on jaxlib" in reason for reason in reasons)
        [said] = avoided(options, jaxlib, "cuda")
        assert said.startswith("compiled with xla_disable_hlo_passes=dynamic-slice-annotator, which keeps the hazard reversed-host-slice")
    assert "xla_disable_hlo_passes" not in compiler_options("cuda", hosted=True, devices=1, jaxlib="0.12.0.1")[0]
    assert avoided({}, "0.10.2", "cuda") == avoided(SAFE, "0.12.0.1", "cuda") == ()


def test_xla_46231_without_the_option_the_program_is_refused_with_the_option_to_set():
    findings = Findings(host_copies=(), host_compute=(), misplaced_slices=("slice",), remat_instructions=0, attention={}, parameters=())
    evidence = Evidence(findings=findings, host=Memory(), options={}, settings={})
    said = refused(hazards(evidence, "0.11.0", "cuda"))
    assert said.startswith("refused: reversed-host-slice, its results would be wrong. Compile with xla_disable_hlo_passes=")
    assert refused(hazards(evidence, "0.11.1", "cuda")) == ""


def test_transformers_28391_moving_tensors_is_no_licence_to_change_their_precision():
    options, _ = compiler_options("cuda", hosted=True, devices=1, jaxlib=jax.__version__)
    assert not any("precision" in name or "fast_math" in name for name in options)


@pytest.mark.usefixtures("small")
def test_marin_nan_at_step_8_donated_state_that_is_partly_on_the_host_stays_the_resident_one():
    program, optimizer = scanned(), optax.adamw(1e-2)
    rules = {"optimizer:0/mu/layers/*": "host[0:2]", "optimizer:0/nu/layers/*": "host[1:3]"}
    got, _ = planned(program, optimizer, rules, steps=10)
    assert np.isfinite(got.losses).all()
    assert_equal(got, resident(program, optimizer, steps=10), 1e-10)


@pytest.mark.usefixtures("quick")
def test_marin_a_step_that_reads_a_donated_buffer_again_fails_the_check_and_a_cpu_passes_no_offload():
    program = scanned()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), program.params)
    work = fb.trace(program.loss_fn, optax.adam(1e-2), shapes, program.batch(0))
    plan = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm:8"))
    report = fb.check(program.loss_fn, optax.adam(1e-2), plan, steps=2)
    assert report.passed, report
    assert report["donation"].outcome == "passed"
    assert {report[name].outcome for name in ("ignored placements", "overlap", "memory")} == {"skipped"}


def test_gemma3_27b_at_o1_pipelined_offload_is_left_alone_and_the_reason_is_kept():
    options, reasons = compiler_options("cuda", hosted=True, devices=8, jaxlib="0.12.0.1")
    assert "xla_gpu_enable_pipelined_host_offloading" not in options
    [said] = [reason for reason in reasons if "xla_gpu_enable_pipelined_host_offloading" in reason]
    assert said.startswith("left alone: ")
