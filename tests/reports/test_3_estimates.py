"""Reports of theme 3, "the estimator is wrong": a figure says whether it was planned, compiled or forecast, and activations count."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

import forebay as fb
from forebay.records import Memory, Verdict
from forebay.report.tables import render_plan

pytestmark = pytest.mark.oldest
FIXTURES = Path(__file__).parents[1] / "timeline" / "fixtures"


@pytest.fixture(scope="module")
def plan(stack):
    return fb.Plan.by_hand(stack(4, 256, 1024), {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm"))


def test_deepspeed_4527_and_5102_activations_are_counted_layer_by_layer(plan):
    activations = [e for e in plan.entries if e.role == "activation" and e.placement == "hbm"]
    assert sum(e.bytes_per_device for e in activations) >= 4 * 1024 * 256 * 4


def test_maxtext_2504_a_plan_that_no_compiler_has_seen_says_so(plan):
    text = render_plan(json.loads(json.dumps(plan.to_json())))
    assert "not judged" in text
    assert "No verdict: the compiler has not been asked." in text


def test_maxtext_4514_planned_compiled_and_forecast_figures_are_never_mixed(plan):
    verdict = Verdict(
        fits=True, reason="within", hbm=Memory(temp_bytes=2**30), host=Memory(argument_bytes=2**21), hbm_budget_bytes=2**36,
        host_budget_bytes=2**38, versions={"jax": "0"}, target="cuda",
    )  # fmt: skip
    schedule = gzip.decompress((FIXTURES / "offload_gpu_0.12.0.1.hlo.gz").read_bytes()).decode()
    forecast = fb.predict(schedule, fb.Hardware.named("h100-sxm:8")).to_json()
    record = json.loads(json.dumps(plan.to_json())) | {"verdict": json.loads(json.dumps(verdict.to_json())), "forecast": forecast}
    text = render_plan(record)
    for mark in ("role (planned)", "the step (compiled)", "(forecast, "):
        assert mark in text


def test_a_forecast_is_a_band_and_says_what_it_does_not_know():
    schedule = gzip.decompress((FIXTURES / "offload_gpu_0.12.0.1.hlo.gz").read_bytes()).decode()
    forecast = fb.predict(schedule, fb.Hardware.named("h100-sxm:8"))
    assert forecast.low_seconds < forecast.step_seconds < forecast.high_seconds
    assert forecast.unknown_share == 0 or forecast.unknowns


def test_jax_9530_out_of_memory_names_the_largest_tensors_by_source_line_and_what_to_do():
    dump = gzip.decompress((FIXTURES.parents[1] / "trust" / "fixtures" / "llama-3.1-8b_h100-sxm-8_resident.hlo.gz").read_bytes()).decode()
    report = fb.explain_oom("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", hlo=dump)
    sizes = [row.bytes * row.copies for row in report.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert any(row.source.startswith("models/llama.py:") for row in report.rows[:10])
    said = str(report)
    assert "out of memory: HBM, at run" in said
    assert "largest at the peak (compiled)" in said
    assert "do: move more to the host: --place optimizer=host" in said


def test_maxtext_2891_a_profiled_run_keeps_measured_and_forecast_apart_and_their_ratio(plan):
    from forebay.training.profile import Measurement, residual

    machine = fb.Hardware.named("h100-sxm:8")
    schedule = gzip.decompress((FIXTURES / "offload_gpu_0.12.0.1.hlo.gz").read_bytes()).decode()
    verdict = Verdict(
        fits=True, reason="", hbm=Memory(temp_bytes=3 * 2**30), host=Memory(), hbm_budget_bytes=2**36, host_budget_bytes=2**38, versions={}
    )
    forecast = dataclasses.replace(plan, verdict=verdict, forecast=fb.predict(schedule, machine).to_json())
    step = forecast.forecast["step_seconds"]
    measured = Measurement(seconds=(1.9 * step, 2 * step, 9 * step), lanes={}, lanes_missing="not traced", hbm_peak_bytes=2**32)
    row = residual(forecast, machine, measured, {"tokens": 1024.0, "flops_per_token": 1e6})
    assert (row["measured"]["hbm_bytes"], row["forecast"]["hbm_bytes"]) == (2**32, 3 * 2**30)
    assert row["ratio"]["step"] == pytest.approx(2)  # the median: one step may have been held up
