"""Gradient accumulation: a step over microbatches that adds up to the step over the whole batch.

Idea: axis 0 of every batch leaf is cut within each device's own rows, so that no row crosses the data axis. One loop runs
forward and backward for each microbatch and adds its gradients to an accumulator of the plan's dtype and place:

    for k in range(microbatches):  loss_k, grads_k;  acc = keep_k * acc + share_k * grads_k
    sum: keep 1, share 1      mean: keep 1, share 1 / microbatches      weighted: the mean so far, by weights

An accumulator on the host takes each layer's gradient inside the backward pass (``runtime.accumulators``).
Cost: activations shrink by the number of microbatches; the accumulator stands where its gradient would.
Limits: the user must say how losses combine (``trace(..., reduction=)``). The update is not fused with the backward pass,
since it waits for the last microbatch. Floating aux is combined like the loss; integers (counts) are summed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.plan import Plan
from forebay.runtime.accumulators import Accumulators, empty
from forebay.runtime.gradients import loss_and_gradients
from forebay.workload.sharding import named


def split_batch(plan: Plan, mesh, batch: Any) -> Any:
    """The batch with a leading axis of microbatches, cut so that every device keeps its own rows."""
    count = plan.options["microbatches"]
    leaves = []
    for leaf, entry in zip(jax.tree.leaves(batch), plan.role("batch"), strict=True):
        shards = plan.mesh.size(entry.spec[0]) if plan.mesh is not None else 1
        rows = leaf.shape[0] // (shards * count)
        cut = leaf.reshape(shards, count, rows, *leaf.shape[1:]).swapaxes(0, 1).reshape(count, shards * rows, *leaf.shape[1:])
        leaves.append(lax.with_sharding_constraint(cut, named(mesh, (None, *entry.spec), "hbm")))
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def accumulated(plan: Plan, mesh, params, extra, batch, key):
    """(loss, aux, new extra, gradients by stored parameter) over all microbatches, as one step over the whole batch would give.

    A gradient on the host is its accumulator, in the accumulator's dtype.
    """
    work, count = plan.bound, plan.options["microbatches"]
    program = work.program_on(mesh, count)

    def one(carry, xs):
        total, weight, acc, extra = carry
        k, rows = xs
        here = None if key is None else jax.random.fold_in(key, k)

        def begin(aux):
            share, keep = _shares(work.reduction, aux, weight, count)
            return Accumulators(plan, mesh, dict(acc), k == 0, keep, share)

        loss, aux, extra, acc = loss_and_gradients(plan, program, None, params, extra, rows, here, begin)
        part = _weight(work.reduction, aux).astype(zero.dtype)
        return (total + loss * part, weight + part, acc, extra), aux

    zero = jnp.zeros((), program.jaxpr.out_avals[0].dtype)
    start = zero, zero, {p: empty(plan, mesh, p) for p, frozen in enumerate(work.frozen) if not frozen}, extra
    xs = jnp.arange(count, dtype=jnp.int32), split_batch(plan, mesh, batch)
    (total, weight, acc, extra), aux = lax.scan(one, start, xs)
    norm = jnp.ones((), zero.dtype) if work.reduction == "sum" else weight
    placed, gradients = plan.role("accumulator"), plan.role("gradient")
    grads = {p: a if placed[p].placement == "host" else a.astype(gradients[p].dtype) for p, a in acc.items()}
    return total / norm, _combined(aux, work.reduction), extra, grads


def _weight(reduction: str, aux):
    """What a microbatch counts for, beside the others."""
    return jnp.ones(()) if reduction in ("mean", "sum") else jnp.asarray(aux[reduction.removeprefix("weight:")])


def _shares(reduction: str, aux, before, count: int):
    """(share of this microbatch's gradient, share of what was accumulated) in the accumulator behind it.

    A weighted accumulator is the mean so far, so that nothing is left to divide by when the last weight is known.
    """
    if not reduction.startswith("weight:"):
        return jnp.asarray(1.0 if reduction == "sum" else 1.0 / count, before.dtype), jnp.ones_like(before)
    part = _weight(reduction, aux).astype(before.dtype)
    total = before + part
    total = jnp.where(total == 0, 1, total)
    return part / total, before / total


def _combined(aux, reduction: str):
    """Aux of all microbatches as one: integers summed, the rest averaged (or summed with the loss)."""
    total = reduction == "sum"
    return jax.tree.map(lambda a: a.sum(0) if total or jnp.issubdtype(a.dtype, jnp.integer) else a.mean(0), aux)
