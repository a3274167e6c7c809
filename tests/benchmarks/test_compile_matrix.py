"""Some cells of the matrix of forms: what the user's own offload must not bring to the compiler, and what is refused before."""

import importlib

import pytest

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]
MACHINE = "h100-sxm:4"


@pytest.fixture(scope="module")
def matrix():
    return importlib.import_module("compile_matrix")


@pytest.mark.parametrize(
    "program",
    [
        "nested around the users own offload", "nested inside the users own offload", "unroll two with the users own offload",
        "cond around the users own offload", "cond in the layer around the users own offload",
        "cond in the layer inside the users own offload",
    ],
)  # fmt: skip
def test_the_users_own_offload_compiles_wherever_it_stands(matrix, program):
    cell = matrix.cell(program, "parameter", MACHINE)
    assert (cell.outcome, cell.ignored) == (matrix.COMPILES, ()), cell.reason


@pytest.mark.parametrize(
    ("program", "rule", "said"),
    [
        ("length one", "the named activation", "its loop has a single iteration, for which the compiler drops an offload"),
        ("int4 parameters", "all three", "cannot be differentiated; pass it in extra= instead"),
        ("donated device to host", "", "is donated to a result in host memory"),
    ],
)
def test_what_cannot_be_is_refused_before_the_compiler_is_asked(matrix, program, rule, said):
    cell = matrix.cell(program, rule, MACHINE)
    assert cell.outcome == matrix.REFUSED
    assert said in cell.reason


def test_words_of_the_compiler_are_no_good_outcome(matrix, monkeypatch):
    verdict = type("Verdict", (), {"compiled": False, "reason": "INTERNAL: during context"})()
    monkeypatch.setattr(matrix, "_planned", lambda *_: (verdict, []))
    assert matrix.cell("flat", "parameter", MACHINE).outcome == matrix.COMPILER not in matrix.GOOD
