"""The programs behind published step times: Llama-2 as MaxText trains it on GPUs, rebuilt for the deviceless compiler.

float32 parameters and AdamW moments, sharded over ``fsdp`` and replicated over ``data``; bfloat16 compute, weights cast before they
are gathered; cuDNN attention; clipping by the global norm; the logits whole, in float32. ``kept`` names what each layer's
rematerialisation keeps, by MaxText's names turned into forebay's. FP8 quantises the inputs and the output gradient of every
projection (e4m3, e5m2) with given scales and takes the maximum of each, as delayed scaling does; the history of maxima (a few
numbers) is left out."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from forebay.training.models.attention import attention
from forebay.training.models.presets import preset

MINIMAL_FLASH = ("q", "k", "v", "attn_context", "attn_stats", "attn_out", "mlp_gate", "mlp_up", "mlp_out")
DOTS_BUT_MLP = ("q", "k", "v", "attn_out")
DOTS_BUT_MLP_IN = (*DOTS_BUT_MLP, "mlp_out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One training step of a preset on a mesh of data x fsdp devices."""

    model: str
    seq: int
    sequences_per_device: int
    fsdp: int
    data: int = 1
    kept: tuple[str, ...]
    scanned: bool = True
    fp8: bool = False

    @property
    def devices(self) -> int:
        return self.fsdp * self.data

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices."""
        return self.seq * self.sequences_per_device * self.devices


def build(program: Program):
    """``(jitted step, arguments, mesh)``; the arguments are shapes with shardings."""
    mesh = AbstractMesh((program.data, program.fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = _params(program, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95))
    state = _like(jax.eval_shape(optimizer.init, params), params, mesh)
    tokens = jax.ShapeDtypeStruct(
        (program.sequences_per_device * program.devices, program.seq + 1), jnp.int32, sharding=NamedSharding(mesh, P(("data", "fsdp")))
    )
    loss = _loss(program, mesh)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    outputs = (*(jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (params, state)), None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs), (params, state, tokens), mesh


def _params(program: Program, mesh: AbstractMesh):
    c = preset(program.model)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = {
        "attn_norm": ((c.model,), None), "mlp_norm": ((c.model,), None), "wq": ((c.model, q), 0), "wk": ((c.model, kv), 0),
        "wv": ((c.model, kv), 0), "wo": ((q, c.model), 1), "w_gate": ((c.model, c.mlp), 0), "w_up": ((c.model, c.mlp), 0),
        "w_down": ((c.mlp, c.model), 1),
    }  # fmt: skip
    if program.fp8:
        layer["scale"] = ((), None)

    def leaf(shape, axis, layers=None):
        spec = [None] * len(shape)
        if axis is not None:
            spec[axis] = "fsdp"
        shape, spec = ((layers, *shape), (None, *spec)) if layers else (shape, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    if program.scanned:
        layers = {name: leaf(shape, axis, c.layers) for name, (shape, axis) in layer.items()}
    else:
        layers = [{name: leaf(shape, axis) for name, (shape, axis) in layer.items()} for _ in range(c.layers)]
    ends = {"embed": leaf((c.vocab, c.model), 1), "head": leaf((c.model, c.vocab), 0), "final_norm": leaf((c.model,), None)}
    return {"layers": layers, **ends}


def _like(state, params, mesh: AbstractMesh):
    """Optimizer state laid out as the parameters are; scalars everywhere."""
    layouts = {jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        found = next((layout for tail, layout in layouts.items() if name.endswith(tail)), NamedSharding(mesh, P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found)

    return jax.tree_util.tree_map_with_path(place, state)


def _loss(program: Program, mesh: AbstractMesh):
    c = preset(program.model)
    policy = jax.checkpoint_policies.save_only_these_names(*program.kept)

    def spread(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(("data", "fsdp"), *[None] * (x.ndim - 1))))

    body = jax.checkpoint(lambda h, w: _layer(c, h, w, spread, program.fp8), policy=policy, prevent_cse=not program.scanned)

    def loss(params, tokens):
        h = spread(params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]])
        if program.scanned:
            h = jax.lax.scan(lambda h, w: (body(h, w), None), h, params["layers"])[0]
        else:
            for weights in params["layers"]:
                h = body(h, weights)
        logits = spread(_norm(h, params["final_norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def _layer(c, h, w, spread, fp8: bool):
    dot = (
        (lambda x, name: _fp8_dot(x, w[name].astype(jnp.bfloat16), w["scale"])) if fp8 else lambda x, name: x @ w[name].astype(jnp.bfloat16)
    )
    batch, seq, _ = h.shape
    x = _norm(h, w["attn_norm"])
    q, k, v = (dot(x, name).reshape(batch, seq, -1, c.head_dim) for name in ("wq", "wk", "wv"))
    q, k, v = checkpoint_name(_rotate(q), "q"), checkpoint_name(_rotate(k), "k"), checkpoint_name(v, "v")
    context = attention(q, k, v, kernel="cudnn").reshape(batch, seq, -1)
    h = spread(h + checkpoint_name(dot(context, "wo"), "attn_out"))
    x = _norm(h, w["mlp_norm"])
    gate, up = checkpoint_name(dot(x, "w_gate"), "mlp_gate"), checkpoint_name(dot(x, "w_up"), "mlp_up")
    return spread(h + checkpoint_name(dot(jax.nn.silu(gate) * up, "w_down"), "mlp_out"))


def _norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * weight).astype(jnp.bfloat16)


def _rotate(x):
    width = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(width) / width)
    sin, cos = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _quantised(x, dtype, scale):
    """``x`` through an 8-bit type and back, in the form that XLA turns into an FP8 matmul."""
    largest = float(jnp.finfo(dtype).max)
    narrow = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype)
    return narrow.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


@jax.custom_vjp
def _narrow_in(x, scale):
    return _quantised(x, jnp.float8_e4m3fn, scale)


def _largest(x, scale):
    """The tensor's largest magnitude over all devices: with delayed scaling it travels to the optimizer as the gradient of the scale."""
    return jnp.max(jnp.abs(x)).astype(scale.dtype)


_narrow_in.defvjp(lambda x, scale: (_narrow_in(x, scale), _largest(x, scale)), lambda largest, g: (g, largest))


@jax.custom_vjp
def _narrow_gradient(x, scale):
    return x


_narrow_gradient.defvjp(lambda x, s: (x, s), lambda s, g: (_quantised(g, jnp.float8_e5m2, s), _largest(g, s)))


def _fp8_dot(x, w, scale):
    return _narrow_gradient(_narrow_in(x, scale) @ _narrow_in(w, scale), scale)
