import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.timeline.groups import parse_groups, parse_pairs
from forebay.timeline.shapes import HloSyntaxError

pytestmark = pytest.mark.oldest


def members(text, devices=8):
    return parse_groups(text, devices).members


def test_explicit_and_all():
    assert members("{{0,1},{2,3}}", 4) == ((0, 1), (2, 3))
    assert members("{}", 3) == ((0, 1, 2),)


def test_iota():
    assert members("[2,4]<=[8]") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert members("[4,2]<=[2,4]T(1,0)") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_mesh_axes_sub_axes_and_device_ids():
    assert members("mesh['data'=2,'fsdp'=4] {'fsdp'}") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert members("mesh['data'=2,'fsdp'=4] {'data'}") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert members("mesh['x'=8] {'x':(2)2}") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert members("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", 4) == ((0, 2), (1, 3))
    assert members("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert members("mesh['a'=2,'b'=2,'c'=2] {'a','c'}") == ((0, 1, 4, 5), (2, 3, 6, 7))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_iota_is_numpy(sizes, data):
    order = data.draw(st.permutations(range(len(sizes))))
    total = int(np.prod(sizes))
    text = f"[1,{total}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    assert list(members(text, total)[0]) == np.arange(total).reshape(sizes).transpose(order).ravel().tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_mesh_groups_partition_the_devices(sizes, data):
    axes = [f"a{i}" for i in range(len(sizes))]
    chosen = data.draw(st.lists(st.sampled_from(axes), unique=True, min_size=1))
    mesh = ",".join(f"'{a}'={s}" for a, s in zip(axes, sizes, strict=True))
    listed = ",".join(f"'{a}'" for a in chosen)
    groups = members(f"mesh[{mesh}] {{{listed}}}", int(np.prod(sizes)))
    assert sorted(itertools.chain(*groups)) == list(range(int(np.prod(sizes))))


def test_span_counts_hosts_and_devices_per_host():
    assert parse_groups("[1,16]<=[16]", 16).span(8) == (2, 8)
    assert parse_groups("[8,2]<=[2,8]T(1,0)", 16).span(8) == (2, 1)
    assert parse_groups("[2,8]<=[16]", 16).span(8) == (1, 8)


@pytest.mark.parametrize(
    "text",
    [
        "replicas(3)",
        "{{0,1},{2}}",
        "mesh['x'=8] {'z'}",
        "mesh['x'=8] {'x':(3)2}",
        "[3,4]<=[8]",
        "mesh['x'=4], device_ids=(0,1) {'x'}",
        "{{}}",
    ],
)
def test_what_is_not_known_is_refused(text):
    with pytest.raises(HloSyntaxError):
        parse_groups(text, 8)


def test_pairs():
    assert parse_pairs("{{0,1},{1,2}}") == ((0, 1), (1, 2))
    with pytest.raises(HloSyntaxError):
        parse_pairs("ring")
