"""Which form of host memory costs what: everything resident, the naive form, and forebay's, for GPU and TPU targets.

    python benchmarks/forms.py [--machine NAME]... [--only TEXT] [--results FOLDER]

Naive is the way of today's JAX trainers: move the whole tree to the device, use it, move it back. forebay's rows are its own runtime
(``fb.update``, ``fb.value_and_grad``, ``fb.train_step`` under a plan by hand), not a second writing of it. Every program is compiled for
one device by its real compiler, forebay's with ``xla_disable_automatic_host_compute_offload``, which turns any computation that would run
on the host into an error. "at most" is the best figure found by hand before forebay for such a program (H100 and TPU v5p targets),
and 1 MiB.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from jax.ad_checkpoint import checkpoint_name

import forebay as fb
from forebay.units import MIB

MACHINES = ("h100-sxm", "tpu-v5p:1x1x1")
NO_HOST_COMPUTE = {"xla_disable_automatic_host_compute_offload": True}
MICROBATCHES = 4
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Widths of the programs. ``layers`` x ``model`` x ``mlp`` float32 is one array of the state: 128 MiB by default."""

    layers: int = 8
    model: int = 1024
    mlp: int = 4096
    tokens: int = 2048
    deep_layers: int = 12
    deep_model: int = 2048
    deep_tokens: int = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One program of the table. ``best_mib`` is what its HBM is held against, by platform; ``ours`` marks forebay's,
    ``in_place`` those that need no memory on the host beside what stands there."""

    theme: str
    name: str
    fn: Any
    args: tuple
    plan: Any = None
    best_mib: dict[str, float] = dataclasses.field(default_factory=dict)
    in_place: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("forebay")


def mlp(h, w):
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def mlp_loss(params, batch):
    """A stack of MLPs whose layers are rematerialised whole."""
    body = jax.checkpoint(lambda h, w: (mlp(h, w), None), prevent_cse=False)
    return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)


def _shapes(size: Size) -> tuple[Any, Any]:
    """Shapes of the parameters and the batch of ``mlp_loss``."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    weights = {"up": shape(size.layers, size.model, size.mlp), "down": shape(size.layers, size.mlp, size.model)}
    return weights, shape(size.tokens, size.model)


def _shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


# ---- the optimizer's update alone


def one_matrix_loss(params, batch):
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w @ w.T), None), prevent_cse=False)
    return jnp.mean(jax.lax.scan(body, batch, params["w"])[0] ** 2)


def optimizer_forms(size: Size, hardware) -> Iterator[Form]:
    """AdamW on one stack: parameters and gradients on the device, both moments where the form puts them."""
    optimizer = optax.adamw(1e-4)
    params, batch = _shapes(size)
    work = fb.trace(one_matrix_loss, optimizer, {"w": params["up"]}, batch)

    def whole(params, state, grads):
        updates, new = optimizer.update(grads, jax.device_put(state, DEVICE), params)
        return optax.apply_updates(params, updates), _like(new, state)

    resident = fb.Plan.by_hand(work, {}, hardware=hardware)
    alone = {"fuse_update": "never"}  # the update by itself, without a backward pass to run beside
    turns = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=hardware, options={"duplex": "never"} | alone)
    both = fb.Plan.by_hand(work, {"optimizer": "host"}, hardware=hardware, options=alone)

    def form(name, plan, fn=None, **more):
        state = plan.abstract_state()
        params, moments = state.stored_params, state.stored_opt_state
        if fn is not None:
            params, moments = state.params, state.opt_state
        fn = fn or (lambda params, state, grads: fb.update(optimizer, plan)(params, state, grads)[:2])
        fn = jax.jit(fn, donate_argnums=(0, 1), out_shardings=_shardings((params, moments)))
        grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
        return Form(theme="optimizer state", name=name, fn=fn, args=(params, moments, grads), plan=plan, **more)

    yield form("resident", resident)
    yield form("naive: whole state", turns, whole)
    # The best row known reads and writes in turns; a stack in halves does both at once for some slices of state more.
    yield form("forebay: streamed, in turns", turns, best_mib={"cuda": 320, "tpu": 336}, in_place=True)
    yield form("forebay: streamed, both ways at once", both, in_place=True)


# ---- parameters


