"""The buyer's questions over a stand-in for the compiler whose HBM grows with the size: the answer is the largest that fits."""

import math
import types

import pytest

from forebay.search import asking

BUDGET = 1000.0


def stand_in(monkeypatch, hbm):
    """``frugal`` answers with ``hbm(size)`` bytes; None: the host cannot hold it."""
    asked = []

    def frugal(size, hardware):
        asked.append(size)
        need = hbm(size)
        if need is None:
            return None
        memory = types.SimpleNamespace(total_bytes=need)
        verdict = types.SimpleNamespace(hbm=memory, host=types.SimpleNamespace(total_bytes=0), reason="", compiled=True)
        return types.SimpleNamespace(verdict=verdict, fits=need <= BUDGET)

    monkeypatch.setattr(asking, "frugal", frugal)
    return asked


MACHINE = types.SimpleNamespace(hbm_budget_bytes=BUDGET)


@pytest.mark.parametrize("curve", [lambda n: 100 + 3 * n, lambda n: 50 + n * 1.2 + n * n / 900, lambda n: 900 + n / 10])
@pytest.mark.parametrize("start", [8, 96, 4000])
def test_the_answer_fits_and_its_neighbour_does_not(monkeypatch, curve, start):
    asked = stand_in(monkeypatch, curve)
    found = asking.largest(lambda n: n, MACHINE, start, 8, None, math.inf)
    step = max(8, found.size // 50)
    assert curve(found.size) <= BUDGET < curve(found.size + step + 8)
    assert found.size % 8 == 0
    assert len(asked) == len(set(asked)) == len(found.said) <= asking.MOST_COMPILES


def test_nothing_fits(monkeypatch):
    stand_in(monkeypatch, lambda n: 2 * BUDGET)
    found = asking.largest(lambda n: n, MACHINE, 64, 8, None, math.inf)
    assert found.size is None
    assert "does not fit (compiled)" in found.said[0]


def test_the_most_that_was_asked_for_is_not_passed(monkeypatch):
    asked = stand_in(monkeypatch, lambda n: float(n))
    assert asking.largest(lambda n: n, MACHINE, 8, 8, 64, math.inf).size == 64
    assert max(asked) == 64


def test_a_budget_of_time_is_said(monkeypatch):
    stand_in(monkeypatch, lambda n: float(n))
    found = asking.largest(lambda n: n, MACHINE, 8, 8, None, -math.inf)
    assert found.size == 8
    assert "the budget of time ended the search here" in found.said[-1]


def test_the_first_machine_that_fits_and_one_whose_host_is_too_small(monkeypatch):
    stand_in(monkeypatch, lambda n: None)
    machines = [types.SimpleNamespace(name=f"m:{n}") for n in (1, 2, 4)]
    found = asking.fewest(lambda: 1, machines, math.inf)
    assert found.size is None
    assert found.said[0] == "m:1: no placement keeps within the memory of the host"
    stand_in(monkeypatch, lambda n: 1.0)
    assert asking.fewest(lambda: 1, machines, math.inf).size is machines[0]
