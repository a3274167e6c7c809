"""The pool of pinned host memory: its growth in doubled regions, replayed."""

import pytest

from forebay.hardware.pool import needed_gib, preallocated_gib
from forebay.units import GIB

pytestmark = pytest.mark.oldest


def test_small_arrays_fill_every_tail_so_the_sum_and_the_margin_are_enough():
    assert needed_gib([GIB // 8] * 800) == preallocated_gib([GIB // 8] * 800) == 110


def test_arrays_a_little_over_half_a_region_waste_the_rest_of_it():
    # 128 and 128 hold one array of 70 each, 256 three, and the last is cut to two: 652 GiB for 490, and a tenth for the margin
    assert preallocated_gib([70 * GIB] * 7) == 539
    assert 652 * 1.1 <= needed_gib([70 * GIB] * 7) <= 652 * 1.1 * 1.05


def test_a_larger_limit_is_never_too_small_for_fewer_arrays():
    assert needed_gib([5 * GIB] * 11) >= needed_gib([5 * GIB] * 10)


def test_one_array_takes_itself_and_the_margin():
    assert needed_gib([100 * GIB]) == 110
    assert needed_gib([1]) == 1
