import pytest

from forebay.timeline.picture import columns
from forebay.timeline.replay import Event

pytestmark = pytest.mark.oldest


def bar(lane, begin, end, share=1.0):
    return Event(lane=lane, name="n", kind="memory", begin_seconds=begin, end_seconds=end, share=share)


def test_columns_are_filled_by_time_and_by_the_share_of_a_bar():
    found = columns([bar("compute", 0, 1), bar("to_device", 1.1, 1.5), bar("to_host", 0, 2, share=0.5)], 2.0, count=4)
    assert found == {"compute": (1, 1, 0, 0), "to_device": (0, 0, 0.8, 0), "to_host": (0.5, 0.5, 0.5, 0.5)}


def test_a_bar_that_ends_with_the_step_stays_inside():
    assert columns([bar("compute", 1.9, 2.0)], 2.0, count=2) == {"compute": (0, 0.1)}


def test_a_column_is_never_fuller_than_full():
    assert columns([bar("side", 0, 1), bar("side", 0, 1)], 1.0, count=1) == {"side": (1.0,)}
