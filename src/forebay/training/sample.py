"""Text from a trained model: one byte after the other, the most likely one or drawn at a temperature.

Each byte runs the whole window through the model (no cache of keys and values): right for a look at what was learnt, not for
serving. The parameters stand whole in the memory of one device.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import InputError
from forebay.training import config as settings
from forebay.training.checkpoints import Checkpoints
from forebay.training.data import VOCABULARY
from forebay.training.models import llama, presets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How bytes are drawn. ``temperature`` 0 takes the most likely byte; ``window`` is how many bytes the model sees at most."""

    count: int = 200
    temperature: float = 0.8
    window: int = 256
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise InputError(f"the temperature is {self.temperature}; it must be 0 (the most likely byte) or positive")
        if self.count < 1 or self.window < 1:
            raise InputError(f"count {self.count} and window {self.window} must be at least 1")


def generate(model: Any, params: Any, prompt: str, sampling: Sampling) -> str:
    """``sampling.count`` bytes that follow ``prompt``, decoded as UTF-8 (bytes that are not show as U+FFFD)."""
    seen = list(prompt.encode()) or [0]
    start = len(seen)
    key = jax.random.key(sampling.seed)
    for number in range(sampling.count):
        tail = seen[-sampling.window :]
        window = np.zeros((1, sampling.window), np.int32)
        window[0, : len(tail)] = tail
        seen.append(int(_next(model, params, window, len(tail), sampling.temperature, jax.random.fold_in(key, number))))
    return bytes(seen[start:]).decode("utf-8", errors="replace")


@partial(jax.jit, static_argnums=0)
def _next(model: Any, params: Any, window: jax.Array, length: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    scores = llama.logits(model, params, window)[0, length - 1, :VOCABULARY]
    drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, scores.argmax())


def load_params(folder: Path) -> tuple[Any, Any]:
    """The model configuration and the newest parameters of a run folder, on one device.

    Raises:
        InputError: the folder is not a run's.
        CheckpointError: it holds no readable checkpoint.
    """
    from forebay.training.loop import CHECKPOINTS  # the loop is heavier than a sample needs until here

    config = settings.load(folder)
    model = presets.find(config.model)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), llama.param_shapes(model))
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    params = checkpoints.restore({"params": wanted})["params"]
    checkpoints.close()
    return model, params
