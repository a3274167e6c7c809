"""forebay: train JAX models larger than GPU memory, by a plan that the real compiler has proved.

Importing this package loads neither jax nor scipy: each public name is imported from its stage on first use.
"""

import importlib

_HOME = {
    "Hardware": "forebay.hardware",
    "probe": "forebay.hardware",
    "Workload": "forebay.workload",
    "trace": "forebay.workload",
    "Plan": "forebay.plan",
    "choose": "forebay.search",
    "Verdict": "forebay.records",
    "judge": "forebay.compiler",
    "predict": "forebay.timeline",
    "Forecast": "forebay.records",
    "train_step": "forebay.runtime",
    "init": "forebay.runtime",
    "place": "forebay.runtime",
    "value_and_grad": "forebay.runtime",
    "update": "forebay.runtime",
    "check": "forebay.trust",
    "State": "forebay.runtime",
    "preflight": "forebay.trust",
    "explain_oom": "forebay.trust",
    "Run": "forebay.training",
    "train": "forebay.training",
}

__version__ = "0.1.0"
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *__all__])
