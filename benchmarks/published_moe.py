"""A mixture-of-experts decoder of the size of a published run, as plain JAX: 48 layers of width 6144, 128 experts of which 4 see each
token, 359.6 B parameters of which 22.6 B are active.

What is not published is chosen so that both counts come out: experts of width 3072 (gate, up, down), 48 heads of 128 with 12 of keys
and values, one shared expert of width 6144, a vocabulary of 128256. AdamW on float32 masters, bfloat16 compute, cuDNN attention, every
layer recomputed from its input. Experts are spread over all devices, everything else is FSDP. Each device sorts its tokens by expert
into slots of equal number (what is over is dropped, as with a capacity factor of 1), and two all-to-alls carry the slots to the
devices of their experts and back."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from forebay.training.models.attention import attention
from forebay.training.models.cross_entropy import cross_entropy

AXIS = "x"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Sizes of the model and of one step."""

    layers: int = 48
    model: int = 6144
    heads: int = 48
    kv_heads: int = 12
    head_dim: int = 128
    experts: int = 128
    chosen: int = 4
    expert_mlp: int = 3072
    shared_mlp: int = 6144
    vocab: int = 128256
    batch: int = 1024
    seq: int = 4096

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        idle = self.layers * (self.experts - self.chosen) * 3 * self.model * self.expert_mlp
        return sum(math.prod(s.shape) for s in jax.tree.leaves(shapes(self))) - idle

    @property
    def flops_per_token(self) -> float:
        """Of one forward and backward pass, nothing recomputed, attention counted causally."""
        weights = self.active_parameters - self.vocab * self.model
        return 6.0 * weights + 12.0 * self.layers * self.heads * self.head_dim * (self.seq + 1) / 2


def shapes(c: Moe):
    """The parameters."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layers = {
        "attn_norm": (c.model,), "mlp_norm": (c.model,), "wq": (c.model, q), "wk": (c.model, kv), "wv": (c.model, kv), "wo": (q, c.model),
        "router": (c.model, c.experts), "gate": (c.experts, c.model, c.expert_mlp), "up": (c.experts, c.model, c.expert_mlp),
        "down": (c.experts, c.expert_mlp, c.model), "shared_gate": (c.model, c.shared_mlp), "shared_up": (c.model, c.shared_mlp),
        "shared_down": (c.shared_mlp, c.model),
    }  # fmt: skip
    ends = {"embed": (c.vocab, c.model), "head": (c.model, c.vocab), "final_norm": (c.model,)}
    tree = {"layers": {name: (c.layers, *shape) for name, shape in layers.items()}, **ends}
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda s: isinstance(s, tuple))


def mesh_of(devices: int) -> AbstractMesh:
    return AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))


def specs(c: Moe):
    """Experts and the rows of every matrix over all devices, vectors everywhere; the embedding by its columns, so that a lookup is
    local."""

    def spec(path, leaf):
        if path[-1].key == "embed":
            return P(None, AXIS)
        stacked = path[0].key == "layers"
        return P(None, AXIS) if stacked and len(leaf.shape) > 2 else P(AXIS) if not stacked and len(leaf.shape) > 1 else P()

    return jax.tree_util.tree_map_with_path(spec, shapes(c))


def make_loss(c: Moe):
    """``loss(params, batch)`` with ``batch = {"tokens": int32 [batch, seq + 1]}``."""

    def loss(params, batch):
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def layer(h, w):
            return _layer(c, named(h, "layer_input"), w), None

        body = jax.checkpoint(layer, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        h = _spread(params["embed"].astype(jnp.bfloat16)[inputs])
        h = jax.lax.scan(body, h, params["layers"])[0]
        return cross_entropy(_norm(h, params["final_norm"]), params["head"], targets).mean()

    return loss


def _layer(c: Moe, h, w):
    batch, seq, _ = h.shape
    dot = lambda x, name: x @ w[name].astype(jnp.bfloat16)  # noqa: E731
    x = _norm(h, w["attn_norm"])
    q, k, v = (dot(x, name).reshape(batch, seq, -1, c.head_dim) for name in ("wq", "wk", "wv"))
    h = _spread(h + dot(attention(q, k, v, kernel="cudnn").reshape(batch, seq, -1), "wo"))
    x = _norm(h, w["mlp_norm"])
    shared = dot(jax.nn.silu(dot(x, "shared_gate")) * dot(x, "shared_up"), "shared_down")
    weights = [w[name].astype(jnp.bfloat16) for name in ("gate", "up", "down")]
    mesh = jax.sharding.get_abstract_mesh()
    rows = P(AXIS, None, None)
    run = jax.shard_map(
        lambda *args: _experts(c, mesh.size, *args), mesh=mesh, in_specs=(rows, P(), rows, rows, rows), out_specs=rows, check_vma=False
    )
    return _spread(h + shared + run(x, w["router"], *weights))


def _experts(c: Moe, devices: int, x, router, gate, up, down):
    """The experts' part for one device's tokens; ``gate``, ``up``, ``down`` are those of its own experts."""
    tokens = x.reshape(-1, c.model)
    count, capacity = tokens.shape[0] * c.chosen, tokens.shape[0] * c.chosen // c.experts
    scores, ids = jax.lax.top_k(jax.nn.softmax(tokens.astype(jnp.float32) @ router), c.chosen)
    order = jnp.argsort(ids.reshape(-1))  # assignments by expert
    expert = ids.reshape(-1)[order]
    place = jnp.arange(count) - jnp.searchsorted(expert, jnp.arange(c.experts))[expert]
    slot = jnp.where(place < capacity, expert * capacity + place, count)  # the last is for what is dropped
    token_of = jnp.zeros(count, jnp.int32).at[slot].set(order // c.chosen, mode="drop")
    slot_of = jnp.zeros(count, jnp.int32).at[order].set(slot)
    sent = tokens[token_of].reshape(c.experts, capacity, c.model)
    mine = jax.lax.all_to_all(sent, AXIS, 0, 1, tiled=True)  # [experts here, capacity of every device, model]
    product = lambda a, b: jnp.einsum("ecm,emf->ecf", a, b)  # noqa: E731
    done = product(jax.nn.silu(product(mine, gate)) * product(mine, up), down)
    back = jax.lax.all_to_all(done, AXIS, 1, 0, tiled=True).reshape(count, c.model)
    parts = back.at[slot_of.reshape(-1, c.chosen)].get(mode="fill", fill_value=0)  # [tokens, chosen, model]
    return jnp.einsum("tkm,tk->tm", parts, scores.astype(jnp.bfloat16)).reshape(x.shape)


def _norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * weight).astype(jnp.bfloat16)


def _spread(x):
    """Sequences over all devices."""
    return jax.lax.with_sharding_constraint(x, P(AXIS, *[None] * (x.ndim - 1)))
