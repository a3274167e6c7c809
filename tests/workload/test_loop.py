"""How arguments are stored, and when a loop can stand in a program at all."""

import numpy as np
import pytest

from forebay.errors import InputError
from forebay.workload.loop import Repeat, Storage, storage_of

pytestmark = pytest.mark.oldest


def repeat(*groups):
    return Repeat(blocks=((0,), (1,)), carry=(), invariants=(), stacked=(), collected=(), last=(), groups=groups)


def test_a_group_stands_where_its_first_leaf_stood():
    storage = storage_of(6, [repeat((3, 1)), repeat((3, 1), (4, 5))])
    assert storage.slots == ((0,), (2,), (3, 1), (4, 5))
    assert storage.groups == ((3, 1), (4, 5))


def test_storage_goes_both_ways():
    storage = Storage(slots=((0, 2), (1,)), inputs=3)
    stored = storage.stack([np.ones(2), 5.0, np.zeros(2)])
    assert [np.shape(value) for value in stored] == [(2, 2), ()]
    assert [np.asarray(value).tolist() for value in storage.unstack(stored)] == [[1, 1], 5.0, [0, 0]]


def test_wrong_number_of_arguments_is_an_error():
    storage = Storage(slots=((0, 2), (1,)), inputs=3)
    with pytest.raises(InputError, match="takes 2 stored arguments, 3 were given"):
        storage.unstack([1, 2, 3])
    with pytest.raises(InputError, match="takes 3 arguments, 1 were given"):
        storage.stack([1])
