"""Distances and tolerances: what rounding may do passes, what a fault does fails."""

import jax.numpy as jnp
import numpy as np
import pytest

from forebay.trust import compare
from forebay.trust.report import Check, Report, line, skipped

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize(("dtype", "wanted"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 2**-6), ("float16", 2**-9)])
def test_tolerances(dtype, wanted):
    assert compare.tolerance(jnp.dtype(dtype)) == wanted


def test_a_leaf_may_differ_by_its_tolerance_and_by_the_yardstick():
    base = {"w": np.linspace(1, 2, 100, dtype=np.float32), "n": np.int32(3)}
    off = lambda part: {"w": base["w"] * np.float32(1 + part), "n": base["n"]}  # noqa: E731
    assert all(d.close for d in compare.distances("parameter", off(5e-6), base))
    far = compare.distances("parameter", off(1e-4), base)
    assert [d.name for d in far if not d.close] == ["parameter:w"]
    assert "parameter:w is 0.00015 away on average, 1.5e-05 allowed" in str(far[1])
    assert all(d.close for d in compare.distances("parameter", off(1e-4), base, off(-5e-5)))


def test_integers_must_be_equal_and_nan_is_never_close():
    base = {"w": np.ones(3, np.float32), "n": np.int32(3)}
    assert [d.close for d in compare.distances("optimizer", base | {"n": np.int32(4)}, base)] == [False, True]
    assert [d.close for d in compare.distances("optimizer", base | {"w": np.full(3, np.nan, np.float32)}, base)] == [True, False]


def test_other_trees_shapes_and_dtypes_are_far():
    base = {"w": np.ones(3, np.float32)}
    assert not compare.distances("parameter", {"v": base["w"]}, base)[0].close
    [found] = compare.distances("parameter", {"w": np.ones(3, np.float64)}, base)
    assert not found.close
    assert "float64[3], resident float32[3]" in found.name


def test_a_leaf_that_hardly_moves_is_named_unless_it_is_frozen():
    start = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    end = {"a": start["a"] + np.float32(1e-3), "b": start["b"] + np.float32(1e-6)}
    found = compare.distances("parameter", end, end)
    assert compare.unmoved(start, end, found, (False, False)) == ["parameter:b"]
    assert compare.unmoved(start, end, found, (False, True)) == []


def test_a_report_says_every_line_and_counts_them():
    checks = line("losses", [], "4 steps"), line("parameters", ["a", "b", "c", "d"], ""), skipped("overlap", "one memory")
    report = Report(title="a step", checks=checks)
    assert not report.passed
    assert report["parameters"] == Check(name="parameters", outcome="failed", detail="a; b; c; and 1 more")
    text = str(report).splitlines()
    assert text[0] == "a step"
    assert text[2] == "failed   parameters  a; b; c; and 1 more"
    assert text[-1] == "1 passed, 1 failed, 1 skipped"
    assert Report(title="", checks=(checks[0], checks[2])).passed
