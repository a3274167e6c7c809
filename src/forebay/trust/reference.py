"""The resident run: ``jax.value_and_grad`` and Optax's own update under ``jax.jit``, and nothing of forebay's transforms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from forebay.errors import InputError
from forebay.trust.twin import Twin
from forebay.workload.program import call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a run leaves behind, as numpy: a loss and a gradient norm per step, and the last state in the user's own trees."""

    losses: np.ndarray
    norms: np.ndarray
    params: Any
    opt_state: Any
    extra: Any


def plain(tree: Any) -> Any:
    """``tree`` as numpy arrays; random keys as their data."""
    data = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    return jax.tree.map(lambda leaf: np.asarray(data(leaf)), tree)


class Resident:
    """The resident step of a twin, compiled once for all of its runs."""

    def __init__(self, twin: Twin):
        self.twin = twin
        self.optimizer = optax.with_extra_args_support(twin.work.optimizer)
        self.step = jax.jit(self._step)

    def _step(self, params, opt_state, extra, batch, number):
        key = None if self.twin.key is None else jax.random.fold_in(self.twin.key, number)
        loss, extra, grads = _value_and_grad(self.twin, params, extra, batch, key)
        updates, opt_state = self.optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, extra, loss, _norm(grads), grads

    def run(self, params: Any) -> tuple[Outcome, Any]:
        """The outcome of the twin's steps from ``params`` (numpy), and the gradients of the first.

        Raises:
            InputError: the loss is not finite.
        """
        params = jax.device_put(params, NamedSharding(self.twin.mesh, PartitionSpec()))
        opt_state, extra, first = jax.jit(self.optimizer.init)(params), self.twin.extra, None
        losses, norms = [], []
        for number, batch in enumerate(self.twin.batches):
            params, opt_state, extra, loss, norm, grads = self.step(params, opt_state, extra, _placed(self.twin, batch), jnp.int32(number))
            first = plain(grads) if first is None else first
            losses.append(float(loss))
            norms.append(float(norm))
        if not (np.isfinite(losses).all() and np.isfinite(norms).all()):
            raise InputError(
                f"the losses of the resident run are {losses[:4]} and its gradient norms {norms[:4]}: nothing can be held against them. "
                "Random values do not suit this model; pass arrays as params and batch"
            )
        params, opt_state, extra = plain((params, opt_state, extra))
        outcome = Outcome(losses=np.array(losses), norms=np.array(norms), params=params, opt_state=opt_state, extra=extra)
        return outcome, first


def nudged(params: Any, part: float) -> Any:
    """``params``, each element off by this part of itself, up or down."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (leaf * (1 + part * random.choice([-1.0, 1.0], leaf.shape))).astype(leaf.dtype), params)


def _placed(twin: Twin, batch):
    specs = jax.tree.unflatten(jax.tree.structure(batch), [PartitionSpec(*e.spec) for e in twin.plan.role("batch")])
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(twin.mesh, spec)), batch, specs)


def _norm(tree):
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(jnp.sum(leaf.real**2 + leaf.imag**2) for leaf in wide))


def _value_and_grad(twin: Twin, params, extra, batch, key):
    """(loss, new extra, gradients) of one step; microbatches one after the other, as the user says that their losses combine."""
    count, reduction = twin.plan.options["microbatches"], twin.work.reduction

    def one(params, extra, rows, key):
        loss, aux, new_extra = call(twin.work.loss_fn, params, extra, rows, key)
        share = aux[reduction.removeprefix("weight:")] if reduction.startswith("weight:") else 1.0
        return loss, (new_extra, share)

    run = jax.value_and_grad(one, has_aux=True)
    if count == 1:
        (loss, (extra, _)), grads = run(params, extra, batch, key)
        return loss, extra, grads
    total, weight, acc = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
    for k in range(count):
        here = None if key is None else jax.random.fold_in(key, k)
        (loss, (extra, share)), grads = run(params, extra, _microbatch(twin, batch, k), here)
        total, weight = total + loss * share, weight + share
        acc = jax.tree.map(lambda a, g, share=share: a + g * share, acc, grads)
    weight = 1.0 if reduction == "sum" else weight
    return total / weight, extra, jax.tree.map(lambda a: a / weight, acc)


def _microbatch(twin: Twin, batch, k: int):
    """Microbatch ``k``: its part of each device's own rows."""
    count = twin.plan.options["microbatches"]

    def rows(leaf, entry):
        shards = twin.plan.mesh.size(entry.spec[0]) if twin.plan.mesh is not None else 1
        cut = leaf.reshape(shards, count, -1, *leaf.shape[1:])[:, k]
        return cut.reshape(-1, *leaf.shape[1:])

    entries = jax.tree.unflatten(jax.tree.structure(batch), twin.plan.role("batch"))
    return jax.tree.map(rows, batch, entries)
