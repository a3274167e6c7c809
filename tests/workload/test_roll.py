"""A rolled program computes what the unrolled one computes: values and gradients, for the ways in which people write their layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from forebay.workload.repeats import survey
from forebay.workload.roll import roll

pytestmark = pytest.mark.oldest
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # the programs are tiny, their compiles are not


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def weights(*shapes_of_layers, seed=0):
    """One dict of small random leaves per layer."""
    random = np.random.default_rng(seed)
    return [{name: random.normal(size=shape) * 0.4 for name, shape in shapes.items()} for shapes in shapes_of_layers]


def array(*shape, seed=7):
    return np.random.default_rng(seed).normal(size=shape)


def flat_program(loss, params, rest):
    leaves, tree = jax.tree.flatten(params)

    def flat(*arguments):
        return loss(jax.tree.unflatten(tree, arguments[: len(leaves)]), *arguments[len(leaves) :])

    return flat, leaves, jax.make_jaxpr(flat)(*leaves, *rest)


def check(loss, params, *rest, counts, grouped=None):
    """Roll, compare value and gradients of every leaf with the unrolled program, and give (survey, rolled, storage)."""
    flat, leaves, jaxpr = flat_program(loss, params, rest)
    found = survey(jaxpr, [()] * len(leaves) + [None] * len(rest))
    assert [repeat.count for repeat in found.repeats] == counts, found
    if grouped is not None:
        assert len({leaf for repeat in found.repeats for group in repeat.groups for leaf in group}) == grouped, found
    rolled, storage = roll(jaxpr, found.repeats)

    def both(leaves, rest):
        unrolled = jax.value_and_grad(lambda leaves: flat(*leaves, *rest))(leaves)
        return unrolled, jax.value_and_grad(lambda leaves: rolled(storage.stack([*leaves, *rest]))[0])(leaves)

    (want, want_gradients), (got, got_gradients) = jax.jit(both, compiler_options=QUICK)(leaves, rest)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    for got_gradient, want_gradient in zip(got_gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-12, atol=1e-12)
    return found, rolled, storage


def scans(rolled, storage, *arguments):
    jaxpr = jax.make_jaxpr(rolled)(jax.eval_shape(storage.stack, arguments))
    return jaxpr, [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]


def mlp(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean()


MLP = {"w": (4, 4), "b": (4,)}


def norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def llama_block(x, layer, cos, sin, mask):
    batch, seq, width = x.shape
    h = norm(x, layer["n1"])
    q, k, v = [(h @ layer[name]).reshape(batch, seq, 2, width // 2) for name in ("q", "k", "v")]

    def rotate(t):
        return t * cos + jnp.concatenate([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin

    q = checkpoint_name(rotate(q), "q")
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, rotate(k)), -1e30)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(batch, seq, width) @ layer["o"]
    h = norm(x, layer["n2"])
    return x + (jax.nn.silu(h @ layer["g"]) * (h @ layer["u"])) @ layer["d"]


def llama_params(layers, width=8, hidden=12):
    shapes = {"n1": (width,), "n2": (width,), **dict.fromkeys("qkvo", (width, width))}
    shapes |= {"g": (width, hidden), "u": (width, hidden), "d": (hidden, width)}
    (outer,) = weights({"embedding": (11, width), "norm": (width,), "head": (width, 11)}, seed=3)
    return {**outer, "layers": weights(*[shapes] * layers)}


def llama(block):
    def loss(params, tokens):
        x = params["embedding"][tokens]
        angles = jnp.arange(tokens.shape[1])[:, None] / (10.0 ** jnp.arange(2)[None])
        angles = jnp.concatenate([angles, angles], -1)[:, None, :]
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        for layer in params["layers"]:
            x = block(x, layer, jnp.cos(angles), jnp.sin(angles), mask)
        logits = jax.nn.log_softmax(norm(x, params["norm"]) @ params["head"])
        return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean()

    return loss


TOKENS = np.random.default_rng(1).integers(0, 11, (2, 5))


def checkpoint_each_call(*arguments):
    policy = jax.checkpoint_policies.save_only_these_names("q")  # a new policy object for every layer
    return jax.checkpoint(llama_block, policy=policy, prevent_cse=False)(*arguments)


def test_plain_mlp_stores_each_part_stacked():
    _, rolled, storage = check(mlp, weights(*[MLP] * 5), array(3, 4), counts=[5])
    assert storage.slots == ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9), (10,))
    leaves = jax.tree.leaves(weights(*[MLP] * 5))
    jaxpr, (scan,) = scans(rolled, storage, *leaves, array(3, 4))
    assert set(jaxpr.jaxpr.invars[:2]) < set(scan.invars), "stacks must reach the scan untouched: they may live in host memory"


@pytest.mark.parametrize(
    "block", [llama_block, jax.jit(llama_block), jax.checkpoint(llama_block), checkpoint_each_call], ids=["plain", "jit", "remat", "policy"]
)
def test_llama(block):
    check(llama(block), llama_params(3), TOKENS, counts=[3], grouped=27)


def test_casts_before_the_loop_join_the_blocks():
    def loss(params, x):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return mlp(params, x.astype(jnp.float32)).astype(jnp.float64)

    check(loss, weights(*[MLP] * 4), array(3, 4), counts=[4], grouped=8)


def test_weight_decay_over_all_leaves_is_a_second_loop_on_the_same_stacks():
    def loss(params, x):
        return mlp(params, x) + 1e-3 * sum(jax.tree.leaves(jax.tree.map(lambda leaf: (leaf**2).sum(), params)))

    check(loss, weights(*[MLP] * 4), array(3, 4), counts=[4, 4], grouped=8)


def test_alternating_blocks_roll_in_pairs():
    def loss(params, x):
        for number, layer in enumerate(params):
            x = (jnp.tanh if number % 2 else jnp.sin)(x @ layer["w"])
        return x.sum()

    found, *_ = check(loss, weights(*[{"w": (4, 4)}] * 6), array(3, 4), counts=[3], grouped=6)
    assert len(found.repeats[0].groups) == 2


def test_alternating_constants_are_stacked_once_each():
    masks = [np.tril(np.ones((4, 4))), np.triu(np.ones((4, 4)))]

    def loss(params, x):
        for number, layer in enumerate(params):
            x = jnp.tanh(x @ (layer["w"] * masks[number % 2]))
        return x.sum()

    check(loss, weights(*[{"w": (4, 4)}] * 5), array(3, 4), counts=[5], grouped=5)


def test_encoder_and_decoder_are_two_loops():
    def loss(params, x, y):
        for layer in params["encoder"]:
            x = jnp.tanh(x @ layer["w"])
        for layer in params["decoder"]:
            y = jnp.sin(y @ layer["w"] + (y @ x.T) @ x @ layer["c"])
        return (y**2).sum()

    params = {"encoder": weights(*[{"w": (4, 4)}] * 4), "decoder": weights(*[{"w": (4, 4), "c": (4, 4)}] * 3, seed=2)}
    check(loss, params, array(3, 4), array(3, 4, seed=9), counts=[4, 3], grouped=10)


def test_residual_stage_with_batch_statistics():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params, x):
        x, statistics = convolve(x, params["stem"]), []
        for layer in params["stage"]:
            h = convolve(x, layer["w"])
            mean, variance = h.mean((0, 1, 2)), h.var((0, 1, 2))
            x = jax.nn.relu(x + (h - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"])
            statistics.append((mean, variance))
        return (x.mean((1, 2)) @ params["head"]).sum() + 0.01 * sum((s**2).sum() for pair in statistics for s in pair)

    (outer,) = weights({"stem": (3, 3, 2, 4), "head": (4, 2)}, seed=5)
    params = {**outer, "stage": weights(*[{"w": (3, 3, 4, 4), "scale": (4,)}] * 3)}
    found, *_ = check(loss, params, array(2, 5, 5, 2), counts=[3], grouped=6)
    assert len(found.repeats[0].collected) == 2


def layer_keys(kind, key, count):
    if kind == "fold_in":
        return [jax.random.fold_in(key, number) for number in range(count)]
    if kind == "chain":
        keys = []
        for _ in range(count):
            key, sub = jax.random.split(key)
            keys.append(sub)
        return keys
    return jax.random.split(key, count)


@pytest.mark.parametrize("kind", ["split", "fold_in", "chain"])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_dropout_with_a_key_per_layer(kind, make):
    def loss(params, x, key):
        keys = layer_keys(kind, key, len(params))
        for number, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"])
            x = jnp.where(jax.random.bernoulli(keys[number], 0.7, x.shape), x / 0.7, 0.0)
        return x.sum()

    check(loss, weights(*[{"w": (4, 4)}] * 3), array(3, 4), make(3), counts=[3], grouped=3)


def test_literals_that_differ_enter_as_constants_even_into_a_checkpoint():
    def loss(params, x, key):
        for number, layer in enumerate(params):

            def block(x, layer, number=number):
                x = x + jnp.tanh(x @ layer["w"]) * (1 - 0.1 * number)
                return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, x.shape), x, 0.0)

            x = jax.checkpoint(block)(x, layer)
        return x.sum()

    found, *_ = check(loss, weights(*[{"w": (4, 4)}] * 4), array(3, 4), jax.random.key(0), counts=[4], grouped=4)
    assert sorted(item.kind for item in found.repeats[0].stacked) == ["leaf", "literal", "literal"]


def test_shared_weights_are_invariants():
    found, _, storage = check(lambda p, x: mlp([p] * 4, x), weights(MLP)[0], array(3, 4), counts=[4], grouped=0)
    assert storage.groups == ()
    assert set(found.repeats[0].invariants) == {0, 1}


def test_weights_shared_in_turn_give_a_longer_block():
    check(lambda p, x: mlp([p[0], p[1]] * 3, x), weights(MLP, MLP), array(3, 4), counts=[3], grouped=0)
    check(lambda p, x: mlp([p[0], p[0], p[1], p[1]], x), weights(MLP, MLP), array(3, 4), counts=[2], grouped=4)


def test_intermediate_outputs_are_collected_and_sums_carried():
    def loss(params, x):
        total, hidden = 0.0, []
        for layer in params:
            before = x @ layer["w"]
            x = jnp.tanh(before)
            total = total + (x**2).mean()
            hidden.append(x)
        return total + jnp.stack(hidden).sum() + hidden[1].mean() + (before**2).sum()

    found, *_ = check(loss, weights(*[{"w": (4, 4)}] * 4), array(3, 4), counts=[4], grouped=4)
    (repeat,) = found.repeats
    assert (len(repeat.carry), len(repeat.collected), len(repeat.last)) == (2, 1, 1)


def test_layers_that_the_user_already_stacks_are_walked_over_as_they_are():
    def loss(params, x):
        for number in range(4):
            x = jnp.tanh(x @ params["w"][number] + params["b"][number])
        return x.sum()

    (params,) = weights({"w": (4, 3, 3), "b": (4, 3)})
    found, rolled, storage = check(loss, params, array(2, 3), counts=[4], grouped=0)
    assert found.repeats[0].whole == (0, 1)
    jaxpr, (scan,) = scans(rolled, storage, *jax.tree.leaves(params), array(2, 3))
    assert set(jaxpr.jaxpr.invars[:2]) < set(scan.invars)


def test_experts_inside_layers():
    def loss(params, x):
        for layer in params:
            gates, y = jax.nn.softmax(x @ layer["router"]), 0.0
            for expert in range(3):
                y = y + gates[:, expert : expert + 1] * (jnp.tanh(x @ layer["in"][expert]) @ layer["out"][expert])
            x = x + y
        return x.sum()

    check(loss, weights(*[{"router": (4, 3), "in": (3, 4, 5), "out": (3, 5, 4)}] * 3), array(2, 4), counts=[3], grouped=9)


def test_custom_derivatives_made_anew_in_each_layer():
    def loss(params, x):
        for layer in params:

            @jax.custom_vjp
            def product(a, w):
                return jnp.tanh(a @ w)

            product.defvjp(lambda a, w: (jnp.tanh(a @ w), (a, w)), lambda kept, g: (2 * g @ kept[1].T, kept[0].T @ g))
            x = product(x, layer["w"])
        return x.sum()

    check(loss, weights(*[{"w": (4, 4)}] * 3), array(3, 4), counts=[3], grouped=3)


def test_equinox_list_of_layers():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    net = [(eqx.nn.LayerNorm(6), eqx.nn.MultiheadAttention(2, 6, key=key), eqx.nn.MLP(6, 6, 8, 1, key=key)) for key in keys]
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, x, key):
        for (scale, attention, hidden), sub in zip(eqx.combine(params, static), jax.random.split(key, 3), strict=True):
            h = jax.vmap(scale)(x)
            x = x + attention(h, h, h)
            x = eqx.nn.Dropout(0.1)(x + jax.vmap(hidden)(x), key=sub)
        return (x**2).mean()

    check(loss, params, array(5, 6), jax.random.key(1), counts=[3], grouped=30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flax_nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.attention = nnx.LayerNorm(6, rngs=rngs), nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.down(nnx.gelu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks, self.head = nnx.List([Block(rngs) for _ in range(3)]), nnx.Linear(6, 2, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)[:2]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    check(lambda p, x: (nnx.merge(graph, p)(x) ** 2).mean(), params, array(2, 5, 6), counts=[3], grouped=42)


def test_nothing_to_roll():
    _, _, storage = check(lambda p, x: jnp.tanh(x @ p["w"]).sum(), weights(MLP)[0], array(3, 4), counts=[])
    assert storage.slots == ((0,), (1,), (2,))


OPERATIONS = {
    "dense": lambda x, w, aux: (jnp.tanh(x @ w), aux),
    "residual": lambda x, w, aux: (x + jnp.sin(x @ w), aux),
    "cast": lambda x, w, aux: (x + (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(x.dtype), aux),
    "auxiliary": lambda x, w, aux: (x * jnp.cos(x @ w), [*aux, (x @ w).mean()]),
    "twice": lambda x, w, aux: (jnp.tanh(x @ w) @ w, aux),
    "remat": lambda x, w, aux: (jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w), aux),
}


NAMES = st.sampled_from(sorted(OPERATIONS))


@settings(max_examples=10, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3), st.integers(2, 3), st.lists(NAMES, max_size=2))
def test_random_chains(pattern, count, tail):
    names = [*tail, *pattern * count, *tail]

    def loss(params, x):
        aux = []
        for name, layer in zip(names, params, strict=True):
            x, aux = OPERATIONS[name](x, layer["w"], aux)
        return (x**2).mean() + sum(aux)

    params, x = weights(*[{"w": (3, 3)}] * len(names)), array(2, 3)
    _, leaves, jaxpr = flat_program(loss, params, (x,))
    found = survey(jaxpr, [()] * len(leaves) + [None])
    assert found.repeats, names
    check(loss, params, x, counts=[repeat.count for repeat in found.repeats])
