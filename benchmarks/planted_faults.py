"""How many planted faults the numerics gate catches: seeded draws of (tensor, kind) over three plans, on any machine.

    python benchmarks/planted_faults.py [--draws 100] [--seed 0]

Prints a line a draw and the rate by kind, writes planted_faults_<platform>_<date>.json. The exit code is 0 only if every fault was caught
and no line failed on a step without one.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import forebay as fb
from forebay.hardware import Hardware
from forebay.trust import gate, mutations, planned
from forebay.trust.twin import make_twin

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 8, 16, 8, 4
EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}
PLANS = {
    "fused": (False, EVERYTHING, lambda: optax.adamw(1e-2)),
    "optimizer on the host, clipped": (
        False,
        {"optimizer": "host"},
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    ),
    "layers written out": (True, EVERYTHING, lambda: optax.adamw(1e-2)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One draw. ``failed``: the lines of the gate that saw it."""

    plan: str
    kind: str
    fault: str
    failed: tuple[str, ...]


def loss(params, batch, *, apart: bool):
    """A residual network over words; ``apart``: its layers are written out one after the other."""
    block = lambda x, w: x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"]  # noqa: E731
    x = params["embed"][batch["x"]]
    if apart:
        for weights in params["layers"]:
            x = block(x, weights)
    else:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"]), batch["y"][..., None], -1).mean()


def shapes(apart: bool):
    layer = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float64)  # noqa: E731
    one = {name: array(*shape) for name, shape in layer.items()}
    layers = [one] * LAYERS if apart else {name: array(LAYERS, *shape) for name, shape in layer.items()}
    return {"embed": array(WORDS, WIDTH), "layers": layers, "head": array(WIDTH, WORDS)}


@functools.cache
def setting(name: str):
    """(twin, its true step, the resident yardstick, every fault) of one plan; in float64."""
    apart, rules, optimizer = PLANS[name]
    model, optimizer = functools.partial(loss, apart=apart), optimizer()
    batch = {leaf: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for leaf in ("x", "y")}
    plan = fb.Plan.by_hand(fb.trace(model, optimizer, shapes(apart), batch), rules, options={"whole_below_bytes": 0})
    twin = make_twin(model, optimizer, plan, None, None, None, steps=3, seed=1, integers=WORDS, hardware=Hardware.here())
    step = fb.train_step(model, optimizer, twin.plan, mesh=twin.mesh)
    return twin, step, gate.Yardstick(twin), mutations.possible(twin, step)


def failed(twin, step, yardstick) -> tuple[str, ...]:
    """The names of the lines that fail on a step."""
    run = planned.run(twin, step)
    lines = [*gate.numerics(twin, run.outcome, yardstick), gate.donation(twin, run, run.outcome, yardstick)]
    return tuple(check.name for check in lines if check.outcome == "failed")


def on_true_steps() -> dict[str, tuple[str, ...]]:
    """The lines that fail on each plan's own step: none."""
    return {name: failed(*setting(name)[:3]) for name in PLANS}


def drawn(count: int, seed: int):
    """``count`` seeded draws, each planted and run."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        name = str(random.choice(list(PLANS)))
        twin, step, yardstick, faults = setting(name)
        fault = mutations.draw(random, faults)
        yield Row(plan=name, kind=fault.kind, fault=str(fault), failed=failed(twin, mutations.planted(twin, step, fault), yardstick))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        true, rows = on_true_steps(), []
        for row in drawn(asked.draws, asked.seed):
            rows.append(row)
            print(f"{'caught' if row.failed else 'MISSED'}  {row.plan}: {row.fault}", flush=True)
    total, caught = Counter(row.kind for row in rows), Counter(row.kind for row in rows if row.failed)
    for kind in mutations.KINDS:
        print(f"{kind:24s} {caught[kind]:3d} of {total[kind]:3d}")
    rate = sum(caught.values()) / len(rows)
    print(f"caught {100 * rate:.0f} % of {len(rows)} planted faults; {sum(map(bool, true.values()))} of {len(true)} true steps failed")
    record = {"theme": "planted_faults", "date": datetime.date.today().isoformat(), "seed": asked.seed, "rate": rate, "true_steps": true}
    record |= {"versions": {"jax": jax.__version__}, "platform": jax.default_backend(), "rows": [dataclasses.asdict(row) for row in rows]}
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / f"planted_faults_{record['platform']}_{record['date']}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if rate == 1 and not any(true.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
