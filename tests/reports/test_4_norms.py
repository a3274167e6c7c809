"""Reports of theme 4, "clipping, norms or metrics break": with parameters and state on the host, optimizers do what they do resident."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import scanned
from resident import assert_equal, planned, resident

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]
EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}


def decayed(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 2, params)


def groups(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "table" if "embed" in jax.tree_util.keystr(path) else "rest", params)


REPORTS = {
    "jax_35900_clipping_over_mixed_memories": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "torch_148532_a_weight_decay_mask": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=decayed),
    "torchtune_1977_a_schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 4)),
    "an_average_of_the_updates": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "optax_320_multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "groups_with_optimizers_of_their_own": lambda: optax.multi_transform({"table": optax.sgd(0.1), "rest": optax.adam(1e-2)}, groups),
}


@pytest.mark.parametrize("report", REPORTS)
def test_the_step_is_the_resident_one_and_grad_norm_is_there(report):
    program, optimizer = scanned(), REPORTS[report]()
    got, _ = planned(program, optimizer, EVERYTHING, steps=3)
    assert_equal(got, resident(program, optimizer, steps=3), 1e-10)
    assert np.isfinite(got.norms).all() and (got.norms > 0).all()


def test_maxtext_grad_norm_is_reported_under_offload_and_is_the_norm_before_clipping():
    program, optimizer = scanned(), optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    got, _ = planned(program, optimizer, EVERYTHING, steps=2)
    assert (got.norms > 1e-3).all()
    assert jnp.isfinite(got.losses).all()
