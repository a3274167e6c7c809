"""A figure: its share, its JSON, and that none is without a source."""

import pytest

from forebay.hardware import Quantity

pytestmark = pytest.mark.oldest


def test_a_share_is_exact_where_it_can_be_and_says_so():
    assert Quantity(10, "a page").per(2) == Quantity(5, "a page, over 2 devices")
    assert Quantity(5, "a page").per(2).value == 2.5
    assert Quantity(5, "a page").per(1) == Quantity(5, "a page")


def test_numbers_and_json():
    figure = Quantity(3.5, "a page", "2026", "publication")
    assert (float(figure), int(figure)) == (3.5, 3)
    assert Quantity.from_json(figure.to_json()) == figure
    assert Quantity.known_or_none(None) is None


@pytest.mark.parametrize(("value", "source", "kind"), [(1, "", "datasheet"), (-1, "a page", "datasheet"), (1, "a page", "rumour")])
def test_a_figure_without_a_source_or_below_zero_is_our_mistake(value, source, kind):
    with pytest.raises(AssertionError):
        Quantity(value, source, kind=kind)
