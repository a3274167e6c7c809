"""Reports of theme 8, types and shapes: what a host array may not do in jax is handled inside, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import batch, cross_entropy, layer, scanned, weights
from resident import Program, assert_equal, by_hand, planned, resident, stands_as_planned, trace

import forebay as fb
from forebay.compiler import lowering
from forebay.errors import CompilerError, InputError

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]
EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}


def test_jax_35900_and_marin_5587_host_parameters_train_without_a_host_gradient_in_sight():
    program, optimizer = scanned(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    got, _ = planned(program, optimizer, EVERYTHING, steps=2)
    assert_equal(got, resident(program, optimizer, steps=2), 1e-10)


def test_xla_34565_a_table_on_the_host_may_be_indexed_by_tokens():
    program, optimizer = scanned(), optax.sgd(0.1)
    got, plan = planned(program, optimizer, {"parameter:embed": "host"}, steps=2)
    assert plan.placement("parameter:embed") == "host"
    assert_equal(got, resident(program, optimizer, steps=2), 1e-10)


def test_jax_23887_cond_in_a_layer_beside_host_state():
    def loss(p, b):
        def body(carry, w):
            x, i = carry
            return (jax.lax.cond(i % 2 == 0, lambda x: layer(x, w), lambda x: x * w["scale"], x), i + 1), None

        (x, _), _ = jax.lax.scan(body, (p["embed"][b["x"]], 0), p["layers"])
        return cross_entropy(p, x, b)

    program = Program(loss_fn=loss, params=weights(np.float64), batch=batch)
    got, _ = planned(program, optax.adam(1e-2), EVERYTHING, steps=2)
    assert_equal(got, resident(program, optax.adam(1e-2), steps=2), 1e-10)


def test_xla_29270_donation_across_memories_is_refused_before_the_compiler_is_asked():
    to_host = lambda x: jax.device_put(x, jax.memory.Space.Host)  # noqa: E731
    args = (jax.ShapeDtypeStruct((64, 64), jnp.float32),)
    with pytest.raises(CompilerError, match=r"args\[0\] stands on the device and is donated to a result in host memory.* forebay\.place"):
        lowering.lower(to_host, args, "cuda", (0,))
    assert lowering.lower(to_host, args, "cuda", ()).program.partitions == 1


def test_jax_16679_and_optax_548_the_state_is_born_where_the_plan_puts_it():
    program, optimizer = scanned(), optax.adam(1e-2)
    plan = by_hand(program, trace(program, optimizer), {"optimizer": "host"})
    init = lambda key: jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape, leaf.dtype), program.params)  # noqa: E731
    state = fb.init(init, optimizer, plan, jax.random.key(0))
    kinds = {e.placement: a.sharding.memory_kind for e, a in zip(plan.role("optimizer"), state.stored_opt_state, strict=True)}
    assert kinds == {"host": "pinned_host", "hbm": "device"}


def test_optax_320_and_maxtext_5039_the_accumulator_is_a_planned_tensor():
    program, optimizer = scanned(), optax.adam(1e-2)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), (program.params, batch(0)))
    work = fb.trace(program.loss_fn, optimizer, *shapes, reduction="mean")
    plan = fb.Plan.by_hand(work, {"parameter": "host"}, options={"microbatches": 2})
    accumulators = plan.role("accumulator")
    assert len(accumulators) == len(plan.role("gradient"))
    assert {e.placement for e in accumulators} >= {"host"}


def test_an_8_bit_float_that_the_optimizer_cannot_promote_is_said_in_one_sentence():
    loss = lambda p, b: jnp.mean((b @ p.astype(jnp.float32)) ** 2)  # noqa: E731
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    with pytest.raises(InputError, match="the optimizer does not work on parameters of these types, in forebay or without it"):
        fb.trace(loss, optax.adamw(1e-3), *shapes)


def test_jax_33657_what_goes_to_the_compiler_keeps_the_memory_of_each_argument():
    program, optimizer = scanned(), optax.adam(1e-2)
    plan = by_hand(program, trace(program, optimizer), {"optimizer": "host"})
    step = fb.train_step(program.loss_fn, optimizer, plan)
    lowered = lowering.lower(step, (plan.abstract_state(), plan.abstract_batch()), "cuda", ()).program
    hosted = sum(e.placement == "host" for e in plan.role("optimizer"))
    assert hosted
    assert lowered.text.count('mhlo.memory_kind = "pinned_host"') >= 2 * hosted  # as arguments, and as results


def test_flax_5172_memory_kinds_are_the_plans_after_every_step():
    program, optimizer = scanned(), optax.adam(1e-2)
    plan = by_hand(program, trace(program, optimizer), EVERYTHING)
    state = fb.place(program.params, optimizer, plan, key=jax.random.key(0))
    step = fb.train_step(program.loss_fn, optimizer, plan)
    for number in range(2):
        state, _ = step(state, program.batch(number))
        stands_as_planned(plan, state)
