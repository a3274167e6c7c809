"""The scripts that hold forecasts against published steps: sizes of the rebuilt models, the refit, and the table of streams."""

import dataclasses
import gzip
import importlib
import math
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "timeline" / "fixtures"


def test_the_moe_has_the_published_counts():
    import jax

    moe = importlib.import_module("published_moe")
    model = moe.Moe()
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(moe.shapes(model)))
    assert total == pytest.approx(359.6e9, rel=0.002)
    assert model.active_parameters == pytest.approx(22.6e9, rel=0.01)


def test_a_refit_finds_constants_that_explain_its_rows():
    validation = importlib.import_module("validation")
    rows = []
    for name in ("fsdp", "offload", "attention", "control"):
        text = gzip.decompress((FIXTURES / f"{name}_gpu_0.12.0.1.hlo.gz").read_bytes()).decode()
        machine = validation.Hardware.named("h100-sxm:8")
        constants = validation.constants_of("h100-sxm", "nvidia")
        schedule = validation.read_schedule(text)
        truth = validation.refitted(constants, (0.66, 0.82, 3e-6))
        row = dataclasses.replace(validation.ROWS[0], published_seconds=validation.step_seconds(schedule, machine, constants=truth))
        rows.append(validation.Replayed(row=row, machine=machine, schedule=schedule, constants=constants))
    before = [abs(row.error((0.70, 0.82, 2e-6))) for row in rows]
    values = validation.refit(rows)
    assert max(abs(row.error(values)) for row in rows) < 0.1 * max(before)
    for value, (low, high) in zip(values, validation.REFITTED.values(), strict=True):
        assert low <= value <= high


def test_promises_are_told_kept_or_not():
    validation = importlib.import_module("validation")
    row = {"error": 0.05, "left_out_error": -0.06, "left_out_baseline_error": 0.1}
    fast = {"read_and_replay_seconds": 1.0}
    assert all(validation.verdicts([row], fast).values())
    assert not any(list(validation.verdicts([{**row, "error": 0.11, "left_out_error": 0.16}], fast).values())[:3])
    assert not all(validation.verdicts([row, {"not_compiled": "refused"}], fast).values())
    assert not all(validation.verdicts([row], {"not_compiled": "refused"}).values())


def test_a_row_that_does_not_compile_says_so_and_keeps_no_promise(monkeypatch, capsys):
    offload = importlib.import_module("published_offload")
    verdict = offload.Verdict(fits=False, reason="too large", hbm=None, host=None, hbm_budget_bytes=1, host_budget_bytes=1)
    monkeypatch.setattr(offload.fb, "judge", lambda *args, **more: verdict)
    rows = offload.rows(offload.DENSE)
    assert [row["not_compiled"] for row in rows] == ["too large"]
    assert not any(offload.promises(rows).values())
    offload.show(rows)
    assert "not compiled: too large" in capsys.readouterr().out


def test_the_published_change_of_a_step_is_over_what_it_gives_back():
    offload = importlib.import_module("published_offload")
    kept = {"row": offload.MOE, "exposed_seconds": 0.4, "ms_per_gib": 10.9}
    assert list(offload.promises([kept]).values()) == [True, True, False]
    assert list(offload.promises([{**kept, "ms_per_gib": 11.1}, {"row": offload.DENSE, "change": 0.03}]).values()) == [True, False, True]


@pytest.mark.compiler
def test_the_table_of_streams_tells_what_fills_the_link(capsys):
    streams = importlib.import_module("streams")
    size = streams.Size(name="tiny", layers=4, model=512, kv=128, mlp=1024)
    rows = {row.form: row for row in streams.measure(size, "h100-sxm:1")}
    assert set(rows) == {"whole", "plain loop", "plain loop, 16 in flight", "forebay"}
    assert rows["forebay"].hbm_temp_bytes < rows["whole"].hbm_temp_bytes
    assert all(0 < share < 1 for row in rows.values() for share in row.full.values())
    streams.show(list(rows.values()))
    assert "bound by" in capsys.readouterr().out
