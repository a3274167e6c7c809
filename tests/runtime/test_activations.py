"""Named activations kept, offloaded or recomputed, with and without the user's own ``jax.checkpoint``: equal steps, residuals as asked."""

import functools

import jax
import optax
import pytest
from programs import HIDDEN, LAYERS, LENGTH, MODELS, ROWS, WIDTH
from resident import assert_equal, by_hand, planned, resident, trace

import forebay as fb
from forebay.errors import InputError, PlacementError

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]

KEPT_AND_OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=["layer_input"], offload_src="device", offload_dst="pinned_host"
)
CHECKPOINTS = {
    "none": lambda body: body,
    "full": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "names": functools.partial(jax.checkpoint, policy=KEPT_AND_OFFLOADED),
}
CASES = [
    ("scanned", "none", {"activation": "host"}),
    ("scanned", "none", {"activation": "recompute"}),
    ("scanned", "none", {"activation:hidden": "host", "optimizer": "host"}),
    ("scanned", "full", {"activation:hidden": "hbm", "activation:layer_input": "host"}),
    ("scanned", "full", {"activation": "hbm", "parameter:layers/*": "host"}),
    ("scanned", "dots", {"activation:hidden": "recompute"}),
    ("scanned", "names", {"activation:layer_input": "hbm", "activation:hidden": "host"}),
    ("unrolled", "none", {"activation:layer_input": "host", "activation:hidden": "recompute"}),
    ("unrolled", "full", {"activation": "host", "parameter": "host"}),
    ("unrolled", "names", {}),
]


@functools.cache
def baseline(model, checkpoint):
    program, optimizer = MODELS[model](wrap=CHECKPOINTS[checkpoint]), optax.adamw(1e-2)
    return program, optimizer, trace(program, optimizer), resident(program, optimizer)


@pytest.mark.parametrize(("model", "checkpoint", "rules"), CASES)
def test_ten_planned_steps_equal_ten_resident_ones(model, checkpoint, rules):
    program, optimizer, work, wanted = baseline(model, checkpoint)
    assert_equal(planned(program, optimizer, rules, work=work)[0], wanted, 1e-10)


def plan_for(checkpoint, rules, model="scanned"):
    program, _, work, _ = baseline(model, checkpoint)
    return program, by_hand(program, work, rules)


def placed(plan):
    return {e.name: e.placement for e in plan.role("activation") if e.name in ("activation:layer_input", "activation:hidden")}


@pytest.mark.parametrize(
    ("checkpoint", "as_written"),
    [("none", ("hbm", "hbm")), ("full", ("hbm", "recompute")), ("dots", ("hbm", "hbm")), ("names", ("host", "hbm"))],
)
def test_without_a_rule_the_plan_states_what_the_program_does_by_itself(checkpoint, as_written):
    assert placed(plan_for(checkpoint, {})[1]) == dict(zip(("activation:layer_input", "activation:hidden"), as_written, strict=True))


def test_bytes_count_every_layer_on_one_device():
    _, plan = plan_for("none", {"activation:hidden": "host"})
    entries = {e.name: e for e in plan.role("activation")}
    assert entries["activation:hidden"].bytes_per_device == LAYERS * ROWS * LENGTH * HIDDEN * 8 // 8
    assert entries["activation:layer_input"].bytes_per_device == LAYERS * ROWS * LENGTH * WIDTH * 8 // 8
    _, plan = plan_for("none", {"activation:hidden": "recompute"})
    assert plan.placement("activation:hidden") == "recompute"
    assert {e.name: e for e in plan.role("activation")}["activation:hidden"].bytes_per_device == 0


def spaces(plan, program, width):
    """The memory spaces in which the traced step stacks a residual of ``width`` over the layers; none where it is recomputed."""
    step = fb.train_step(program.loss_fn, optax.adamw(1e-2), plan)
    found = set()

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("scan", "while"):
                found.update(str(v.aval.memory_space) for v in eqn.outvars if v.aval.shape == (LAYERS, ROWS, LENGTH, width))
            for value in eqn.params.values():
                for inner in value if isinstance(value, (list, tuple)) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        look(getattr(inner, "jaxpr", inner))

    look(step.trace(plan.abstract_state(), plan.abstract_batch()).jaxpr.jaxpr)
    return {space.rpartition(".")[2].lower() for space in found}


@pytest.mark.parametrize("hosted", [{}, {"parameter:layers/*": "host"}], ids=["resident", "hosted layers"])
@pytest.mark.parametrize(("placement", "space"), [("hbm", {"device"}), ("host", {"host"}), ("recompute", set())])
def test_the_step_stacks_a_residual_where_the_plan_puts_it(placement, space, hosted):
    program, plan = plan_for("none", {"activation": "recompute", "activation:hidden": placement} | hosted)
    assert spaces(plan, program, HIDDEN) == space


def test_the_carry_goes_to_the_host():
    program, plan = plan_for("full", {"activation:layer_input": "host"})
    assert spaces(plan, program, WIDTH) == {"host"}


def named_output(params, batch):
    """A body that names its output, which differentiation never keeps."""

    def body(x, w):
        return jax.ad_checkpoint.checkpoint_name(x @ w, "block_output"), None

    return jax.lax.scan(body, batch["x"], params["w"])[0].sum()


def work_of(loss, length=3):
    shapes = {"w": jax.ShapeDtypeStruct((length, 4, 4), "float32")}, {"x": jax.ShapeDtypeStruct((2, 4), "float32")}
    return fb.trace(loss, optax.sgd(0.1), *shapes)


def test_a_name_on_the_output_of_a_block_is_refused_with_the_remedy():
    with pytest.raises(PlacementError, match=r"would do nothing.*block's output.*next block's input"):
        fb.Plan.by_hand(work_of(named_output), {"activation:block_output": "host"})


def test_a_loop_of_length_one_cannot_be_offloaded():
    def loss(params, batch):
        body = lambda x, w: (jax.numpy.tanh(jax.ad_checkpoint.checkpoint_name(x, "inner") @ w), None)  # noqa: E731
        return jax.lax.scan(body, batch["x"], params["w"])[0].sum()

    with pytest.raises(PlacementError, match="single iteration"):
        fb.Plan.by_hand(work_of(loss, length=1), {"activation:inner": "host"})
    assert fb.Plan.by_hand(work_of(loss, length=2), {"activation:inner": "host"}).placement("activation:inner") == "host"


def test_a_misspelt_name_is_an_error_with_the_nearest_name():
    with pytest.raises(InputError, match=r"matches nothing; did you mean 'layer_input'"):
        plan_for("none", {"activation:layer_inptu": "host"})
