"""A Llama-family decoder: parameters as nested dicts, layers stacked on a leading axis and scanned.

    h = embed[tokens]
    for each layer:   h += attention(rmsnorm(h)) wo;   h += (silu(g) * u) w_down,  g, u = rmsnorm(h) w_gate, w_up
    loss = mean of cross_entropy(rmsnorm(h), head, targets)

Parameters are float32 masters. A layer casts each weight to the compute dtype inside the scanned body, at its use: under FSDP the
gather then moves the narrow copy, and a weight that waits in host memory can be fetched inside the body.

Every scanned body is rematerialised and saves nothing but its carry, as written ("full recompute"); what to keep is the plan's
choice. The values worth keeping are named before their first use: ``layer_input q k v attn_context attn_stats attn_out mlp_gate
mlp_up mlp_out``. q and k are named after the rotation, or, with qk-norm, before the norm, whose derivative needs its input.

Shapes: tokens [batch, seq]; h [batch, seq, model]; projections [layers, in, out].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as named

from forebay.errors import InputError
from forebay.training.models.attention import attention
from forebay.training.models.config import LlamaConfig, Rope
from forebay.training.models.cross_entropy import cross_entropy
from forebay.training.models.layout import current

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, PRNGKeyArray

    Params = dict[str, Any]
    Batch = dict[str, Array]

FULL_RECOMPUTE = jax.checkpoint_policies.nothing_saveable
_INIT_SCALE = 0.02


def param_shapes(config: LlamaConfig) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s, in the tree that `init_params` returns."""
    c, n, dtype = config, config.layers, jnp.dtype("float64" if config.dtype == "float64" else "float32")
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layers = {
        "attn_norm": (n, c.model), "wq": (n, c.model, q), "wk": (n, c.model, kv), "wv": (n, c.model, kv), "wo": (n, q, c.model),
        "mlp_norm": (n, c.model), "w_gate": (n, c.model, c.mlp), "w_up": (n, c.model, c.mlp), "w_down": (n, c.mlp, c.model),
    }  # fmt: skip
    if c.qkv_bias:
        layers |= {"bq": (n, q), "bk": (n, kv), "bv": (n, kv)}
    if c.qk_norm:
        layers |= {"q_norm": (n, c.head_dim), "k_norm": (n, c.head_dim)}
    shapes = {"embed": (c.vocab, c.model), "layers": layers, "final_norm": (c.model,)}
    if not c.tied:
        shapes["head"] = (c.model, c.vocab)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))


def init_params(config: LlamaConfig, key: PRNGKeyArray) -> Params:
    """Random parameters: normal weights of deviation 0.02 (0.02 / sqrt(2 layers) into the residual stream), unit norms, zero biases.

    Each leaf has its own key, folded from its place in the tree, so a leaf can be made alone and wherever it will live.
    """

    def make(path, shape, index):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape.shape, shape.dtype)
        if name in ("bq", "bk", "bv"):
            return jnp.zeros(shape.shape, shape.dtype)
        scale = _INIT_SCALE / math.sqrt(2 * config.layers) if name in ("wo", "w_down") else _INIT_SCALE
        return scale * jax.random.normal(jax.random.fold_in(key, index), shape.shape, shape.dtype)

    leaves, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config))
    return jax.tree.unflatten(tree, [make(path, shape, i) for i, (path, shape) in enumerate(leaves)])


def parameter_count(config: LlamaConfig) -> int:
    """How many numbers are trained; a tied output matrix counts once, as published counts do."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(param_shapes(config)))


def train_flops_per_token(config: LlamaConfig, seq: int) -> float:
    """Floating-point operations per token of one forward and backward pass, nothing recomputed.

    Six per weight that multiplies (the output matrix, not the embedding table), and twelve per head dimension and *visible* position
    for attention: counted causally, about seq / 2 positions, fewer with a window.
    """
    table = config.vocab * config.model
    norms = sum(math.prod(s.shape) for s in jax.tree.leaves(param_shapes(config)) if len(s.shape) < 2)
    small = sum(math.prod(s.shape) for k, s in param_shapes(config)["layers"].items() if len(s.shape) == 2)
    weights = parameter_count(config) - norms - small - (0 if config.tied else table)
    window = min(config.window or seq, seq)
    visible = (window * (window + 1) / 2 + (seq - window) * window) / seq
    return 6.0 * weights + 12.0 * config.layers * config.heads * config.head_dim * visible


def hidden(
    config: LlamaConfig, params: Params, tokens: Int[Array, "batch seq"], policy: Callable = FULL_RECOMPUTE
) -> Float[Array, "batch seq model"]:
    """The last hidden states, after the final norm, in the compute dtype. ``policy`` is of `jax.checkpoint_policies`."""
    rotation = _rotation(config, jnp.arange(tokens.shape[1]))

    def layer(h, weights):
        return _layer(config, named(h, "layer_input"), weights, rotation), None

    # Inside a scan no expression is shared with the backward pass, so the barrier against that is not needed.
    body = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    h, _ = jax.lax.scan(body, _embed(config, params["embed"], tokens), params["layers"])
    return _rms_norm(h, params["final_norm"], config.norm_eps)


def logits(config: LlamaConfig, params: Params, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
    """Scores of every next token, float32. The whole [batch, seq, vocab] array: for sampling and tests, not for training."""
    h = hidden(config, params, tokens)
    wide = jnp.promote_types(h.dtype, jnp.float32)
    return jnp.einsum("bsd,dv->bsv", h, _head(params).astype(h.dtype), preferred_element_type=wide)


def make_loss(config: LlamaConfig, policy: Callable = FULL_RECOMPUTE) -> Callable[[Params, Batch], tuple[Array, dict[str, Array]]]:
    """``loss(params, batch) -> (mean loss per token, {"tokens": count})``; ``policy`` says what a layer keeps for the backward pass.

    ``batch`` is ``{"tokens": int32 [batch, seq + 1]}``, or ``{"inputs", "targets"}`` of [batch, seq] each, where a negative target is
    left out of the mean. Ids must be below the vocabulary: see `check_tokens`.
    """

    def loss(params, batch):
        if "tokens" in batch:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        else:
            inputs, targets = batch["inputs"], batch["targets"]
        losses = cross_entropy(hidden(config, params, inputs, policy), _head(params), targets)
        counted = targets >= 0
        tokens = counted.sum(dtype=jnp.int32)
        return jnp.where(counted, losses, 0).sum() / jnp.maximum(tokens, 1), {"tokens": tokens}

    return loss


def make(config: LlamaConfig, *, batch: int, seq: int, optimizer: Any = None):
    """``(loss_fn, optimizer, params, batch)`` for ``forebay.trace``; the last two are shapes, nothing is allocated.

    ``optimizer`` is any Optax transformation; by default AdamW with the moments usual for language models.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if optimizer is None:
        import optax  # not at the top: only this default needs it

        optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return make_loss(config), optimizer, param_shapes(config), {"tokens": jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)}


