"""What XLA:GPU makes of the streamed loops: copies both ways at once, nothing from host to host, no host memory beyond the state."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import forebay as fb
from forebay.hardware import Hardware

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]

LAYERS, WIDTH, HIDDEN, VOCABULARY = 8, 1024, 2048, 4096
STRICT = {"xla_disable_automatic_host_compute_offload": True}


def shapes():
    array = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    layers = {"up": array(LAYERS, WIDTH, HIDDEN), "down": array(LAYERS, HIDDEN, WIDTH)}
    return {"embed": array(VOCABULARY, WIDTH), "layers": layers, "head": array(VOCABULARY, WIDTH)}


def loss_fn(params, batch):
    def layer(x, w):
        x = jax.ad_checkpoint.checkpoint_name(x, "layer_input")
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), params["embed"][batch["tokens"]], params["layers"])
    return jnp.mean((x @ params["head"].T) ** 2)


def judged(rules, optimizer, hardware="h100-sxm:8"):
    hw = Hardware.named(hardware)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 128), jnp.int32)}
    plan = fb.Plan.by_hand(fb.trace(loss_fn, optimizer, shapes(), batch), rules, hardware=hw)
    step = fb.train_step(loss_fn, optimizer, plan)
    args = (plan.abstract_state(), plan.abstract_batch())
    return plan, fb.judge(step, args, hw, plan=plan, compiler_options=STRICT)


PLACEMENTS = {
    "optimizer": {"optimizer": "host"},
    "all": {"optimizer": "host", "parameter": "host", "activation:layer_input": "host"},
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def compiled(request):
    plan, verdict = judged(PLACEMENTS[request.param], optax.adamw(1e-3))
    assert verdict.compiled, verdict.reason
    return request.param, plan, verdict


def bodies(hlo: str):
    """The bodies of loops that both read slices from the host and write slices to it: a list of marks each, in schedule order."""
    for text in hlo.split("\n\n"):
        marks = [m for line in text.splitlines() if (m := mark(line))]
        if {"read", "write"} <= {what for what, _, begins in marks if begins}:
            yield marks


def mark(line: str):
    """(read or write, the name of the start, whether it begins) of an asynchronous copy of a slice from or to host memory."""
    found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? (fusion|copy|async)-(start|done)\(%?([\w.\-]+)", line)
    if not found or not ("dynamic" in line or "S(5)" in line):
        return None
    name, _, edge, operand = found.groups()
    what = "write" if "update" in name else "read"
    return (what, name, True) if edge == "start" else (what, operand, False)


def test_no_copy_from_host_to_host_and_no_extra_host_memory(compiled):
    name, plan, verdict = compiled
    assert not [c for c in verdict.host_copies if c.direction == "host_to_host"]
    activations = sum(e.bytes_per_device for e in plan.role("activation") if e.placement == "host")
    gradients = sum(e.bytes_per_device for e in plan.role("gradient") if e.placement == "host")
    assert verdict.host.temp_bytes <= activations + gradients, name
    assert verdict.host.alias_bytes == verdict.host.argument_bytes


def test_reads_and_writes_are_in_flight_together(compiled):
    _, _, verdict = compiled
    found = 0
    for marks in bodies(verdict.hlo):
        flying: dict[str, str] = {}
        together = 0
        for what, name, begins in marks:
            if begins:
                together += sum(other != what for other in flying.values())
                flying[name] = what
            else:
                flying.pop(name, None)
        assert together, "no read is in flight beside a write"
        found += 1
    assert found


def test_moving_the_state_gives_back_all_of_its_bytes():
    resident, lean = judged({}, optax.adamw(1e-3)), judged({"optimizer": "host"}, optax.adamw(1e-3))
    state = sum(e.bytes_per_device for e in resident[0].role("optimizer"))
    saved = resident[1].hbm.total_bytes - lean[1].hbm.total_bytes
    assert saved >= 0.95 * state, (saved, state)
