"""The models of the runtime's tests: a small residual network with an embedding and a head, its layers scanned or written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import resident
from jax.ad_checkpoint import checkpoint_name

LAYERS, WIDTH, HIDDEN, WORDS, ROWS, LENGTH = 3, 8, 16, 23, 8, 3


def layer(x, weights):
    """One block; its input and its hidden values bear names."""
    x = checkpoint_name(x, "layer_input")
    hidden = checkpoint_name((x * weights["scale"]) @ weights["up"], "hidden")
    return x + jnp.tanh(hidden) @ weights["down"]


def scanned_loss(params, batch, *, wrap=lambda body: body, compute=None):
    x = params["embed"].astype(compute or params["embed"].dtype)[batch["x"]]
    body = wrap(lambda x, w: (layer(x, jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)), None))
    x, _ = jax.lax.scan(body, x, params["layers"])
    return cross_entropy(params, x, batch), {"mean": x.mean()}


def unrolled_loss(params, batch, *, wrap=lambda body: body, compute=None):
    x = params["embed"].astype(compute or params["embed"].dtype)[batch["x"]]
    body = wrap(lambda x, w: layer(x, jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)))
    for weights in params["layers"]:
        x = body(x, weights)
    return cross_entropy(params, x, batch), {"mean": x.mean()}


def cross_entropy(params, x, batch):
    logits = (x @ params["head"].astype(x.dtype)).astype(params["head"].dtype)
    chances = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chances, batch["y"][..., None], -1).mean()


def weights(dtype, seed=0):
    """Parameters with stacked layers."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: (random.normal(size=shape) * 0.3).astype(dtype)  # noqa: E731
    return {
        "embed": normal(WORDS, WIDTH),
        "layers": {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH), "scale": np.ones((LAYERS, WIDTH), dtype)},
        "head": normal(WIDTH, WORDS),
    }


def batch(step):
    """Words and the word that follows each: a map that can be learnt."""
    words = np.random.default_rng(100 + step).integers(0, WORDS, (ROWS, LENGTH), dtype=np.int32)
    return {"x": words, "y": (5 * words + 1) % WORDS}


def apart(params):
    """The same parameters with one dict per layer."""
    return params | {"layers": [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(LAYERS)]}


def scanned(dtype=np.float64, **how) -> resident.Program:
    return resident.Program(loss_fn=functools.partial(scanned_loss, **how), params=weights(dtype), batch=batch)


def unrolled(dtype=np.float64, **how) -> resident.Program:
    return resident.Program(loss_fn=functools.partial(unrolled_loss, **how), params=apart(weights(dtype)), batch=batch)


MODELS = {"scanned": scanned, "unrolled": unrolled}
