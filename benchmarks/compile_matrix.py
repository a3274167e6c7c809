"""Every way to write layers x placements on the host x GPU and TPU: each cell compiles, or is refused before the compiler is asked.

    python benchmarks/compile_matrix.py [--machine NAME]... [--only TEXT] [--results FOLDER]

A cell is one of:

    compiles    the plan's train step compiled; what stands where is checked by the verdict
    planned     compiled, with at least one entry that a rule for a whole role named and that forebay left on the device for a stated reason
    refused     a ForebayError with a reason, raised by ``trace``, ``Plan.by_hand`` or ``train_step``: no compiler was asked
    COMPILER    the compiler itself refused or died: its own words would have reached the user. The script then exits with 1
    TRACEBACK   an exception that is not forebay's. The script then exits with 1

Run it once with the oldest and once with the newest pins. Sizes are small: what is tested is the form, not the bytes.
"""

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console
from rich.table import Table

import forebay as fb
from forebay.errors import ForebayError

MACHINES = ("h100-sxm:4", "tpu-v5p:2x2x1")
COMPILES, PLANNED, REFUSED, COMPILER, TRACEBACK = "compiles", "planned", "refused", "COMPILER", "TRACEBACK"
GOOD = (COMPILES, PLANNED, REFUSED)
LAYERS, WIDTH, ROWS, TOKENS = 4, 256, 8, 128
RULES = {
    "activation": {"activation": "host"},
    "the named activation": {"activation:kept": "host"},
    "parameter": {"parameter": "host"},
    "optimizer": {"optimizer": "host"},
    "all three": {"parameter": "host", "optimizer": "host", "activation": "host"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A loss with the shapes it is traced with. ``extra`` is what ``fb.trace`` takes under that name."""

    loss_fn: Callable
    params: Any
    batch: Any
    extra: Any = None
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What came of one program under one rule on one machine."""

    program: str
    rule: str
    machine: str
    outcome: str
    reason: str = ""
    ignored: tuple[str, ...] = ()


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array's shape."""
    return jax.ShapeDtypeStruct(dims, dtype)


def layer(x, w):
    """One layer with a named residual; recomputation is left to the plan."""
    return x + checkpoint_name(jnp.tanh(x @ w["up"]), "kept") @ w["down"]


def weights(*stack: int, width: int = WIDTH, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of ``layer``, stacked."""
    return {"up": shape(*stack, width, 2 * width, dtype=dtype), "down": shape(*stack, 2 * width, width, dtype=dtype)}


def rows(width: int = WIDTH) -> jax.ShapeDtypeStruct:
    """A batch of embedded tokens."""
    return shape(ROWS, TOKENS, width)


def scanned(x, stack, step=layer, **how):
    """Layers in a scan."""
    return jax.lax.scan(lambda x, w: (step(x, w), None), x, stack, **how)[0]


def flat(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p) ** 2), params=weights(LAYERS), batch=rows())


def rematerialised(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, jax.checkpoint(layer)) ** 2), params=weights(LAYERS), batch=rows())


def nested(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, scanned) ** 2), params=weights(2, LAYERS), batch=rows())


def nested_in_checkpoint(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, jax.checkpoint(scanned)) ** 2), params=weights(2, LAYERS), batch=rows())


def own_offload(function):
    """A function under the user's own checkpoint policy, which offloads what ``layer`` names."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
    )
    return jax.checkpoint(function, policy=policy)


def nested_around_the_users_own_offload(_mesh) -> Program:
    inner = lambda x, stack: scanned(x, stack, own_offload(layer))  # noqa: E731
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, inner) ** 2), params=weights(2, LAYERS), batch=rows())


def nested_inside_the_users_own_offload(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, own_offload(scanned)) ** 2), params=weights(2, LAYERS), batch=rows())


def unroll_two_with_the_users_own_offload(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, own_offload(layer), unroll=2) ** 2), params=weights(LAYERS), batch=rows())


def cond_around_the_users_own_offload(_mesh) -> Program:
    def loss(params, batch):
        return jnp.mean(jax.lax.cond(batch[0, 0, 0] > 0, lambda x: scanned(x, params, own_offload(layer)), lambda x: x, batch) ** 2)

    return Program(loss_fn=loss, params=weights(LAYERS), batch=rows())


def cond_in_the_layer_around_the_users_own_offload(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, either(own_offload(layer))) ** 2), params=weights(LAYERS), batch=rows())


def cond_in_the_layer_inside_the_users_own_offload(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, own_offload(either(layer))) ** 2), params=weights(LAYERS), batch=rows())


def either(step):
    """``step``, or nothing, by what the first row holds."""
    return lambda x, w: jax.lax.cond(x[0, 0, 0] > 0, lambda x: step(x, w), lambda x: x, x)


