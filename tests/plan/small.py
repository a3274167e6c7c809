"""A workload for the tests of plans: a scanned stack with named residuals, a table, a scalar."""

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import forebay as fb

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 256, 512, 16, 8


def loss_fn(params, batch):
    x = params["embed"][batch["x"]]

    def body(x, w):
        x = checkpoint_name(x, "layer_input")
        size = checkpoint_name(jnp.sqrt(jnp.mean(x * x)), "size")
        return x + checkpoint_name(jnp.tanh(x @ w["up"] / size), "hidden") @ w["down"], None

    x, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean(x**2) * params["scale"]


def shapes(width=WIDTH, rows=ROWS):
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {
        "embed": like(WORDS, width),
        "layers": {"up": like(LAYERS, width, 2 * width), "down": like(LAYERS, 2 * width, width)},
        "scale": like(),
    }
    return params, {"x": jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)}


def traced(optimizer=None, **how):
    return fb.trace(loss_fn, optimizer or optax.adamw(1e-3), *shapes(**how), name="small")