def parameter_forms(size: Size, hardware) -> Iterator[Form]:
    """Loss and gradients of a rematerialised stack, parameters (and so gradients) where the form puts them."""
    params, batch = _shapes(size)
    work = fb.trace(mlp_loss, optax.sgd(0.1), params, batch)

    def whole(params, batch):
        return jax.value_and_grad(lambda p: mlp_loss(jax.device_put(p, DEVICE), batch))(params)

    def planned(params, batch, plan):
        (loss, _), grads = fb.value_and_grad(mlp_loss, plan)(params, batch)
        return loss, grads

    resident = fb.Plan.by_hand(work, {}, hardware=hardware)
    plan = fb.Plan.by_hand(work, {"parameter": "host"}, hardware=hardware)

    def form(name, fn, plan, **more):
        params = plan.abstract_state().params
        fn = jax.jit(fn, out_shardings=(None, _shardings(params)))
        return Form(theme="parameters", name=name, fn=fn, args=(params, plan.abstract_batch()), plan=plan, **more)

    yield form("resident", lambda p, b: planned(p, b, resident), resident)
    yield form("naive: whole tree", whole, plan)
    yield form("forebay: layer by layer", lambda p, b: planned(p, b, plan), plan, best_mib={"cuda": 232, "tpu": 185})


# ---- the whole step, updates inside the backward pass


def fused_forms(size: Size, hardware) -> Iterator[Form]:
    """A whole AdamW step: parameters and both moments where the form puts them."""
    optimizer = optax.adamw(1e-4)
    params, batch = _shapes(size)
    work = fb.trace(mlp_loss, optimizer, params, batch)
    resident = fb.Plan.by_hand(work, {}, hardware=hardware)
    plan = fb.Plan.by_hand(work, {"parameter": "host", "optimizer": "host"}, hardware=hardware)

    def whole(params, state, batch):
        here, moments = jax.device_put((params, state), DEVICE)
        loss, grads = jax.value_and_grad(mlp_loss)(here, batch)
        updates, new = optimizer.update(grads, moments, here)
        return _like(optax.apply_updates(here, updates), params), _like(new, state), loss

    def step(plan):
        state = plan.abstract_state()
        return fb.train_step(mlp_loss, optimizer, plan), (state, plan.abstract_batch())

    state = plan.abstract_state()
    naive = jax.jit(whole, donate_argnums=(0, 1), out_shardings=(*_shardings((state.params, state.opt_state)), None))
    common = {"theme": "fused backward"}
    yield Form(name="resident", fn=step(resident)[0], args=step(resident)[1], plan=resident, **common)
    yield Form(name="naive: whole state", fn=naive, args=(state.params, state.opt_state, plan.abstract_batch()), plan=plan, **common)
    # The best row known fetches each layer when its turn comes; copies that run beside the layer's arithmetic stand in HBM meanwhile.
    turns = fb.Plan.by_hand(work, {"parameter": "host", "optimizer": "host"}, hardware=hardware, options={"prefetch": 0})
    best = {"cuda": 280, "tpu": 281}
    for name, made, bound in (("updated in the backward pass", turns, best), ("the same, copies beside the layers", plan, {})):
        yield Form(name=f"forebay: {name}", fn=step(made)[0], args=step(made)[1], plan=made, best_mib=bound, in_place=True, **common)


# ---- gradients accumulated over microbatches


def accumulation_forms(size: Size, hardware) -> Iterator[Form]:
    """A whole AdamW step over four microbatches, each of the batch of the other tables."""
    optimizer = optax.adamw(1e-4)
    params, one = _shapes(size)
    batch = jax.ShapeDtypeStruct((MICROBATCHES * one.shape[0], *one.shape[1:]), one.dtype)
    work = fb.trace(mlp_loss, optimizer, params, batch, reduction="mean")
    options = {"microbatches": MICROBATCHES}
    resident = fb.Plan.by_hand(work, {}, hardware=hardware, options=options)
    rules = {"parameter": "host", "optimizer": "host", "accumulator": "host"}
    plan = fb.Plan.by_hand(work, rules, hardware=hardware, options=options)

    def whole(params, state, batch):
        here, moments = jax.device_put((params, state), DEVICE)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mlp_loss)(here, part)), None

        parts = batch.reshape(MICROBATCHES, -1, *batch.shape[1:])
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, here)
        loss, grads = jax.tree.map(lambda a: a / MICROBATCHES, jax.lax.scan(add, zeros, parts)[0])
        updates, new = optimizer.update(grads, moments, here)
        return _like(optax.apply_updates(here, updates), params), _like(new, state), loss

    state = plan.abstract_state()
    naive = jax.jit(whole, donate_argnums=(0, 1), out_shardings=(*_shardings((state.params, state.opt_state)), None))
    common = {"theme": "accumulation"}
    args = (resident.abstract_state(), resident.abstract_batch())
    yield Form(name="resident", fn=fb.train_step(mlp_loss, optimizer, resident), args=args, plan=resident, **common)
    yield Form(name="naive: whole state", fn=naive, args=(state.params, state.opt_state, plan.abstract_batch()), plan=plan, **common)
    args = (state, plan.abstract_batch())
    yield Form(name="forebay: all on the host", fn=fb.train_step(mlp_loss, optimizer, plan), args=args, plan=plan, **common)


