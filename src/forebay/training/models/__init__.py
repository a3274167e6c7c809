"""Reference models: Llama-family decoders as plain functions on nested dicts.

In: the name of a preset or a Hugging Face ``config.json``. Out: a `LlamaConfig`, and from `llama` the loss, the shapes and
the parameters that any caller hands to ``forebay.trace``. These models go through the same public door as everyone
else's: nothing here imports another stage of forebay but `errors`. Reading a configuration does not load jax.
"""

from forebay.training.models.config import LlamaConfig, Rope
from forebay.training.models.presets import load_config, preset, preset_names

__all__ = ["LlamaConfig", "Rope", "load_config", "preset", "preset_names"]
