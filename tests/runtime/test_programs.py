"""Ways in which people write loops and use weights: under offload, the gradients stay those of the program as it was written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import HIDDEN, LAYERS, ROWS, WIDTH, apart, batch, cross_entropy, layer, scanned_loss, weights
from resident import Program, assert_equal, planned, resident, trace

pytestmark = pytest.mark.usefixtures("small")

EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}
RECOMPUTED = EVERYTHING | {"activation": "recompute"}
STEPS = 4
FORMS = {}


def form(make):
    """Register a function that gives (loss, parameters)."""
    FORMS[make.__name__] = make
    return make


def one_layer(x, w):
    return layer(x, w), None


def looped(params, batch, stack=None, **how):
    x, _ = jax.lax.scan(one_layer, params["embed"][batch["x"]], params["layers"] if stack is None else stack, **how)
    return cross_entropy(params, x, batch)


def with_up(params, up):
    return params | {"layers": params["layers"] | {"up": up}}


# ---- weights used in several places


@form
def tied_embedding():
    params = weights(np.float64)
    del params["head"]
    return lambda p, b: looped(p | {"head": p["embed"].T}, b), params


@form
def one_stack_in_two_loops():
    def loss(p, b):
        x = p["embed"][b["x"]]
        for _ in range(2):
            x, _ = jax.lax.scan(one_layer, x, p["layers"])
        return cross_entropy(p, x, b)

    return loss, weights(np.float64)


@form
def gradient_penalty():
    """A derivative inside the loss: the stack feeds three loops, one of them reversed, and values made from it pass between them."""

    def loss(p, b):
        def energy(x):
            x, _ = jax.lax.scan(one_layer, x, p["layers"])
            return cross_entropy(p, x, b)

        x = p["embed"][b["x"]]
        return energy(x) + jnp.sum(jax.grad(energy)(x) ** 2)

    return loss, weights(np.float64)


@form
def penalty_on_all_weights():
    return lambda p, b: looped(p, b) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)), weights(np.float64)


@form
def a_stack_twice_in_one_loop():
    def loss(p, b):
        body = lambda x, w: (x + jnp.tanh(x @ w[0]["up"]) @ w[1]["down"], None)  # noqa: E731
        x, _ = jax.lax.scan(body, p["embed"][b["x"]], (p["layers"], p["layers"]))
        return cross_entropy(p, x, b)

    return loss, weights(np.float64)


@form
def unused_weights():
    return lambda p, b: looped(p, b), weights(np.float64) | {"spare": np.ones((16, 8)), "scalar": np.float64(1)}


# ---- stacks that change on their way to the loop


@form
def a_stack_times_a_function_of_itself():
    """Each operand of the product has its own history: following one of them would be silently wrong."""
    return lambda p, b: looped(with_up(p, p["layers"]["up"] * jnp.tanh(p["layers"]["up"])), b), weights(np.float64)


@form
def a_stack_scaled_by_a_trained_scalar():
    return lambda p, b: looped(with_up(p, p["layers"]["up"] * p["scale"]), b), weights(np.float64) | {"scale": np.float64(1.3)}


@form
def permuted_stack():
    params = weights(np.float64)
    params["layers"]["up"] = np.swapaxes(params["layers"]["up"], 1, 2).copy()
    return lambda p, b: looped(with_up(p, jnp.swapaxes(p["layers"]["up"], 1, 2)), b), params


@form
def reshaped_and_cast_stack():
    params = weights(np.float64)
    params["layers"]["up"] = np.stack([params["layers"]["up"].reshape(LAYERS, -1)] * 2, 1)

    def loss(p, b):
        return looped(with_up(p, 2.0 * p["layers"]["up"].mean(1).reshape(LAYERS, WIDTH, HIDDEN)), b)

    return loss, params


@form
def a_stack_of_stacks_made_one():
    """The reshape joins the scanned axis with the next: the loop is longer than the stack."""
    params = weights(np.float64)
    params["layers"] = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 0.1]), params["layers"])
    merged = lambda p: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), p["layers"])  # noqa: E731
    return lambda p, b: looped(p, b, merged(p)), params


@form
def normalised_weights():
    def loss(p, b):
        up = p["layers"]["up"]
        return looped(with_up(p, up / jnp.sqrt(jnp.sum(up**2, 1, keepdims=True))), b)

    return loss, weights(np.float64)


@form
def half_of_the_stack():
    def loss(p, b):
        first, rest = (jax.tree.map(lambda leaf, cut=cut: leaf[cut], p["layers"]) for cut in (slice(2), slice(2, None)))
        x, _ = jax.lax.scan(one_layer, p["embed"][b["x"]], first)
        x, _ = jax.lax.scan(one_layer, x, rest)
        return cross_entropy(p, x, b)

    return loss, weights(np.float64)


# ---- loops


@form
def reversed_loop():
    return lambda p, b: looped(p, b, reverse=True), weights(np.float64)


@form
def unrolled_by_two():
    return lambda p, b: looped(p, b, unroll=2), weights(np.float64)


@form
def one_layer_alone():
    params = weights(np.float64)
    return lambda p, b: looped(p, b), params | {"layers": jax.tree.map(lambda leaf: leaf[:1], params["layers"])}


@form
def loop_in_a_loop():
    params = weights(np.float64)
    params["layers"] = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 0.1]), params["layers"])

    def loss(p, b):
        x, _ = jax.lax.scan(lambda x, w: (jax.lax.scan(one_layer, x, w)[0], None), p["embed"][b["x"]], p["layers"])
        return cross_entropy(p, x, b)

    return loss, params


@form
def indexed_in_a_fori_loop():
    def loss(p, b):
        body = lambda i, x: layer(x, jax.tree.map(lambda leaf: leaf[i], p["layers"]))  # noqa: E731
        return cross_entropy(p, jax.lax.fori_loop(0, LAYERS, body, p["embed"][b["x"]]), b)

    return loss, weights(np.float64)


@form
def outputs_of_every_layer():
    def loss(p, b):
        def body(x, w):
            x = layer(x, w)
            return x, jnp.mean(x**2)

        x, means = jax.lax.scan(body, p["embed"][b["x"]], p["layers"])
        return cross_entropy(p, x, b) + 1e-2 * means.sum(), {"means": means}

    return loss, weights(np.float64)


@form
def a_choice_in_every_layer():
    def loss(p, b):
        def body(carry, w):
            x, i = carry
            return (jax.lax.cond(i % 2 == 0, lambda x: layer(x, w), lambda x: x * w["scale"], x), i + 1), None

        (x, _), _ = jax.lax.scan(body, (p["embed"][b["x"]], 0), p["layers"])
        return cross_entropy(p, x, b)

    return loss, weights(np.float64)


@form
def checkpoint_around_the_loop():
    def loss(p, b):
        run = jax.checkpoint(lambda x, stack: jax.lax.scan(one_layer, x, stack)[0])
        return cross_entropy(p, run(p["embed"][b["x"]], p["layers"]), b)

    return loss, weights(np.float64)


@form
def custom_derivatives():
    @jax.custom_vjp
    def bent(x):
        return jnp.sin(x)

    bent.defvjp(lambda x: (bent(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))  # on purpose not the true derivative

    def loss(p, b):
        body = lambda x, w: (x + jax.nn.relu(bent(jax.nn.gelu(x @ w["up"]))) @ w["down"], None)  # noqa: E731
        x, _ = jax.lax.scan(body, p["embed"][b["x"]], p["layers"])
        return cross_entropy(p, x, b)

    return loss, weights(np.float64)


@form
def one_example_at_a_time():
    def loss(p, b):
        return jnp.mean(jax.vmap(lambda x, y: looped(p, {"x": x[None], "y": y[None]}))(b["x"], b["y"]))

    return loss, weights(np.float64)


@form
def a_scalar_for_every_written_layer():
    params = apart(weights(np.float64))
    for number, weight in enumerate(params["layers"]):
        weight["gain"] = np.float64(1 + 0.1 * number)

    def loss(p, b):
        x = p["embed"][b["x"]]
        for w in p["layers"]:
            x = layer(x, w) * w["gain"]
        return cross_entropy(p, x, b)

    return loss, params


@form
def another_tree():
    params = weights(np.float64)
    tree = (params["embed"], [params["head"], None], {"layers": params["layers"], "empty": {}})
    return lambda p, b: scanned_loss({"embed": p[0], "head": p[1][0], "layers": p[2]["layers"]}, b), tree


@functools.cache
def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.oldest if k % 3 == 0 else ()) for k, n in enumerate(FORMS)])
def test_the_gradients_are_those_of_the_program_as_written(name):
    loss, params = FORMS[name]()
    program = Program(loss_fn=loss, params=params, batch=batch)
    rules = RECOMPUTED if len(name) % 2 else EVERYTHING
    got, _ = planned(program, optimizer(), rules, work=trace(program, optimizer()), steps=STEPS)
    assert_equal(got, resident(program, optimizer(), steps=STEPS), 1e-10)


def test_a_tree_of_one_leaf_and_a_batch_with_scalars():
    params = weights(np.float64)["embed"]
    rows = lambda step: batch(step) | {"weight": np.full(ROWS, 0.5), "scale": np.float64(3)}  # noqa: E731
    program = Program(loss_fn=lambda p, b: jnp.mean((p[b["x"]] - 1) ** 2) * b["weight"].mean() * b["scale"], params=params, batch=rows)
    got, plan = planned(program, optimizer(), {"parameter": "host", "optimizer": "host"}, steps=STEPS)
    assert_equal(got, resident(program, optimizer(), steps=STEPS), 1e-10)
    assert [e.name for e in plan.role("parameter")] == ["parameter:."]


@pytest.mark.oldest
def test_the_gradient_of_a_host_parameter_that_no_loop_layers_stands_where_the_plan_says():
    """A stack of one layer is fetched whole, and its gradient is so small that it is planned on the device: found by test_random."""
    loss, params = FORMS["one_layer_alone"]()
    program, adafactor = Program(loss_fn=loss, params=params, batch=batch), optax.adafactor(1e-2, min_dim_size_to_factor=4)
    for rules in ({"parameter": "host"}, {"parameter:layers/scale": "host"}, {"parameter": "host", "optimizer:*/embed": "host"}):
        got, _ = planned(program, adafactor, rules, steps=2)
        assert_equal(got, resident(program, adafactor, steps=2), 1e-10)


def test_scalars_stay_on_the_device():
    loss, params = FORMS["a_stack_scaled_by_a_trained_scalar"]()
    program = Program(loss_fn=loss, params=params, batch=batch)
    _, plan = planned(program, optimizer(), EVERYTHING, steps=1)
    assert plan.placement("parameter:scale") == "hbm"
    assert plan.placement("gradient:scale") == "hbm"
    assert next(e for e in plan.entries if e.name == "parameter:scale").reason == "a scalar stays on the device"
