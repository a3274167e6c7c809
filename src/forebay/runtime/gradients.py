"""Loss and gradients of a planned program: reverse mode over its segments, so that layer loops can be driven by hand.

    segment 0 | loop over host parameters | segment 1 | loop | segment 2 -> loss
    forward:   jax.vjp of each segment; ``LayerPass.forward`` for each managed loop
    backward:  in the other direction, cotangents summed by variable; ``LayerPass.backward`` updates its layers on the way

A loop is *managed* where at least one of its parameters stands on the host or is updated in the backward pass. Without one, this is
``jax.value_and_grad``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from forebay.plan import Plan
from forebay.runtime import jobs as make
from forebay.runtime import loss as planned
from forebay.runtime import streaming
from forebay.runtime.accumulators import Accumulators
from forebay.runtime.layers import Fused, LayerPass, is_float
from forebay.runtime.streaming import DEVICE, HOST, Job, Port
from forebay.runtime.values import Values
from forebay.workload import jaxprs
from forebay.workload.program import LayerLoop, Program


def loss_and_gradients(
    plan: Plan, program: Program, values: Values | None, params, extra, batch, key, begin: Callable[[Any], Accumulators] | None = None
):
    """(loss, aux, new extra, gradients by stored parameter).

    Families that ``plan.fused`` names are updated in ``values``, and have no gradient. With ``begin``, gradients are added to the
    accumulators that it gives when it knows aux, and these are the result.
    """
    if not any(managed(plan, loop) for loop in program.loops):
        run = jax.value_and_grad(planned.planned_loss(plan, program), has_aux=True)
        (loss, (aux, new_extra)), grads = run(tuple(params), extra, batch, key)
        if begin is not None:
            accumulators = begin(aux)
            accumulators.add(dict(enumerate(grads)))
            return loss, aux, new_extra, accumulators.arrays
        return loss, aux, new_extra, {p: _in_place(plan, p, g) for p, g in enumerate(grads)}
    tape = _Tape(plan, program, values)
    tape.env = planned.start(plan, program, plan.managed, params, extra, batch, key)
    tape.forward()
    loss, (aux, new_extra) = planned.results(program, tape.env)
    if begin is not None:
        tape.accumulators = begin(aux)
        tape.accumulators.add(tape.backward(loss))
        return loss, aux, new_extra, tape.accumulators.arrays
    if values is not None:
        values.receive({}, loss)
        if plan.two_pass:
            tape.job = make.sums_job
            values.receive(tape.backward(loss), loss)
            tape.job = make.final_job
    return loss, aux, new_extra, tape.backward(loss)


def _in_place(plan: Plan, p: int, gradient):
    """A gradient where the plan puts it: the natural place of a host parameter's is the host, and a small one is planned on the device."""
    if plan.role("parameter")[p].placement == plan.role("gradient")[p].placement:
        return gradient
    return jax.device_put(gradient, HOST if plan.role("gradient")[p].placement == "host" else DEVICE)


def managed(plan: Plan, loop: LayerLoop) -> bool:
    """Whether a loop has a parameter that is taken layer by layer, and more than one layer."""
    return loop.loop.length > 1 and any(p in plan.managed for p in loop.params)


