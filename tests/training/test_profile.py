"""Measured against forecast: which steps count, what is kept, what is shown, and that a run's numbers do not change by being watched."""

import dataclasses
import json
import time
import types

import jax.numpy as jnp
import pytest

from forebay import cli
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.records import Entry
from forebay.report.profile import render_profile
from forebay.training import config, loop, profile
from forebay.training.profile import MEASURED, TRACED, WARM_UP, Measurement, ProfiledStep, keep, plan_fingerprint, residual

pytestmark = pytest.mark.oldest
H100 = Hardware.named("h100-sxm:8")
WORK = {"tokens": 1000.0, "flops_per_token": 2e12}
FORECAST = {
    "step_seconds": 1.0, "low_seconds": 0.9, "high_seconds": 1.2, "tokens_per_second": 1000.0, "mfu": 0.25, "exposed_copy_seconds": 0.1,
    "lanes": {"compute": 0.8, "to_device": 0.2},
}  # fmt: skip


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """``watched(steps)``: a profiled step that sleeps, and the numbers of the steps between which the profiler ran."""
    traced = []
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda folder: traced.append(("from", count[0])))
    monkeypatch.setattr(profile.jax.profiler, "stop_trace", lambda: traced.append(("until", count[0])))
    count = [0]

    def step(state, batch):
        time.sleep(0.2 if count[0] < WARM_UP else 0.001)
        count[0] += 1
        return state + 1, {"loss": batch}

    def run(steps):
        profiled, state = ProfiledStep(step, tmp_path, steps), jnp.zeros(())
        for _ in range(steps):
            state, _ = profiled(state, jnp.zeros(()))
        assert int(state) == steps
        return profiled, traced

    return run


def test_warm_up_is_left_out_and_the_trace_comes_after_what_is_measured(watched):
    profiled, traced = watched(WARM_UP + MEASURED + TRACED + 3)
    assert len(profiled.measurement().seconds) == MEASURED
    assert max(profiled.measurement().seconds) < 0.15 + min(profiled.measurement().seconds), "the slow first steps are none of them"
    assert traced == [("from", WARM_UP + MEASURED), ("until", WARM_UP + MEASURED + TRACED)]


@pytest.mark.parametrize(("steps", "measured", "traced"), [(3, 1, 0), (4, 1, 1), (5, 1, 2), (8, 4, 2)])
def test_a_short_run_measures_what_there_is(watched, steps, measured, traced):
    profiled, ends = watched(steps)
    seen = profiled.measurement()
    assert len(seen.seconds) == measured
    assert ends == ([("from", steps - traced), ("until", steps)] if traced else [])
    assert "left no trace.json.gz" in seen.lanes_missing if traced else seen.lanes_missing == "no step was traced"


def test_a_run_of_warm_up_alone_measured_nothing(watched):
    profiled, _ = watched(WARM_UP)
    with pytest.raises(InputError, match=r"2 steps are left out as warm-up and this process did 2; give --steps 14 or more"):
        profiled.measurement()


def make_plan(forecast=None, **changes):
    entry = Entry(name="optimizer:mu", role="optimizer", bytes_per_device=4, placement="host", spec=("fsdp",))
    said = {"workload": {"model": "m", "fingerprint": "f"}, "entries": [dataclasses.asdict(entry)], "options": {"prefetch": 1}} | changes
    verdict = types.SimpleNamespace(hbm=types.SimpleNamespace(total_bytes=2**30))
    return types.SimpleNamespace(workload=said["workload"], forecast=forecast, verdict=verdict, to_json=lambda: said)


SEEN = Measurement(seconds=(1.2, 1.1, 1.0), lanes={"compute": 1.0, "collective": 0.3}, hbm_peak_bytes=3 * 2**30)


def test_the_residual_is_measured_over_forecast():
    row = residual(make_plan(FORECAST), H100, SEEN, WORK)
    assert row["ratio"] == {"step": pytest.approx(1.1), "lanes": {"compute": pytest.approx(1.25)}}
    assert row["measured"]["tokens_per_second"] == pytest.approx(1000 / 1.1)
    assert row["measured"]["mfu"] == pytest.approx(2e15 / (1.1 * 8 * float(H100.peak_flops["bf16"])))
    assert (row["measured"]["fastest_seconds"], row["measured"]["slowest_seconds"], row["measured"]["steps"]) == (1.0, 1.2, 3)
    assert row["versions"]["jaxlib"]
    json.dumps(row)


