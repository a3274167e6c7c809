"""The decoder against an independent one written plainly, in float64; its shapes, masks, counts and shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from forebay.errors import InputError, UnsupportedError
from forebay.training.models import Rope, llama, preset, preset_names

pytestmark = pytest.mark.oldest

TINY = [n for n in preset_names() if n.startswith("tiny")]
NAMES = ["layer_input", "q", "k", "v", "attn_context", "attn_stats", "attn_out", "mlp_gate", "mlp_up", "mlp_out"]


def small(name, **change):
    return dataclasses.replace(preset(name), **({"layers": 2, "vocab": 64, "window": preset(name).window and 7} | change))


def tokens_of(config, batch=2, seq=21):
    return {"tokens": np.random.default_rng(7).integers(0, config.vocab, (batch, seq + 1), np.int32)}


def params_of(config):
    """Random numbers everywhere, norms and biases too: made by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    dtype = "float64" if config.dtype == "float64" else "float32"

    def make(path, x):
        return (0.1 * rng.standard_normal(x.shape) + path[-1].key.endswith("norm")).astype(dtype)

    return jax.tree_util.tree_map_with_path(make, llama.param_shapes(config))


def plain_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def plain_rotate(x, theta):
    """Rotation as multiplication of complex numbers, position by position."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([z.real, z.imag], -1)


def plain_loss(config, params, tokens):
    """One sequence at a time, one head at a time, in numpy. Only the default rotation."""
    assert config.rope.kind == "default"
    total = 0.0
    for row in tokens:
        h = params["embed"][row[:-1]]
        behind = np.arange(len(h))[:, None] - np.arange(len(h))[None, :]
        allowed = (behind >= 0) & (behind < (config.window or len(h)))
        for n in range(config.layers):
            w = {k: v[n] for k, v in params["layers"].items()}
            x = plain_norm(h, w["attn_norm"], config.norm_eps)
            q, k, v = (x @ w["w" + c] + w.get("b" + c, 0) for c in "qkv")
            q, k, v = (y.reshape(len(h), -1, config.head_dim) for y in (q, k, v))
            if config.qk_norm:
                q, k = plain_norm(q, w["q_norm"], config.norm_eps), plain_norm(k, w["k_norm"], config.norm_eps)
            q, k = plain_rotate(q, config.rope.theta), plain_rotate(k, config.rope.theta)
            heads = []
            for i in range(config.heads):
                j = i * config.kv_heads // config.heads
                e = np.where(allowed, np.exp(q[:, i] @ k[:, j].T / np.sqrt(config.head_dim)), 0)
                heads.append(e / e.sum(-1, keepdims=True) @ v[:, j])
            h = h + np.concatenate(heads, -1) @ w["wo"]
            x = plain_norm(h, w["mlp_norm"], config.norm_eps)
            gate = x @ w["w_gate"]
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w["w_up"])) @ w["w_down"]
        z = plain_norm(h, params["final_norm"], config.norm_eps) @ params.get("head", params["embed"].T)
        total += (np.log(np.exp(z).sum(-1)) - z[np.arange(len(h)), row[1:]]).sum()
    return total / tokens[:, 1:].size


@pytest.mark.parametrize(("name", "change"), [("tiny-qwen", {"tied": True}), ("tiny-mistral", {})])
def test_loss_and_gradient_equal_a_plain_decoder(name, change):
    with jax.enable_x64(True):
        config = small(name, dtype="float64", **change)
        params, batch = params_of(config), tokens_of(config)
        (loss, aux), grads = jax.jit(jax.value_and_grad(llama.make_loss(config), has_aux=True))(params, batch)
        assert int(aux["tokens"]) == 42
        np.testing.assert_allclose(loss, plain_loss(config, params, batch["tokens"]), rtol=1e-11)
        rng = np.random.default_rng(1)
        direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
        sides = [jax.tree.map(lambda x, d, s=s: x + s * d, params, direction) for s in (1e-5, -1e-5)]
        slope = np.subtract(*(plain_loss(config, p, batch["tokens"]) for p in sides)) / 2e-5
        ours = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
        np.testing.assert_allclose(ours, slope, rtol=1e-6)


def test_llama3_rotation_stretches_long_waves_only():
    rope = preset("llama-3.1-8b").rope
    plain = llama._frequencies(Rope(theta=rope.theta), 128)
    scaled = llama._frequencies(rope, 128)
    wavelength = 2 * np.pi / plain
    assert np.all(scaled[wavelength < 8192 / 4] == plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-12)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert 0 < between.sum() < 10
    assert np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))
    np.testing.assert_allclose(llama._frequencies(Rope(kind="linear", factor=4.0), 16) * 4, llama._frequencies(Rope(), 16))


def test_a_fresh_model_knows_nothing_and_learns():
    config = preset("tiny-gqa")
    params = jax.jit(llama.init_params, static_argnums=0)(config, jax.random.key(0))
    batch = tokens_of(config, batch=4, seq=32)
    step = jax.jit(jax.value_and_grad(llama.make_loss(config), has_aux=True))
    (first, _), _ = step(params, batch)
    assert abs(float(first) - np.log(config.vocab)) < 0.1
    for _ in range(10):
        (loss, _), grads = step(params, batch)
        params = jax.tree.map(lambda p, g: np.asarray(p) - 0.5 * np.asarray(g), params, grads)
    assert float(loss) < float(first) - 0.5


def test_half_precision_follows_full_precision():
    config = small("tiny-gqa")
    params, batch = params_of(config), tokens_of(config)
    losses, norms = [], []
    for dtype in ("float32", "bfloat16"):
        f = jax.jit(jax.value_and_grad(llama.make_loss(dataclasses.replace(config, dtype=dtype)), has_aux=True))
        (loss, _), grads = f(params, batch)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        losses.append(float(loss))
        norms.append(np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads))))
    np.testing.assert_allclose(*losses, rtol=5e-3)
    np.testing.assert_allclose(*norms, rtol=3e-2)


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-tied"])
def test_logits_agree_with_the_loss_and_look_back_only(name):
    config = small(name)
    params, batch = params_of(config), tokens_of(config)
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    score = jax.jit(lambda params, tokens: llama.logits(config, params, tokens))
    z = np.asarray(score(params, inputs))
    assert z.shape == (2, 21, config.vocab)
    nll = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(jax.jit(llama.make_loss(config))(params, batch)[0], nll.mean(), rtol=1e-5)
    inputs[:, 15:] = 0
    later = score(params, inputs)
    np.testing.assert_allclose(later[:, :15], z[:, :15], rtol=1e-5, atol=1e-6)


def test_negative_targets_are_left_out():
    config = small("tiny")
    params, tokens = params_of(config), tokens_of(config)["tokens"]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = jax.jit(llama.make_loss(config))
    early = targets.copy()
    early[:, 9:] = -100
    late = targets.copy()
    late[:, :9] = -1
    (first, count), (second, rest) = (loss(params, {"inputs": inputs, "targets": t}) for t in (early, late))
    assert (int(count["tokens"]), int(rest["tokens"])) == (18, 24)
    np.testing.assert_allclose((18 * first + 24 * second) / 42, loss(params, {"inputs": inputs, "targets": targets})[0], rtol=1e-5)
    nothing, none = loss(params, {"inputs": inputs, "targets": np.full_like(targets, -1)})
    assert (float(nothing), int(none["tokens"])) == (0.0, 0)


def test_the_mesh_changes_nothing_but_where_the_work_is():
    config = small("tiny-gqa", model=128)
    params, batch = params_of(config), tokens_of(config, batch=8)
    f = jax.jit(jax.value_and_grad(llama.make_loss(config), has_aux=True))
    (alone, _), wanted = f(params, batch)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def split(x, axis):
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if i == axis else None for i in range(x.ndim))))

    where = jax.tree.map(lambda x: split(x, 1 if x.ndim > 1 and x.shape[1] % 8 == 0 else None), params)
    with jax.set_mesh(mesh):
        (loss, aux), grads = f(jax.device_put(params, where), jax.device_put(batch, split(batch["tokens"], 0)))
    assert int(aux["tokens"]) == 8 * 21
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def test_explicit_axes_are_refused_by_name():
    config = small("tiny")
    with (
        jax.set_mesh(jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))),
        pytest.raises(UnsupportedError, match=r"has Explicit axes.*axis_types"),
    ):
        jax.eval_shape(llama.make_loss(config), llama.param_shapes(config), {"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)})


def test_every_name_worth_saving_is_bound_in_the_layer():
    config = small("tiny-qwen")
    loss, _, params, batch = llama.make(config, batch=2, seq=16)
    text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, batch))
    assert [n for n in NAMES if f"name={n}\n" not in text and f"name={n}]" not in text] == []


def test_make_gives_shapes_only():
    loss, optimizer, params, batch = llama.make(preset("llama-3.1-405b"), batch=2, seq=64)
    assert batch["tokens"].shape == (2, 65)
    assert params["layers"]["wk"].shape == (126, 16384, 1024)
    assert jax.eval_shape(loss, params, batch)[0].shape == ()
    assert len(jax.tree.leaves(jax.eval_shape(optimizer.init, params))) > len(jax.tree.leaves(params))
    with pytest.raises(InputError, match="seq is 0; it must be a whole number of at least 1"):
        llama.make(preset("tiny"), batch=1, seq=0)


def test_init_makes_what_param_shapes_says():
    for name in TINY:
        config = small(name)
        made = jax.eval_shape(lambda key, c=config: llama.init_params(c, key), jax.random.key(0))
        assert made == llama.param_shapes(config)


def test_flops_count_weights_and_visible_positions():
    config = preset("llama-2-7b")
    multiplied = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert llama.train_flops_per_token(config, 4096) == 6 * multiplied + 12 * 32 * 4096 * 4097 / 2
    narrow = preset("mistral-7b")
    assert llama.train_flops_per_token(narrow, 4096) == llama.train_flops_per_token(dataclasses.replace(narrow, window=None), 4096)
    assert llama.train_flops_per_token(narrow, 32768) < llama.train_flops_per_token(dataclasses.replace(narrow, window=None), 32768)
    tied = dataclasses.replace(preset("tiny-tied"), tied=False)
    assert llama.train_flops_per_token(tied, 64) == llama.train_flops_per_token(preset("tiny-tied"), 64)


def test_tokens_outside_the_vocabulary_are_named():
    config = preset("tiny")
    llama.check_tokens(config, np.array([[0, 319]], np.uint16))
    with pytest.raises(InputError, match=r"data\.txt: id 320 at position 2 is outside the vocabulary of tiny \(0 to 319; 2 such ids\)"):
        llama.check_tokens(config, np.array([[0, 5], [320, -1]]), "data.txt")
    with pytest.raises(InputError, match="token ids are float32"):
        llama.check_tokens(config, np.zeros(3, np.float32))
