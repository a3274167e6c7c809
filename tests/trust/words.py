"""A small model of the tests of trust: a residual network over words, its layers scanned, in any dtype."""

import functools

import jax
import jax.numpy as jnp

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 8, 16, 4, 3
EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}


def loss(params, batch, key=None, *, compute=None, extra=None):
    x = params["embed"].astype(compute or params["embed"].dtype)[batch["x"]]
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)

    def body(x, w):
        return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), None

    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = (x @ params["head"].astype(x.dtype)).astype(params["head"].dtype)
    value = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1).mean()
    return value if extra is None else (value, (None, {"calls": extra["calls"] + 1, "mean": 0.9 * extra["mean"] + 0.1 * logits.mean()}))


def shapes(dtype=jnp.float32, layers=LAYERS, width=WIDTH):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    stacks = {"up": shape((layers, width, 2 * width)), "down": shape((layers, 2 * width, width))}
    return {"embed": shape((WORDS, width)), "layers": stacks, "head": shape((width, WORDS))}


def batch(rows=ROWS):
    return {name: jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32) for name in ("x", "y")}
