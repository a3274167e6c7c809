"""`forebay plan` from words to plan.json: what the compiler says of a small model, and answers that are kept on disk."""

import json
import subprocess
import sys

import pytest

from forebay import cli
from forebay.training import answers, planning

pytestmark = pytest.mark.oldest

TINY = ["plan", "--model", "tiny", "--hardware", "h100-sxm:8", "--seq", "64", "--batch", "8"]
# 66 million parameters in the embedding and the head: 0.76 GiB of parameters and moments.
WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128000, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip

MODULE = """
import jax, jax.numpy as jnp, optax

def make(batch):
    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)
    return loss, optax.sgd(0.1), jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def wrong():
    return None
"""


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))


def test_rules_keep_their_order_and_the_last_of_a_kind():
    rules = planning.placement_rules(("optimizer=host", "activation:attn_*=recompute", "optimizer=hbm"))
    assert list(rules.items()) == [("activation:attn_*", "recompute"), ("optimizer", "hbm")]


def test_a_damaged_answer_is_no_answer(fresh_cache, tmp_path):
    key = answers.key_of({"model": "tiny"})
    assert answers.read(key) is None
    answers.write(key, "the plan\nof lines")
    assert answers.read(key) == "the plan\nof lines"
    file = next((tmp_path / "cache").rglob("*.json"))
    file.write_text(file.read_text().replace("plan", "plum"))
    assert answers.read(key) is None


def test_an_answer_depends_on_the_question_and_on_the_settings_of_jax(monkeypatch):
    key = answers.key_of({"model": "tiny"})
    assert key == answers.key_of({"model": "tiny"}) != answers.key_of({"model": "tiny-gqa"})
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert key != answers.key_of({"model": "tiny"})


def test_only_the_newest_answers_are_kept(fresh_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "KEPT", 2)
    for name in "abc":
        answers.write(name, name)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_answer(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file"))
    answers.write("key", "text")
    assert answers.read("key") is None


@pytest.mark.compiler
def test_an_answer_is_plan_json_and_the_second_asking_loads_no_jax(fresh_cache, tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = [*TINY, "--place", "optimizer=host", "--json", "--out", str(out)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    record = json.loads(text)
    assert out.read_text() == text
    assert record["workload"]["model"] == "tiny"
    assert (record["workload"]["global_batch"], record["workload"]["sequence_length"]) == (8, 64)
    assert record["hardware"]["name"] == "h100-sxm:8"
    verdict = record["verdict"]
    assert verdict["fits"] is True
    assert verdict["by_role"]["optimizer"]["host"] > 0
    assert verdict["host"]["argument_bytes"] == verdict["by_role"]["optimizer"]["host"]

    program = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); from forebay.cli import main; sys.exit(main())"
    )
    again = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout) == (0, text)
    assert not set(again.stderr.split()) & {"jax", "jaxlib", "numpy", "optax", "scipy"}


@pytest.mark.compiler
def test_a_model_that_does_not_fit_is_exit_code_1_with_the_numbers(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WIDE))
    words = ["plan", "--model", str(config), "--hardware", "h100-sxm:1", "--seq", "64", "--batch", "1", "--hbm", "768MiB"]
    assert cli.main(words) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "is over the budget of" in text


@pytest.mark.compiler
def test_a_module_of_the_user_is_planned_and_never_kept(fresh_cache, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["plan", "--model", "my_training:make", "--hardware", "h100-sxm:8", "--batch", "16"]
    assert cli.main(words) == 0
    assert "my_training:make on h100-sxm:8 (8 devices): fits (compiled)" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert cli.main([*words, "--seq", "5"]) == 2
    assert "my_training:make takes no seq; leave --seq out" in capsys.readouterr().err
    assert cli.main(["plan", "--model", "my_training:wrong", "--hardware", "h100-sxm:8"]) == 2
    assert "must return a tuple (loss_fn, optimizer, params, batch)" in capsys.readouterr().err


@pytest.mark.compiler
def test_the_step_can_be_written_as_a_trace_from_plan_and_from_explain(fresh_cache, tmp_path, capsys):
    plan, first, second = tmp_path / "plan.json", tmp_path / "first.json", tmp_path / "second.json"
    assert cli.main([*TINY, "--out", str(plan), "--trace", str(first)]) == 0
    said = capsys.readouterr().out
    assert "compute |" in said
    assert "(forecast)" in said
    assert cli.main(["explain", str(plan), "--trace", str(second)]) == 0
    assert "compute |" in capsys.readouterr().out
    assert json.loads(first.read_text()) == json.loads(second.read_text())
    assert cli.main([*TINY, "--trace", str(tmp_path / "missing" / "t.json")]) == 2
    assert "--trace" in capsys.readouterr().err
