"""Where forebay keeps compiles and answers between runs. Loads no jax."""

import os
from pathlib import Path


def folder() -> Path:
    """``FOREBAY_CACHE``, or ``~/.cache/forebay`` (under ``XDG_CACHE_HOME`` where that is set)."""
    if os.environ.get("FOREBAY_CACHE"):
        return Path(os.environ["FOREBAY_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "forebay"