class _Tape:
    """The record of one forward pass, and its reversal."""

    def __init__(self, plan: Plan, program: Program, values: Values | None):
        self.plan, self.program, self.values = plan, program, values
        self.env: dict[Any, Any] = {}
        self.steps: list[Callable[[dict[Any, Any]], None]] = []
        self.gradients: dict[int, Any] = {}
        self.fetched: dict[int, Any] = {}
        self.job = make.final_job
        self.accumulators: Accumulators | None = None

    def forward(self):
        eqns, segment = self.program.jaxpr.jaxpr.eqns, []
        for k, eqn in enumerate(eqns):
            loop = self.program.loop_at(eqn)
            if loop is None or not managed(self.plan, loop):
                segment.append(eqn)
                continue
            self._segment(segment, eqns[k:])
            self._loop(eqn, loop)
            segment = []
        self._segment(segment, [])

    def _segment(self, eqns, later):
        """Evaluate equations, remembering their derivative with respect to the floating values that they read."""
        if not eqns:
            return
        eqns = self._wait(eqns)
        made = {v for e in eqns for v in e.outvars}
        read = dict.fromkeys(v for e in eqns for v in e.invars if not jaxprs.is_literal(v) and v not in made)
        ahead = [v for e in later for v in e.invars] + list(self.program.jaxpr.jaxpr.outvars)
        after = {v for v in ahead if not jaxprs.is_literal(v)}
        kept = [v for e in eqns for v in e.outvars if v in after]
        # A host parameter is fetched once for all segments: its cotangents then meet on the device.
        raw = {v: planned.fetched(self.env[v], self.fetched) for v in read}
        inputs = [v for v in read if is_float(raw[v])]

        def run(floats):
            env = raw | dict(zip(inputs, floats, strict=True))
            planned.run(self.plan, self.program, eqns, env)
            outs = [planned.fetched(env[v], {}) for v in kept]
            return [o for o in outs if is_float(o)], [o for o in outs if not is_float(o)]

        outs, pullback, rest = jax.vjp(run, [raw[v] for v in inputs], has_aux=True)
        floating = [v for v in kept if is_float(v.aval)]
        self.env.update(zip(floating, outs, strict=True))
        self.env.update(zip([v for v in kept if not is_float(v.aval)], rest, strict=True))

        def reverse(cotangents):
            [given] = pullback([cotangents.pop(v) if v in cotangents else jnp.zeros_like(o) for v, o in zip(floating, outs, strict=True)])
            for v, ct in zip(inputs, given, strict=True):
                _add(cotangents, v, ct)

        self.steps.append(reverse)

    def _wait(self, eqns):
        """Casts of host parameters join the wait of their parameter; the other equations are left."""
        left = []
        for eqn in eqns:
            fed = [self.env.get(v) if not jaxprs.is_literal(v) else None for v in eqn.invars]
            waiting = [v for v in fed if isinstance(v, planned.Waiting)]
            alone = len(waiting) == 1 and all(jaxprs.is_literal(v) or f is waiting[0] for v, f in zip(eqn.invars, fed, strict=True))
            if alone and not self.program.whole[waiting[0].param]:
                values = [v.val if jaxprs.is_literal(v) else waiting[0] for v in eqn.invars]
                self.env[eqn.outvars[0]] = waiting[0].follow(eqn, values)
            else:
                left.append(eqn)
        return left

    def _loop(self, eqn, loop: LayerLoop):
        head = loop.loop.consts + loop.loop.carry
        values = [v.val if jaxprs.is_literal(v) else self.env[v] for v in eqn.invars]
        values = [*(planned.fetched(v, {}) for v in values[:head]), *values[head:]]
        layers = LayerPass(self.plan, loop, [v if isinstance(v, planned.Waiting) else jnp.asarray(v) for v in values])
        outs = layers.forward()
        self.env.update(zip(eqn.outvars, outs, strict=True))
        self.steps.append(lambda cotangents: self._reverse_loop(eqn, loop, layers, outs, cotangents))

    def _reverse_loop(self, eqn, loop, layers: LayerPass, outs, cotangents):
        given = [cotangents.pop(v) if v in cotangents else jnp.zeros_like(o) for v, o in zip(eqn.outvars, outs, strict=True)]
        fused, sums = self._fused(loop)
        consts, init, plain, gradients, totals = layers.backward(given, fused)
        if fused is not None and self.accumulators is not None:
            self.accumulators.arrays.update((p, fused.arrays["acc", p]) for p in fused.params)
        elif fused is not None and self.values is not None:
            self.values.arrays.update(fused.arrays)
            for variables, total in zip(sums, totals, strict=True):
                make.record(self.values, variables, total)
        for p, g in gradients.items():
            self.gradients[p] = self._sum(p, self.gradients[p], g) if p in self.gradients else g
        head = loop.loop.consts + loop.loop.carry
        floats = [v for v in eqn.invars[:head] if is_float(v.aval)]
        for v, ct in zip(floats, [*consts, *init], strict=True):
            _add(cotangents, v, ct)
        for k, ct in plain.items():
            _add(cotangents, eqn.invars[head + k], ct)

    def _fused(self, loop: LayerLoop):
        """The updates of this loop's parameters (or what adds their gradients), as jobs, and the variables that each sums."""
        work, acc = self.plan.bound, self.accumulators
        if acc is not None:
            inside = acc.inside(self.program, loop)
            arrays = {("acc", p): acc.arrays[p] for p in inside}
            return Fused(jobs=[acc.job(p) for p in inside], arrays=arrays, params=inside) if inside else None, []
        mine = [f for f in sorted(self.plan.fused) if work.families[f].params[0] in loop.params]
        if self.values is None or not mine:
            return None, []
        made = [self.job(self.values, work.families[f], self.plan.streams[f]) for f in mine]
        slots = {port.slot for job, _ in made for port in (*job.reads, *job.writes) if port.slot[0] != "grads"}
        arrays = {slot: self.values.arrays[slot] for slot in slots}
        return Fused(jobs=[job for job, _ in made], arrays=arrays, params=[work.families[f].params[0] for f in mine]), [v for _, v in made]

    def backward(self, loss) -> dict[int, Any]:
        """Gradients by stored parameter."""
        self.gradients = {}
        cotangents: dict[Any, Any] = {self.program.jaxpr.jaxpr.outvars[0]: jnp.ones_like(loss)}
        for step in reversed(self.steps):
            step(cotangents)
        consumed = {self.plan.bound.families[f].params[0] for f in self.plan.fused} if self.values is not None else set()
        if self.accumulators is not None:
            consumed = {p for loop in self.program.loops if managed(self.plan, loop) for p in self.accumulators.inside(self.program, loop)}
        for p in range(len(self.program.stored)):
            v = self.program.jaxpr.jaxpr.invars[p]
            if p in consumed:
                continue
            total = cotangents.get(v)
            if p in self.gradients:
                total = self.gradients[p] if total is None else self._sum(p, self.gradients[p], total)
            total = jnp.zeros(v.aval.shape, v.aval.dtype) if total is None else total
            leaves = self._on_host(p) and self.accumulators is None
            self.gradients[p] = jax.device_put(total, HOST) if leaves else total
        return self.gradients

    def _on_host(self, p: int) -> bool:
        return self.plan.role("gradient")[p].placement == "host"

    def _sum(self, p: int, total, more):
        """Two gradients of one parameter that is used in several places; those of a host stack are added layer by layer, on the device."""
        if not self._on_host(p):
            return total + more
        ports = (Port(slot="total", axis=0, host=True), Port(slot="more", axis=0, host=jax.typeof(more).memory_space == HOST))
        job = Job(reads=ports, writes=ports[:1], compute=lambda start, size, slices: ([slices[0] + slices[1]], []))
        new: dict[str, Any] = {}
        streaming.run([job], {"total": total, "more": more}, total.shape[0], new)
        return new["total"]


def _add(cotangents, v, ct):
    if jaxprs.is_literal(v) or ct.dtype == jax.dtypes.float0:
        return
    cotangents[v] = cotangents[v] + ct if v in cotangents else ct
