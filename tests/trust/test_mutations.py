"""The gate sees planted faults of every kind, and fails no step that has none. 100 draws: benchmarks/planted_faults.py."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planted_faults as benchmark

from forebay.trust import mutations

pytestmark = pytest.mark.usefixtures("quick")

DRAWS = 25


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def test_no_line_fails_on_a_true_step():
    assert not any(benchmark.on_true_steps().values())


def test_every_planted_fault_is_caught(capsys):
    rows = list(benchmark.drawn(DRAWS, seed=7))
    caught = [row for row in rows if row.failed]
    with capsys.disabled():
        print(f"\ncaught {100 * len(caught) / len(rows):.0f} % of {len(rows)} planted faults")
    assert caught == rows
    assert {row.kind for row in rows} == set(mutations.KINDS)


def test_a_fault_that_changes_nothing_is_not_drawn():
    """Residuals to swap are different variables, slices move with an index, and no tensor takes its own buffer."""
    for name in benchmark.PLANS:
        for fault in benchmark.setting(name)[3]:
            assert fault.kind in mutations.KINDS
            assert fault.tensor != fault.other
            assert fault.operands or fault.kind in (mutations.DROPPED, mutations.CAST, mutations.REUSED)
