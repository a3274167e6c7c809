"""`choose` on small models: the plan fits by the real compiler, beats what was tried beside it, explains itself, and trains the same."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brute import cheapest, every_choice
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forebay as fb
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.search.choices import choice_of, rules_of
from forebay.search.formulating import formulate
from forebay.search.pricing import Prices
from forebay.search.problem import Correction, estimate
from forebay.search.program import Limits, solve
from forebay.search.proving import SIDE_BY_SIDE

LAYERS, WIDTH, ROWS = 6, 512, 2048


def loss_fn(params, batch):
    def layer(x, w):
        h = jnp.tanh(x @ w["up"])
        return x + jnp.sin(h * h) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), batch["x"], params)
    return jnp.mean(x**2)


def traced(optimizer, rows=ROWS, width=WIDTH, dtype="float32"):
    like = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    params = {"up": like(LAYERS, width, 2 * width), "down": like(LAYERS, 2 * width, width)}
    return fb.trace(loss_fn, optimizer, params, {"x": like(rows, width)}, name="small")


@pytest.fixture(scope="module")
def prices():
    return Prices(Hardware.named("h100-sxm:1"))


@pytest.fixture(scope="module", params=["16GiB", "140MiB"])
def chosen(request):
    hardware = Hardware.named("h100-sxm:1", hbm=request.param)
    return request.param, fb.choose(traced(optax.adamw(1e-3)), hardware, budget_seconds=240)


@pytest.mark.compiler
def test_the_plan_fits_and_no_candidate_that_fits_is_faster(chosen):
    size, plan = chosen
    assert plan.verdict.fits
    [mine] = [c for c in plan.candidates if not c["why_not"]]
    assert mine["step_seconds"] == plan.forecast["step_seconds"]
    assert all(mine["step_seconds"] <= c["step_seconds"] for c in plan.candidates if c["fits"])
    assert plan.candidates[0]["summary"] == ("as written" if size == "16GiB" else "as written, optimizer state on host")
    assert any("search: " in reason for reason in plan.options["reasons"])


@pytest.mark.compiler
def test_where_everything_fits_nothing_is_moved(chosen):
    size, plan = chosen
    assert ("host" in {e.placement for e in plan.entries}) == (size != "16GiB")


@pytest.mark.compiler
def test_every_entry_says_why_and_a_plan_goes_to_disk_and_back(chosen, tmp_path):
    _, plan = chosen
    assert all(e.reason for e in plan.entries)
    moved = [e for e in plan.role("optimizer") if e.placement == "host"]
    assert all("(forecast)" in e.reason and "of HBM" in e.runner_up for e in moved)
    plan.save(tmp_path / "plan.json")
    read = fb.Plan.load(tmp_path / "plan.json", traced(optax.adamw(1e-3)))
    assert read.entries == plan.entries
    assert "chosen" in str(read)


@pytest.mark.compiler
def test_ten_steps_of_the_chosen_plan_equal_the_resident_ones(chosen):
    _, plan = chosen
    [mine] = [c for c in plan.candidates if not c["why_not"]]
    optimizer = optax.adamw(1e-3)
    with jax.enable_x64(True):
        one, other = (_ten_steps(traced(optimizer, rows=8, dtype="float64"), optimizer, rules) for rules in ({}, mine["rules"]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def _ten_steps(work, optimizer, rules):
    plan, key = Plan.by_hand(work, rules), jax.random.key(0)
    params = {n: 0.05 * jax.random.normal(key, s.shape, s.dtype) for n, s in work.args.params.items()}
    batch = {"x": jax.random.normal(key, (8, WIDTH), "float64")}
    step, state = fb.train_step(loss_fn, optimizer, plan), fb.init(lambda _: params, optimizer, plan, key)
    for _ in range(10):
        state, metrics = step(state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((metrics["loss"], state.params))]


@pytest.mark.compiler
def test_what_does_not_fit_says_so_and_what_was_tried():
    hardware = Hardware.named("h100-sxm:1", hbm="60MiB", host_ram="100MiB")
    plan = fb.choose(traced(optax.adamw(1e-3)), hardware, budget_seconds=240)
    assert plan.verdict.fits is False
    assert all("over the budget" in c["why_not"] for c in plan.candidates)
    assert "was found to fit" in plan.options["reasons"][-1]


@pytest.mark.compiler
def test_a_time_budget_that_is_used_up_ends_the_search_and_there_is_an_answer():
    plan = fb.choose(traced(optax.adamw(1e-3)), Hardware.named("h100-sxm:1", hbm="140MiB"), budget_seconds=0)
    assert plan.verdict.fits
    assert len(plan.candidates) == SIDE_BY_SIDE
    assert "the time budget ended the search" in plan.options["reasons"][-1]


def test_a_machine_without_device_memory_is_refused():
    with pytest.raises(InputError, match="has no device memory to plan for"):
        fb.choose(traced(optax.adamw(1e-3)), dataclasses.replace(Hardware.here(), name="here"))


PRIMITIVES = (jnp.sin, jnp.tanh, lambda x: x * x, lambda x: x + 1)


@st.composite
def programs(draw):
    """A scanned body of a few values, some shared, some inside a nested call; one matmul at least."""
    plan = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=2))

    def loss(params, batch):
        def layer(x, w):
            values = [x, x @ w]
            for which, source, nested in plan:
                apply = jax.jit(PRIMITIVES[which]) if nested else PRIMITIVES[which]
                values.append(apply(values[source % len(values)]))
            return values[-1] * values[1] + x, None

        y, _ = jax.lax.scan(layer, batch, params)
        return jnp.mean(y**2)

    return loss


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loss=programs(), room=st.floats(0.0, 1.0), momentum=st.booleans())
def test_the_optimum_of_a_traced_program_equals_brute_force(prices, loss, room, momentum):
    shapes = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    work = fb.trace(loss, optax.sgd(0.1, momentum=0.9 if momentum else None), *shapes)
    problem = formulate(work, Hardware.named("h100-sxm:1"), prices, {})
    correction = Correction(constant_seconds=1e-3)
    sizes = [estimate(problem, choice, correction).hbm_bytes for choice in every_choice(problem)]
    limits = Limits(hbm_bytes=min(sizes) + room * (max(sizes) - min(sizes)) + 1, host_bytes=math.inf)
    best, found = cheapest(problem, correction, limits), solve(problem, correction, limits)
    assert estimate(problem, found, correction).seconds == pytest.approx(best[0], rel=2e-4)


def test_what_is_made_first_is_read_last(prices):
    values = [v for v in formulate(traced(optax.adamw(1e-3)), Hardware.named("h100-sxm:1"), prices, ()).values if v.name]
    for earlier, later in itertools.pairwise(values):
        assert earlier.after_seconds > later.after_seconds
        assert earlier.ahead_seconds > later.ahead_seconds
    product = values[1]
    assert values[0].after_seconds - product.after_seconds == pytest.approx(product.rebuild_seconds)
    assert values[0].ahead_seconds == pytest.approx(2 * product.after_seconds)  # the carry is read by the derivative of the first product


def test_a_choice_goes_to_rules_and_back(prices):
    work, hardware = traced(optax.adamw(1e-3)), Hardware.named("h100-sxm:1")
    problem = formulate(work, hardware, prices, {})
    written = {t.name: t.written for t in work.tensors if t.role == "activation"}
    small = [c for c in every_choice(dataclasses.replace(problem, groups=())) if c.places]
    for choice in small[:40]:
        whole = dataclasses.replace(
            choice, state_parts=tuple(g.parts for g in problem.groups), params_on_host=tuple(g.param_moves for g in problem.groups)
        )
        rules = rules_of(problem, whole, written)
        assert choice_of(problem, Plan.by_hand(work, rules, hardware=hardware)) == whole
