"""Which leaves a loop takes together: the turns add up to less, nothing is lost, and no pack is much larger than the largest leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime import streaming
from forebay.runtime.packs import SLACK, pack, packed, packs
from forebay.runtime.streaming import Job, Port

pytestmark = pytest.mark.oldest
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def turns(weights):
    return sum(max(a, b) for a, b in zip(weights, [*weights[1:], weights[0]], strict=True))


@given(SIZES)
def test_every_leaf_is_in_one_pack_and_packs_stay_small(sizes):
    made = packs(sizes)
    assert sorted(k for one in made for k in one) == list(range(len(sizes)))
    assert max(sum(sizes[k] for k in one) for one in made) <= SLACK * max(sizes)
    assert len(made) >= min(2, len(sizes))


@given(SIZES)
def test_packs_never_take_more_turns_than_one_leaf_a_visit(sizes):
    weights = [sum(sizes[k] for k in one) for one in packs(sizes)]
    assert turns(weights) <= turns(sorted(sizes, reverse=True))


def test_leaves_that_move_nothing_leave_no_empty_pack():
    assert packs([0, 0, 0]) == [[0, 1, 2]]
    assert sorted(k for one in packs([0, 7, 0, 0]) for k in one) == [0, 1, 2, 3]
    assert all(packs([0, 7, 0, 0]))


def test_the_leaves_of_a_llama_fill_the_link():
    sizes = [224, 224, 224, 16, 64, 64, 16]
    weights = [sum(sizes[k] for k in one) for one in packs(sizes)]
    assert turns(sizes) > 1.3 * sum(sizes)
    assert turns(weights) < 1.05 * sum(sizes)


def job(name, width, scale, **more):
    port = Port(slot=name, axis=0, host=True)
    return Job(
        reads=(port,), writes=(port,), compute=lambda start, size, slices: ([slices[0] * scale + start], [slices[0].sum()]),
        sums=(jnp.zeros(()),), combine=(jnp.add,), **more,
    )  # fmt: skip


@pytest.mark.parametrize("names", ["ab", "abcde"])
def test_a_packed_loop_computes_what_its_jobs_compute_alone(names):
    """The loop reads its first slice ahead, so each slice must still be read before it is written, and once."""
    widths = {name: 3 + 5 * k for k, name in enumerate(names)}
    arrays = {name: jnp.arange(4.0 * width).reshape(4, width) for name, width in widths.items()}
    jobs = [job(name, widths[name], 2.0 + k) for k, name in enumerate(names)]
    taken = packed(jobs, arrays)

    @jax.jit
    def loop(arrays):
        into: dict = {}
        sums = streaming.run([pack([jobs[k] for k in one]) for one in taken], jax.device_put(arrays, streaming.HOST), 4, into)
        return sums, jax.device_put(into, streaming.DEVICE)

    sums, into = loop(arrays)
    found = {names[k]: total for one, totals in zip(taken, sums, strict=True) for k, total in zip(one, totals, strict=True)}
    for k, name in enumerate(names):
        np.testing.assert_array_equal(into[name], arrays[name] * (2.0 + k) + jnp.arange(4.0)[:, None])
        assert found[name] == arrays[name].sum()


def test_jobs_of_other_slices_stay_apart():
    arrays = {name: jnp.ones((4, 8)) for name in "abc"}
    jobs = [job("a", 8, 1.0), job("b", 8, 1.0, size=2), job("c", 8, 1.0, rest=1)]
    assert sorted(packed(jobs, arrays)) == [[0], [1], [2]]
