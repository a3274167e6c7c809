"""Ten planned steps equal ten resident ones in single precision, and with bf16 computation over fp32 masters."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import MODELS
from resident import assert_equal, planned, resident, trace

pytestmark = pytest.mark.usefixtures("small")

EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
}
CASES = [
    ("scanned", "adamw", {"optimizer": "host"}),
    ("scanned", "clipped", EVERYTHING),
    ("unrolled", "sgd", EVERYTHING),
    ("unrolled", "lion", {"optimizer": "host"}),
]


@functools.cache
def baseline(model, name, compute):
    program, optimizer = MODELS[model](np.float32, compute=compute), OPTIMIZERS[name]()
    return program, optimizer, trace(program, optimizer), resident(program, optimizer)


@pytest.mark.parametrize(("model", "name", "rules"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_single_precision(model, name, rules):
    program, optimizer, work, wanted = baseline(model, name, None)
    assert_equal(planned(program, optimizer, rules, work=work)[0], wanted, 1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rules", [{"optimizer": "host"}, EVERYTHING], ids=["optimizer", "everything"])
def test_bf16_over_fp32_masters(model, rules):
    """Losses agree to two units in the last place of bf16, and the masters and their state stay fp32."""
    program, optimizer, work, wanted = baseline(model, "adamw", jnp.bfloat16)
    got, plan = planned(program, optimizer, rules, work=work)
    ulp = 2.0 ** (np.floor(np.log2(wanted.losses)) - 7)
    assert (np.abs(got.losses - wanted.losses) <= 2 * ulp).all()
    assert all(e.dtype == "float32" for e in plan.role("parameter"))
    assert wanted.losses[-1] < wanted.losses[0]
