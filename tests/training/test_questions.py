"""The buyer's questions from words to an answer, on a small model of the user's own, by the real compiler."""

import pytest

from forebay import cli

pytestmark = [pytest.mark.compiler, pytest.mark.oldest]

MODULE = """
import jax, jax.numpy as jnp, optax

def make(batch):
    if batch % 96 or batch > 30_000:
        raise ValueError(f"{batch} rows are not for this model")
    def loss(params, x):
        layer = lambda h, w: (h + jnp.sin(jnp.tanh(h @ w["up"])) @ w["down"], None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0] ** 2)
    params = {name: jax.ShapeDtypeStruct((6, *shape), jnp.float32) for name, shape in (("up", (512, 1024)), ("down", (1024, 512)))}
    return loss, optax.adamw(1e-3), params, jax.ShapeDtypeStruct((batch, 512), jnp.float32)

def anything(**sizes):
    return make(**sizes)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "rows_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def plan(capsys, *words, batch="1920", hbm="140MiB", host_ram="1GiB"):
    code = cli.main(
        ["plan", "--model", "rows_model:make", "--hardware", "h100-sxm:1", "--hbm", hbm, "--host-ram", host_ram, "--batch", batch, *words]
    )
    out, err = capsys.readouterr()
    return code, out, err


def test_the_largest_batch_is_a_batch_that_the_model_takes_and_the_plan_of_it_fits(capsys):
    code, out, _ = plan(capsys, "--maximize", "batch", "--budget", "3min")
    assert code == 0
    size = int(out.partition("largest batch that fits: ")[2].split()[0])
    assert size % 96 == 0
    assert f"{size}: fits (compiled)" in out
    assert "fits (compiled)" in out.splitlines()[0]


def test_where_nothing_fits_the_answer_is_a_plan_that_does_not_and_exit_code_1(capsys):
    code, out, _ = plan(capsys, "--maximize", "batch", hbm="24MiB", host_ram="300MiB")
    assert code == 1
    assert "no batch was found that fits" in out
    assert "does not fit" in out.splitlines()[0]


def test_what_would_fit_is_smaller_and_a_machine_that_is_no_larger_is_not_named(capsys):
    code, out, _ = plan(capsys, batch="28800", host_ram="200MiB")
    assert code == 1
    smaller = int(out.partition("would fit: batch ")[2].split()[0])
    assert smaller % 96 == 0
    assert smaller < 28_800
    assert "would fit: h100-sxm:1 (" not in out


def test_the_models_own_error_is_shown_with_its_traceback_and_is_no_verdict(capsys):
    code, _, err = plan(capsys, batch="100")
    assert code == 2
    assert err.splitlines()[-1] == "forebay: rows_model:make with batch 100 raised ValueError: 100 rows are not for this model"
    assert "rows_model.py" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--maximize", "batch", "--minimize", "devices"], "are two questions: ask one of them"),
        (["--place", "optimizer=host", "--budget", "soon"], "soon"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--model", "rows_model:anything", "--batch", "97"], "with batch 97 raised ValueError"),
    ],
)
def test_a_question_that_cannot_be_used_is_exit_code_2(capsys, words, said):
    code, _, err = plan(capsys, *words)
    assert code == 2
    assert said in err
