"""The loop, through the public verbs: what is stopped goes on exactly, under the same plan or another, and compiles once."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import forebay as fb
from forebay import runtime
from forebay.errors import CheckpointError, ForebayError, InputError, PlanError
from forebay.training import config, data, loop, metrics

pytestmark = pytest.mark.oldest
STEPS, STOPPED_AT = 6, 3


def settings(folder, **changes):
    """A run of a few seconds, its optimizer on the host."""
    plain = config.TrainConfig(
        out=folder,
        steps=STEPS,
        data=config.DataConfig(batch=8, seq=32),
        optimizer=config.OptimizerConfig(learning_rate=3e-3, decay_steps=STEPS),
        place=("optimizer=host", "activation=host"),
    )
    return dataclasses.replace(plain, **changes)


CACHED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(tmp_path_factory):
    """The same few programs again and again: XLA compiles each once for this file, in whichever process."""
    folder = str(tmp_path_factory.mktemp("programs"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CACHED, "JAX_COMPILATION_CACHE_DIR": folder}.items():
            patch.setenv(name, value)
        before = {name.lower(): getattr(jax.config, name.lower()) for name in (*CACHED, "JAX_COMPILATION_CACHE_DIR")}
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def keep_steps(patch):
    """A list of the train steps that are made from now on."""
    made = []

    def train_step(*args, **more):
        made.append(runtime.train_step(*args, **more))
        return made[-1]

    patch.setattr(fb, "train_step", train_step, raising=False)
    return made


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """All steps in one go on the eight devices; with the train step that it made."""
    with pytest.MonkeyPatch.context() as patch:
        made = keep_steps(patch)
        run = loop.train(settings(tmp_path_factory.mktemp("straight")))
    return run, made[0]


def test_a_run_leaves_its_folder(straight):
    run, _ = straight
    assert (run.first_step, run.final_step, run.exit_code, len(run.losses)) == (0, STEPS, 0, STEPS)
    assert {path.name for path in run.folder.iterdir()} >= {"config.json", "plan.json", "metrics.jsonl", "checkpoints"}
    assert json.loads((run.folder / "config.json").read_text())["place"] == ["optimizer=host", "activation=host"]
    assert json.loads((run.folder / "plan.json").read_text())["schema"] == 1
    rows = metrics.read(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == list(run.losses)
    assert rows[0]["includes_compile"]
    assert run.losses[-1] < run.losses[0]
    assert 3 < run.unigram_entropy_nats < 4


def test_all_steps_are_one_compile(straight):
    assert straight[1].compiles() == 1


def test_stopped_and_resumed_is_the_same_run(straight, tmp_path, monkeypatch):
    written = metrics.MetricsLog.write

    def stop_here(log, row):
        written(log, row)
        if row.step == STOPPED_AT and not stopped:
            stopped.append(row)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    stopped, made = [], keep_steps(monkeypatch)
    monkeypatch.setattr(metrics.MetricsLog, "write", stop_here)
    first = loop.train(settings(tmp_path))
    assert (first.final_step, first.exit_code) == (STOPPED_AT, 130)
    second = loop.train(settings(tmp_path, resume=True))
    assert (second.first_step, second.final_step, second.exit_code) == (STOPPED_AT, STEPS, 0)
    assert [step.compiles() for step in made] == [1, 1]
    assert first.losses + second.losses == straight[0].losses
    assert [row["loss"] for row in metrics.read(second.metrics)] == list(straight[0].losses)


ONE_DEVICE = """
import sys
from pathlib import Path
from forebay.training import config, loop
sys.exit(loop.train(config.from_json(__import__("json").loads(sys.argv[1]), "the test")).exit_code)
"""


def on_one_device(folder, **changes):
    """A run's words for a process that has one device and keeps nothing on the host."""
    changed = settings(folder, place=(), **changes)
    return [sys.executable, "-c", ONE_DEVICE, json.dumps(config.to_json(changed))], os.environ | {"JAX_NUM_CPU_DEVICES": "1"}


def test_a_run_goes_on_in_another_process_under_another_plan_and_mesh(straight, tmp_path, capsys):
    words, env = on_one_device(tmp_path, steps=STOPPED_AT)
    subprocess.run(words, env=env, timeout=300, check=True, capture_output=True)
    run = loop.train(settings(tmp_path, resume=True))
    losses = [row["loss"] for row in metrics.read(run.metrics)]
    np.testing.assert_allclose(losses, straight[0].losses, rtol=2e-5)
    said = capsys.readouterr().out
    assert f"after step {STOPPED_AT}" in said
    assert f"changed since: steps was {STOPPED_AT}, now {STEPS}" in said
    assert "placed anew: optimizer:" in said


def test_sigterm_saves_and_ends_with_its_code(tmp_path):
    words, env = on_one_device(tmp_path, steps=100_000)
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 240
        log = tmp_path / "metrics.jsonl"
        while not (log.exists() and log.read_text().count("\n") >= 2) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "SIGTERM: stopping after this step" in said
    done = len(metrics.read(log))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [str(done)]


def test_a_folder_that_holds_a_run_is_not_overwritten(straight):
    with pytest.raises(InputError, match=f"already holds a run at step {STEPS}; go on with --resume, or choose another --out"):
        loop.train(settings(straight[0].folder))


def test_another_model_cannot_resume(straight):
    with pytest.raises(PlanError, match=r"is of another model: kv_heads was 4, now 2;.* start another run with another --out"):
        loop.train(settings(straight[0].folder, model="tiny-gqa", resume=True))


def test_a_resume_that_fails_leaves_the_settings_as_they_were(straight):
    before = (straight[0].folder / "config.json").read_text()
    unclipped = config.OptimizerConfig(learning_rate=3e-3, decay_steps=STEPS, clip_norm=None)
    with pytest.raises(CheckpointError, match=r"has no opt_state\.\S+, which this model and optimizer need"):
        loop.train(settings(straight[0].folder, optimizer=unclipped, resume=True))
    assert (straight[0].folder / "config.json").read_text() == before


def test_a_run_that_is_complete_says_so(straight, capsys):
    run = loop.train(settings(straight[0].folder, resume=True))
    assert (run.first_step, run.final_step, run.losses) == (STEPS, STEPS, ())
    assert f"nothing to do: step {STEPS} of {STEPS} is done" in capsys.readouterr().out
    assert len(metrics.read(run.metrics)) == STEPS


def test_text_that_changed_cannot_resume(straight, tmp_path, monkeypatch):
    other = data.open_corpus([str(Path(__file__).parent)])
    monkeypatch.setattr(data, "open_corpus", lambda paths: other)
    with pytest.raises(InputError, match="the text is not what this run was trained on until step 6"):
        loop.train(settings(straight[0].folder, resume=True))


def test_a_batch_that_the_devices_do_not_divide_is_refused_with_numbers(tmp_path):
    with pytest.raises(InputError, match="6 rows, which 8 devices do not divide"):
        loop.train(settings(tmp_path, data=config.DataConfig(batch=6, seq=32)))


def test_a_loss_that_is_not_a_number_is_not_saved(tmp_path, monkeypatch):
    def train_step(*args, **more):
        step = runtime.train_step(*args, **more)

        def broken(state, batch):
            state, measured = step(state, batch)
            return state, {**measured, "loss": measured["loss"] / (3 - state.step)}

        return broken

    monkeypatch.setattr(fb, "train_step", train_step, raising=False)
    with pytest.raises(ForebayError, match=r"the loss is inf at step 3 .* this state is not saved"):
        loop.train(settings(tmp_path, checkpoint=config.CheckpointConfig(every=1)))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
