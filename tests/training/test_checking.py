"""`forebay check` from words to a report and an exit code."""

import json

import pytest

from forebay import cli
from forebay.training import checking
from forebay.training.models import presets

WORDS = ["check", "--model", "tiny", "--seq", "64", "--batch", "8", "--hardware", "h100-sxm:1", "--steps", "2"]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
MODULE = """
import jax, jax.numpy as jnp, optax

def make(layers=64):
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
        return jnp.mean(x ** 2)
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return loss, optax.adamw(1e-2), like(layers, 16, 16), like(8, 16)
"""


def test_a_true_plan_passes_line_by_line_and_a_cpu_skips_what_it_cannot_show(capsys):
    assert cli.main([*WORDS, "--place", "optimizer=host"]) == 0
    text = capsys.readouterr().out
    assert "passed   optimizer state" in text
    assert "skipped  overlap" in text
    assert "0 failed" in text


def test_a_module_of_the_user_is_made_small_by_its_own_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_check.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    words = ["check", "--model", "my_check:make", "--hardware", "h100-sxm:1", "--place", "parameter=host", "--small", "layers=3"]
    assert cli.main(words) == 0
    assert "768 parameters" in capsys.readouterr().out
    assert cli.main([*words, "--small", "layers"]) == 2
    assert "--small 'layers' is not NAME=NUMBER" in capsys.readouterr().err


def test_the_plan_of_a_training_run_is_checked_with_the_runs_own_optimizer(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text.txt").write_text("a forebay feeds a turbine. " * 200)
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", "model.json", "--data", "text.txt", "--steps", "2", "--seq", "32", "--batch", "8", "--out", "run"]
    assert cli.main([*words, "--place", "optimizer=host"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["check", "../run/plan.json", "--steps", "2"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_a_module_is_given_the_sizes_of_its_plan_and_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "sized.py").write_text(MODULE.replace("layers=64", "batch, layers=64").replace("like(8, 16)", "like(batch, 16)"))
    monkeypatch.chdir(tmp_path)
    words = ["--model", "sized:make", "--hardware", "h100-sxm:1", "--place", "parameter=host"]
    assert cli.main(["plan", *words, "--batch", "16", "--out", "plan.json"]) == 0
    assert cli.main(["check", "plan.json", "--small", "layers=2"]) == 0
    assert "0 failed" in capsys.readouterr().out
    assert cli.main(["check", *words]) == 2
    assert "sized:make needs batch: give --batch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen-3-8b", "mistral-7b"])
def test_the_twin_keeps_the_structure(name):
    config = presets.preset(name)
    twin = checking.scaled_down(config, 8)
    assert twin.heads // twin.kv_heads == config.heads // config.kv_heads
    assert (twin.qk_norm, twin.tied, twin.dtype) == (config.qk_norm, config.tied, config.dtype)
    assert 1 < twin.layers <= 4


def test_no_model_is_one_sentence(capsys):
    assert cli.main(["check"]) == 2
    assert "there is no model: name a plan.json" in capsys.readouterr().err
