"""How far apart two runs may be: the tolerance of a dtype, and the distance of two trees leaf by leaf.

Idea: two programs that do the same mathematics differ by rounding, and an optimizer that divides by a root (Adam) or takes a sign (Lion)
makes a large difference of a small one wherever a gradient is close to zero. So a leaf is measured by its *mean* absolute difference, which
a few such elements do not decide, and the yardstick is made on the spot: the resident run is made twice, the second time from parameters
that are one rounding away. A leaf of the planned run may be as far from the resident run as

    tolerance(dtype) * mean |resident|  +  4 * mean |nudged - resident|

Cost: one more resident run. Limits: a fault that moves a leaf by less than that is not seen; ``moved`` says whether a whole lost update is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUDGES = 4
FLOATS = (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16)


def tolerance(dtype: Any) -> float:
    """The relative difference that rounding may make: 1e-10 in float64, 1e-5 in float32, two units in the last place in narrower types."""
    bits = jnp.finfo(dtype).bits
    return 1e-10 if bits == 64 else 1e-5 if bits == 32 else 2 * float(jnp.finfo(dtype).eps)


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far one leaf is from its reference, on average over its elements, and how far it may be."""

    name: str
    distance: float
    allowed: float

    @property
    def close(self) -> bool:
        return self.distance <= self.allowed  # False where it is nan

    def __str__(self) -> str:
        return f"{self.name} is {self.distance:.2g} away on average, {self.allowed:.2g} allowed"


def distances(what: str, got: Any, wanted: Any, nudged: Any = None, least: float = 0.0) -> list[Distance]:
    """The distance of each leaf of ``got`` (numpy trees). Leaves that are not floats must be equal. ``least``: tolerance of every dtype."""
    ours, theirs = (jax.tree_util.tree_flatten_with_path(tree) for tree in (got, wanted))
    others = jax.tree.leaves(nudged) if nudged is not None else [leaf for _, leaf in theirs[0]]
    if ours[1] != theirs[1]:
        return [Distance(name=f"{what}: the tree is {ours[1]}, the resident one {theirs[1]};", distance=np.inf, allowed=0.0)]
    out = []
    for (path, a), (_, b), c in zip(ours[0], theirs[0], others, strict=True):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        name = f"{what}:{where}" if where else what
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            name += f" ({a.dtype}{list(a.shape)}, resident {b.dtype}{list(b.shape)})"
            out.append(Distance(name=name, distance=np.inf, allowed=0.0))
            continue
        relative = max(tolerance(b.dtype), least) if is_float(b) else 0.0
        a, b, c = wide(a), wide(b), wide(c)
        allowed = relative * _mean(b) + (NUDGES * _mean(c - b) if relative else 0.0)
        out.append(Distance(name=name, distance=_mean(a - b), allowed=allowed))
    return out


def _mean(leaf: np.ndarray) -> float:
    return float(np.abs(leaf).mean()) if leaf.size else 0.0


def unmoved(start: Any, end: Any, found: list[Distance], frozen: tuple[bool, ...]) -> list[str]:
    """The leaves whose change over the run is not twice what is allowed: there the loss of an update would not show."""
    leaves = zip(jax.tree.leaves(start), jax.tree.leaves(end), found, frozen, strict=True)
    return [d.name for a, b, d, still in leaves if not still and is_float(b) and _mean(wide(b) - wide(a)) <= 2 * d.allowed]
