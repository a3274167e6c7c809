"""Everything of jax that is private and that this stage needs, for jax 0.10.2 to 0.12: in one place, to be checked at each release.

User's process: ``settings`` to ``describe``. Worker: ``apply_settings`` to ``hlo_text``.
"""

import contextlib
import dataclasses

import jax
import numpy as np
from jax._src import compiler, core, dispatch
from jax._src.interpreters import mlir, pxla
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

from forebay.hardware.targets import tpu_host_bounds


@dataclasses.dataclass(frozen=True)
class AbsentClient:
    platform: str


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """Stands for the default device while lowering on an abstract mesh, so that jax does not start the user's backend.

    Lowering asks for the default device even when every sharding is abstract, and uses only its platform then (TPU programs of
    more than 2000 arguments take a tuple); jax accepts any class named like a device (``jax._src.config._validate_default_device``).
    """

    client: AbsentClient
    device_kind: str = "absent"  # asked by primitives with a TPU lowering of their own; an unknown kind takes the plain one


def lower(traced, platform: str, abstract: bool):
    """``traced`` lowered for ``platform``. ``abstract`` says that no concrete mesh takes part, so no backend is needed."""
    default = jax.default_device(AbsentDevice(AbsentClient(platform))) if abstract else contextlib.nullcontext()
    with default:
        return traced.lower(lowering_platforms=(platform,))


# Settings of jax that change what the compiler is told (``jax._src.compiler.get_compile_options``); some exist only in some versions.
_SETTINGS = (
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_use_shardy_partitioner",
    "jax_disable_most_optimizations",
    "jax_remat3",  # changes what is lowered, not how it is compiled; the hazard of that name looks for it
)


def settings() -> dict:
    """The user's settings of jax that the worker must compile with."""
    return {name: getattr(jax.config, name) for name in _SETTINGS if hasattr(jax.config, name)}


def inner_shardings(traced) -> list:
    """Shardings that the program itself states: jit's own, and those inside. Unspecified ones are left out."""
    stated = [*traced._params["in_shardings"], *traced._params["out_shardings"]]
    stated += [sharding for sharding, _ in dispatch.get_intermediate_shardings(traced.jaxpr.jaxpr)]
    return [sharding for sharding in stated if isinstance(sharding, jax.sharding.Sharding)]


def context_mesh(traced):
    """The mesh of ``jax.set_mesh`` under which ``traced`` was made (empty where there was none)."""
    return traced._params["ctx_mesh"]


def primitives_with_devices(traced) -> list[str]:
    """The primitives of the program that cannot be lowered on an abstract mesh: cuDNN attention, custom partitioning, callbacks."""
    found, waiting = set(), [traced.jaxpr.jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        found |= {eqn.primitive.name for eqn in jaxpr.eqns if eqn.primitive in dispatch.prim_requires_devices_during_lowering}
        waiting.extend(core.subjaxprs(jaxpr))
    return sorted(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A lowered program as the worker and the cache need it. ``text`` has no source locations; ``bytecode`` has."""

    bytecode: bytes
    text: str
    partitions: int
    tuple_arguments: bool
    propagate_to_inputs: tuple[bool, ...]
    propagate_to_outputs: tuple[bool, ...]
    arguments: tuple[tuple[str, str | None], ...]  # name and memory kind of each parameter of the module, in order
    compiler_options: dict


def describe(lowered) -> Program:
    """What jax itself would hand to the compiler for ``lowered`` (``pxla.create_compile_options``)."""
    lowering = lowered._lowering
    arguments = lowering.compile_args
    module = lowering.stablehlo()
    attributes = module.operation.attributes
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        arguments["in_shardings"], arguments["out_shardings"], len(arguments["ordered_effects"])
    )
    return Program(
        bytecode=mlir.module_to_bytecode(module),
        text=module.operation.get_asm(enable_debug_info=False),
        partitions=ir.IntegerAttr(attributes["mhlo.num_partitions"]).value if "mhlo.num_partitions" in attributes else 1,
        tuple_arguments=bool(arguments["tuple_args"]),
        propagate_to_inputs=tuple(map(bool, to_inputs)),
        propagate_to_outputs=tuple(map(bool, to_outputs)),
        arguments=_arguments(lowered, arguments),
        compiler_options=dict(lowering._compiler_options_kvs),
    )


def _arguments(lowered, arguments) -> tuple[tuple[str, str | None], ...]:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]]
    names = [f"{'args' if path[0].idx == 0 else 'kwargs'}{jax.tree_util.keystr(path[1:])}" for path in paths]
    shardings = arguments["in_shardings"]
    kept = [names[i] for i in sorted(arguments["kept_var_idx"]) if i < len(names)]
    constants = len(shardings) - len(kept)  # arrays that the function closes over come first
    names = [f"constant {i}" for i in range(constants)] + kept
    return tuple((name, getattr(sharding, "memory_kind", None)) for name, sharding in zip(names, shardings, strict=True))


def apply_settings(values: dict) -> None:
    """The user's settings of jax, in the worker."""
    for name, value in values.items():
        jax.config.update(name, value)


def topology_devices(platform: str, topology: str, target_config: str | None, partitions: int) -> list:
    """The first ``partitions`` devices of the target: compile-only for cuda and tpu, virtual ones for cpu."""
    if platform == "cpu":
        return jax.devices("cpu")[:partitions]
    if platform == "cuda":
        return topologies.get_topology_desc("", platform="cuda", target_config=target_config, topology=topology).devices[:partitions]
    bounds = tpu_host_bounds(topology)
    given = {} if bounds is None else {"chips_per_host_bounds": bounds}
    return topologies.get_topology_desc(topology, platform=platform, **given).devices[:partitions]


def parse(bytecode: bytes):
    """The StableHLO module of ``bytecode``."""
    return ir.Module.parse(bytecode, context=mlir.make_ir_context())


def compile_module(module, devices: list, request: dict):
    """The executable of ``module`` for ``devices``, with the options that jax would use and those of ``request``."""
    ids = np.array([device.id for device in devices]).reshape(1, len(devices))
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=ids, env_options_overrides=request["compiler_options"]
    )
    options.parameter_is_tupled_arguments = request["tuple_arguments"]
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = request["propagate_to_inputs"]
    build.allow_spmd_sharding_propagation_to_output = request["propagate_to_outputs"]
    client = devices[0].client
    compile_for = client.compile_and_load if request["platform"] == "cpu" else client.compile
    return compile_for(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)


def sizes(executable, platform: str) -> dict:
    """The compiled sizes by memory space, in the words of ``records.Memory``."""
    stats = executable.get_compiled_memory_stats()
    words = {"argument": "argument", "output": "output", "alias": "alias", "temp": "temp", "generated_code": "code"}
    found = {
        space: {f"{word}_bytes": getattr(stats, f"{prefix}{name}_size_in_bytes") for name, word in words.items()}
        for space, prefix in (("hbm", ""), ("host", "host_"))
    }
    if platform == "tpu" and hasattr(stats, "total_allocation_bytes"):  # jax 0.12; of HBM alone
        found["hbm"]["allocated_bytes"] = stats.total_allocation_bytes
    return found


def hlo_text(executable) -> str:
    """The scheduled HLO of ``executable``."""
    return executable.hlo_modules()[0].to_string()


CompilerRefusal = xla_client.XlaRuntimeError if hasattr(xla_client, "XlaRuntimeError") else jax.errors.JaxRuntimeError
