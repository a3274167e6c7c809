"""A layer loop driven by hand, forwards and backwards, with fetches one layer ahead and the update inside.

Idea (ZeRO-Offload, LOMO): the cotangent of a layer's weights is complete when the backward pass leaves that layer, so its
update can run right there and no gradient is ever stored. The loop's own derivative is taken one layer at a time by
``jax.vjp`` of the rematerialised body; what that body saves is stacked by the forward loop, where the plan puts it:

    forward   i = 0..L-1:   w = ahead;  ahead = fetch(stack, i+1);   x, saved[i] = vjp(body, x, w)
    backward  i = L-1..0:   w = ahead
                            dx, pending = saved[i](dx)                        <- the matmuls that hide these copies:
                            beside it, update layer i+1 with its pending gradient, leaf by leaf: read state, write all back in place
                            ahead = fetch(stack, i-1)                        <- after the write to the same stack
    at the end              update layer 0

The update of a layer is delayed by one iteration, so that it does not depend on this iteration's matmuls; ``interleave`` spreads its
copies over them. In the first iteration there is nothing to update, and what stands there is written back.

Cost: HBM holds the weights of two layers and one layer's gradient beside the slices of two leaves of state. With the option
``prefetch=0`` a layer is fetched when its turn comes: a layer less in HBM, and its copy beside nothing but its own first matmuls.
Where nothing of the loop stands on the host, layers are read when their turn comes and updated before the next one's derivative.
Limits: one derivative only (no second order); a parameter whose update needs the whole gradient first is not fused: its
gradient is stacked, as the plan's entry says.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.plan import Plan
from forebay.runtime import copies
from forebay.runtime.interleave import shares_of, spread
from forebay.runtime.loss import Waiting, checkpointing
from forebay.runtime.streaming import HOST, Job, run_steps, steps, visit
from forebay.workload import jaxprs, residuals
from forebay.workload.program import LayerLoop
from forebay.workload.sharding import named


def is_float(value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """The updates that run inside a loop's backward pass: jobs, their arrays by slot, and for each job its stored parameter."""

    jobs: list[Job]
    arrays: dict[Any, Any]
    params: list[int]


