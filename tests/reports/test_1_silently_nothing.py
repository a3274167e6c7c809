"""Reports of theme 1, "the setting silently does nothing": each says now which entry did nothing, and why."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import forebay as fb
from forebay.errors import InputError, PlacementError
from forebay.records import Memory, Verdict
from forebay.report.tables import render_plan

pytestmark = pytest.mark.oldest
H100 = "h100-sxm"


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def work(body, layers=4, wrap=lambda step: step):
    """A workload of one scan of ``body``; ``wrap`` goes around the body."""
    loss = lambda p, b: jnp.mean(jax.lax.scan(wrap(lambda x, w: (body(x, w), None)), b, p)[0] ** 2)  # noqa: E731
    return fb.trace(loss, optax.sgd(0.1), shape(layers, 128, 128), shape(16, 128))


def named_inside(x, w):
    return x + jnp.tanh(checkpoint_name(x, "layer_input") @ w)


def test_jax_23869_a_named_block_output_says_why_nothing_moved():
    outputs = work(lambda x, w: checkpoint_name(jnp.tanh(x @ w), "block_output"), wrap=jax.checkpoint)
    with pytest.raises(PlacementError, match=r"activation:block_output=host would do nothing: .*; place the next block's input instead"):
        fb.Plan.by_hand(outputs, {"activation:block_output": "host"})


def test_xla_17541_a_named_carry_is_one_entry_and_moves():
    plan = fb.Plan.by_hand(work(named_inside), {"activation:layer_input": "host"})
    assert plan.placement("activation:layer_input") == "host"


def test_maxtext_4990_a_loop_of_one_layer_says_that_its_offload_would_be_dropped():
    with pytest.raises(PlacementError, match="its loop has a single iteration, for which the compiler drops an offload"):
        fb.Plan.by_hand(work(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "inner")), layers=1), {"activation:inner": "host"})


@pytest.mark.compiler
def test_maxtext_4995_offload_in_nested_scans_is_brought_into_a_form_that_compiles():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(params, batch):
        layer = jax.checkpoint(lambda x, w: (x + checkpoint_name(jnp.tanh(x @ w), "kept"), None), policy=policy)
        return jnp.mean(jax.lax.scan(lambda x, stack: (jax.lax.scan(layer, x, stack)[0], None), batch, params)[0] ** 2)

    machine = fb.Hardware.named(H100)
    nested = fb.trace(loss, optax.sgd(0.1), shape(2, 4, 128, 128), shape(16, 128))
    plan = fb.Plan.by_hand(nested, {}, hardware=machine)
    step = fb.train_step(loss, optax.sgd(0.1), plan)
    verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), machine, plan=plan)
    assert verdict.compiled, verdict.reason


def test_a_name_in_both_lists_is_shown_as_what_the_program_does_with_it():
    both = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["layer_input"], names_which_can_be_offloaded=["other"], offload_src="device", offload_dst="pinned_host"
    )
    kept = work(named_inside, wrap=lambda step: jax.checkpoint(step, policy=both))
    entry = next(e for e in fb.Plan.by_hand(kept, {}).entries if e.name == "activation:layer_input")
    assert (entry.placement, entry.reason) == ("hbm", "as written: the program keeps it")
    twice = fb.Plan.by_hand(kept, {"activation:layer_input": "hbm", "activation:layer*": "host"})
    entry = next(e for e in twice.entries if e.name == "activation:layer_input")
    assert (entry.placement, entry.reason) == ("host", "rule activation:layer*=host")


def test_a_misspelt_name_is_an_error_with_the_nearest():
    with pytest.raises(InputError, match=r"activation:layer_inputs=host matches nothing; did you mean 'layer_input'"):
        fb.Plan.by_hand(work(named_inside), {"activation:layer_inputs": "host"})


def test_a_name_that_no_tensor_bears_is_an_error_that_lists_what_there_is():
    with pytest.raises(InputError, match=r"activation:attention_scores=host matches nothing; entries of role activation: .*layer_input"):
        fb.Plan.by_hand(work(named_inside), {"activation:attention_scores": "host"})


def test_jax_19063_the_plan_shows_what_was_asked_what_was_ignored_and_the_bytes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan = fb.Plan.by_hand(work(named_inside), {"activation:layer_input": "host"}, hardware=fb.Hardware.named(H100))
    verdict = Verdict(
        fits=True, reason="within", hbm=Memory(temp_bytes=2**30), host=Memory(), hbm_budget_bytes=2**36, host_budget_bytes=2**38,
        ignored=("activation:layer_input",), versions={"jax": "0"}, target="cuda",
    )  # fmt: skip
    text = render_plan(json.loads(json.dumps(dataclasses.replace(plan, verdict=verdict).to_json())))
    assert "compiled: asked onto the host and not there: activation:layer_input" in text
    assert "rule activation:layer_input=host" in text
    assert "32.0 KiB" in text  # 4 layers of 16 x 128 floats