def written_out_with_the_users_own_offload(_mesh) -> Program:
    def loss(params, batch):
        for w in params:
            batch = own_offload(layer)(batch, w)
        return jnp.mean(batch**2)

    return Program(loss_fn=loss, params=[weights() for _ in range(LAYERS)], batch=rows())


def shard_map_around_the_users_own_offload(mesh) -> Program:
    spec, whole = jax.sharding.PartitionSpec("fsdp"), jax.sharding.PartitionSpec()

    def loss(params, batch):
        run = jax.shard_map(lambda x, stack: scanned(x, stack, own_offload(layer)), mesh=mesh, in_specs=(spec, whole), out_specs=spec)
        return jnp.mean(run(batch, params) ** 2)

    return Program(loss_fn=loss, params=weights(LAYERS), batch=rows())


def length_one(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p) ** 2), params=weights(1), batch=rows())


def unroll_two(_mesh) -> Program:
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, unroll=2) ** 2), params=weights(LAYERS), batch=rows())


def written_out(_mesh) -> Program:
    def loss(params, batch):
        for w in params:
            batch = layer(batch, w)
        return jnp.mean(batch**2)

    return Program(loss_fn=loss, params=[weights() for _ in range(LAYERS)], batch=rows())


def cond_in_the_layer(_mesh) -> Program:
    def body(carry, w):
        x, i = carry
        return (jax.lax.cond(i % 2 == 0, lambda x: layer(x, w), lambda x: x + jnp.tanh(x @ w["up"]) @ w["down"], x), i + 1), None

    return Program(loss_fn=lambda p, b: jnp.mean(jax.lax.scan(body, (b, jnp.int32(0)), p)[0][0] ** 2), params=weights(LAYERS), batch=rows())


def cond_around_the_layers(_mesh) -> Program:
    def loss(params, batch):
        return jnp.mean(jax.lax.cond(batch[0, 0, 0] > 0, lambda x: scanned(x, params), lambda x: x, batch) ** 2)

    return Program(loss_fn=loss, params=weights(LAYERS), batch=rows())


def shard_map_in_the_loss(mesh) -> Program:
    spec = jax.sharding.PartitionSpec("fsdp")

    def step(x, w):
        return jax.shard_map(lambda x: jnp.tanh(x), mesh=mesh, in_specs=spec, out_specs=spec)(layer(x, w))

    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params=weights(LAYERS), batch=rows())


def tiny_minor_axis(_mesh) -> Program:
    def step(x, w):
        return layer(x, w) + checkpoint_name(jnp.tanh(x @ w["narrow"]), "kept_narrow") @ w["narrow"].T

    params = weights(LAYERS) | {"narrow": shape(LAYERS, WIDTH, 16)}
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params=params, batch=rows())


def tiny_named_activation(_mesh) -> Program:
    def step(x, w):
        return x + checkpoint_name(jnp.tanh(x @ w["narrow"]), "kept") @ w["narrow"].T

    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params={"narrow": shape(LAYERS, WIDTH, 16)}, batch=rows())


def fp8_parameters(_mesh) -> Program:
    step = lambda x, w: layer(x, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), w))  # noqa: E731
    params = weights(LAYERS, dtype=jnp.float8_e4m3fn)
    return Program(  # AdamW is refused by jax itself: it promotes no 8-bit floats
        loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params=params, batch=rows(), optimizer=optax.sgd(0.5, momentum=0.5)
    )


def _narrow_activation(dtype):
    def step(x, w):
        small = checkpoint_name((jnp.tanh(x @ w["up"]) * 4).astype(dtype), "kept")
        return x + small.astype(jnp.float32) @ w["down"]

    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params=weights(LAYERS), batch=rows())


def fp8_activation(_mesh) -> Program:
    return _narrow_activation(jnp.float8_e4m3fn)


def int4_activation(_mesh) -> Program:
    return _narrow_activation(jnp.int4)


def int4_parameters(_mesh) -> Program:
    step = lambda x, w: layer(x, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), w))  # noqa: E731
    return Program(loss_fn=lambda p, b: jnp.mean(scanned(b, p, step) ** 2), params=weights(LAYERS, dtype=jnp.int4), batch=rows())


def int4_beside_the_parameters(_mesh) -> Program:
    """A quantised base model as ``extra``, with trained weights beside it."""

    def loss(params, batch, extra):
        step = lambda x, w: layer(x, {name: w["base"][name].astype(jnp.float32) + w["own"][name] for name in w["own"]})  # noqa: E731
        return jnp.mean(scanned(batch, {"own": params, "base": extra}, step) ** 2), (None, extra)

    return Program(loss_fn=loss, params=weights(LAYERS), batch=rows(), extra=weights(LAYERS, dtype=jnp.int4))


