"""Run by test_targets.py in a process of its own: compile a small matmul with a weight in pinned_host for each machine named.

Usage: ``python compile_targets.py NAME...``; prints one JSON object: name -> devices, hosts, argument bytes on device and on host.
"""

import json
import os
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TF_CPP_MIN_LOG_LEVEL="3")
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from forebay.hardware import Hardware
from forebay.hardware.targets import tpu_host_bounds

SIZE, ROWS = 1024, 256


def main(names: list[str]) -> None:
    print(json.dumps({name: measure(Hardware.named(name)) for name in names}))


def measure(machine: Hardware) -> dict:
    devices = _devices(machine)
    stats = _compile(devices, machine.target.platform).get_compiled_memory_stats()
    return {
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "device_argument_bytes": stats.argument_size_in_bytes,
        "host_argument_bytes": stats.host_argument_size_in_bytes,
    }


def _devices(machine: Hardware) -> list:
    target = machine.target
    if target.platform == "tpu":
        bounds = tpu_host_bounds(target.topology)
        given = {} if bounds is None else {"chips_per_host_bounds": bounds}
        return topologies.get_topology_desc(target.topology, platform="tpu", **given).devices
    options = {"target_config": target.target_config, "topology": target.topology}
    return topologies.get_topology_desc("", platform="cuda", **options).devices


def _forward(weight, batch):
    weight = jax.device_put(weight, jax.memory.Space.Device)
    return jnp.tanh(batch @ weight) @ weight.T


def _compile(devices: list, platform: str):
    count = len(devices)
    mesh = AbstractMesh((count,), ("x",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host")
    weight = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=host)
    batch = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    module = jax.jit(_forward).trace(weight, batch).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    assignment = np.array([device.id for device in devices]).reshape(1, count)
    options = compiler.get_compile_options(num_replicas=1, num_partitions=count, device_assignment=assignment)
    options.executable_build_options.use_shardy_partitioner = True
    return devices[0].client.compile(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)


if __name__ == "__main__":
    main(sys.argv[1:])
