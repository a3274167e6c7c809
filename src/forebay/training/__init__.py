"""Training: from a TrainConfig to a Run, through forebay's public verbs only.

In: a configuration, text files, a plan's rules. Out: a run folder with config.json, plan.json, metrics.jsonl, checkpoints/,
tensorboard/. May import every earlier stage (records to trust); nothing before it imports this one. Loads jax only when
training begins.
"""

import importlib

_HOME = {
    "Run": "forebay.training.loop",
    "train": "forebay.training.loop",
    "TrainConfig": "forebay.training.config",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'forebay.training' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