def check_tokens(config: LlamaConfig, tokens: Any, where: str = "tokens"):
    """Every id must be a whole number in the vocabulary: a gather beyond the table does not fail, it trains on the wrong row.

    Raises:
        InputError: not integers, or an id outside 0 .. vocab - 1, with its position in ``where``.
    """
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"{where}: token ids are {tokens.dtype}; they must be integers")
    bad = np.flatnonzero((tokens < 0) | (tokens >= config.vocab))
    if bad.size:
        first = int(bad[0])
        raise InputError(
            f"{where}: id {int(tokens.flat[first])} at position {first} is outside the vocabulary of {config.name} "
            f"(0 to {config.vocab - 1}; {bad.size} such ids). Use the model's own tokenizer, or a model with a larger vocabulary"
        )


def _head(params: Params) -> Array:
    return params["head"] if "head" in params else params["embed"].T


def _embed(config: LlamaConfig, table: Array, tokens: Array) -> Array:
    """Rows of the table, cast after the lookup. On a mesh every device looks up all tokens in its own columns, then the batch is
    exchanged for the columns: otherwise the gradient of the table is a whole copy on every device."""
    layout = current(tokens.shape[0])
    rows = layout.constrain(table[layout.constrain(tokens, None, None)], None, None, layout.batch)
    return layout.constrain(rows.astype(config.dtype), layout.batch, None, None)


def _layer(config: LlamaConfig, h: Array, weights: Params, rotation: tuple[Array, Array]) -> Array:
    w = {k: v.astype(config.dtype) for k, v in weights.items()}
    batch, seq, _ = h.shape
    context = attention(*_qkv(config, h, w, rotation), kernel=config.kernel, window=config.window)
    h = h + named(context.reshape(batch, seq, -1) @ w["wo"], "attn_out")
    x = _rms_norm(h, w["mlp_norm"], config.norm_eps)
    gate, up = named(x @ w["w_gate"], "mlp_gate"), named(x @ w["w_up"], "mlp_up")
    return h + named((jax.nn.silu(gate) * up) @ w["w_down"], "mlp_out")


def _qkv(config: LlamaConfig, h: Array, w: Params, rotation: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    x = _rms_norm(h, w["attn_norm"], config.norm_eps)
    q, k, v = x @ w["wq"], x @ w["wk"], x @ w["wv"]
    if config.qkv_bias:
        q, k, v = q + w["bq"], k + w["bk"], v + w["bv"]
    q, k, v = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in (q, k, v))
    if config.qk_norm:
        q = _rms_norm(named(q, "q"), w["q_norm"], config.norm_eps)
        k = _rms_norm(named(k, "k"), w["k_norm"], config.norm_eps)
        return _rotate(q, rotation), _rotate(k, rotation), named(v, "v")
    return named(_rotate(q, rotation), "q"), named(_rotate(k, rotation), "k"), named(v, "v")


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def _frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float64 [head_dim / 2]. Llama 3.1's stretch is in Grattafiori et al., 2024."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * frequencies / (2 * np.pi)
        blend = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return frequencies * (blend + (1 - blend) / rope.factor)
    return frequencies


def _rotation(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of each position's angles, float32 (float64) [seq, 1, head_dim / 2], made once for all layers."""
    wide = jnp.promote_types(config.dtype, jnp.float32)
    angles = positions.astype(wide)[:, None, None] * jnp.asarray(_frequencies(config.rope, config.head_dim), wide)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate pairs (i, i + head_dim / 2), the order of Hugging Face checkpoints."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
