"""Programs that the tests of the compiler stage judge, and their compile in the process itself, by jax's own path.

Run as a script, ``compiler_programs.py PLATFORM TOPOLOGY DEVICES TARGET_CONFIG_FILE``, it compiles each program without forebay and
prints the sizes as JSON: what judge must equal to the byte.
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def mesh(devices):
    return AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))


def array(devices, *shape, spec=(), kind=None, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(devices), PartitionSpec(*spec), memory_kind=kind))


def offload(name):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[name], offload_src="device", offload_dst="pinned_host"
    )


def notebook(variant):
    """The ten-layer scan of JAX's notebook on host offloading: ``resident``, ``activation`` or ``weights``."""

    def layer(x, w):
        x = checkpoint_name(x, "x")
        w1, w2 = jax.device_put(w, DEVICE) if variant == "weights" else w
        return (x @ w1) @ w2, None

    body = layer if variant == "resident" else jax.checkpoint(layer, policy=offload("x"), prevent_cse=False)
    return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0]))


def notebook_args(variant, devices):
    kind = "pinned_host" if variant == "weights" else None
    weights = array(devices, 10, 256, 1024, kind=kind), array(devices, 10, 1024, 256, kind=kind)
    return weights, array(devices, 256, 256)


def fsdp_step(state, batch):
    """A scanned FSDP step with a momentum in host memory, updated in place; the state is donated by judge's default."""

    def loss(weights, x):
        def body(x, w):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        return (jax.lax.scan(jax.checkpoint(body), x, weights)[0] ** 2).mean()

    weights, momentum = state
    value, gradient = jax.value_and_grad(loss)(weights, batch)
    read = lambda a, i: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=True)  # noqa: E731
    write = lambda a, b, i: jax.lax.dynamic_update_index_in_dim(a, b, i, 0)  # noqa: E731

    def update(i, carry):
        weights, momentum = carry
        old = jax.device_put(jax.tree.map(lambda m: read(m, i), momentum), DEVICE)
        new = jax.tree.map(lambda m, g: 0.9 * m + read(g, i), old, gradient)
        weights = jax.tree.map(lambda w, m: write(w, read(w, i) - 1e-3 * m, i), weights, new)
        return weights, jax.tree.map(lambda m, n: write(m, n, i), momentum, jax.device_put(new, HOST))

    return jax.lax.fori_loop(0, LAYERS, update, (weights, momentum)), value


LAYERS = 4


def fsdp_args(devices):
    def weights(kind):
        return {
            "up": array(devices, LAYERS, 256, 1024, spec=(None, None, "x"), kind=kind),
            "down": array(devices, LAYERS, 1024, 256, spec=(None, "x", None), kind=kind),
        }

    return (weights(None), weights("pinned_host")), array(devices, 8 * devices, 64, 256, spec=("x",))


def programs(devices):
    """Name -> (function, arguments, donated argument numbers)."""
    found = {variant: (notebook(variant), notebook_args(variant, devices), ()) for variant in ("resident", "activation", "weights")}
    return found | {"fsdp": (fsdp_step, fsdp_args(devices), (0,))}


def sizes_in_this_process(platform, topology, devices, target_config):
    from jax.experimental import topologies

    given = {"target_config": target_config, "topology": topology} if platform == "cuda" else {}
    name = "" if platform == "cuda" else topology
    target = tuple(topologies.get_topology_desc(name, platform=platform, **given).devices)
    found = {}
    for program, (fn, args, donated) in programs(devices).items():
        with jax.default_device(target[0]):  # jax compiles with the client of the default device
            lowered = jax.jit(fn, donate_argnums=donated).trace(*args).lower(lowering_platforms=(platform,))
        stats = lowered.compile(device_assignment=target).memory_analysis()
        words = ("argument", "output", "alias", "temp")
        found[program] = {space: [getattr(stats, f"{prefix}{word}_size_in_bytes") for word in words] for space, prefix in
                          (("hbm", ""), ("host", "host_"))}  # fmt: skip
    return found


if __name__ == "__main__":
    platform, topology, devices, config = sys.argv[1:]
    with open(config) as file:
        print(json.dumps(sizes_in_this_process(platform, topology, int(devices), file.read())))
