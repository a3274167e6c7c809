"""Checkpoints of a run: written by Orbax in the user's own tree, read back shard by shard into whatever plan comes next.

    save:     free space checked -> Orbax writes into a temporary folder, a few leaves at a time -> one rename makes it a checkpoint
    restore:  for each leaf, for each shard that this process holds: read exactly that slice, place it in the leaf's memory kind

What is saved knows no plan: no mesh, no memory kind, no stacking. So a run may go on under another plan and on another mesh.
Shards are placed with ``jax.make_array_from_callback``, because Orbax's own restore goes through single-device arrays, which the
runtime refuses for pinned_host. Host RAM beside the state itself stays near ``host_bytes`` while saving (one leaf at least) and
near one shard while restoring. Limits: an asynchronous save holds a copy of the whole state on the host until it is written, and
numbers that change on the disk are not noticed (missing and shortened files are).
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from forebay.errors import CheckpointError, nearest
from forebay.records.reading import Unreadable, build
from forebay.units import GIB, MIB, show_bytes

_STATE, _RECORD = "state", "record"
_CHUNK_BYTES = 64 * MIB
_MARGIN_BYTES = 4 * MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a checkpoint, as it is on disk. A PRNG key is stored as its data, with the name of its implementation."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None


class Checkpoints:
    """The checkpoints of one folder, newest ``keep`` of them.

    Raises:
        CheckpointError: from every method, where the folder cannot be written or read, with what is still there.
    """

    def __init__(self, folder: Path, *, keep: int = 2, asynchronous: bool = False, host_bytes: int = 8 * GIB):
        self.folder = Path(folder).absolute()
        # Saving in batches of leaves would read buffers that the next step has already overwritten, were it asynchronous.
        gigabytes = None if asynchronous else max(1, host_bytes // 10**9)
        registry = ocp.type_handlers.create_type_handler_registry(
            # Replicas slicing a pinned_host array would start a computation on the host (google/orbax, "might hang").
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
        )
        writer = ocp.PyTreeCheckpointHandler(
            save_device_host_concurrent_gb=gigabytes,
            use_compression=False,  # it saves 8 % of float32 weights and costs more time than writing them
            enable_pinned_host_transfer=False,  # it would take from XLA's pinned pool, which the plan has sized for the state
            type_handler_registry=registry,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_handlers={_STATE: writer, _RECORD: ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=asynchronous),
            )
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {self.folder}: {error.strerror}; choose another folder with --out"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def check_space(self, tree: Any) -> None:
        """Remove what killed saves left behind; then refuse where one more checkpoint of ``tree`` finds no room.

        For the one process that writes here: what it removes must not be another's save under way.

        Raises:
            CheckpointError: fewer bytes are free than ``tree`` (arrays or ShapeDtypeStructs) needs.
        """
        self._remove_unfinished()
        needed, free = stored_bytes(tree) + _MARGIN_BYTES, shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"a checkpoint needs {show_bytes(needed)} in {self.folder} and {show_bytes(free)} are free; "
                f"free {show_bytes(needed - free)} there, keep fewer with --checkpoint.keep, or give --out a folder on another disk. "
                f"{self._what_stays()}"
            )

    def save(self, step: int, tree: Any, record: dict[str, Any]) -> None:
        """Write ``tree`` (arrays, any nesting) and the JSON values of ``record`` as the checkpoint of ``step``.

        All or nothing: until the last byte is on disk the folder's newest checkpoint is the one before.

        Raises:
            CheckpointError: the disk is full, or cannot be written. Earlier checkpoints are untouched.
        """
        self.wait()
        if step in self.steps():
            return
        self.check_space(tree)
        leaves = _leaves(tree)
        plain = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), plain)
        table = {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()}
        items = ocp.args.Composite(
            **{
                _STATE: ocp.args.PyTreeSave(plain, save_args=chunks),
                _RECORD: ocp.args.JsonSave({"format": 1, "step": step, "leaves": table, "run": record}),
            }
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:  # Orbax, tensorstore and the file system each have their own kinds
            raise self._failed_save(step, tree, error) from error

    def wait(self) -> None:
        """Return when no save is under way any more."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # as in save
            raise self._failed_save(None, None, error) from error

    def close(self) -> None:
        """Finish what is under way and let go of the folder."""
        self.wait()
        self._manager.close()

    def record(self, step: int | None = None) -> dict[str, Any]:
        """What was given to ``save`` as ``record``, with ``step``, the checkpoint's step (default: the newest)."""
        stored = self._read_record(self._chosen(step))
        return {**stored["run"], "step": stored["step"]}

    def restore(self, abstract: dict[str, Any], step: int | None = None) -> dict[str, Any]:
        """The tree of a checkpoint (default: the newest), each leaf with the sharding and memory kind that ``abstract`` gives it.

        ``abstract`` is the tree of ShapeDtypeStructs that the new plan wants, or some of its parts (``{"params": ...}``). Leaves are read
        one after the other.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or its leaves are not those of ``abstract``.
        """
        step = self._chosen(step)
        stored = self._read_record(step)["leaves"]
        wanted = _leaves(abstract)
        stored = {name: leaf for name, leaf in stored.items() if name.split(".")[0] in abstract}
        _refuse_other_leaves(stored, wanted, f"the checkpoint of step {step} in {self.folder}")
        structs, treedef = jax.tree.flatten(abstract)
        read = [self._read(step, name, stored[name], struct) for name, struct in zip(wanted, structs, strict=True)]
        return jax.tree.unflatten(treedef, read)

    def _read(self, step: int, name: str, leaf: Leaf, struct: jax.ShapeDtypeStruct) -> jax.Array:
        base = (self.folder / str(step) / _STATE).as_uri() + "/"
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            source = tensorstore.open(spec, read=True, open=True).result()
            if source.shape != leaf.shape:
                raise ValueError(f"its shape is {source.shape}, {leaf.shape} was saved")
            return _placed(source, leaf, struct)
        except (ValueError, OSError) as error:
            raise self._damaged(step, f"{name} cannot be read: {_first_line(error)}") from error

    def _read_record(self, step: int) -> dict[str, Any]:
        try:
            stored = self._manager.restore(step, args=ocp.args.Composite(**{_RECORD: ocp.args.JsonRestore()}))[_RECORD]
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(step, f"its record cannot be read: {_first_line(error)}") from error
        try:
            return read_record(stored)
        except Unreadable as problem:
            raise self._damaged(step, f"its record cannot be used: {problem}") from None

    def _chosen(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no complete checkpoint in {self.folder}; start the run without --resume")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}; there are those of {_listed(steps)}")
        return steps[-1] if step is None else step

    def _damaged(self, step: int, why: str) -> CheckpointError:
        earlier = [other for other in self.steps() if other < step]
        back = f"remove {self.folder / str(step)} to go on from step {earlier[-1]}" if earlier else "there is no earlier one to go on from"
        return CheckpointError(f"the checkpoint of step {step} in {self.folder} is damaged: {why}; {back}")

    def _failed_save(self, step: int | None, tree: Any, error: Exception) -> CheckpointError:
        self._remove_unfinished()
        self._manager.reload()
        which = "the checkpoint under way" if step is None else f"the checkpoint of step {step}"
        size = "" if tree is None else f" ({show_bytes(stored_bytes(tree))} needed, {show_bytes(shutil.disk_usage(self.folder).free)} free)"
        return CheckpointError(f"{which} could not be written to {self.folder}{size}: {_first_line(error)}. {self._what_stays()}")

    def _remove_unfinished(self) -> None:
        for rest in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _what_stays(self) -> str:
        steps = self.steps()
        return f"The newest complete checkpoint is that of step {steps[-1]}." if steps else "There is no complete checkpoint yet."


