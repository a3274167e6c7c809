"""Where a model's activations lie on the mesh that its caller set.

On Auto axes an array's type carries no sharding, so the mesh comes from the context (``jax.set_mesh`` or
``jax.sharding.use_abstract_mesh``), which forebay's train step and tracing set to the plan's mesh. The convention: the batch
is split over every axis but ``tensor`` and ``context``, heads over ``tensor``. Without a mesh every function here is the identity.

Known limit: a ``context`` axis does not split the sequence inside attention; its devices repeat that work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from jaxtyping import Array

_NOT_BATCH = ("tensor", "context")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The axes that split a batch (``batch``) and attention heads (``heads``) of ``mesh``; ``None`` is no mesh."""

    mesh: AbstractMesh | None = None
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """Into how many pieces the batch is split."""
        return math.prod(self.mesh.shape[a] for a in self.batch) if self.mesh else 1

    def constrain(self, x: Array, *spec) -> Array:
        """``x`` laid out by ``spec`` (as of `PartitionSpec`). A dimension that does not divide is left whole."""
        if self.mesh is None:
            return x
        whole = [axes if axes and x.shape[i] % self._count(axes) == 0 else None for i, axes in enumerate(spec)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*whole)))

    def per_device(self, f: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
        """``f`` run by each device on its own piece; specs name dimensions ``"batch"``, ``"heads"`` or ``None``."""
        if self.mesh is None:
            return f
        mapping = {"batch": self.batch or None, "heads": self.heads or None, None: None}
        specs = [tuple(PartitionSpec(*(mapping[d] for d in dims)) for dims in side) for side in (in_specs, out_specs)]
        axes = frozenset(self.mesh.axis_names) - frozenset(self.mesh.manual_axes)
        # check_vma is off: a custom call states nothing about the axes over which its result varies.
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], axis_names=axes, check_vma=False)

    def _count(self, axes: tuple[str, ...]) -> int:
        assert self.mesh is not None, "without a mesh nothing is split"
        return math.prod(self.mesh.shape[a] for a in axes)


def current(batch: int, heads: int = 1) -> Layout:
    """The layout for ``batch`` sequences (and ``heads`` key/value heads) on the mesh of the context.

    An axis that does not divide the batch is left out: its devices then repeat the work.

    Raises:
        UnsupportedError: the mesh of the context has Explicit axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = [] if mesh.empty or mesh.size == 1 else [a for a in mesh.axis_names if a not in mesh.manual_axes]
    if not free:
        return Layout()
    if AxisType.Explicit in mesh.axis_types:
        raise UnsupportedError(
            f"the mesh {dict(mesh.shape)} has Explicit axes; these models leave shardings to the compiler. "
            f"Make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    axes, count = [], 1
    for axis in free:
        if axis not in _NOT_BATCH and batch % (count * mesh.shape[axis]) == 0:
            axes.append(axis)
            count *= mesh.shape[axis]
    split_heads = "tensor" in free and heads % mesh.shape["tensor"] == 0
    return Layout(mesh=mesh, batch=tuple(axes), heads=("tensor",) if split_heads else ())
