"""The tables of a plan: every figure in them is one of the record's, and what went wrong is said."""

import dataclasses

import pytest

from forebay.errors import InputError
from forebay.records import Entry, Hazard, HostCopy, Memory, Verdict
from forebay.report.tables import render_entries, render_plan
from forebay.units import GIB, MIB

pytestmark = pytest.mark.oldest

ENTRIES = [
    Entry(name="parameter:layers/wq", role="parameter", bytes_per_device=3 * GIB, placement="hbm", reason="resident: no rule names it"),
    Entry(name="optimizer:0/mu/layers/wq", role="optimizer", bytes_per_device=5 * GIB, placement="host", reason="rule optimizer=host"),
    Entry(name="optimizer:0/mu/embed", role="optimizer", bytes_per_device=2 * GIB, placement="hbm", reason="too small to move"),
    Entry(name="activation:layer_input", role="activation", bytes_per_device=768 * MIB, placement="hbm", layers=(0, 4)),
    Entry(name="activation:mlp_up", role="activation", bytes_per_device=0, placement="recompute"),
]
VERDICT = Verdict(
    fits=True,
    reason="HBM 6.50 GiB is within the budget of 9.00 GiB per device",
    hbm=Memory(argument_bytes=5 * GIB, output_bytes=5 * GIB, alias_bytes=5 * GIB, temp_bytes=3 * GIB // 2),
    host=Memory(argument_bytes=7 * GIB),
    hbm_budget_bytes=9 * GIB,
    host_budget_bytes=100 * GIB,
    host_copies=(HostCopy(name="copy-start.1", direction="to_device", bytes=2 * GIB, asynchronous=True, loop="while", trip_count=32),),
    attention={"__cudnn$fmhaSoftmax": 2},
    compile_seconds=8.0,
    versions={"jax": "0.12.0"},
    target="cuda 1x1x8 (h100-sxm:8)",
)


def _record(verdict: Verdict | None = VERDICT) -> dict:
    return {
        "workload": {"model": "tiny", "parameters": 8_030_000_000, "global_batch": 8, "sequence_length": 8192},
        "hardware": {"name": "h100-sxm:8", "devices": 8},
        "entries": [dataclasses.asdict(entry) for entry in ENTRIES],
        "verdict": verdict and verdict.to_json(),
    }


def _row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_roles_are_summed_by_placement():
    text = render_plan(_record())
    assert _row(text, "parameter  ").split() == ["parameter", "3.00", "GiB", "-", "arguments"]
    assert _row(text, "optimizer  ").split() == ["optimizer", "2.00", "GiB", "5.00", "GiB", "arguments"]
    assert _row(text, "activation  ").split() == ["activation", "768.0", "MiB", "-", "temporaries", "1", "of", "2"]


def test_the_compiled_sizes_stand_against_the_budget():
    text = render_plan(_record())
    assert text.startswith("tiny on h100-sxm:8 (8 devices): fits (compiled)\n8.03 billion parameters, global batch 8, sequences of 8192")
    assert _row(text, "total").split() == ["total", "6.50", "GiB", "7.00", "GiB"]
    assert _row(text, "budget").split() == ["budget", "9.00", "GiB", "100.00", "GiB"]
    assert _row(text, "donated outputs").split()[2:] == ["-5.00", "GiB", "-"]
    assert "64.00 GiB to device" in text
    assert "2 x __cudnn$fmhaSoftmax" in text


def test_entries_carry_placement_and_reason_largest_first():
    lines = render_entries(_record(), "optimizer:*").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["optimizer:0/mu/layers/wq", "optimizer:0/mu/embed"]
    assert lines[1].endswith("host        rule optimizer=host")
    assert "activation:layer_input[0:4]" in render_entries(_record(), "activation")


def test_an_unknown_entry_is_an_error_with_the_nearest():
    with pytest.raises(InputError, match=r"called 'optimizer:0/nu/embed'; did you mean 'optimizer:0/mu/embed'"):
        render_entries(_record(), "optimizer:0/nu/embed")


def test_what_went_wrong_is_said():
    hazard = Hazard(id="reversed-host-slice", message="wrong gradients", action="disable the pass")
    text = render_plan(
        _record(dataclasses.replace(VERDICT, fits=False, hazards=(hazard,), ignored=("args[0].mu",), messages=("a flag was dropped",)))
    )
    assert "tiny on h100-sxm:8 (8 devices): does not fit" in text
    assert "hazard reversed-host-slice: wrong gradients -> disable the pass" in text
    assert "asked onto the host and not there: args[0].mu" in text
    assert "note: a flag was dropped" in text


def test_a_compile_that_did_not_end_shows_no_sizes():
    text = render_plan(_record(dataclasses.replace(VERDICT, fits=None, reason="timed out: 900 s", hbm=None, host=None)))
    assert "unknown: timed out: 900 s" in text
    assert "temporaries  " not in _row(text, "budget")
    assert not any(line.startswith("total") for line in text.splitlines())


def test_a_plan_that_nobody_judged_says_so():
    assert render_plan(_record(None)).endswith("No verdict: the compiler has not been asked.")


def test_sizes_stay_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = render_plan(_record())
    tables = text.split("compiled: ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "5.00 GiB" in tables


def test_options_are_shown_with_their_reasons_and_what_was_left_by_name():
    reasons = ["xla_a=16: more in flight", "left alone: xla_b=True, xla_c=1: it costs HBM", "left alone: xla_b=False: again"]
    text = render_plan(_record() | {"options": {"reasons": reasons}})
    assert _row(text, "compiler option xla_a") == "compiler option xla_a=16: more in flight"
    assert _row(text, "compiler options left").endswith("(options.reasons): xla_b")
    assert "compiler option" not in render_plan(_record() | {"options": {}})
