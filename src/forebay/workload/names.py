"""Names of things that occupy memory: ``role:path``, from the user's own tree."""

from typing import Any

import jax


def path_name(path) -> str:
    """``layers/attn/wq`` for a jax key path; the root of a single-leaf tree is ``.``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "."


def leaf_names(tree: Any) -> tuple[str, ...]:
    """The path of every leaf, in flattening order."""
    return tuple(path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