def _like(tree, old):
    """``tree`` in the memory of ``old``; scalars stay on the device."""
    return jax.tree.map(lambda a, b: jax.device_put(a, HOST) if b.ndim else a, tree, old)


# ---- activations


def block(h, w):
    h = checkpoint_name(h, "layer_input")
    return h + jax.nn.gelu(h @ w)


def deep_loss(remat: Callable, unrolled: bool = False) -> Callable:
    """Layers of one product each; the input of each is named."""

    def loss(params, batch):
        if unrolled:
            h = batch
            for w in params["layers"]:
                h = remat(block)(h, w)
        else:
            h = jax.lax.scan(lambda h, w: (remat(block)(h, w), None), batch, params["layers"])[0]
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return loss


def _recompute(body):
    return jax.checkpoint(body, prevent_cse=False)


def _offload(body):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["layer_input"], offload_src="device", offload_dst="pinned_host"
    )
    return jax.checkpoint(body, policy=policy)


def activation_forms(size: Size, hardware) -> Iterator[Form]:
    """Gradients of a deep stack with a wide carry: everything kept, layers recomputed, or the input of each layer on the host."""
    params = {"layers": jax.ShapeDtypeStruct((size.deep_layers, size.deep_model, size.deep_model), jnp.bfloat16)}
    batch = jax.ShapeDtypeStruct((size.deep_tokens, size.deep_model), jnp.bfloat16)
    work = fb.trace(deep_loss(_recompute), optax.sgd(0.1), params, batch)
    plan = fb.Plan.by_hand(work, {"activation:layer_input": "host"}, hardware=hardware)
    args = (plan.abstract_state().params, plan.abstract_batch())
    gradients = lambda loss: jax.jit(jax.value_and_grad(loss))  # noqa: E731
    yield Form(theme="activations", name="resident", fn=gradients(deep_loss(lambda body: body)), args=args)
    yield Form(theme="activations", name="recomputed", fn=gradients(deep_loss(_recompute)), args=args)
    yield Form(theme="activations", name="naive: layers not in a loop", fn=gradients(deep_loss(_offload, unrolled=True)), args=args)
    ours = jax.jit(fb.value_and_grad(plan.bound.loss_fn, plan))
    yield Form(theme="activations", name="forebay: layer input on the host", fn=ours, args=args, plan=plan, best_mib={"cuda": 356})


THEMES = {
    "optimizer state": optimizer_forms,
    "parameters": parameter_forms,
    "fused backward": fused_forms,
    "accumulation": accumulation_forms,
    "activations": activation_forms,
}


def measure(machine: str, size: Size, only: str = "") -> tuple[list[record.Row], dict]:
    """The table of one machine, and the versions of the compiler."""
    hardware = fb.Hardware.named(machine)
    rows, versions = [], {}
    for theme, forms in THEMES.items():
        if only not in theme:
            continue
        for form in forms(size, hardware):
            options = NO_HOST_COMPUTE if form.ours else None
            verdict = fb.judge(form.fn, form.args, hardware, plan=form.plan, compiler_options=options)
            best = form.best_mib.get(hardware.target.platform)
            bound = int((best + 1) * MIB) if best and size == Size() else None
            rows.append(record.row(theme, form.name, verdict, bound_bytes=bound, facts={"in_place": form.in_place}))
            versions = verdict.versions
    return rows, versions


def _kept(r: record.Row) -> bool:
    """Whether a row of forebay's keeps what the table promises."""
    return r.within is not False and not r.host_to_host_in_loops and not (r.facts["in_place"] and r.host_temp_bytes)


def main(argv: list[str]) -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--machine", action="append", help=f"a machine to compile for; by default {' and '.join(MACHINES)}")
    given = parser.parse_args(argv)
    kept = True
    for machine in given.machine or MACHINES:
        rows, versions = measure(machine, Size(), given.only)
        record.show(f"Forms on {machine}", rows, MIB, "MiB")
        print(f"written to {record.keep('forms', machine, rows, versions, given.results)}")
        ours = [r for r in rows if r.form.startswith("forebay")]
        kept &= all(map(_kept, ours))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