def test_a_plan_is_named_by_what_decides_its_program():
    assert plan_fingerprint(make_plan()) == plan_fingerprint(make_plan(FORECAST, options={"prefetch": 1, "reasons": ["other words"]}))
    assert plan_fingerprint(make_plan()) != plan_fingerprint(make_plan(options={"prefetch": 0}))


def test_residuals_are_appended_to_the_run_and_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "user"))
    row = residual(make_plan(FORECAST), H100, SEEN, WORK)
    for _ in range(2):
        files = keep(row, tmp_path / "run")
    assert files == (tmp_path / "run/residuals.jsonl", tmp_path / "user/residuals.jsonl")
    for file in files:
        assert [json.loads(line) for line in file.read_text().splitlines()] == [row, row]


def test_without_a_forecast_only_the_run_keeps_the_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "user"))
    row = residual(make_plan(), Hardware.here(), SEEN, WORK, "there is no forecast for a CPU")
    assert keep(row, tmp_path / "run") == (tmp_path / "run/residuals.jsonl",)
    assert (row["forecast"], row["ratio"], row["forecast_missing"]) == (None, None, "there is no forecast for a CPU")


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match="the residuals cannot be written to"):
        keep(residual(make_plan(), H100, SEEN, WORK), tmp_path / "run")


def test_forecast_and_measured_stand_side_by_side():
    said = render_profile(residual(make_plan(FORECAST), H100, SEEN, WORK)).splitlines()
    rows = {line[2:26].strip(): line[26:].split() for line in said if line.startswith("  ")}
    assert rows["step"] == ["1", "s", "1.1", "s", "1.10"]
    assert rows["HBM peak (compiled)"][:4] == ["1.00", "GiB", "3.00", "GiB"]
    assert rows["compute busy"] == ["800", "ms", "1", "s", "1.25"]
    assert rows["copies to device busy"] == ["200", "ms", "-", "-"]
    assert rows["collectives busy"] == ["-", "300", "ms", "-"]
    assert any("forecast from 900 ms to 1.2 s" in line for line in said)


def test_what_was_not_forecast_or_not_read_says_so():
    seen = dataclasses.replace(SEEN, lanes={}, lanes_missing="the trace holds no CUDA streams", hbm_peak_bytes=None)
    said = render_profile(residual(make_plan(), H100, seen, WORK, "there is no forecast for a CPU"))
    assert "there is no forecast for a CPU" in said
    assert "lanes are not measured: the trace holds no CUDA streams" in said


def settings(folder, **changes):
    plain = config.TrainConfig(out=folder, steps=6, data=config.DataConfig(batch=8, seq=32), place=("optimizer=host",))
    return dataclasses.replace(plain, **changes)


def test_a_profiled_run_on_this_machine(tmp_path):
    plain, profiled = loop.train(settings(tmp_path / "plain")), loop.train(settings(tmp_path / "profiled", profile=True))
    assert profiled.losses == plain.losses
    assert plain.profile is None
    measured = profiled.profile["measured"]
    assert measured["steps"] == 2
    assert 0 < measured["fastest_seconds"] <= measured["step_seconds"] <= measured["slowest_seconds"]
    assert measured["lanes"]["compute"] > 0
    assert measured["lanes"]["collective"] > 0, "eight virtual devices reduce their gradients"
    assert profiled.profile["forecast"] is None
    assert json.loads((profiled.folder / "residuals.jsonl").read_text())["measured"] == measured
    assert list((profiled.folder / "profile").glob("plugins/profile/*/*.xplane.pb"))
    assert "profile" not in json.loads((profiled.folder / "config.json").read_text())
    said = render_profile(profiled.profile)
    assert "there is no forecast for a CPU" in said
    assert "sums of its thunks" in said


def test_a_run_too_short_to_profile_is_refused_before_it_starts(tmp_path, capsys):
    words = ["train", "--steps", "2", "--batch", "8", "--seq", "32", "--profile", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 2
    assert "--profile has nothing to measure: 2 steps are left out as warm-up and this run has 2 to do" in capsys.readouterr().err
