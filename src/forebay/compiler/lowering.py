"""From a function and its arguments to a program for another machine, without starting the user's devices.

Shardings on a concrete mesh are moved to its abstract mesh: the devices of a compile-only client have no memories, so a sharding on
them drops ``memory_kind="pinned_host"`` without a word. A program without any mesh is put on an abstract mesh of one device.
"""

import dataclasses
import warnings

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from forebay.compiler import jaxcompat
from forebay.errors import CompilerError, InputError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A program to compile, the devices that its meshes ask for (``None`` without a mesh), and what jax warned of."""

    program: jaxcompat.Program
    mesh_devices: int | None
    messages: tuple[str, ...]


def lower(fn, args: tuple, platform: str, donate_argnums: tuple[int, ...]) -> Lowered:
    """``fn(*args)`` lowered for ``platform``. Nothing is allocated and no array is read.

    Raises:
        InputError: an argument that is neither an array nor a shape.
        CompilerError: jax cannot lower this program for that platform; the text says why.
    """
    args = jax.tree.map(_abstract, args)
    # warnings are collected one lowering at a time by the caller: catch_warnings is not safe between threads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = _trace(fn, args, donate_argnums)
        meshes = _meshes(args, traced)
        if not meshes:
            traced = _trace(fn, jax.tree.map(_on_one_device, args), donate_argnums)
        lowered = _lower(traced, platform)
    messages = dict.fromkeys(f"jax: {item.category.__name__}: {item.message}" for item in caught)
    return Lowered(program=jaxcompat.describe(lowered), mesh_devices=max(meshes, default=None), messages=tuple(messages))


def _abstract(leaf):
    """``leaf`` as shape, type and abstract sharding; Python numbers stay as they are (they are weakly typed)."""
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise InputError(
            f"an argument of judge holds {type(leaf).__name__} {leaf!r:.60}; "
            "give arrays or jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        sharding = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=sharding.memory_kind)
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        host = sharding.memory_kind == "pinned_host"
        sharding = NamedSharding(_one_device(), PartitionSpec(), memory_kind="pinned_host") if host else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _one_device() -> AbstractMesh:
    return AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,))


def _on_one_device(leaf):
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf
    sharding = NamedSharding(_one_device(), PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _trace(fn, args: tuple, donate_argnums: tuple[int, ...]):
    if not hasattr(fn, "trace"):
        fn = jax.jit(fn, donate_argnums=tuple(number for number in donate_argnums if number < len(args)))
    return fn.trace(*args)


def _meshes(args: tuple, traced) -> set[int]:
    """The sizes of the meshes that the arguments, the context and the program itself name."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None]
    shardings += jaxcompat.inner_shardings(traced)
    meshes = {sharding.mesh.size if isinstance(sharding, NamedSharding) else sharding.num_devices for sharding in shardings}
    context = jaxcompat.context_mesh(traced)
    return meshes if context.empty else meshes | {context.size}


def _lower(traced, platform: str):
    context = jaxcompat.context_mesh(traced)
    concrete = not context.empty and isinstance(context, Mesh)
    for sharding in jaxcompat.inner_shardings(traced):
        concrete |= not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))
    if not concrete and jaxcompat.needs_devices(traced):
        raise CompilerError(
            "this program holds a primitive that jax lowers only on a mesh of devices (cuDNN attention, custom partitioning), and its "
            "shardings are abstract. Use an attention that lowers on an abstract mesh, or give the step a mesh of virtual CPU devices: "
            "jax.config.update('jax_num_cpu_devices', N) before the first use of jax, then jax.set_mesh(jax.make_mesh(...))"
        )
    try:
        return jaxcompat.lower(traced, platform, abstract=not concrete)
    except (ValueError, NotImplementedError) as problem:
        raise CompilerError(f"jax cannot lower this program for {platform}: {problem}") from problem
