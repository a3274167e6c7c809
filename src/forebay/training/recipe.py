"""The optimizer of a TrainConfig: AdamW under a warm-up and a cosine, built from Optax's own parts."""

from typing import Any

import jax
import optax

from forebay.training.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear from 0 to the peak over the warm-up, a cosine down to ``final_fraction`` of it at ``steps``.

    The first step already learns: step s of a warm-up of w steps has (s + 1) / w of the peak.
    """
    warmup = max(1, round(config.warmup_fraction * steps))
    peak = config.learning_rate
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    fall = optax.cosine_decay_schedule(peak, max(1, steps - warmup), alpha=config.final_fraction)
    return optax.join_schedules([rise, fall], [warmup - 1])


def decayed(params: Any) -> Any:
    """Which leaves decay: all but norms and biases, told by their names, since a stack of norms is a matrix too."""

    def decays(path: tuple, _leaf: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True).lower()
        return not ("norm" in name or "bias" in name or name in {"bq", "bk", "bv"})

    return jax.tree_util.tree_map_with_path(decays, params)


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm (if asked for), then AdamW on `schedule`."""
    adamw = optax.adamw(schedule(config, steps), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed)
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
