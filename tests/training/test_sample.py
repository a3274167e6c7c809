"""Sampling: what a model that was made to know one answer says."""

import math

import jax
import jax.numpy as jnp
import pytest

from forebay.errors import InputError
from forebay.training import data
from forebay.training.evaluate import validation_loss
from forebay.training.models import llama, presets
from forebay.training.sample import Sampling, generate

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def successor():
    """A model whose most likely next byte is the byte after the last one: a tied identity shifted by one."""
    model = presets.preset("tiny")
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), llama.param_shapes(model))
    wave = jax.random.normal(jax.random.key(0), params["embed"].shape)
    wave /= jnp.sqrt((wave**2).mean(axis=1, keepdims=True))
    params |= {"embed": wave, "head": 4 * jnp.roll(wave, 1, axis=0).T, "final_norm": jnp.ones_like(params["final_norm"])}
    return model, params


def test_the_most_likely_byte_is_taken(successor):
    assert generate(*successor, "ab", Sampling(count=5, temperature=0, window=8)) == "cdefg"


def test_the_window_slides(successor):
    assert generate(*successor, "abcdefghij", Sampling(count=6, temperature=0, window=4)) == "klmnop"


def test_a_temperature_draws_and_a_seed_repeats(successor):
    model, params = successor
    flat = params | {"head": jnp.zeros_like(params["head"])}
    one, same, other = (generate(model, flat, "a", Sampling(count=20, temperature=1.0, window=8, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_validation_loss_of_a_model_that_knows_nothing(successor):
    model, params = successor
    flat = params | {"head": jnp.zeros_like(params["head"])}
    _, unseen = data.split(data.open_corpus(), batch=2, seq=16)
    assert validation_loss(model, flat, unseen, steps=2) == pytest.approx(math.log(model.vocab), rel=1e-5)


def test_nonsense_is_refused():
    with pytest.raises(InputError, match=r"the temperature is -1"):
        Sampling(temperature=-1)
