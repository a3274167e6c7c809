"""From an error or a log to an explanation: the memory named, the buffers under the plan's names, plans that fit, and what to do."""

import dataclasses
import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay import cli
from forebay.errors import InputError, OutOfMemoryError
from forebay.training import loop
from forebay.training.config import DataConfig, TrainConfig
from forebay.trust import oom_next
from forebay.trust.oom import explain_file

FIXTURES = Path(__file__).parent / "fixtures"
HBM_ERROR = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
POOL_ERROR = "W bfc_allocator.cc:512] Allocator (gpu_host_bfc) ran out of memory trying to allocate 8.00GiB (rounded to 8589934592)"


@pytest.fixture(scope="module")
def step_hlo():
    return gzip.decompress((FIXTURES / "llama-3.1-8b_h100-sxm-8_host.hlo.gz").read_bytes()).decode()


def deep(machine, hbm=None, rules=None):
    """A plan of a stack of layers on ``machine``, bound to its workload: 32 layers of 16 MiB, and 4 MiB of activations a layer."""

    def loss_fn(params, batch):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)

    params = {"w": jax.ShapeDtypeStruct((32, 2048, 2048), jnp.float32)}
    batch = jax.ShapeDtypeStruct((512, 2048), jnp.float32)
    work = fb.trace(loss_fn, optax.adamw(1e-3), params, batch)
    return fb.Plan.by_hand(work, rules or {}, hardware=fb.Hardware.named(machine, hbm=hbm))


@pytest.mark.oldest
def test_a_dump_alone_is_explained_by_the_users_lines(step_hlo):
    report = fb.explain_oom(step_hlo)
    said = str(report)
    assert "HBM at the peak (compiled)" in said
    assert "models/llama.py:" in said
    assert "do: move more to the host" in said
    assert report.shortage is None


@pytest.mark.oldest
def test_a_full_host_pool_lists_what_stands_on_the_host_and_the_variable(step_hlo):
    report = fb.explain_oom(POOL_ERROR, hlo=step_hlo)
    said = str(report)
    assert "pinned host memory (XLA's host pool), not the device" in said
    assert "limit 64.00 GiB" in said
    assert report.peak.temp_bytes == 2 * 2**30
    assert "do: export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=15, before jax starts" in said


@pytest.mark.oldest
def test_an_error_alone_says_how_to_learn_more():
    said = str(fb.explain_oom(RuntimeError(HBM_ERROR)))
    assert said.startswith("out of memory: HBM, at run\n  asked 16.00 GiB")
    assert "no list of buffers: give the plan, or an HLO dump" in said


@pytest.mark.oldest
def test_a_log_is_read_from_a_file_and_a_text_of_nothing_is_refused(tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(POOL_ERROR)
    assert cli.main(["explain", "--oom", str(log)]) == 0
    assert "pinned host memory" in capsys.readouterr().out
    log.write_text("all is well")
    with pytest.raises(InputError, match="no out-of-memory message"):
        explain_file(log)


@pytest.mark.compiler
def test_a_plan_that_ran_out_is_explained_with_the_cheapest_that_fits():
    plan = deep("h100-sxm:1", hbm="3GiB")
    report = fb.explain_oom(RuntimeError(HBM_ERROR), plan, tries=2)
    entries = {row.entry for row in report.rows}
    assert {"parameter:w", "optimizer:0/mu/w", "optimizer:0/nu/w"} <= entries
    assert report.peak.temp_bytes > 0
    budget = fb.Hardware.from_json(plan.hardware).hbm_budget_bytes
    assert report.nexts
    assert all(found.hbm_bytes <= budget and found.freed_bytes > 0 for found in report.nexts)
    assert [p.added_seconds for p in report.nexts] == sorted(p.added_seconds for p in report.nexts)
    said = str(report)
    assert "plans that fit, cheapest first (memory compiled, time forecast)" in said
    assert f"do: run again with {report.nexts[0].flags}" in said


@pytest.mark.oldest
@pytest.mark.parametrize("rules", [{"optimizer": "host:50%"}, {"optimizer:0/mu/w": "host[4:8]", "activation": "recompute"}])
def test_the_next_plan_keeps_what_the_plan_had_whether_by_rule_or_by_search(rules):
    had = deep("h100-sxm:1", rules=rules)
    searched = dataclasses.replace(had, entries=tuple(dataclasses.replace(e, reason="on the host: ... (forecast)") for e in had.entries))
    machine = fb.Hardware.from_json(had.hardware)
    placed = lambda plan: {e.name: e.placement for e in plan.entries if e.role == "optimizer"}  # noqa: E731
    for plan in (had, searched):
        other = oom_next._changed(plan, {"parameter": "host"}, machine)
        assert other.placement("parameter:w") == "host"
        assert {name.partition("[")[0] for name, place in placed(other).items() if place == "host"} == {
            name.partition("[")[0] for name, place in placed(plan).items() if place == "host"
        }
        assert {e.layers for e in other.entries if e.layers} <= {(0, 16), (16, 32), (0, 4), (4, 8), (8, 32)}


def test_training_that_runs_out_is_an_explanation_and_not_a_traceback(tmp_path, monkeypatch, capsys):
    def born(setup):
        raise jax.errors.JaxRuntimeError(HBM_ERROR)

    monkeypatch.setattr(loop, "_born", born)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 400)
    config = TrainConfig(model="tiny", out=tmp_path / "run", steps=2, data=DataConfig(paths=(str(text),), batch=8, seq=32))
    with pytest.raises(OutOfMemoryError, match="out of memory: host RAM, not an accelerator's memory, at run") as stopped:
        loop.train(config)
    assert isinstance(stopped.value.__cause__, jax.errors.JaxRuntimeError)
    kept = (tmp_path / "run" / loop.OOM_FILE).read_text()
    assert HBM_ERROR in kept
    assert "asked 16.00 GiB" in kept
    assert "preflight on" in capsys.readouterr().out
