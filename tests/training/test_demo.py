"""The demonstration: it really stops and resumes, and it fails where the model has not learnt."""

import json

import pytest

from forebay.training import demo, metrics


def rows(folder, losses):
    lines = [
        metrics.StepMetrics(step=step, loss=loss, grad_norm=1, learning_rate=1e-3, step_seconds=1, tokens_per_second=1).to_json()
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("final", "learnt", "words"), [(2.0, True, "66.7 %, at most 70 %"), (2.2, False, "73.3 %, NOT at most 70 %")])
def test_the_loss_is_held_against_the_unigram_entropy(tmp_path, capsys, final, learnt, words):
    rows(tmp_path, [4.0] * 30 + [final] * 20)
    assert demo._report_loss(tmp_path, 3.0, 25) is learnt
    said = capsys.readouterr().out
    assert f"unigram entropy 3.0000 nats, final loss {final:.4f} nats (mean of the last 20 steps): {words}" in said
    assert "% of the unigram entropy  resumed" in said


def test_a_run_that_exists_is_left_alone(tmp_path):
    assert demo._free(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo._free(tmp_path / "demo") == tmp_path / "demo-3"


def test_too_few_steps_stop_resume_sample_and_fail(tmp_path, monkeypatch, capfd):
    run = demo._run
    monkeypatch.setattr(demo, "_run", lambda words: 0 if words[0] == "plan" else run(words))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    assert demo.main(["--out", str(tmp_path / "demo"), "--steps", "40"]) == 1
    said = capfd.readouterr().out
    assert "resuming" in said
    assert "NOT at most 70 %" in said
    assert "validation loss" in said
    done = metrics.read(tmp_path / "demo" / "metrics.jsonl")
    assert [row["step"] for row in done] == list(range(1, 41))
    assert sum(row["includes_compile"] for row in done) == 2  # two processes
    assert json.loads((tmp_path / "demo" / "plan.json").read_text())["workload"]["parameters"] > 500_000
    assert (tmp_path / "demo" / "sample.txt").read_text().startswith("def ")
