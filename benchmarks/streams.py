"""How fast AdamW's state streams through the device: the plain loop, the whole tree moved, and forebay's loop, from compiled schedules.

    python benchmarks/streams.py [--only TEXT] [--results FOLDER]

One update of the layers of a Llama (parameters and gradients float32 in HBM, both moments in host memory), compiled for one GPU and for
eight that share a host, each step replayed. The plain loop is an in-place ``fori_loop`` that takes all leaves of a layer at once, with the
compiler's default limits and with sixteen copies in flight; ``whole`` moves the tree to the device and back, as JAX trainers do;
forebay's row is ``fb.update`` under a plan by hand with the plan's own compiler options. "full" is bytes over rate x seconds, for each
direction of the host link. ms/GiB is exposed time for each GiB that stands on the host. Everything here is a forecast."""

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from rich.console import Console
from rich.table import Table

import forebay as fb
from forebay.timeline.constants import constants_of
from forebay.timeline.costs import Costs
from forebay.units import GIB

MACHINES = ("h100-sxm:1", "h100-sxm:8")
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
IN_FLIGHT = {"xla_gpu_experimental_parallel_async_compute_limit": 16}
DIRECTIONS = ("to_device", "to_host")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The layers of a Llama: widths of the model, of its keys and values, and of the MLP."""

    name: str
    layers: int
    model: int
    kv: int
    mlp: int


SIZES = (
    Size(name="1B", layers=16, model=2048, kv=512, mlp=8192),
    Size(name="8B", layers=32, model=4096, kv=1024, mlp=14336),
)
"""Both fit one H100 with their gradients; a program over its memory is scheduled to save memory, and its copies take turns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to move the state: a jitted ``fn(params, state, grads)``, its arguments and its compiler options."""

    name: str
    fn: Any
    args: tuple
    options: dict[str, Any]


def layers_of(size: Size) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the stacked parameters."""
    c, shapes = size, {}
    for name, shape in {
        "wq": (c.model, c.model), "wk": (c.model, c.kv), "wv": (c.model, c.kv), "wo": (c.model, c.model),
        "gate": (c.model, c.mlp), "up": (c.model, c.mlp), "down": (c.mlp, c.model),
    }.items():  # fmt: skip
        shapes[name] = jax.ShapeDtypeStruct((c.layers, *shape), jnp.float32)
    return shapes


def loss_fn(params, batch):
    """Uses every leaf once a layer; only its shapes matter here."""

    def layer(h, w):
        h = h + (h @ w["wq"]) @ w["wo"] + (h @ w["wk"]) @ w["wv"].T
        return h + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), batch, params)[0] ** 2)


def forms(size: Size, hardware) -> Iterator[Form]:
    """The rows of one size on one machine."""
    optimizer = optax.adamw(1e-4)
    batch = jax.ShapeDtypeStruct((hardware.devices, size.model), jnp.float32)
    work = fb.trace(loss_fn, optimizer, layers_of(size), batch)
    plan = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=hardware, options={"fuse_update": "never"})
    state = plan.abstract_state()
    outs = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state.params)

    def form(name, fn, options):
        jitted = jax.jit(fn, donate_argnums=(0, 1), out_shardings=outs)
        return Form(name=name, fn=jitted, args=(state.params, state.opt_state, grads), options=options)

    def whole(params, state, grads):
        updates, new = optimizer.update(grads, jax.device_put(state, DEVICE), params)
        return optax.apply_updates(params, updates), jax.tree.map(lambda a: jax.device_put(a, HOST) if a.ndim else a, new)

    yield form("whole", whole, {})
    yield form("plain loop", _plain(size.layers), {})
    yield form("plain loop, 16 in flight", _plain(size.layers), IN_FLIGHT)
    yield form("forebay", lambda p, s, g: fb.update(optimizer, plan)(p, s, g)[:2], plan.compiler_options)


