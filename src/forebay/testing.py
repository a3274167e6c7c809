"""``assert_plan_holds``: the numerics gate as an assertion, for a project's own test suite.

from forebay.testing import assert_plan_holds

def test_the_plan_holds():
    assert_plan_holds(loss_fn, optimizer, params, batch, {"optimizer": "host", "activation": "recompute"})
"""

from collections.abc import Callable, Mapping
from typing import Any

from forebay.plan import Plan
from forebay.trust import Report, check
from forebay.workload import trace


def assert_plan_holds(
    loss_fn: Callable, optimizer: Any, params: Any, batch: Any, plan: Plan | Mapping[str, str], *, extra: Any = None, rng: bool = False,
    **settings: Any,
) -> Report:  # fmt: skip
    """Run ``forebay.check`` and raise where a line failed; the report comes back where none did.

    Args:
        params, batch, extra: arrays, or shapes for which random values are drawn.
        plan: a plan, of these shapes or larger ones, or placement rules such as ``{"optimizer": "host"}``.
        rng: the loss takes a PRNG key as third argument (a plan knows that already).
        settings: ``steps``, ``seed``, ``integers``, ``hardware`` of ``forebay.check``.

    Raises:
        AssertionError: a line failed; the message is the whole report.
    """
    if not isinstance(plan, Plan):
        # In the test every host array streams, however small: that is the code that runs at full size.
        plan = Plan.by_hand(trace(loss_fn, optimizer, params, batch, rng=rng, extra=extra), plan, options={"whole_below_bytes": 0})
    report = check(loss_fn, optimizer, plan, params, batch, extra=extra, **settings)
    if not report.passed:
        raise AssertionError(f"the planned step is not the resident one\n{report}")
    return report
