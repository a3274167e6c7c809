"""``forebay.testing``: silent where the plan holds, the whole report where it does not."""

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay.testing import assert_plan_holds
from forebay.trust import planned

pytestmark = pytest.mark.oldest

PARAMS = {"w": jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)}
BATCH = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
    return jnp.mean((x - 1) ** 2)


def test_a_plan_that_holds_gives_its_report():
    report = assert_plan_holds(loss, optax.adam(1e-2), PARAMS, BATCH, {"parameter": "host", "optimizer": "host"}, steps=2)
    assert report.passed
    assert report["losses"].outcome == "passed"


def test_a_plan_that_does_not_hold_raises_with_the_whole_report(monkeypatch):
    """A planned step that forgets its update: the runtime's own step, its new parameters exchanged for the old values."""
    true_run = planned.run

    def forgetful(twin, step):
        def wrong(state, batch):
            old = [jnp.copy(leaf) for leaf in state.stored_params]
            new, metrics = step(state, batch)
            return type(new)(**(vars(new) | {"stored_params": tuple(old)})), metrics

        return true_run(twin, wrong)

    monkeypatch.setattr(planned, "run", forgetful)
    plan = fb.Plan.by_hand(fb.trace(loss, optax.sgd(0.1), PARAMS, BATCH), {})
    with pytest.raises(
        AssertionError, match=r"(?s)the planned step is not the resident one.*failed   parameters +parameter:w is"
    ) as caught:
        assert_plan_holds(loss, optax.sgd(0.1), PARAMS, BATCH, plan, steps=2)
    assert "passed   gradients" in str(caught.value)
