"""A decoder on eight H100s that are not here: cuDNN attention lowers on an abstract mesh, and nothing large is ever whole."""

import dataclasses
import re

import jax
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from forebay.compiler import judge
from forebay.hardware import Hardware
from forebay.training.models import llama, preset

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]

MESH = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def placed(x, axis):
    spec = PartitionSpec(*("fsdp" if i == axis else None for i in range(len(x.shape))))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec))


def compiled_step(config, seq, saved=()):
    """The verdict on one AdamW step of ``config``, FSDP over 8 GPUs, one sequence on each; ``saved`` names what a layer keeps."""
    _, optimizer, params, batch = llama.make(config, batch=8, seq=seq)
    loss = llama.make_loss(config, jax.checkpoint_policies.save_only_these_names(*saved))
    params = jax.tree.map(lambda x: placed(x, min(1, len(x.shape) - 1)), params)
    state = jax.tree.map(lambda x: placed(x, min(1, len(x.shape) - 1)), jax.eval_shape(optimizer.init, params))

    def step(params, state, batch):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    whole = NamedSharding(MESH, PartitionSpec())
    shardings = *jax.tree.map(lambda x: x.sharding, (params, state)), whole
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    with jax.sharding.use_abstract_mesh(MESH):
        return judge(jitted, (params, state, {"tokens": placed(batch["tokens"], 0)}), Hardware.named("h100-sxm:8"))


def gathered_kinds(hlo):
    """Element types of what the all-gathers and reduce-scatters of matrices move."""
    moves = re.findall(r"= (.*?) (?:all-gather|reduce-scatter)(?:-start)?\(", hlo)
    return {kind for shape in moves for kind in re.findall(r"(\w+)\[\d+,\d{3,}", shape)}


def test_llama_8b_keeps_no_large_temporary_and_gathers_half_precision():
    config, seq = preset("llama-3.1-8b"), 8192
    verdict = compiled_step(config, seq)
    assert verdict.fits, verdict.reason
    assert verdict.attention == {FORWARD: 2, BACKWARD: 1}  # the second forward is the recomputation
    gradients_bytes = 4 * llama.parameter_count(config) / 8
    carries_bytes = 2 * config.layers * seq * config.model
    # What stays beside them: one gathered layer or two, its activations, one chunk of logits. The whole logits alone are 3.9 GiB.
    assert verdict.hbm.temp_bytes - gradients_bytes - carries_bytes < 2.5 * 2**30
    assert gathered_kinds(verdict.hlo) <= {"bf16", "s32"}


@pytest.mark.parametrize("name", ["mistral-7b", "qwen-3-8b"])
def test_with_its_statistics_saved_attention_is_not_run_again(name):
    config = dataclasses.replace(preset(name), layers=4)
    verdict = compiled_step(config, 8192, saved=("attn_context", "attn_stats"))
    assert verdict.fits, verdict.reason
    assert verdict.attention == {FORWARD: 1, BACKWARD: 1}
    assert ('"sliding_window_length":4096' in verdict.hlo.replace(" ", "")) == (name == "mistral-7b")
