"""The pieces of a planned step, used singly: equal to the whole step, in the user's own tree or in stored arrays, and clear refusals."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay.errors import InputError, PlanError

pytestmark = pytest.mark.oldest

LAYERS, WIDTH, ROWS = 3, 16, 8
SCANNED, UNROLLED = "scanned", "unrolled"
HOST = {"parameter:layers*": "host", "optimizer": "host"}


def block(h, w):
    return h + jnp.tanh(h @ w["in"]) @ w["out"]


def loss_of(form):
    def loss(params, batch):
        h = batch["x"] @ params["embed"]
        if form == SCANNED:
            h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), h, params["layers"])
        else:
            for w in params["layers"]:
                h = block(h, w)
        return jnp.mean((h - batch["y"]) ** 2), {"largest": jnp.max(h)}

    return loss


def init_of(form):
    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"in": (LAYERS, WIDTH, 2 * WIDTH), "out": (LAYERS, 2 * WIDTH, WIDTH)}
        stacked = {k: 0.1 * jax.random.normal(keys[i], s) for i, (k, s) in enumerate(shapes.items())}
        layers = stacked if form == SCANNED else [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(LAYERS)]
        return {"embed": 0.1 * jax.random.normal(keys[2], (WIDTH, WIDTH)), "layers": layers}

    return init


def batch_of(seed=0):
    x = jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))
    return {"x": x, "y": jnp.roll(x, 1, axis=1)}


def setting(form, rules, optimizer):
    loss, init = loss_of(form), init_of(form)
    work = fb.trace(loss, optimizer, jax.eval_shape(init, jax.random.key(0)), batch_of())
    plan = fb.Plan.by_hand(work, rules, options={"whole_below_bytes": 0})
    return loss, plan, fb.init(init, optimizer, plan, jax.random.key(1))


def own_step(loss, optimizer, plan, params, opt_state):
    """A user's step around the pieces, jitted with the plan's shardings."""
    grad, update = fb.value_and_grad(loss, plan), fb.update(optimizer, plan)
    placed = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placed, None))
    def step(params, opt_state, batch):
        (value, aux), grads = grad(params, batch)
        params, opt_state, norm = update(params, opt_state, grads, value)
        return params, opt_state, (value, norm, aux)

    return step


@pytest.mark.parametrize("form", [SCANNED, UNROLLED])
@pytest.mark.parametrize("rules", [{}, HOST], ids=["resident", "host"])
def test_the_pieces_are_the_step(form, rules):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    loss, plan, state = setting(form, rules, optimizer)
    _, _, again = setting(form, rules, optimizer)
    if form == SCANNED:
        params, opt_state = again.params, again.opt_state
    else:
        params, opt_state = again.stored_params, again.stored_opt_state
    whole, mine = fb.train_step(loss, optimizer, plan), own_step(loss, optimizer, plan, params, opt_state)
    for k in range(3):
        state, metrics = whole(state, batch_of(k))
        params, opt_state, (value, norm, aux) = mine(params, opt_state, batch_of(k))
        assert jnp.allclose(value, metrics["loss"], rtol=1e-6)
        assert jnp.allclose(norm, metrics["grad_norm"], rtol=1e-6)
        assert jnp.allclose(aux["largest"], metrics["aux"]["largest"], rtol=1e-6)
    expected = (state.params, state.opt_state) if form == SCANNED else (state.stored_params, state.stored_opt_state)
    for got, want in zip(jax.tree.leaves((params, opt_state)), jax.tree.leaves(expected), strict=True):
        assert got.sharding.memory_kind == want.sharding.memory_kind
        assert jnp.allclose(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-7)


def test_another_function_and_optimizer_of_the_same_shapes_are_used_not_the_traced_ones():
    loss, plan, state = setting(SCANNED, HOST, optax.adamw(1e-2))

    def doubled(params, batch):
        value, aux = loss(params, batch)
        return 2 * value, aux

    grad, update = fb.value_and_grad(doubled, plan), fb.update(optax.adamw(0.0, weight_decay=0.0), plan)
    (value, _), grads = jax.jit(grad)(state.params, batch_of())
    (once, _), _ = jax.jit(fb.value_and_grad(loss, plan))(state.params, batch_of())
    assert jnp.allclose(value, 2 * once, rtol=1e-6)
    params, _, _ = jax.jit(update)(state.params, state.opt_state, grads)
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert jnp.array_equal(jax.device_get(new), jax.device_get(old))


def test_a_tree_that_is_stored_stacked_is_refused_with_the_way_out():
    loss, plan, state = setting(UNROLLED, HOST, optax.sgd(0.1, momentum=0.9))
    with pytest.raises(PlanError, match=r"stores 2 stacks .*parameter:layers/\*/in.* pass state\.stored_params"):
        fb.value_and_grad(loss, plan)(state.params, batch_of())


def test_an_array_that_stands_elsewhere_is_named():
    loss, plan, state = setting(SCANNED, HOST, optax.sgd(0.1, momentum=0.9))
    on_device = jax.device_put(state.params, jax.memory.Space.Device)
    with pytest.raises(InputError, match="parameter:layers/in stands in HBM memory and the plan puts it in host memory"):
        jax.jit(fb.value_and_grad(loss, plan))(on_device, batch_of())


def test_other_parameters_are_refused():
    loss, plan, state = setting(SCANNED, {}, optax.sgd(0.1))
    with pytest.raises(PlanError, match=r"the parameter tree is .* and the plan was made for"):
        fb.value_and_grad(loss, plan)(state.params["layers"], batch_of())
    wrong = {**state.params, "embed": jnp.zeros((4, 4))}
    with pytest.raises(PlanError, match=r"parameter:embed is float\d+\[4, 4\] and the plan was made for float\d+\[16, 16\]"):
        fb.value_and_grad(loss, plan)(wrong, batch_of())


def test_another_optimizer_is_refused():
    _, plan, _ = setting(SCANNED, {}, optax.adamw(1e-2))
    with pytest.raises(PlanError, match=r"this optimizer's state is .* make a plan for it"):
        fb.update(optax.sgd(0.1, momentum=0.9), plan)


def test_an_optimizer_that_needs_the_loss_says_so():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    loss, plan, state = setting(SCANNED, {}, optimizer)
    (_, _), grads = fb.value_and_grad(loss, plan)(state.params, batch_of())
    with pytest.raises(InputError, match="asks for the value of the loss"):
        fb.update(optimizer, plan)(state.params, state.opt_state, grads)


def test_a_frozen_parameter_has_no_gradient_and_stays():
    labels = {"embed": "frozen", "layers": "trained"}
    optimizer = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adamw(1e-2)}, labels)
    loss, plan, state = setting(SCANNED, {"parameter": "host", "optimizer": "host"}, optimizer)
    (_, _), grads = jax.jit(fb.value_and_grad(loss, plan))(state.params, batch_of())
    assert grads["embed"] is None
    params, _, _ = jax.jit(fb.update(optimizer, plan))(state.params, state.opt_state, grads)
    assert jnp.array_equal(jax.device_get(params["embed"]), jax.device_get(state.params["embed"]))
    assert not jnp.array_equal(jax.device_get(params["layers"]["in"]), jax.device_get(state.params["layers"]["in"]))


def test_a_plan_from_a_file_must_be_bound_first(tmp_path):
    loss, plan, _ = setting(SCANNED, {}, optax.sgd(0.1))
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="bind it to its model first"):
        fb.value_and_grad(loss, fb.Plan.load(tmp_path / "plan.json"))
