"""Gradient accumulation: a step over microbatches that adds up to the step over the whole batch.

Idea: axis 0 of every batch leaf is cut within each device's own rows, so that no row crosses the data axis. One loop runs
forward and backward for each microbatch and adds its gradients to an accumulator of the plan's dtype and place:

    for k in range(microbatches):  loss_k, grads_k;  acc += weight_k * grads_k        acc on the host: layer by layer, in place
    mean: acc / microbatches      sum: acc      weighted: acc / sum of weights

Cost: activations shrink by the number of microbatches; the accumulator stands where its gradient would.
Limits: the user must say how losses combine (``trace(..., reduction=)``). The update is not fused with the backward pass,
since it waits for the last microbatch. Floating aux is combined like the loss; integers (counts) are summed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.plan import Plan
from forebay.runtime.gradients import loss_and_gradients
from forebay.runtime.streaming import DEVICE, HOST
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
    """(loss, aux, new extra, gradients by stored parameter) over all microbatches, as one step over the whole batch would give."""
    work, count = plan.bound, plan.options["microbatches"]
    program = work.program_on(mesh, count)

    def one(carry, xs):
        total, weight, acc, extra = carry
        k, rows = xs
        here = None if key is None else jax.random.fold_in(key, k)
        loss, aux, extra, grads = loss_and_gradients(plan, program, None, params, extra, rows, here)
        share = _share(work.reduction, aux).astype(zero.dtype)
        acc = {p: _add(plan, p, acc[p], grads[p], share) for p in acc}
        return (total + loss * share, weight + share, acc, extra), aux

    zero = jnp.zeros((), program.jaxpr.out_avals[0].dtype)
    start = zero, zero, {p: _empty(plan, mesh, p) for p, frozen in enumerate(work.frozen) if not frozen}, extra
    xs = jnp.arange(count, dtype=jnp.int32), split_batch(plan, mesh, batch)
    (total, weight, acc, extra), aux = lax.scan(one, start, xs)
    norm = jnp.ones((), zero.dtype) if work.reduction == "sum" else weight
    grads = {p: _divided(plan, p, a, norm, plan.role("gradient")[p].dtype) for p, a in acc.items()}
    return total / norm, _combined(aux, work.reduction), extra, grads


def _share(reduction: str, aux):
    if reduction in ("mean", "sum"):
        return jnp.ones(())
    return jnp.asarray(aux[reduction.removeprefix("weight:")])


def _empty(plan: Plan, mesh, p: int):
    entry = plan.role("accumulator")[p]
    value = lax.with_sharding_constraint(jnp.zeros(entry.shape, entry.dtype), named(mesh, entry.spec, "hbm"))
    return jax.device_put(value, HOST) if entry.placement == "host" else value


def _add(plan: Plan, p: int, acc, grad, share):
    """``acc + share * grad``; on the host one layer at a time, in place."""
    if plan.role("accumulator")[p].placement != "host":
        return acc + grad.astype(acc.dtype) * share.astype(acc.dtype)
    return _by_layer(lambda a, g: a + g.astype(a.dtype) * share.astype(a.dtype), acc, grad)


def _divided(plan: Plan, p: int, acc, norm, dtype):
    if plan.role("accumulator")[p].placement != "host":
        return (acc / norm.astype(acc.dtype)).astype(dtype)
    return _by_layer(lambda a: a / norm.astype(a.dtype), acc)


def _by_layer(fn, acc, *others):
    def body(i, acc):
        here = [jax.device_put(lax.dynamic_slice_in_dim(a, i, 1, 0), DEVICE) for a in (acc, *others)]
        return lax.dynamic_update_slice_in_dim(acc, jax.device_put(fn(*here), HOST), i, 0)

    if acc.ndim:
        return lax.fori_loop(0, acc.shape[0], body, acc)
    return jax.device_put(fn(*(jax.device_put(a, DEVICE) for a in (acc, *others))), HOST)


def _combined(aux, reduction: str):
    """Aux of all microbatches as one: integers summed, the rest averaged (or summed with the loss)."""
    total = reduction == "sum"
    return jax.tree.map(lambda a: a.sum(0) if total or jnp.issubdtype(a.dtype, jnp.integer) else a.mean(0), aux)
