"""The optimizer recipe: its schedule, what decays, and that it is one Optax transformation."""

import jax.numpy as jnp
import numpy as np
import pytest

from forebay.training import recipe
from forebay.training.config import OptimizerConfig

pytestmark = pytest.mark.oldest


def test_the_schedule_rises_peaks_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.2)
    rate = np.array([float(recipe.schedule(config, 100)(step)) for step in range(100)])
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert rate.argmax() == 9
    assert (np.diff(rate[9:]) <= 0).all()
    assert rate[-1] == pytest.approx(0.2, abs=0.01)


def test_a_run_of_one_step_has_the_peak():
    assert float(recipe.schedule(OptimizerConfig(learning_rate=0.5), 1)(0)) == 0.5


def test_norms_and_biases_do_not_decay():
    params = {"embed": 0, "layers": {"attn_norm": 0, "wq": 0, "bq": 0, "q_norm": 0}, "final_norm": 0, "head_bias": 0}
    assert recipe.decayed(params) == {
        "embed": True,
        "layers": {"attn_norm": False, "wq": True, "bq": False, "q_norm": False},
        "final_norm": False,
        "head_bias": False,
    }


def test_with_no_gradient_only_decaying_leaves_move():
    transform = recipe.optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip_norm=1.0), 10)
    params = {"w": jnp.ones(3), "norm": jnp.ones(3)}
    zeros = {"w": jnp.zeros(3), "norm": jnp.zeros(3)}
    updates, _ = transform.update(zeros, transform.init(params), params)
    assert float(updates["norm"].max()) == 0
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
