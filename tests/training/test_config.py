"""The configuration: the frozen command line, what is saved, what is refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import InputError
from forebay.training import config

pytestmark = pytest.mark.oldest


def test_the_command_line_is_this_one():
    words = "--model llama-3.1-8b --data a.txt folder --steps 7 --batch 4 --seq 32 --place optimizer=host --place activation=recompute"
    got = config.from_command_line([*words.split(), "--out", "runs/x", "--optimizer.learning-rate", "0.01", "--checkpoint.every", "3"])
    assert got == config.TrainConfig(
        model="llama-3.1-8b",
        data=config.DataConfig(paths=("a.txt", "folder"), batch=4, seq=32),
        optimizer=config.OptimizerConfig(learning_rate=0.01),
        checkpoint=config.CheckpointConfig(every=3),
        steps=7,
        place=("optimizer=host", "activation=recompute"),
        out=Path("runs/x"),
    )
    assert got.rules() == {"optimizer": "host", "activation": "recompute"}


def test_the_last_rule_of_a_pattern_wins_and_stands_last():
    rules = config.TrainConfig(place=("optimizer=host", "*/wq=hbm", "optimizer=hbm")).rules()
    assert list(rules.items()) == [("*/wq", "hbm"), ("optimizer", "hbm")]


def test_saved_and_loaded_is_the_same(tmp_path):
    saved = config.TrainConfig(out=tmp_path, place=("optimizer=host",), data=config.DataConfig(paths=("x",)), seed=3)
    config.save(saved)
    assert config.load(tmp_path) == dataclasses.replace(saved, resume=True)


def test_resume_takes_what_is_not_given_from_the_run(tmp_path):
    config.save(config.TrainConfig(out=tmp_path, model="other", place=("optimizer=host",), steps=5))
    got = config.from_command_line(["--resume", "--out", str(tmp_path), "--steps", "9"])
    assert (got.model, got.steps, got.place, got.resume) == ("other", 9, ("optimizer=host",), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch is 0; it must be at least 1 sequence"),
        (["--steps", "0"], "--steps is 0"),
        (["--place", "optimizer"], "'optimizer' is not a rule"),
        (["--place", "optimizer=hots"], "no placement 'hots'; did you mean 'host'"),
        (["--optimizer.clip-norm", "0"], "positive, or None"),
        (["--resume", "--out", "no/such/run"], "no run to resume in no/such/run"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, message):
    with pytest.raises(InputError) as caught:
        config.from_command_line(words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "the value is [1]; it must be an object"),
        ('{"stepz": 1}', "stepz is no field of it; did you mean 'steps'"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json") as caught:
        config.load(tmp_path)
    assert message in str(caught.value)


def test_a_full_disk_leaves_the_settings_that_were_there(tmp_path):
    run = config.TrainConfig(out=tmp_path)
    config.save(run)
    (tmp_path / "config.json.new").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"config\.json cannot be written \(No space left on device\)"):
        config.save(dataclasses.replace(run, steps=7))
    assert config.load(tmp_path).steps == run.steps


def test_configuration_and_data_load_no_jax():
    code = "import sys, forebay.training.config, forebay.training.data, forebay.training; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
