"""The train state: what a step takes and gives back, each array standing where the plan puts it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import numpy as np

from forebay.plan.copies import rebuild
from forebay.workload.program import Stored


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the user's trees are stored: hashable, so that it can be static in a jitted state."""

    params_tree: Any
    opt_tree: Any
    params: tuple[Stored, ...]
    opt_state: tuple[Stored, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """One train state. ``params`` and ``opt_state`` are views in the user's own trees; the arrays themselves are ``stored_*``.

    ``step``: int32 scalar. ``key``: a PRNG key or None; the key of a step is ``fold_in(key, step)``. ``extra``: the user's
    mutable, undifferentiated state or None. A view of leaves that are stored stacked cuts the stack, on the stack's own memory.
    ``stored_copies``: the compute copies of parameters (``plan.copies``), which the user's trees do not hold.
    """

    step: Any
    stored_params: tuple[Any, ...]
    stored_opt_state: tuple[Any, ...]
    key: Any
    extra: Any
    layout: Layout = dataclasses.field(metadata={"static": True})
    stored_copies: tuple[Any, ...] = ()

    @property
    def params(self) -> Any:
        return jax.tree.unflatten(self.layout.params_tree, unstack(self.layout.params, self.stored_params))

    @property
    def opt_state(self) -> Any:
        return jax.tree.unflatten(self.layout.opt_tree, unstack(self.layout.opt_state, self.stored_opt_state))

    def to_tree(self) -> dict[str, Any]:
        """The state in the user's own trees, the key as its data: what checkpoints hold."""
        key = self.key
        if key is not None and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key) if isinstance(key, jax.Array) else jax.eval_shape(jax.random.key_data, key)
        return {"step": self.step, "params": self.params, "opt_state": self.opt_state, "key": key, "extra": self.extra}

    @classmethod
    def from_tree(cls, tree: dict[str, Any], plan: Any, mesh: Any = None) -> "State":
        """The inverse of ``to_tree`` under a plan, whose placements the leaves take.

        ``mesh`` defaults to the plan's over this process's devices.
        """
        wanted = plan.abstract_state(mesh if mesh is not None else plan.make_mesh())
        params, opt_state = jax.tree.leaves(tree["params"]), jax.tree.leaves(tree["opt_state"])
        key = tree["key"]
        if key is not None and wanted.key is not None and jax.dtypes.issubdtype(wanted.key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        put = lambda value, like: value if value is None else jax.device_put(value, like.sharding)  # noqa: E731
        stored = restack(plan.layout.params, params, wanted.stored_params)
        return cls(
            step=put(tree["step"], wanted.step),
            stored_params=stored,
            stored_opt_state=restack(plan.layout.opt_state, opt_state, wanted.stored_opt_state),
            key=put(key, wanted.key),
            extra=jax.tree.map(put, tree["extra"], wanted.extra),
            layout=plan.layout,
            stored_copies=rebuild(plan, stored, wanted.stored_copies),
        )


def unstack(stored: tuple[Stored, ...], arrays) -> list[Any]:
    """The user's leaves, in order, of stored arrays (or of their ShapeDtypeStructs)."""
    out: dict[int, Any] = {}
    parts: dict[int, list[Any]] = {}
    for s, array in zip(stored, arrays, strict=True):
        start, stop = s.part or (0, len(s.members))
        if s.stacked:
            out.update((k, _item(array, i)) for i, k in enumerate(s.members[start:stop]))
        elif s.part is not None:
            parts.setdefault(s.members[0], []).append(array)
        else:
            out[s.members[0]] = array
    out.update((k, _joined(pieces)) for k, pieces in parts.items())
    return [out[k] for k in range(len(out))]


def _joined(pieces):
    """A leaf whose layers stand in several arrays, in the order of their layers: one array in host memory."""
    first = next((p for p in pieces if p.sharding is not None and p.sharding.memory_kind == "pinned_host"), pieces[0])
    shape = (sum(p.shape[0] for p in pieces), *pieces[0].shape[1:])
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding)
    shards = [{_bounds(s.index[1:], shape[1:]): s.data for s in p.addressable_shards} for p in pieces]
    read = lambda index: np.concatenate([np.asarray(found[_bounds(index[1:], shape[1:])]) for found in shards])  # noqa: E731
    return jax.make_array_from_callback(shape, first.sharding, read)


def _item(array, i: int):
    if isinstance(array, jax.ShapeDtypeStruct):
        sharding = array.sharding and _item_sharding(array.sharding)
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array) or array.sharding.memory_kind != "pinned_host":
        return array[i]
    return _host_item(array, i)


def _item_sharding(sharding):
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*tuple(sharding.spec)[1:]), memory_kind=sharding.memory_kind
    )


def _host_item(array, i: int):
    """Cut one layer out of a host stack without a detour over the device: each shard is host memory, read where it lies."""
    shape = array.shape[1:]
    shards = {_bounds(s.index[1:], shape): s.data for s in array.addressable_shards}
    return jax.make_array_from_callback(shape, _item_sharding(array.sharding), lambda index: np.asarray(shards[_bounds(index, shape)])[i])


def _bounds(index, shape):
    return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))


def restack(stored: tuple[Stored, ...], leaves, wanted) -> tuple[Any, ...]:
    """Stored arrays of the user's leaves, each placed like its ``wanted`` ShapeDtypeStruct; leaf by leaf, on the host."""
    out = []
    for s, like in zip(stored, wanted, strict=True):
        start, stop = s.part or (0, len(s.members))
        if s.part is not None and not s.stacked:
            whole = np.asarray(leaves[s.members[0]])
            out.append(jax.make_array_from_callback(like.shape, like.sharding, lambda index, rows=whole[start:stop]: rows[index]))
            continue
        if not s.stacked:
            out.append(jax.device_put(leaves[s.members[0]], like.sharding))
            continue
        rows = [np.asarray(leaves[k]) for k in s.members[start:stop]]
        out.append(jax.make_array_from_callback(like.shape, like.sharding, functools.partial(_shard, rows)))
    return tuple(out)


def _shard(rows, index):
    """The part of a stack of ``rows`` that ``index`` names."""
    return np.stack([r[index[1:]] for r in rows[index[0]]])
