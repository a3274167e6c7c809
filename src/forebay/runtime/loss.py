"""The user's loss with the plan's parameters and activations made true, without a change to the model.

Idea: the program is evaluated equation by equation. A parameter on the host *waits*: casts and scales of it wait with it,
and the layer loop receives the host stack itself. Inside the loop's body the layer's slice is put on the device, once,
before anything touches it; the body is rematerialised under a policy that names what is kept and what is offloaded:

    scan(body, x, stack)   ->   scan(checkpoint(body', policy), x, host stack)
    body'(x, w_host):  w = cast(device_put(w_host)); x = name(x, "kept or offloaded"); ... the user's equations ...

Cost: one copy of each layer's slice to the device in the forward and one in the backward pass; the cotangent of a slice
leaves by the same door, so the gradient of a host stack is written to the host layer by layer.
Limits: a host parameter used outside loops is fetched whole at its first use. A loop that is unrolled (``unroll > 1``) is
rolled up, and a loop inside another loop or checkpoint is left as the user wrote it: XLA refuses such offloads (``own_offload``).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from forebay.plan import Plan
from forebay.workload import jaxprs, residuals, slicing
from forebay.workload.program import LayerLoop, Program, follows
from forebay.workload.sharding import named

DEVICE = jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A parameter that is taken layer by layer: its stack (``hosted``: in host memory) and the equations to apply to each layer."""

    value: Any
    param: int
    spec: tuple
    mesh: Any
    hosted: bool
    frozen: bool = False
    chain: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    def follow(self, eqn, values) -> "Waiting":
        return dataclasses.replace(self, chain=(*self.chain, (eqn, tuple(None if isinstance(v, Waiting) else v for v in values))))

    def fetch(self, layer=None):
        """The whole parameter, or one ``layer`` of it (without the stacked axis), on the device, ready to use."""
        return self.prepare(self.near(self.value if layer is None else layer))

    def near(self, value):
        """The stack, or some layers of it, on the device."""
        return jax.device_put(value, DEVICE) if self.hosted else value

    def prepare(self, value):
        """Apply the chain to a fetched value.

        Its spec is pinned first: then the gradient is reduce-scattered before it leaves the device.
        """
        spec = self.spec[len(self.spec) - len(value.shape) :]
        value = jax.lax.with_sharding_constraint(value, named(self.mesh, spec, "hbm"))
        value = lax.stop_gradient(value) if self.frozen else value
        layer = len(value.shape) < len(self.spec)
        value = lax.expand_dims(value, (0,)) if layer and self.chain else value
        for eqn, others in self.chain:
            [value] = _bind_resized(eqn, [value if other is None else other for other in others], others.index(None))
        return lax.squeeze(value, (0,)) if layer and self.chain else value


def _bind_resized(eqn, values, waiting: int):
    """Bind an equation of a chain on some layers of its operand number ``waiting``, whose stacked axis is the first."""
    axes = [0 if k == waiting else None for k in range(len(values))]
    window = slicing.Window(0, values[waiting].shape[0], eqn.invars[waiting].aval.shape[0])
    return slicing.bind(eqn, values, axes, slicing.out_axes(eqn, axes), window)


def planned_loss(plan: Plan, program: Program) -> Callable:
    """``(stored params, extra, batch, key) -> (loss, (aux, new extra))`` with the plan carried out."""

    def loss(stored_params, extra, batch, key):
        env = start(plan, program, plan.hosted, stored_params, extra, batch, key)
        run(plan, program, program.jaxpr.jaxpr.eqns, env)
        return results(program, env)

    return loss


def start(plan: Plan, program: Program, waiting: frozenset[int], stored_params, extra, batch, key) -> dict[Any, Any]:
    """The program's inputs and constants by variable; the parameters that ``waiting`` numbers wait."""
    jaxpr = program.jaxpr.jaxpr
    mesh = plan.abstract_mesh()
    entries = zip(stored_params, plan.role("parameter"), plan.bound.frozen, strict=True)
    given = [
        Waiting(v, p, e.spec, mesh, p in plan.hosted, frozen) if p in waiting else lax.stop_gradient(v) if frozen else v
        for p, (v, e, frozen) in enumerate(entries)
    ]
    env = dict(zip(jaxpr.constvars, program.jaxpr.consts, strict=True))
    return env | dict(zip(jaxpr.invars, [*given, *jax.tree.leaves((extra, batch, key))], strict=True))


