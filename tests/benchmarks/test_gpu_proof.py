"""The proof for a GPU machine, at a toy size on the CPU: the sizes it would choose, its jobs, and what it says of jobs left out."""

import importlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

GIB = 2**30


@pytest.fixture(scope="module")
def proof():
    return importlib.import_module("gpu_proof")


@pytest.mark.parametrize(("hbm_gib", "host_gib"), [(80, 2048), (141, 128), (24, 64), (192, 1024)])
def test_sizes_overflow_the_pool_and_fit_the_host(proof, hbm_gib, host_gib):
    sizes = proof.choose_sizes(hbm_gib * GIB, host_gib * GIB)
    pool = sizes.fraction * hbm_gib * GIB
    assert sizes.overflow.parameters * proof.STATE_BYTES > 1.15 * pool
    assert sizes.overflow.parameters * proof.HOST_STATE_BYTES < 0.65 * host_gib * GIB
    assert sizes.pair.parameters * proof.STATE_BYTES < 0.5 * proof.FRACTION * hbm_gib * GIB
    assert sizes.fraction <= proof.FRACTION


def test_a_form_of_the_twin_equals_the_resident_one(proof, monkeypatch):
    monkeypatch.setattr(proof, "FORMS", {name: proof.FORMS[name] for name in ("resident", "everything")})
    monkeypatch.setattr(proof, "TWIN_STEPS", 3)
    record = proof.job_numerics(proof.toy_sizes())
    assert record["passed"], record
    assert record["forms"]["everything"]["loss_error"] < 1e-5


def test_a_lost_update_and_a_wrong_loss_fail_the_gate(proof, monkeypatch):
    def ran(program, first, size, name):
        lost = name == "optimizer"
        losses = np.asarray([2.0, 1.0]) * (1.001 if name == "activations" else 1.0)
        return losses, jax.tree.map(lambda leaf: leaf if lost else leaf + 1, first)

    monkeypatch.setattr(proof, "_twin_run", ran)
    record = proof.job_numerics(proof.toy_sizes())
    assert not record["passed"]
    assert {name for name, form in record["forms"].items() if not form["passed"]} == {"optimizer", "activations"}


def test_one_command_runs_jobs_apart_with_no_package_that_only_draws_or_parses(proof, tmp_path):
    """A GPU machine may have jax, optax, orbax, scipy and numpy and nothing else."""
    for name in ("rich", "tyro", "flax"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')")
    words = [sys.executable, proof.__file__, "--toy", "--only", "overflow:everything", "--results", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(tmp_path.glob("gpu_proof_cpu_*.json")).read_text())
    row = record["jobs"]["overflow:everything"]
    assert row["status"] == "ran", row
    assert row["compiled_hbm_bytes"] > 0
    assert row["step_seconds"] > 0
    assert row["last_loss"] < row["first_loss"]
    assert "overflow:everything" in done.stdout
    assert "step s measured" in done.stdout


def test_jobs_without_time_are_named(proof, monkeypatch):
    said = []
    device = {"status": "ran", "platform": "cpu", "kind": "cpu", "hbm_bytes": None, "versions": {"jax": "0"}}
    monkeypatch.setattr(proof, "run_job", lambda job, *rest: device)
    record = proof.prove(1.0, "", toy=True, say=said.append)
    assert set(record["jobs"]) == set(proof.jobs())
    assert all(job["status"] == "left out" for job in record["jobs"].values())
    assert "left out" in proof.table(record | {"seconds": 1.0})
    assert len(said) == len(proof.jobs())


def test_a_job_that_ends_without_a_word_is_told(proof, monkeypatch):
    monkeypatch.setattr(proof.sys, "executable", "/bin/false")
    record = proof.run_job("links", proof.toy_sizes(), 0.5, 30.0, toy=True)
    assert record["status"] == "failed"
    assert "exit code 1" in record["said"]
