"""Meshes and specs as plain data, and the bytes that one device holds of a sharded array."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from forebay.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """A mesh as data: sizes and names of its axes, all of them Auto (the compiler partitions)."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self):
        assert len(self.sizes) == len(self.names), (self.sizes, self.names)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, axes: Any) -> int:
        """Devices along one axis name, a tuple of them, or None."""
        axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        for axis in axes:
            if axis not in self.names:
                raise InputError(f"a spec names the mesh axis {axis!r}, but the mesh has {dict(zip(self.names, self.sizes, strict=True))}")
        return math.prod(self.sizes[self.names.index(a)] for a in axes)

    def abstract(self) -> AbstractMesh:
        """The jax mesh without devices, for tracing, lowering and judging."""
        return AbstractMesh(self.sizes, self.names, axis_types=(AxisType.Auto,) * len(self.names))

    def concrete(self, devices=None):
        """The jax mesh over ``devices`` (default: all of this process's backend).

        Raises:
            InputError: there are fewer devices than the mesh needs.
        """
        have = list(jax.devices()) if devices is None else list(devices)
        if len(have) < self.devices:
            raise InputError(
                f"the plan's mesh {dict(zip(self.names, self.sizes, strict=True))} needs {self.devices} devices and there are {len(have)} "
                f"({have[0].platform}); plan for hardware with {len(have)} devices, or start on a machine that has {self.devices}"
            )
        return jax.make_mesh(self.sizes, self.names, devices=have[: self.devices], axis_types=(AxisType.Auto,) * len(self.names))


def mesh_shape(mesh) -> MeshShape:
    """The shape of a jax Mesh or AbstractMesh."""
    return MeshShape(sizes=tuple(mesh.shape.values()), names=tuple(mesh.axis_names))


def spec_of(leaf) -> tuple | None:
    """The partition spec that a ShapeDtypeStruct or array carries, as a tuple padded to its rank; None without one."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return pad_spec(sharding.spec, len(leaf.shape))


def mesh_of(tree) -> MeshShape | None:
    """The one mesh that the shardings of a tree's leaves stand on, or None.

    Raises:
        InputError: they stand on meshes of different shapes.
    """
    meshes = {mesh_shape(s.mesh) for leaf in jax.tree.leaves(tree) if isinstance(s := getattr(leaf, "sharding", None), NamedSharding)}
    if len(meshes) > 1:
        raise InputError(f"the leaves are sharded over different meshes: {sorted(map(str, meshes))}; use one mesh for params and batch")
    return meshes.pop() if meshes else None


def pad_spec(spec, rank: int) -> tuple:
    """``spec`` as a tuple of ``rank`` parts, one-name tuples unwrapped."""
    parts = [p[0] if isinstance(p, tuple) and len(p) == 1 else p for p in tuple(spec or ())]
    if len(parts) > rank:
        raise InputError(f"the spec {tuple(spec)} has {len(parts)} parts for an array of rank {rank}")
    return tuple(parts) + (None,) * (rank - len(parts))


def local_shape(shape: tuple[int, ...], spec: tuple, mesh: MeshShape | None, name: str = "an array") -> tuple[int, ...]:
    """The shape of one device's shard.

    Raises:
        InputError: an axis of the array is not divisible by the mesh axes that shard it.
    """
    if mesh is None:
        return tuple(shape)
    out = []
    for k, (n, axes) in enumerate(zip(shape, pad_spec(spec, len(shape)), strict=True)):
        parts = mesh.size(axes)
        if n % parts:
            raise InputError(f"axis {k} of {name} has {n} elements, which the {parts} devices along mesh axis {axes!r} do not divide")
        out.append(n // parts)
    return tuple(out)


def nbytes(shape, dtype) -> int:
    """Bytes of an array; a typed random key counts as its data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), dtype))
        shape, dtype = data.shape, data.dtype
    return math.prod(shape) * np.dtype(dtype).itemsize


def named(mesh, spec, kind: str) -> NamedSharding:
    """A NamedSharding with a memory kind; ``kind`` is a placement, ``hbm`` or ``host``."""
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind={"hbm": "device", "host": "pinned_host"}[kind])
