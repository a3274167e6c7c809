"""The train state: born in place, donated, taken apart into the user's tree and put together again under another plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import LAYERS, MODELS, WIDTH, apart, batch, scanned_loss, unrolled, weights
from resident import Program, by_hand, key, planned, resident, stands_as_planned, trace

import forebay as fb
from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]

HOST = {"parameter": "host", "optimizer": "host"}


def init_of(model):
    """An ``init_fn`` whose leaves depend on the key."""

    def init_fn(key):
        def leaf(number, shape):
            return 0.3 * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float64)

        leaves, tree = jax.tree.flatten(weights(np.float64))
        made = jax.tree.unflatten(tree, [leaf(k, v.shape) for k, v in enumerate(leaves)])
        return made if model == "scanned" else made | {"layers": [jax.tree.map(lambda v, i=i: v[i], made["layers"]) for i in range(LAYERS)]}

    return init_fn


@functools.cache
def setting(model):
    program, optimizer = MODELS[model](), optax.adamw(1e-2)
    work = trace(program, optimizer)
    return program, optimizer, work, by_hand(program, work, HOST)


@pytest.mark.parametrize("model", MODELS)
def test_init_gives_the_users_values_in_the_plans_places(model):
    _, optimizer, _, plan = setting(model)
    init_fn = init_of(model)
    state = fb.init(init_fn, optimizer, plan, key())
    stands_as_planned(plan, state)
    wanted = init_fn(jax.random.split(key())[0])
    assert jax.tree.structure(state.params) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), state.params, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), state.opt_state, optimizer.init(wanted))
    assert state.key is None and state.extra is None
    assert int(state.step) == 0


def test_state_that_copies_the_parameters_is_born_on_the_host_too():
    """schedule_free keeps a second copy of the weights, which no constant can fill."""
    program, optimizer = unrolled(), optax.contrib.schedule_free_adamw(1e-2)
    plan = by_hand(program, trace(program, optimizer), HOST)
    state = fb.place(program.params, optimizer, plan)
    stands_as_planned(plan, state)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.z, program.params)


def test_init_refuses_other_parameters_by_name():
    program, optimizer, _, plan = setting("scanned")

    def wider(key):
        return jax.tree.map(jnp.asarray, program.params) | {"head": jnp.zeros((WIDTH, 99))}

    with pytest.raises(PlanError, match=r"parameter:head is float64\[8, 99\] and the plan was made for float64\[8, 23\]"):
        fb.init(wider, optimizer, plan, key())
    with pytest.raises(PlanError, match="the plan was made for"):
        fb.place({"head": program.params["head"]}, optimizer, plan)


@pytest.mark.parametrize("model", MODELS)
def test_the_tree_goes_from_one_plan_to_another(model):
    """What one plan wrote, another reads: other placements, another mesh, and the next step gives the same loss."""
    program, optimizer, work, plan = setting(model)
    state = fb.place(program.params, optimizer, plan)
    step = fb.train_step(program.loss_fn, optimizer, plan)
    state, _ = step(state, batch(0))
    tree = jax.tree.map(np.asarray, state.to_tree())
    assert set(tree) == {"step", "params", "opt_state", "key", "extra"}
    assert jax.tree.structure(tree["params"]) == jax.tree.structure(program.params)
    other = fb.Plan.by_hand(work, {"optimizer:*/embed": "host"}, hardware=Hardware.named("h100-sxm:4"), options={"whole_below_bytes": 0})
    moved = fb.State.from_tree(tree, other)
    stands_as_planned(other, moved)
    _, here = step(state, batch(1))
    _, there = fb.train_step(program.loss_fn, optimizer, other)(moved, batch(1))
    np.testing.assert_allclose(there["loss"], here["loss"], rtol=1e-12)
    np.testing.assert_allclose(there["grad_norm"], here["grad_norm"], rtol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_views_of_stored_stacks_stay_in_their_memory(model):
    """``state.params`` and the restore target agree leaf by leaf: shapes, specs, memory kinds."""
    program, optimizer, _, plan = setting(model)
    tree, target = fb.place(program.params, optimizer, plan).to_tree(), plan.abstract_tree(plan.make_mesh())
    assert jax.tree.structure(tree) == jax.tree.structure(target)
    for value, like in zip(jax.tree.leaves(tree), jax.tree.leaves(target), strict=True):
        assert (value.shape, value.dtype) == (like.shape, like.dtype)
        assert value.sharding.memory_kind == like.sharding.memory_kind
        assert value.sharding.is_equivalent_to(like.sharding, value.ndim)
    jax.tree.map(np.testing.assert_array_equal, tree["params"], program.params)


def test_everything_is_known_before_anything_is_allocated():
    """The abstract state has the placements; the step lowers on it, on a mesh without devices."""
    program, optimizer, _, plan = setting("unrolled")
    state = plan.abstract_state()
    assert {leaf.sharding.memory_kind for leaf in state.stored_params} == {"pinned_host"}
    assert jax.tree.structure(plan.shardings) == jax.tree.structure(state)
    step = fb.train_step(program.loss_fn, optimizer, plan)
    traced = step.trace(state, plan.abstract_batch())
    new, metrics = traced.out_info
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert metrics["loss"].shape == () and set(metrics) == {"loss", "grad_norm", "aux"}
    assert "pinned_host" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_callers_key_and_mutable_state_outlive_the_first_step():
    """The step donates the state; ``place`` therefore keeps copies of what the caller may use again."""

    def loss(params, batch, key, extra):
        return scanned_loss(params, batch)[0], (None, {"calls": extra["calls"] + 1})

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    extra, seed = jax.device_put({"calls": jnp.zeros(4, jnp.int32)}, everywhere), jax.device_put(key(), everywhere)
    program, optimizer = Program(loss_fn=loss, params=weights(np.float64), batch=batch, rng=True, extra=extra), optax.sgd(0.1)
    plan = by_hand(program, trace(program, optimizer), {})
    state = fb.place(program.params, optimizer, plan, key=seed, extra=extra)
    state, _ = fb.train_step(loss, optimizer, plan)(state, batch(0))
    assert not extra["calls"].is_deleted() and not seed.is_deleted()
    np.testing.assert_array_equal(state.extra["calls"], 1)
    np.testing.assert_array_equal(jax.random.key_data(seed), jax.random.key_data(key()))


def test_ten_steps_compile_once_and_nothing_else(caplog):
    """Counted by jax itself: no second compile after a save and a restore, and no small programs of ours between steps."""
    program, optimizer, _, plan = setting("scanned")
    state = fb.place(program.params, optimizer, plan)
    step = fb.train_step(program.loss_fn, optimizer, plan)
    batches = [batch(number) for number in range(10)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for number, rows in enumerate(batches):
            state, _ = step(state, rows)
            if number == 4:
                state = fb.State.from_tree(state.to_tree(), plan)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert len(compiled) == 1, compiled
    assert step.compiles() == 1


def test_the_key_of_a_step_depends_on_the_state_and_the_step():
    """Dropout in a scanned body under offload: the masks are those of ``fold_in(state.key, step)``, as in the resident run."""

    def loss(params, batch, key):
        def body(x, wk):
            weights, key = wk
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0)
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        x, _ = jax.lax.scan(body, params["embed"][batch["x"]], (params["layers"], jax.random.split(key, LAYERS)))
        return jnp.mean((x @ params["head"]) ** 2), {"key": jax.random.key_data(key)}

    program = Program(loss_fn=loss, params=weights(np.float64), batch=batch, rng=True)
    optimizer = optax.adam(1e-2)
    got, _ = planned(program, optimizer, HOST | {"activation": "host"}, steps=4)
    wanted = resident(program, optimizer, steps=4)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-12)
    np.testing.assert_array_equal(got.aux["key"], wanted.aux["key"])
    np.testing.assert_array_equal(got.aux["key"], jax.random.key_data(jax.random.fold_in(key(), 3)))


def test_extra_state_moves_on_undifferentiated():
    def loss(params, batch, extra):
        value, aux = scanned_loss(params, batch)
        mean = 0.9 * extra["mean"] + 0.1 * jax.lax.stop_gradient(aux["mean"])
        return value + mean, (aux, {"mean": mean, "calls": extra["calls"] + 1})

    program = Program(loss_fn=loss, params=weights(np.float64), batch=batch, extra={"mean": np.float64(0), "calls": np.int32(0)})
    optimizer = optax.adam(1e-2)
    got, plan = planned(program, optimizer, HOST, steps=4)
    wanted = resident(program, optimizer, steps=4)
    assert got.extra["calls"] == wanted.extra["calls"] == 4
    np.testing.assert_allclose(got.extra["mean"], wanted.extra["mean"], rtol=1e-12)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-12)
    with pytest.raises(InputError, match="pass its initial value as extra="):
        fb.place(program.params, optimizer, plan)


def test_metrics_without_aux_are_loss_and_norm_alone():
    program, optimizer = Program(loss_fn=lambda p, b: scanned_loss(p, b)[0], params=weights(np.float64), batch=batch), optax.sgd(0.1)
    plan = by_hand(program, trace(program, optimizer), {})
    _, metrics = fb.train_step(program.loss_fn, optimizer, plan)(fb.place(program.params, optimizer, plan), batch(0))
    assert set(metrics) == {"loss", "grad_norm"}


def test_a_batch_of_another_shape_is_refused_by_name():
    program, optimizer, _, plan = setting("scanned")
    step = fb.train_step(program.loss_fn, optimizer, plan)
    state = fb.place(program.params, optimizer, plan)
    with pytest.raises(PlanError, match=r"batch:x has shape \[4, 3\] and the plan was made for \[8, 3\]"):
        step(state, jax.tree.map(lambda leaf: leaf[:4], batch(0)))
    with pytest.raises(PlanError, match="the batch is"):
        step(state, {"x": batch(0)["x"]})
    with pytest.raises(InputError, match=r"make the state with forebay\.init"):
        fb.train_step(program.loss_fn, optimizer, plan)(jax.tree.map(np.asarray, state), batch(0))


def test_a_plan_from_a_file_must_be_bound_first(tmp_path):
    program, optimizer, work, plan = setting("unrolled")
    plan.save(tmp_path / "plan.json")
    loose = fb.Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="bind it"):
        fb.init(init_of("unrolled"), optimizer, loose, key())
    state = fb.place(program.params, optimizer, fb.Plan.load(tmp_path / "plan.json", work))
    stands_as_planned(plan, state)


def test_apart_is_the_same_model():
    """The two test models are one: their resident losses agree, so that an equality of one is evidence for the other."""
    together, split = weights(np.float64), apart(weights(np.float64))
    np.testing.assert_allclose(scanned_loss(together, batch(0))[0], unrolled().loss_fn(split, batch(0))[0], rtol=1e-12)
