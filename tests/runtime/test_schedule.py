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
HOST = {"optimizer": "host", "parameter": "host", "activation:layer_input": "host"}
STACKS = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shapes():
    layers = {name: array(LAYERS, *shape) for name, shape in STACKS.items()}
    return {"embed": array(VOCABULARY, WIDTH), "layers": layers, "head": array(VOCABULARY, WIDTH)}


def loss_fn(params, batch):
    def layer(x, w):
        x = jax.ad_checkpoint.checkpoint_name(x, "layer_input")
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), params["embed"][batch["tokens"]], params["layers"])
    return jnp.mean((x @ params["head"].T) ** 2)


def one_stack_loss(params, batch):
    """A model with a single stack of weights: a loop over it has no other array to read while one is written."""

    def layer(x, w):
        x = jax.ad_checkpoint.checkpoint_name(x, "layer_input")
        return x + jnp.tanh(x @ w) @ w.T, None

    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), jnp.ones((WIDTH,)) + batch["tokens"][..., None], params["w"])
    return jnp.mean(x**2)


def judged(rules, optimizer, loss_fn=loss_fn, params=None, options=None, hardware="h100-sxm:8"):
    hw = Hardware.named(hardware)
    batch = {"tokens": jax.ShapeDtypeStruct((32, 64), jnp.int32)}
    work = fb.trace(loss_fn, optimizer, params or shapes(), batch, reduction="mean")
    plan = fb.Plan.by_hand(work, rules, hardware=hw, options=options)
    step = fb.train_step(loss_fn, optimizer, plan)
    args = (plan.abstract_state(), plan.abstract_batch())
    return plan, fb.judge(step, args, hw, plan=plan, compiler_options=STRICT)


def one_stack(rules, optimizer, options=None):
    return judged(rules, optimizer, one_stack_loss, {"w": array(LAYERS, WIDTH, HIDDEN)}, options)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
CASES = {
    "many stacks, state": lambda: judged({"optimizer": "host"}, optax.adamw(1e-3)),
    "many stacks, all": lambda: judged(HOST, optax.adamw(1e-3)),
    "many stacks, all, clipped": lambda: judged(HOST, CLIPPED),
    "many stacks, all, microbatches": lambda: judged(HOST, optax.adamw(1e-3), options={"microbatches": 2}),
    "one stack, momentum": lambda: one_stack({"optimizer": "host"}, optax.sgd(0.1, momentum=0.9)),
    "one stack, adam": lambda: one_stack({"optimizer": "host"}, optax.adamw(1e-3)),
    "one stack, mu alone": lambda: one_stack({"optimizer:*mu*": "host"}, optax.adamw(1e-3)),
    "one stack, all": lambda: one_stack(HOST, optax.sgd(0.1, momentum=0.9)),
    "one stack, all, clipped": lambda: one_stack(HOST, CLIPPED),
}


@pytest.fixture(scope="module", params=CASES)
def compiled(request):
    plan, verdict = CASES[request.param]()
    assert verdict.compiled, verdict.reason
    return request.param, plan, verdict


def loops(hlo: str):
    """The bodies of loops that copy from or to host memory: a list of (read or write, name, whether it begins), in schedule order."""
    for text in hlo.split("\n\n"):
        flying: dict[str, str] = {}
        marks = [m for line in text.splitlines() if (m := mark(line, flying))]
        if marks and not text.lstrip().startswith("ENTRY"):
            yield marks


def mark(line: str, flying: dict[str, str]):
    """The asynchronous copy of a slice between host memory and the device that begins or ends on a line; ``flying``: those begun so far."""
    found = re.match(
        r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) (?:fusion|copy|async|dynamic-slice|dynamic-update-slice)-(start|done)\(%?([\w.\-]+)", line
    )
    if not found:
        return None
    name, kind, edge, operand = found.groups()
    if edge == "done":
        return (flying[operand], operand, False) if operand in flying else None
    if "S(5)" not in kind:
        return None
    flying[name] = "write" if "update" in name else "read"
    return flying[name], name, True


def alone(marks) -> set[str]:
    """The copies during which none in the other direction is in flight: name and direction."""
    met, flying = set(), {}
    for what, name, begins in marks:
        if not begins:
            flying.pop(name, None)
            continue
        others = {other for other, kind in flying.items() if kind != what}
        met |= others | ({name} if others else set())
        flying[name] = what
    return {f"{what} {name}" for what, name, _ in marks if name not in met}


def test_no_copy_from_host_to_host_and_no_extra_host_memory(compiled):
    name, plan, verdict = compiled
    assert not [c for c in verdict.host_copies if c.direction == "host_to_host"]
    stands = [*plan.role("activation"), *plan.role("gradient"), *plan.role("accumulator")]
    expected = sum(e.bytes_per_device for e in stands if e.placement == "host")
    assert verdict.host.temp_bytes <= expected, name
    assert verdict.host.alias_bytes == verdict.host.argument_bytes


def test_reads_and_writes_are_in_flight_together(compiled):
    """In every loop that both reads and writes host memory; in those of the update, no read and no write is without one of the other."""
    name, plan, verdict = compiled
    bodies = [marks for marks in loops(verdict.hlo) if {"read", "write"} <= {what for what, _, begins in marks if begins}]
    assert bodies
    for marks in bodies:
        assert len(alone(marks)) < len({copy for _, copy, _ in marks}), (name, marks)
    if not plan.fused:
        assert any(not alone(marks) for marks in bodies), (name, bodies)


def test_a_stack_that_streams_alone_is_kept_in_halves():
    plan, _ = one_stack({"optimizer": "host"}, optax.adamw(1e-3))
    names = [e.name for e in plan.role("optimizer") if e.placement == "host"]
    assert names == ["optimizer:0/mu/w[0:4]", "optimizer:0/nu/w[0:4]", "optimizer:0/mu/w[4:8]", "optimizer:0/nu/w[4:8]"]
    plan, _ = one_stack({"optimizer": "host"}, optax.adamw(1e-3), {"duplex": "never"})
    assert [e.name for e in plan.role("optimizer") if e.placement == "host"] == ["optimizer:0/mu/w", "optimizer:0/nu/w"]


def test_moving_the_state_gives_back_all_of_its_bytes():
    resident, lean = judged({}, optax.adamw(1e-3)), judged({"optimizer": "host"}, optax.adamw(1e-3))
    state = sum(e.bytes_per_device for e in resident[0].role("optimizer"))
    saved = resident[1].hbm.total_bytes - lean[1].hbm.total_bytes
    assert saved >= 0.95 * state, (saved, state)