def results(program: Program, env: dict[Any, Any]):
    """(loss, (aux, new extra)) from the program's result variables."""
    out = [v.val if jaxprs.is_literal(v) else fetched(env[v], {}) for v in program.jaxpr.jaxpr.outvars]
    value, aux, new_extra = jax.tree.unflatten(program.out_tree, out)
    return value, (aux, new_extra)


def fetched(value, done: dict[int, Any]):
    """A waiting parameter brought to the device, once; any other value as it is."""
    if not isinstance(value, Waiting):
        return value
    if id(value) not in done:
        done[id(value)] = value.fetch()
    return done[id(value)]


def run(plan: Plan, program: Program, eqns, env: dict[Any, Any]) -> None:
    """Evaluate equations of the program into ``env``, loops as the plan wants them."""
    done: dict[int, Any] = {}
    for eqn in eqns:
        values = [v.val if jaxprs.is_literal(v) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, _equation(plan, program, eqn, values, done), strict=True))


def _equation(plan, program, eqn, values, done):
    if (loop := program.loop_at(eqn)) is not None:
        return _planned_loop(plan, loop, values, done)
    waiting = [v for v in values if isinstance(v, Waiting)]
    if waiting and not program.whole[waiting[0].param]:
        fed = [v.param if isinstance(v, Waiting) else None for v in values]
        if follows(eqn, fed) is not None:
            return [waiting[0].follow(eqn, values)]
    return jaxprs.bind(eqn, [fetched(v, done) for v in values])


def placements(plan: Plan, loop: LayerLoop) -> dict[str, str]:
    """Where the plan wants each residual of a loop: mark to placement."""
    entries = {e.name: e for e in plan.role("activation")}
    wanted = {}
    for r in loop.body.residuals:
        entry = entries.get(f"activation:{r.path}")
        movable = r.needed and loop.loop.length > 1
        wanted[r.mark] = entry.placement if entry is not None and movable else r.written
    return wanted


def checkpointing(plan: Plan, loop: LayerLoop, hosted: bool):
    """Names for the residuals of a loop that the plan keeps or offloads, and the checkpoint policy that does so.

    What is made from parameters alone is not kept where the loop has ``hosted`` parameters: they are fetched again.
    """
    drop = {r.mark for r in loop.body.residuals if r.weights_only} if hosted else set()
    wanted = {mark: place for mark, place in placements(plan, loop).items() if place in ("hbm", "host") and mark not in drop}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[m for m in wanted if wanted[m] == "hbm"],
        names_which_can_be_offloaded=[m for m in wanted if wanted[m] == "host"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return {mark: mark for mark in wanted}, policy


def _planned_loop(plan, loop: LayerLoop, values, done):
    """The user's scan, rewritten only where the plan asks for something that it does not do by itself."""
    shape = loop.loop
    head = shape.consts + shape.carry
    values = [*(fetched(v, done) for v in values[:head]), *values[head:]]
    waits = [v if isinstance(v, Waiting) else None for v in values[head:]]
    wanted = placements(plan, loop)
    written = {r.mark: r.written for r in loop.body.residuals}
    if wanted == written and not any(waits):
        return jaxprs.bind(loop.equation, values)
    fixed, init = values[: shape.consts], values[shape.consts : head]
    kept, policy = checkpointing(plan, loop, any(waits))

    def body(carry, slices):
        layer = [s if w is None else w.fetch(s) for s, w in zip(slices, waits, strict=True)]
        out = residuals.apply_marks(loop.body, kept, [*fixed, *carry, *layer])
        return out[: shape.carry], out[shape.carry :]

    xs = [v if w is None else w.value for v, w in zip(values[head:], waits, strict=True)]
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    carry, ys = lax.scan(body, list(init), xs, length=shape.length, reverse=shape.reverse)
    return [*carry, *ys]
