"""The loss on text that was never trained on, with the parameters whole on one device."""

from typing import Any

import jax

from forebay.training.data import Batches
from forebay.training.models import llama


def validation_loss(model: Any, params: Any, batches: Batches, steps: int = 8) -> float:
    """Mean loss, in nats per token, over the first ``steps`` batches."""
    loss_fn = jax.jit(llama.make_loss(model))
    return sum(float(loss_fn(params, {"tokens": batches.tokens(step)})[0]) for step in range(steps)) / steps
