"""From a function and its arguments to a program for another machine, without starting the user's devices.

Shardings on a concrete mesh are moved to its abstract mesh: the devices of a compile-only client have no memories, so a sharding on
them drops ``memory_kind="pinned_host"`` without a word. A program without any mesh is put on an abstract mesh of one device.
"""

import dataclasses
import re
import warnings

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from forebay.compiler import jaxcompat
from forebay.errors import CompilerError, InputError

_ONE_DEVICE = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,))

_CALLS_BACK = "CustomSPMDPartitioning"  # the custom call of jax.experimental.custom_partitioning


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
    given = jax.tree.map(lambda leaf: _shape_of(leaf, strict=not hasattr(fn, "trace")), args)
    args = jax.tree.map(_abstract, given)
    # warnings are collected one lowering at a time by the caller: catch_warnings is not safe between threads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = _trace(fn, args, donate_argnums)
        meshes = _meshes(args, traced)
        if not meshes:
            traced = _trace(fn, jax.tree.map(_on_one_device, args), donate_argnums)
        on_devices = bool(jaxcompat.primitives_with_devices(traced)) and any(map(_is_concrete, _shardings(given)))
        if on_devices:
            traced = _trace(fn, given, donate_argnums)  # such a primitive asks for the devices themselves
        lowered = _lower(traced, platform, on_devices)
    messages = dict.fromkeys(f"jax: {item.category.__name__}: {str(item.message).splitlines()[0]}" for item in caught)
    program = jaxcompat.describe(lowered)
    _refuse_custom_partitioning(program)
    _refuse_donation_across_memories(program)
    return Lowered(program=program, mesh_devices=max(meshes, default=None), messages=tuple(messages))


def _shape_of(leaf, strict: bool):
    """``leaf`` as shape, type and sharding; Python numbers stay as they are (they are weakly typed)."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if strict and not isinstance(leaf, (bool, int, float, complex)):
            raise InputError(
                f"an argument of judge holds {type(leaf).__name__} {leaf!r:.60}; "
                "give arrays or jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            )
        return leaf  # a jitted function may have declared it static
    return _shape(leaf, getattr(leaf, "sharding", None))


def _shape(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _abstract(leaf):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return _shape(leaf, NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=sharding.memory_kind))
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        host = sharding.memory_kind == "pinned_host"
        return _shape(leaf, NamedSharding(_ONE_DEVICE, PartitionSpec(), memory_kind="pinned_host") if host else None)
    return leaf


def _on_one_device(leaf):
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf
    return _shape(leaf, NamedSharding(_ONE_DEVICE, PartitionSpec()))


def _trace(fn, args: tuple, donate_argnums: tuple[int, ...]):
    if not hasattr(fn, "trace"):
        fn = jax.jit(fn, donate_argnums=tuple(number for number in donate_argnums if number < len(args)))
    return fn.trace(*args)


def _shardings(args) -> list:
    return [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None]


def _is_concrete(sharding) -> bool:
    return not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))


def _meshes(args: tuple, traced) -> set[int]:
    """The sizes of the meshes that the arguments, the context and the program itself name."""
    meshes = set()
    for sharding in [*_shardings(args), *jaxcompat.inner_shardings(traced)]:
        if not isinstance(sharding, NamedSharding):
            meshes.add(sharding.num_devices)
        elif sharding.mesh != _ONE_DEVICE:
            meshes.add(sharding.mesh.size)
    context = jaxcompat.context_mesh(traced)
    return meshes if context.empty else meshes | {context.size}


def _lower(traced, platform: str, on_devices: bool):
    """``on_devices`` says that arguments were traced on a mesh of devices."""
    context = jaxcompat.context_mesh(traced)
    on_devices |= (not context.empty and isinstance(context, Mesh)) or any(map(_is_concrete, jaxcompat.inner_shardings(traced)))
    if not on_devices and (primitives := jaxcompat.primitives_with_devices(traced)):
        _refuse_devices(primitives)
    try:
        return jaxcompat.lower(traced, platform, abstract=not on_devices)
    except (ValueError, NotImplementedError) as problem:
        raise CompilerError(f"jax cannot lower this program for {platform}: {problem}") from problem


def _refuse_devices(primitives: list[str]) -> None:
    raise CompilerError(
        f"jax lowers {', '.join(primitives)} only on a mesh of devices, and the shardings of this program are abstract. Leave it out of "
        "the step, or judge on a mesh of virtual CPU devices: jax.config.update('jax_num_cpu_devices', N) before jax is first used, then "
        "arguments with shardings on jax.make_mesh(...). For cuDNN attention use forebay.training.models.attention"
    )


def _refuse_custom_partitioning(program: jaxcompat.Program) -> None:
    if f"@{_CALLS_BACK}(" in program.text:
        raise CompilerError(
            "the program holds custom_partitioning (jax.nn.dot_product_attention(implementation='cudnn') is one): the compiler calls back "
            "into the Python of the process that lowered it, so it cannot be compiled in a worker. Use an attention without it, such as "
            "forebay.training.models.attention, which runs the same cuDNN kernels under jax.shard_map"
        )


def _refuse_donation_across_memories(program: jaxcompat.Program) -> None:
    """XLA takes a donated device buffer for the host buffer of a result and then fails inside (openxla/xla 29270)."""
    head = next((line for line in program.text.splitlines() if "func.func public @main(" in line), "")
    given, _, returned = head.partition(") -> ")
    results = re.split(r"(?=tensor<)", returned)[1:]
    for number, argument in enumerate(re.split(r"(?=%arg\d+: )", given)[1:]):
        reused = re.search(r"tf\.aliasing_output = (\d+)", argument)
        if reused is None or int(reused.group(1)) >= len(results):
            continue
        on_host = ["pinned_host" in text for text in (argument, results[int(reused.group(1))])]
        if on_host[0] != on_host[1]:
            name = program.arguments[number][0] if number < len(program.arguments) else f"argument {number}"
            where = [("on the device", "in host memory")[host] for host in on_host]
            raise CompilerError(
                f"{name} stands {where[0]} and is donated to a result {where[1]}, and XLA cannot use one buffer for both. Do not "
                "donate it; to move a state between memories use forebay.place, which frees each leaf as it goes"
            )
