"""Microbatches: a step over several equals a step over the whole batch, wherever the accumulators stand, and no second stack exists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import MODELS
from resident import assert_equal, planned, resident, trace

import forebay as fb
from forebay.hardware import Hardware

pytestmark = pytest.mark.oldest

PLACEMENTS = {
    "hbm": {"optimizer": "host"},
    "layers": {"parameter:layers/*": "host", "optimizer:*layers*": "host"},
    "everything": {"parameter": "host", "optimizer": "host", "activation": "host"},
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, 0.9)),
}
CASES = [("scanned", "mean", "hbm", "clipped"), ("scanned", "mean", "everything", "adamw"), ("unrolled", "mean", "layers", "adamw")]
CASES += [
    ("scanned", "sum", "everything", "clipped"),
    ("unrolled", "weight:rows", "everything", "clipped"),
    ("scanned", "weight:rows", "layers", "adamw"),
]


def of(model, reduction):
    """A model with 32 rows, so that two microbatches divide over eight devices; of some rows nothing is asked where they have weights."""
    program = MODELS[model](np.float64)
    join = lambda *rows: np.concatenate(rows)  # noqa: E731

    def batch(step):
        rows = jax.tree.map(join, *(program.batch(step + 50 * k) for k in range(2)))
        return rows | {"asked": (np.arange(16) % 5 < (4 if step % 2 else 2)).astype(np.float64)}

    def loss_fn(params, batch):
        if reduction == "mean":
            return program.loss_fn(params, {k: batch[k] for k in ("x", "y")})[0]
        each = jax.vmap(lambda x, y: program.loss_fn(params, {"x": x[None], "y": y[None]})[0])(batch["x"], batch["y"])
        total, rows = jnp.sum(each * batch["asked"]), batch["asked"].sum()
        return (total, None) if reduction == "sum" else (total / rows, {"rows": rows})

    return dataclasses.replace(program, batch=batch, loss_fn=loss_fn)


def traced(program, optimizer, reduction):
    return dataclasses.replace(trace(program, optimizer), reduction=reduction)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("model", "reduction", "placement", "name"), CASES)
def test_steps_over_microbatches_equal_steps_over_the_whole_batch(model, reduction, placement, name):
    program, optimizer = of(model, reduction), OPTIMIZERS[name]()
    rules, options = PLACEMENTS[placement], {"microbatches": 2}
    got, plan = planned(program, optimizer, rules, work=traced(program, optimizer, reduction), options=options, steps=5)
    wanted = resident(program, optimizer, steps=5)
    assert_equal(dataclasses.replace(got, aux=None), dataclasses.replace(wanted, aux=None), 1e-10)
    assert np.ptp(wanted.losses) > 1e-3
    on_host = {e.name.partition(":")[2] for e in plan.role("accumulator") if e.placement == "host"}
    assert {"hbm": 0, "layers": 3, "everything": 5}[placement] == len(on_host)
    inside = {e.name.partition(":")[2] for e in plan.role("gradient") if e.reason.startswith("added to its accumulator inside")}
    assert inside == {path for path in on_host if path.startswith("layers")}


@pytest.mark.usefixtures("small")
def test_gradients_of_two_bytes_are_added_in_four():
    """The accumulator has more bits than the parameters, on the host as in HBM, and the update reads what it expects."""
    program, optimizer = dataclasses.replace(MODELS["scanned"](jnp.bfloat16), batch=of("scanned", "sum").batch), optax.adamw(1e-2)
    program = dataclasses.replace(program, loss_fn=lambda p, b: MODELS["scanned"]().loss_fn(p, {k: b[k] for k in ("x", "y")})[0])
    work = traced(program, optimizer, "mean")
    (host, plan), (hbm, _) = (
        planned(program, optimizer, rules, work=work, options={"microbatches": 2}, steps=5) for rules in (PLACEMENTS["everything"], {})
    )
    assert {(e.dtype, e.placement) for e in plan.role("accumulator")} == {("float32", "host")}
    assert_equal(host, hbm, 2e-2)


@pytest.mark.compiler
@pytest.mark.parametrize("machine", ["h100-sxm:8", "tpu-v5p:2x2x1"])
def test_the_accumulator_is_the_only_stack(machine):
    """Every microbatch reads and writes it in place; no stack of gradients stands beside it, nor zeros in HBM."""
    layers, width, hidden = 8, 1024, 2048
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), batch, params)[0] ** 2)

    hardware, optimizer = Hardware.named(machine), optax.adamw(1e-3)
    params = {"up": array(layers, width, hidden), "down": array(layers, hidden, width)}
    work = fb.trace(loss_fn, optimizer, params, array(1024, width), reduction="mean")
    rules = {"parameter": "host", "optimizer": "host"}
    plan = fb.Plan.by_hand(work, rules, hardware=hardware, options={"microbatches": 4})
    step = fb.train_step(loss_fn, optimizer, plan)
    strict = {"xla_disable_automatic_host_compute_offload": True}
    verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan, compiler_options=strict)
    assert verdict.compiled, verdict.reason
    accumulators = sum(e.bytes_per_device for e in plan.role("accumulator"))
    assert accumulators == 2 * 4 * layers * width * hidden // hardware.devices
    # XLA:TPU keeps a layer's slices on the host beside it; a stack of gradients would be as large again
    assert accumulators <= verdict.host.temp_bytes <= accumulators * (1 + 1 / layers)
    assert not [c for c in verdict.host_copies if c.direction == "host_to_host"]
    assert verdict.hbm.total_bytes - verdict.hbm.argument_bytes < 2 * accumulators, "a whole stack stands in HBM"