class LayerPass:
    """One managed loop. ``values``: operands of the scan; host parameters wait among the scanned inputs."""

    def __init__(self, plan: Plan, loop: LayerLoop, values: list[Any]):
        self.plan, self.loop, self.shape = plan, loop, loop.loop
        head = self.shape.consts + self.shape.carry
        self.consts, self.init, scanned = values[: self.shape.consts], values[self.shape.consts : head], values[head:]
        self.waits = {k: v for k, v in enumerate(scanned) if isinstance(v, Waiting)}
        self.plain = {k: v for k, v in enumerate(scanned) if not isinstance(v, Waiting)}
        self.kept, policy = checkpointing(plan, loop, hosted=True)
        self.body = jax.checkpoint(self._body, policy=policy, prevent_cse=False)
        self.saved: list[Any] = []
        waiting = {w.param for w in self.waits.values()}
        moves = any(plan.on_host(f) for f, family in enumerate(plan.bound.families) if waiting & set(family.params))
        self.prefetches = moves and bool(plan.options["prefetch"])
        self._classify()

    def _body(self, floats, others):
        """The user's body on operands split by whether they can be differentiated; results likewise."""
        consts, carry, weights, plain = self._join(floats, others)
        layer = [self.waits[k].prepare(weights[k]) if k in self.waits else plain[k] for k in range(len(self.waits) + len(self.plain))]
        outs = residuals.apply_marks(self.loop.body, self.kept, [*consts, *carry, *layer])
        return [o for o in outs if is_float(o)], [o for o in outs if not is_float(o)]

    def _split(self, consts, carry, weights, plain):
        """((differentiable), (others)) of a layer's operands, and how to join them again."""
        flat, tree = jax.tree.flatten((list(consts), list(carry), weights, plain))
        mask = [is_float(v) for v in flat]
        self._join = lambda floats, others: _joined(tree, mask, floats, others)
        return [v for v, m in zip(flat, mask, strict=True) if m], [v for v, m in zip(flat, mask, strict=True) if not m]

    def _vjp(self, floats, others):
        """Results of a layer, results that cannot be differentiated, and what its derivative needs, flat."""
        outs, pullback, rest = jax.vjp(lambda fs: self.body(fs, others), floats, has_aux=True)
        leaves, self.pullback = jax.tree.flatten(pullback)
        return outs, rest, leaves

    def _classify(self):
        """For each value that the derivative needs: which operand it is, or None where the layer must save it."""
        weights = {k: self._like(w.value.shape[1:], self._dtype(w)) for k, w in self.waits.items()}
        plain = {k: self._like(v.shape[1:], v.dtype) for k, v in self.plain.items()}
        consts, init = ([self._like(v.shape, v.dtype) for v in given] for given in (self.consts, self.init))
        floats, others = self._split(consts, init, weights, plain)
        traced = jax.make_jaxpr(self._vjp)(floats, others)
        count = len(jax.tree.leaves(jax.eval_shape(self.body, floats, others)))
        position: dict[Any, int] = {v: k for k, v in enumerate(traced.jaxpr.invars)}
        mask = [is_float(v) for v in jax.tree.leaves((list(self.consts), list(self.init), weights, plain))]
        order = [k for k, m in enumerate(mask) if m] + [k for k, m in enumerate(mask) if not m]
        fixed = len(self.consts)
        kinds = []
        for v in traced.jaxpr.outvars[count:]:
            at = position.get(v) if not hasattr(v, "val") else None
            operand = None if at is None else order[at]
            carried = operand is not None and fixed <= operand < fixed + len(self.init)
            kinds.append(None if carried else operand)
        self.kinds = kinds

    def _dtype(self, wait: Waiting):
        return self.plan.role("parameter")[wait.param].dtype

    def _wide(self, weights):
        """Fetched weights in the dtypes of their masters: what a layer is differentiated by."""
        return copies.widened(self.plan, {k: w.param for k, w in self.waits.items()}, weights)

    @staticmethod
    def _like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def _fetch(self, stacks, i):
        """The slices of layer ``i`` of every waiting stack, on the device, as they are stored."""
        return {k: self.waits[k].near(lax.dynamic_slice_in_dim(s, i, 1, 0))[0] for k, s in stacks.items()}

    def _next(self, i, ahead: bool):
        """The layer after ``i`` in the forward (``ahead``) or backward direction, held at the ends."""
        step = 1 if ahead != self.shape.reverse else -1
        return jnp.clip(i + step, 0, self.shape.length - 1)

    def _ahead(self, stacks, i, forward: bool):
        """The layer after ``i``, fetched while ``i`` is computed; nothing without a prefetch."""
        return self._fetch(stacks, self._next(i, forward)) if self.prefetches else {}

    def _now(self, fetched, stacks, i):
        """The weights of layer ``i``: fetched an iteration ago, or now."""
        return fetched or self._fetch(stacks, i)

    def _first(self, forward: bool) -> int:
        return 0 if forward != self.shape.reverse else self.shape.length - 1

    def forward(self) -> list[Any]:
        """The scan's results: carry, then stacked outputs."""
        stacks = {k: w.value for k, w in self.waits.items()}

        def body(carry, xs):
            values, fetched = carry
            i, plain = xs
            weights = self._now(fetched, stacks, i)
            floats, others = self._split(self.consts, values, self._wide(weights), plain)
            outs, rest, leaves = self._vjp(floats, others)
            ahead = self._ahead(stacks, i, True)
            results = self._results(outs, rest)
            saved = [leaf for leaf, kind in zip(leaves, self.kinds, strict=True) if kind is None]
            return (results[: self.shape.carry], ahead), (results[self.shape.carry :], saved)

        start = list(self.init), self._fetch(stacks, self._first(True)) if self.prefetches else {}
        indices = jnp.arange(self.shape.length, dtype=jnp.int32)
        (carry, _), (ys, self.saved) = lax.scan(body, start, (indices, self.plain), length=self.shape.length, reverse=self.shape.reverse)
        return [*carry, *ys]

    def _results(self, outs, rest):
        floats, others = iter(outs), iter(rest)
        return [next(floats) if is_float(a) else next(others) for a in self.loop.loop.body.out_avals]

    def backward(self, cotangents: list[Any], fused: Fused | None):
        """Cotangents of (consts, init, plain inputs, gradient stacks of host parameters), and the sums of the fused jobs.

        ``cotangents``: one for each result of the scan, zeros where nothing came. The arrays of ``fused`` are replaced.
        """
        fused = fused or Fused(jobs=[], arrays={}, params=[])
        slot_of = {w.param: k for k, w in self.waits.items()}
        consumed = {slot_of[p] for p in fused.params}
        slots = list(dict.fromkeys(port.slot for job in fused.jobs for port in (*job.reads, *job.writes) if port.slot[0] != "grads"))
        first = self._first(False)
        ct_carry, ct_ys = self._floating(cotangents)

        def body(carry, xs):
            i, plain, saved, ys = xs
            table = dict(zip(slots, carry["arrays"], strict=True))
            given = self._given(fused, slot_of, carry["done"], carry["pending"]) if fused.jobs else {}
            chain = steps(fused.jobs, table, carry["sums"], self._next(i, True), given, live=i != first)
            operands = plain, saved, [*carry["ct"], *ys]
            weights, ahead, (d_const, d_carry, d_weights, d_plain), sums = self._updating(fused, chain, table, given, carry, i, operands)
            pending = {k: d_weights[k] for k in consumed}
            out = {
                "ct": d_carry, "consts": [a + b for a, b in zip(carry["consts"], d_const, strict=True)],
                "weights": ahead, "pending": pending,
                "done": {k: weights[k] for k in carry["done"]}, "arrays": [table[s] for s in slots], "sums": sums,
            }  # fmt: skip
            return out, (d_plain, self._left(d_weights, consumed))

        start = self._start(ct_carry, first, consumed, fused) | {"arrays": [fused.arrays[s] for s in slots]}
        xs = jnp.arange(self.shape.length, dtype=jnp.int32), self.plain, self.saved, ct_ys
        end, (d_plain, left) = lax.scan(body, start, xs, length=self.shape.length, reverse=not self.shape.reverse)
        table, sums = dict(zip(slots, end["arrays"], strict=True)), end["sums"]
        if fused.jobs:
            sums = visit(fused.jobs, table, sums, self._first(True), self._given(fused, slot_of, end["done"], end["pending"]))
        fused.arrays.update(table)
        return end["consts"], end["ct"], d_plain, left, sums

    def _start(self, ct_carry, first: int, consumed, fused: Fused) -> dict[str, Any]:
        """What the backward loop begins with: the last layer's weights, and nothing to update."""
        weights = self._fetch({k: w.value for k, w in self.waits.items()}, first)
        return {
            "ct": ct_carry,
            "consts": [jnp.zeros(c.shape, c.dtype) for c in self.consts if is_float(c)],
            "weights": weights if self.prefetches else {},
            "pending": {k: jnp.zeros_like(weights[k], self._dtype(self.waits[k])) for k in consumed},
            "done": self._masters(weights, consumed, fused),
            "sums": [[*job.sums] for job in fused.jobs],
        }

    def _floating(self, cotangents):
        """Cotangents of the carry, and of the stacked results, that can be differentiated."""
        carry, kept = self.shape.carry, [is_float(a) for a in self.shape.body.out_avals]
        of = lambda part: [c for c, f in zip(cotangents[part], kept[part], strict=True) if f]  # noqa: E731
        return of(slice(carry)), of(slice(carry, None))

    def _masters(self, weights, consumed, fused: Fused):
        """Weights on the device that are masters which the jobs read: these need not fetch them again."""
        read = {port.slot for job in fused.jobs for port in job.reads}
        return {k: weights[k] for k in consumed if ("params", p := self.waits[k].param) in read and p not in self.plan.copies}

    def _left(self, d_weights, consumed) -> dict[int, Any]:
        """A layer's gradients by stored parameter, where the plan puts them; a parameter may enter a loop more than once."""
        left: dict[int, Any] = {}
        for k, d in d_weights.items():
            p = self.waits[k].param
            if k not in consumed and not self.waits[k].frozen:
                left[p] = left[p] + d if p in left else d
        on_host = {p for p in left if self.plan.role("gradient")[p].placement == "host"}
        return {p: jax.device_put(d, HOST) if p in on_host else d for p, d in left.items()}

    def _given(self, fused: Fused, slot_of, weights, gradients):
        """Slices that the updates find on the device, on the specs of their stacks: the layer's gradient, and its weights unless copied."""
        given = {}
        for p in fused.params:
            wait = self.waits[slot_of[p]]
            pin = named(wait.mesh, (None, *wait.spec[1:]), "hbm")
            if slot_of[p] in weights:
                given["params", p] = lax.with_sharding_constraint(weights[slot_of[p]][None], pin)
            given["grads", p] = lax.with_sharding_constraint(gradients[slot_of[p]][None], pin)
        return given

    @property
    def _interleaves(self) -> bool:
        """XLA:TPU turns a barrier over the layer's arithmetic and a host stack into a call of the host."""
        return not self.plan.hardware or self.plan.hardware["chip"]["platform"] != "tpu"

    def _stacks(self, table) -> dict[int, Any]:
        """The host stacks of waiting parameters as they are now."""
        return {k: table.get(copies.slot_of(self.plan, w.param), w.value) for k, w in self.waits.items()}

    def _updating(self, fused: Fused, chain, table, given, carry, i, operands):
        """(the layer's weights, the next one's, its derivative, the chain's sums), the update of the layer before beside it."""
        if fused.jobs and self.prefetches and self._interleaves:
            weights = carry["weights"]
            pulled, sums = self._beside(chain, shares_of(fused.jobs, table, given), (weights, *operands))
            return weights, self._ahead(self._stacks(table), i, False), pulled, sums
        # without a prefetch a layer is fetched when its turn comes, and so behind all writes to its stack
        sums, stacks = run_steps(chain, len(fused.jobs)), self._stacks(table)
        weights, ahead = self._now(carry["weights"], stacks, i), self._ahead(stacks, i, False)
        return weights, ahead, self._pull(weights, *operands), sums

    def _beside(self, chain, shares, operands):
        """The layer's derivative with a chain of updates spread over it: what ``_pull`` gives, and the chain's sums."""
        flat, tree = jax.tree.flatten(operands)
        out_tree = None

        def pull(*leaves):
            nonlocal out_tree
            outs, out_tree = jax.tree.flatten(self._pull(*jax.tree.unflatten(tree, leaves)))
            return outs

        program = jaxprs.inline(jax.make_jaxpr(pull)(*flat), also=jaxprs.REMAT)
        outs, sums = spread(chain, shares, program, flat)
        return jax.tree.unflatten(out_tree, outs), sums

    def _pull(self, weights, plain, saved, cotangents):
        """The layer's derivative, from what was saved and from the operands that are at hand again."""
        flat = jax.tree.leaves((list(self.consts), list(self.init), self._wide(weights), plain))
        stored = iter(saved)
        leaves = [next(stored) if kind is None else flat[kind] for kind in self.kinds]
        [floats] = jax.tree.unflatten(self.pullback, leaves)(cotangents)
        given = list(floats)
        n_consts, n_carry = (sum(is_float(v) for v in part) for part in (self.consts, self.init))
        ct_weights = dict(zip(sorted(self.waits), given[n_consts + n_carry : n_consts + n_carry + len(self.waits)], strict=True))
        floating = [k for k in sorted(self.plain) if is_float(self.plain[k])]
        ct_plain = dict(zip(floating, given[n_consts + n_carry + len(self.waits) :], strict=True))
        return given[:n_consts], given[n_consts : n_consts + n_carry], ct_weights, ct_plain


def _joined(tree, mask, floats, others):
    floats, others = iter(floats), iter(others)
    return jax.tree.unflatten(tree, [next(floats) if m else next(others) for m in mask])
