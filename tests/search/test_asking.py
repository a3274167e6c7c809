"""The buyer's questions over a stand-in for the compiler whose HBM grows with the size: the answer is the largest that fits."""

import math
import types

import pytest

from forebay.errors import InputError
from forebay.search import asking

BUDGET = 1000.0
MACHINE = types.SimpleNamespace(hbm_budget_bytes=BUDGET)


def stand_in(monkeypatch, hbm):
    """``frugal`` answers with ``hbm(size)`` bytes; None: the host cannot hold it."""
    asked = []

    def frugal(size, hardware, deadline):
        asked.append(size)
        need = hbm(size)
        if need is None:
            return None
        memory = types.SimpleNamespace(total_bytes=need)
        verdict = types.SimpleNamespace(hbm=memory, host=types.SimpleNamespace(total_bytes=0), reason="", compiled=True)
        return types.SimpleNamespace(verdict=verdict, fits=need <= BUDGET)

    monkeypatch.setattr(asking, "frugal", frugal)
    return asked


def largest(start, step=8, make=lambda n: n, over=None, deadline=math.inf):
    return asking.largest(make, MACHINE, start, step, over, deadline)


def only(usable):
    """A model that refuses the sizes that are not ``usable``."""

    def make(size):
        if not usable(size):
            raise InputError(f"no {size} for me")
        return size

    return make


CURVES = [lambda n: 100 + 3 * n, lambda n: 50 + n * 1.2 + n * n / 900, lambda n: 900 + n / 10]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("start", [8, 96, 4000])
def test_the_answer_fits_and_its_neighbour_does_not(monkeypatch, curve, start):
    asked = stand_in(monkeypatch, curve)
    found = largest(start)
    step = max(8, found.size // 50)
    assert found.ended
    assert curve(found.size) <= BUDGET < curve(found.size + step + 8)
    assert found.size % 8 == 0
    assert found.proven.verdict.hbm.total_bytes == curve(found.size)
    assert len(asked) == len(set(asked)) == len(found.said) <= asking.MOST_COMPILES


def test_steps_of_the_curve_do_not_hold_the_search_up(monkeypatch):
    stand_in(monkeypatch, lambda n: 500 if n < 70_001 else 100 + n // 1000)
    found = largest(1, 1)
    assert found.ended
    assert found.size <= 900_999 < found.size + found.size // 50 + 1


def test_a_start_that_is_no_whole_step_is_tried_as_it_is(monkeypatch):
    stand_in(monkeypatch, lambda n: 10 * n)
    assert largest(64, 128).size == 64


def test_a_model_that_takes_twelves_is_asked_in_twelves(monkeypatch):
    asked = stand_in(monkeypatch, lambda n: n / 10)
    found = largest(48, make=only(lambda n: n % 12 == 0))
    assert all(n % 12 == 0 for n in asked)
    assert found.ended
    assert found.size <= 10_000 < found.size + found.size // 50 + 24


def test_a_length_that_the_model_does_not_go_beyond_is_the_answer_and_said(monkeypatch):
    stand_in(monkeypatch, lambda n: n / 100)
    found = largest(1024, 128, make=only(lambda n: n <= 2048 and n % 256 == 0))
    assert found.ended
    assert found.size == 2048
    assert any("refused: no " in line for line in found.said)


def test_a_start_that_is_refused_goes_down_to_a_whole_step_or_is_the_error(monkeypatch):
    stand_in(monkeypatch, lambda n: 10 * n)
    assert largest(12, make=only(lambda n: n % 8 == 0)).size == 96
    with pytest.raises(InputError, match="no 12 for me"):
        largest(12, make=only(lambda n: False))


def test_nothing_fits(monkeypatch):
    stand_in(monkeypatch, lambda n: 2 * BUDGET)
    found = largest(64)
    assert found.size is None
    assert found.ended
    assert "does not fit (compiled)" in found.said[0]


def test_a_size_that_is_known_not_to_fit_is_not_passed_or_tried_again(monkeypatch):
    asked = stand_in(monkeypatch, float)
    assert largest(8, over=64).size == 56
    assert max(asked) == 56


def test_a_budget_of_time_is_said(monkeypatch):
    stand_in(monkeypatch, float)
    found = largest(8, deadline=-math.inf)
    assert found.size == 8
    assert not found.ended
    assert "the time budget ended the search here: a size above 8 may fit" in found.said[-1]


def machines(*counts):
    return [types.SimpleNamespace(name=f"m:{n}", devices=n, hbm_budget_bytes=BUDGET) for n in counts]


def on_machines(monkeypatch, hbm, counted=None):
    """``frugal`` and the count answer by the devices of a machine; the machines that were compiled for."""
    asked = stand_in(monkeypatch, lambda n: hbm(n))
    by_size = asking.frugal
    monkeypatch.setattr(asking, "frugal", lambda work, machine, deadline: by_size(machine.devices, machine, deadline))
    monkeypatch.setattr(asking, "least_hbm_bytes", lambda work, machine: (counted or hbm)(machine.devices))
    return asked


def work(rows, mesh=None):
    return types.SimpleNamespace(mesh=mesh, tensors=[types.SimpleNamespace(role="batch", shape=(rows, 7))])


@pytest.mark.parametrize("miss", [0.4, 1.0, 2.5])
def test_the_first_machine_that_fits_is_proved_and_so_is_the_one_below_it(monkeypatch, miss):
    asked = on_machines(monkeypatch, lambda n: 2900 / n, lambda n: miss * 2900 / n)
    found = asking.fewest(work(240), machines(1, 2, 3, 4, 5, 6, 7, 8, 16, 24), math.inf)
    assert found.size.devices == 3
    assert {2, 3} <= set(asked)
    assert 7 not in asked  # seven devices do not divide the batch


def test_no_machine_fits_or_may_be_asked(monkeypatch):
    on_machines(monkeypatch, lambda n: None, lambda n: math.inf)
    found = asking.fewest(work(8), machines(1, 2, 4), math.inf)
    assert found.size is None
    assert found.said[-1] == "m:4: no placement keeps within the memory of the host"
    assert asking.fewest(work(8), machines(3), math.inf).size is None
    assert asking.fewest(work(8), [], math.inf).size is None


def test_a_mesh_of_the_users_own_has_one_size(monkeypatch):
    on_machines(monkeypatch, lambda n: 1.0)
    mesh = types.SimpleNamespace(devices=4)
    assert asking.fewest(work(8, mesh), machines(1, 2, 4, 8), math.inf).size.devices == 4