PROGRAMS = {
    name.__name__.replace("_", " "): name
    for name in (
        flat, rematerialised, nested, nested_in_checkpoint, nested_around_the_users_own_offload, nested_inside_the_users_own_offload,
        length_one, unroll_two, unroll_two_with_the_users_own_offload, written_out, written_out_with_the_users_own_offload,
        cond_in_the_layer, cond_around_the_layers, cond_around_the_users_own_offload, cond_in_the_layer_around_the_users_own_offload,
        cond_in_the_layer_inside_the_users_own_offload, shard_map_in_the_loss, shard_map_around_the_users_own_offload,
        tiny_minor_axis, tiny_named_activation, fp8_parameters, fp8_activation, int4_activation, int4_parameters,
        int4_beside_the_parameters,
    )
}  # fmt: skip
DONATION = "donated device to host"


def cell(program: str, rule: str, machine: str) -> Cell:
    """One cell: plan, build the step, judge it."""
    hardware = fb.Hardware.named(machine)
    at = {"program": program, "rule": rule, "machine": machine}
    try:
        verdict, left = _donated(hardware) if program == DONATION else _planned(program, rule, hardware)
    except ForebayError as error:
        return Cell(**at, outcome=REFUSED, reason=str(error))
    except Exception as error:  # any other exception is the finding itself: a traceback that a user would see
        return Cell(**at, outcome=TRACEBACK, reason=f"{type(error).__name__}: {error}")
    if not verdict.compiled:
        return Cell(**at, outcome=COMPILER, reason=verdict.reason)
    return Cell(**at, outcome=PLANNED if left else COMPILES, reason="; ".join(left), ignored=verdict.ignored)


def _planned(program: str, rule: str, hardware) -> tuple[Any, list[str]]:
    mesh = jax.sharding.AbstractMesh((hardware.devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    made = PROGRAMS[program](mesh)
    work = fb.trace(made.loss_fn, made.optimizer, made.params, made.batch, extra=made.extra)
    plan = fb.Plan.by_hand(work, RULES[rule], hardware=hardware)
    asked = [key for key in RULES[rule] if ":" not in key]
    left = [f"{e.name} stays in {e.placement}: {e.reason}" for e in plan.entries if e.role in asked and e.placement != "host"]
    step = fb.train_step(made.loss_fn, made.optimizer, plan)
    return fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan), left


def _donated(hardware) -> tuple[Any, list[str]]:
    """A person's own function that donates an array of the device and returns it on the host."""
    to_host = lambda x: jax.device_put(x, jax.memory.Space.Host)  # noqa: E731
    return fb.judge(to_host, (shape(1024, 1024),), hardware, donate_argnums=(0,)), []


def measure(machine: str, only: str = "") -> list[Cell]:
    """All cells of one machine."""
    asked = [(program, rule) for program in PROGRAMS for rule in RULES] + [(DONATION, "")]
    found = []
    for program, rule in asked:
        if only in f"{program} / {rule}":
            found.append(cell(program, rule, machine))
            print(
                f"{machine} {program} / {rule}: {found[-1].outcome} {found[-1].ignored or ''} {found[-1].reason[:200]}",
                file=sys.stderr,
                flush=True,
            )
    return found


def show(machine: str, cells: list[Cell]) -> None:
    """Programs down, rules across."""
    table = Table(title=f"{machine}, jax {jax.__version__}", title_justify="left")
    table.add_column("layers")
    for rule in RULES:
        table.add_column(rule)
    by = {(c.program, c.rule): c.outcome for c in cells}
    for program in dict.fromkeys(c.program for c in cells):
        table.add_row(program, *(by.get((program, rule), by.get((program, ""), "")) for rule in RULES))
    Console(width=record.WIDTH).print(table)


def main(argv: list[str]) -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--machine", action="append", help=f"a machine to compile for; by default {' and '.join(MACHINES)}")
    given = parser.parse_args(argv)
    cells = []
    for machine in given.machine or MACHINES:
        found = measure(machine, given.only)
        show(machine, found)
        cells += found
    today = datetime.date.today().isoformat()
    path = given.results / f"compile-matrix_deviceless-jax-{jax.__version__}_{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"theme": "compile-matrix", "date": today, "jax": jax.__version__, "cells": [dataclasses.asdict(c) for c in cells]}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    bad = [c for c in cells if c.outcome not in GOOD]
    counts = {outcome: sum(c.outcome == outcome for c in cells) for outcome in (*GOOD, COMPILER, TRACEBACK)}
    print(f"{counts}; written to {path}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
