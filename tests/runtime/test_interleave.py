"""A chain of copies spread over the arithmetic that runs beside it."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay.hardware import Hardware
from forebay.runtime.interleave import spread
from forebay.timeline.predicting import read_schedule
from forebay.workload import jaxprs

WIDTH = 64


def program(matmuls):
    def run(x):
        for _ in range(matmuls):
            x = jnp.tanh(x @ x)
        return x, x.sum()

    return jax.make_jaxpr(run)(jnp.zeros((WIDTH, WIDTH)))


def chain(log, count):
    total = 0.0
    for k in range(count):
        total = yield total + k
        log.append(k)
    return total


@pytest.mark.parametrize("matmuls", [0, 1, 2, 7])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_results_are_those_of_both_alone(matmuls, count):
    x, log = jnp.eye(WIDTH) / 3, []
    traced = program(matmuls)
    shares = [(k + 1) / (count + 1) for k in range(count)]
    outs, total = jax.jit(lambda x: spread(chain(log, count), shares, traced, [x]))(x)
    assert log == list(range(count))
    assert total == sum(range(count))
    for got, wanted in zip(outs, jaxprs.evaluate(traced, [x]), strict=True):
        assert jnp.allclose(got, wanted)


def test_points_share_the_matmuls():
    jaxpr = jax.make_jaxpr(lambda x: spread(chain([], 3), [0.25, 0.5, 0.75], program(8), [x]))(jnp.zeros((WIDTH, WIDTH)))
    order = [e.primitive.name for e in jaxpr.jaxpr.eqns if e.primitive.name in ("dot_general", "optimization_barrier")]
    barriers = [order[:k].count("dot_general") for k, name in enumerate(order) if name == "optimization_barrier"]
    assert barriers == [2, 4, 6]


@pytest.mark.oldest
@pytest.mark.compiler
def test_the_matmuls_of_a_layer_run_beside_the_copies_of_its_update():
    layers, width = 8, 2048
    params = {name: jax.ShapeDtypeStruct((layers, width, width), jnp.float32) for name in ("a", "b", "c")}

    def loss_fn(params, batch):
        def layer(x, w):
            return jnp.tanh(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]), None

        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), batch, params)
        return jnp.mean(x**2)

    hardware = Hardware.named("h100-sxm:1")
    work = fb.trace(loss_fn, optax.adamw(1e-3), params, jax.ShapeDtypeStruct((4096, width), jnp.float32))
    plan = fb.Plan.by_hand(work, {"parameter": "host", "optimizer": "host"}, hardware=hardware)
    verdict = fb.judge(fb.train_step(loss_fn, optax.adamw(1e-3), plan), (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan)
    bodies = [works for works in read_schedule(verdict).program.computations.values() if any(w.traffic.host_written for w in works)]
    body = max(bodies, key=lambda works: sum(w.flops for w in works))
    begins = [at for at, w in enumerate(body) if w.kind == "host_copy"]
    between = [sum(w.flops for w in body[at:after]) for at, after in itertools.pairwise([0, *begins, len(body)])]
    # one after the other, all matmuls stand behind the last copy's start; of three leaves each has a part of them
    assert 0 < max(between) <= 0.6 * sum(between)
    assert not [c for c in verdict.host_copies if c.direction == "host_to_host"]
