"""``forebay.check``: a true plan passes in every dtype, a step that is wrong in one way fails on the line that says so."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from words import EVERYTHING, LAYERS, ROWS, batch, loss, shapes

import forebay as fb
from forebay.errors import InputError, PlanError
from forebay.trust import compare, gate, planned
from forebay.trust.twin import make_values

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.oldest]

ADAM = optax.adamw(1e-2)


def plan_of(loss_fn, rules=EVERYTHING, optimizer=ADAM, params=None, rows=ROWS, options=None, **traced):
    work = fb.trace(loss_fn, optimizer, params or shapes(), batch(rows), **traced)
    return fb.Plan.by_hand(work, rules, options={"whole_below_bytes": 0} | (options or {}))


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


CPU_CANNOT = {"placement", "memory", "overlap", "ignored placements"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_true_plan_passes_and_a_cpu_skips_what_it_cannot_show(dtype):
    with jax.enable_x64(dtype == "float64"):
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        model = functools.partial(loss, compute=jnp.dtype(dtype))
        report = fb.check(model, ADAM, plan_of(model, params=shapes(wide)), integers=16)
    found = outcomes(report)
    assert report.passed, report
    assert {name for name, outcome in found.items() if outcome == "skipped"} - {"parameters"} == CPU_CANNOT
    assert found["parameters"] == "passed" or dtype == "bfloat16"
    assert f"computing in {dtype}" in report.title
    assert {"losses", "gradient norms", "parameters", "optimizer state", "gradients", "donation", "compiles"} < set(found)
    assert "a CPU has one memory" in report["overlap"].detail


def test_keys_extra_state_and_microbatches_are_held_against_their_own_reference():
    extra = {"calls": np.int32(0), "mean": np.float32(0)}
    plan = plan_of(loss, {"optimizer": "host"}, rng=True, extra=extra, reduction="mean", options={"microbatches": 2})
    report = fb.check(loss, ADAM, plan, extra=extra, integers=16)
    assert report.passed, report
    assert outcomes(report)["extra state"] == "passed"
    assert outcomes(report)["gradients"] == "skipped"


def test_a_smaller_twin_stands_as_the_large_plan_says():
    large = plan_of(loss, {"optimizer": "host[0:4]", "activation": "host"}, params=shapes(layers=8, width=32), rows=8)
    twin = gate.make_twin(
        loss, ADAM, large, shapes(), batch(), None, steps=2, seed=0, integers=16, hardware=fb.Hardware.named("h100-sxm:1")
    )
    placed = {(e.name, e.layers): e.placement for e in twin.plan.entries if e.role != "gradient"}
    assert placed["optimizer:0/mu/layers/up[0:2]", (0, 2)] == "host"
    assert placed["optimizer:0/mu/layers/up[2:4]", (2, LAYERS)] == "hbm"
    wanted = {e.name: e.placement for e in large.role("activation")}
    assert {e.name: e.placement for e in twin.plan.role("activation")} == wanted
    assert "host" in wanted.values()


def test_another_model_is_no_twin():
    plan = plan_of(loss)
    other = lambda params, rows: loss({**params, "embed": params["words"]}, rows)  # noqa: E731
    params = shapes() | {"words": shapes()["embed"]}
    del params["embed"]
    with pytest.raises(PlanError, match=r"the plan has no parameter:words; .*The twin must be the plan's model"):
        fb.check(other, ADAM, plan, params, batch(2))


def test_a_model_that_does_not_fit_resident_asks_for_a_twin():
    large = shapes(width=2**17)
    with pytest.raises(InputError, match=r"needs some [\d.]+ TiB .* pass params and batch of smaller sizes"):
        fb.check(loss, ADAM, plan_of(loss, {}, params=large))


def test_a_loss_that_is_not_finite_is_no_reference():
    bad = lambda params, rows: loss(params, rows) / 0  # noqa: E731
    with pytest.raises(InputError, match=r"the losses of the resident run are \[(inf|nan).* pass arrays"):
        fb.check(bad, optax.sgd(0.1), plan_of(bad, {}, optax.sgd(0.1)))


def test_an_update_that_cannot_be_seen_is_skipped_not_passed():
    made = twin()
    start = jax.tree.map(np.asarray, made.params)
    end = gate.Outcome(losses=np.ones(3), norms=np.ones(3), params=start, opt_state=None, extra=None)
    found = gate._parameters(made, compare.distances("parameter", start, start), end)
    assert found.outcome == "skipped"
    assert "parameter:embed, hardly move in 3 steps, so a lost update would not show" in found.detail


@functools.cache
def twin():
    plan = plan_of(loss, {"optimizer": "host"})
    return gate.make_twin(loss, ADAM, plan, None, None, None, steps=3, seed=0, integers=16, hardware=fb.Hardware.here())


def step_of(made):
    return fb.train_step(loss, ADAM, made.plan, mesh=made.mesh)


def test_a_state_that_is_not_consumed_is_named():
    made = twin()
    run = planned.run(made, planned.undonated(made, step_of(made)))
    assert "parameter:embed" in run.kept and "optimizer:0/mu/embed" in run.kept
    found = gate.donation(made, run, run.outcome, gate.Yardstick(made))
    assert found.outcome == "failed"
    assert "parameter:embed was donated and is still there" in found.detail


def test_a_second_compile_is_counted():
    made = twin()
    step = step_of(made)
    shifts = iter(range(3))

    def recompiled(state, rows):
        shift = next(shifts)
        jax.jit(lambda x: x + shift)(np.float32(0))
        return step(state, rows)

    run = planned.run(made, recompiled)
    assert run.compiles == 4
    assert gate._compiles(run).detail == "4 compilations while the steps ran; one is expected, at the first"
    assert gate._compiles(dataclasses.replace(run, compiles=1)).outcome == "passed"


def test_an_array_that_stands_elsewhere_is_named():
    made = twin()
    state = fb.place(made.params, ADAM, made.plan, mesh=made.mesh)
    moved = jax.device_put(state.stored_opt_state, jax.memory.Space.Device)
    wrong = list(planned.misplaced(made.plan, type(state)(**(vars(state) | {"stored_opt_state": moved}))))
    assert "optimizer:0/mu/embed stands in device memory, planned pinned_host" in wrong
    assert not list(planned.misplaced(made.plan, state))


def test_values_are_drawn_from_shapes_and_arrays_are_kept():
    given = {"a": np.arange(3), "b": jax.ShapeDtypeStruct((50,), jnp.int32), "c": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)}
    made = make_values(given, np.random.default_rng(0), 5)
    assert made["a"] is given["a"]
    assert made["b"].dtype == np.int32 and set(made["b"]) == set(range(5))
    assert made["c"].dtype == jnp.bfloat16 and float(np.abs(made["c"].astype(np.float32)).max()) > 0