def _plain(layers: int):
    """The in-place loop as one writes it first: each layer's moments in, the update, the moments out."""

    def update(params, state, grads):
        adam = state[0]
        count = adam.count + 1

        def body(i, carry):
            read = lambda tree: jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=True), tree)  # noqa: E731
            write = lambda tree, new: jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, i, 0), tree, new)  # noqa: E731
            params, mu, nu = carry
            m, v = jax.device_put((read(mu), read(nu)), DEVICE)
            g = read(grads)
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
            v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
            fair = 1 - 0.9**count, 1 - 0.999**count
            new = jax.tree.map(lambda p, m, v: p - 1e-4 * (m / fair[0] / (jnp.sqrt(v / fair[1]) + 1e-8) + 1e-4 * p), read(params), m, v)
            m, v = jax.device_put((m, v), HOST)
            return write(params, new), write(mu, m), write(nu, v)

        params, mu, nu = jax.lax.fori_loop(0, layers, body, (params, adam.mu, adam.nu))
        return params, (adam._replace(count=count, mu=mu, nu=nu), *state[1:])

    return update


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the replay says of one form; ``full`` is how full the link is in each direction while the state moves."""

    machine: str
    size: str
    form: str
    seconds: float
    full: dict[str, float]
    bound: str
    exposed_seconds: float
    ms_per_gib: float
    hbm_temp_bytes: int


def measure(size: Size, machine: str) -> Iterator[Row]:
    """The rows of one size on one machine."""
    hardware = fb.Hardware.named(machine)
    for form in forms(size, hardware):
        verdict = fb.judge(form.fn, form.args, hardware, compiler_options={"xla_gpu_autotune_level": 0} | form.options)
        if not verdict.compiled or verdict.hbm is None:
            raise SystemExit(f"{form.name} on {machine}: {verdict.reason}")
        forecast = fb.predict(verdict, hardware)
        full, bound = _use(forecast, hardware)
        yield Row(
            machine=machine, size=size.name, form=form.name, seconds=forecast.step_seconds, full=full, bound=bound,
            exposed_seconds=forecast.exposed_copy_seconds, ms_per_gib=forecast.exposed_ms_per_gib, hbm_temp_bytes=verdict.hbm.temp_bytes,
        )  # fmt: skip


def _use(forecast, hardware) -> tuple[dict[str, float], str]:
    """Link use and what bounds it: of the loop that streams or, where there is none, of the whole step."""
    loops = [loop for loop in forecast.loops if loop.link_use]
    if loops:
        longest = max(loops, key=lambda loop: loop.seconds)
        return dict(longest.link_use), longest.bound
    costs = Costs(hardware, constants_of(hardware.chip.name, hardware.chip.vendor))
    full = {way: forecast.bytes[way] / (costs.link_rate(way) * forecast.step_seconds) for way in DIRECTIONS}
    return full, "link, one way at a time"


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title=f"AdamW's state streamed through the device (forecast, jax {jax.__version__})", title_justify="left")
    for heading in ("machine", "layers of", "form"):
        table.add_column(heading, no_wrap=True)
    for heading in ("seconds", "in full", "out full", "ms/GiB", "HBM temp GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for r in rows:
        full = [f"{100 * r.full[way]:.0f} %" for way in DIRECTIONS]
        table.add_row(
            r.machine, r.size, r.form, f"{r.seconds:.3f}", *full, f"{r.ms_per_gib:.1f}", f"{r.hbm_temp_bytes / GIB:.2f}", r.bound,
            end_section=r.form == "forebay",
        )  # fmt: skip
    Console(width=record.WIDTH).print(table)


def main(words: list[str]) -> int:
    given = record.arguments(__doc__ or "").parse_args(words)
    rows = [row for machine in MACHINES for size in SIZES if given.only in size.name for row in measure(size, machine)]
    show(rows)
    today = datetime.date.today().isoformat()
    path = given.results / f"streams_h100-sxm-jax-{jax.__version__}_{today}.json"
    path.write_text(json.dumps({"jax": jax.__version__, "rows": [dataclasses.asdict(r) for r in rows]}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