def read_record(stored: Any) -> dict[str, Any]:
    """The record of a checkpoint, its leaves as ``Leaf``. Raises Unreadable where it is not one that this version writes."""
    values = build(dict, stored, "the record")
    if values.get("format") != 1:
        raise Unreadable("it is not one that this version of forebay writes")
    kinds = {"step": int, "leaves": dict[str, Leaf], "run": dict}
    return values | {name: build(kind, values.get(name), name) for name, kind in kinds.items()}


def _placed(source: tensorstore.TensorStore, leaf: Leaf, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """``source`` as an array where ``struct`` wants it, read shard by shard."""
    if leaf.key is not None:
        key = jax.random.wrap_key_data(jax.numpy.asarray(source.read().result()), impl=leaf.key)
        return key if struct.sharding is None else jax.device_put(key, struct.sharding)
    if struct.sharding is None:
        return jax.numpy.asarray(source.read().result())
    return jax.make_array_from_callback(leaf.shape, struct.sharding, lambda index: source[index].read().result())


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaves(tree: Any) -> dict[str, Leaf]:
    """The leaves of ``tree`` in its order, under the names that Orbax gives them: keys joined by dots."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if _is_key(leaf):
            found[name] = _key_leaf(leaf)
        else:
            found[name] = Leaf(shape=tuple(leaf.shape), dtype=str(leaf.dtype))
    return found


def _key_leaf(key: Any) -> Leaf:
    names = []

    def data(traced: jax.Array) -> jax.Array:  # inside a trace, because a ShapeDtypeStruct does not tell its implementation
        names.append(str(jax.random.key_impl(traced)))
        return jax.random.key_data(traced)

    struct = jax.eval_shape(data, key)
    return Leaf(shape=struct.shape, dtype=str(struct.dtype), key=names[0])


def stored_bytes(tree: Any) -> int:
    """Bytes of the arrays of ``tree``."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * jax.numpy.dtype(leaf.dtype).itemsize for leaf in _leaves(tree).values())


def _refuse_other_leaves(stored: dict[str, Leaf], wanted: dict[str, Leaf], which: str) -> None:
    for name, leaf in sorted(wanted.items(), key=lambda pair: not pair[0].startswith("params")):  # a weight says more than its mu
        if name not in stored:
            raise CheckpointError(f"{which} has no {name}, which this model and optimizer need; {nearest(name, stored)}")
        if stored[name] != leaf:
            raise CheckpointError(
                f"{name} is {_shown(stored[name])} in {which}, and {_shown(leaf)} in this model and optimizer; "
                "resume with the settings that it was saved with, or start another run"
            )
    for name in stored:
        if name not in wanted:
            raise CheckpointError(f"{which} holds {name}, which this model and optimizer do not have; {nearest(name, wanted)}")


def _shown(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" + (f" (a {leaf.key} key)" if leaf.key else "")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
