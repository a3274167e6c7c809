"""``trace``: everything that occupies memory in a training step, from a loss function and shapes. Nothing is allocated."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from forebay.errors import InputError
from forebay.workload import outside, recompute, sharding
from forebay.workload import program as programs
from forebay.workload.families import Family, make_families
from forebay.workload.names import leaf_names
from forebay.workload.program import Arguments, Program, Stored, stored_names
from forebay.workload.update import Update, trace_update


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A thing that occupies memory: one stored leaf, its gradient, a batch leaf, or an activation: of all layers of a loop, or one value
    outside of the loops.

    ``bytes`` are global. ``spec`` is the partition spec, or None where the caller gave no shardings. For an activation,
    ``count`` is the loop's length (outside of loops: how many are alike), ``shape`` one layer's; ``written`` is what the program does
    with it by itself, ``named`` says that the user named it, ``note`` why it cannot be moved, if it cannot, and ``needed`` that keeping
    it serves the backward pass.
    ``part``: only these layers of a stack of optimizer state.

    Of an activation: ``recompute_flops`` and ``recompute_bytes`` of all its layers, to make it again where nothing but the loops' carries
    and what is at hand anyhow is kept; ``recompute_from``, the nearest entries on that way; ``consumers`` (``primitive@file.py:12``, the
    first few); ``born`` and ``dies``, the equations of the body that make it and last use it on the way forward. ``batched``: the rows of
    the batch are on one of its axes, so it is taken to be split like the batch.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    count: int = 1
    spec: tuple | None = None
    members: tuple[str, ...] = ()
    written: str = "hbm"
    movable: bool = True
    note: str = ""
    source: str = ""
    named: bool = False
    part: tuple[int, int] | None = None
    recompute_flops: float = 0.0
    recompute_bytes: float = 0.0
    recompute_from: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    born: int = 0
    dies: int = 0
    batched: bool = False
    needed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A traced training step: the user's functions, the shapes, the tensors, and the programs they come from.

    ``mesh`` and the specs inside ``tensors`` are None unless the caller gave shardings. ``stored`` and ``stored_state``
    say which leaves of the user's trees each array of the state holds. ``uncut``: of a workload whose state is in parts, the one before.
    """

    loss_fn: Callable
    optimizer: Any
    args: Arguments
    opt_state: Any
    mesh: sharding.MeshShape | None
    batch_specs: tuple | None
    tensors: tuple[Tensor, ...]
    program: Program
    update: Update
    families: tuple[Family, ...]
    stored: tuple[Stored, ...]
    stored_state: tuple[Stored, ...]
    name: str = ""
    reduction: str = ""
    uncut: "Workload | None" = None

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.args.params))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what a plan depends on: names, shapes and dtypes of every leaf and activation, not names of variables."""
        return hashlib.sha256(json.dumps(self.signature, sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def signature(self) -> dict[str, str]:
        """``{entry name: "float32[32,4096]"}``: compared entry by entry when a plan does not match."""
        return {t.name: f"{t.dtype}{list(t.shape)}" + (f"x{t.count}" if t.count > 1 else "") for t in self.tensors}

    @functools.cached_property
    def recompute_graphs(self) -> tuple[recompute.Graph, ...]:
        """For each loop of ``program.loops``: what each value of its body is made from, and at which cost."""
        return graphs(self.program)

    @functools.cached_property
    def frozen(self) -> tuple[bool, ...]:
        """For each stored parameter, whether the optimizer never changes it."""
        return tuple(all(self.update.frozen[k] for k in s.members) for s in self.stored)

    def program_on(self, mesh, microbatches: int = 1) -> Program:
        """The program traced in the context of an abstract mesh (a loss may look at it), on one microbatch."""
        key = (mesh, microbatches)
        cache = self.__dict__.setdefault("_programs", {(None, 1): self.program})
        if key not in cache:
            cut = lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // microbatches, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
            args = self.args if microbatches == 1 else dataclasses.replace(self.args, batch=jax.tree.map(cut, self.args.batch))
            cache[key] = programs.build(self.loss_fn, args, mesh, self._specs())
            if cache[key].stored != self.stored:
                raise InputError(
                    "the loss has other repeated layers when it is traced on the mesh: it must not depend on the mesh in its structure"
                )
        return cache[key]

    def _specs(self):
        specs = {m: t.spec for t in self.tensors if t.role == "parameter" for m in t.members}
        return tuple(specs.get(name) for name in leaf_names(self.args.params))


def trace(
    loss_fn: Callable,
    optimizer: Any,
    params: Any,
    batch: Any,
    *,
    rng: bool = False,
    extra: Any = None,
    mesh: Any = None,
    param_specs: Any = None,
    batch_spec: Any = None,
    reduction: str | None = None,
    name: str = "",
) -> Workload:
    """Trace one training step on shapes.

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss`` or ``(loss, aux)``; with ``extra``,
            ``loss_fn(params, batch[, key], extra=extra) -> (loss, (aux, new_extra))``.
        optimizer: an Optax gradient transformation.
        params, batch: trees of arrays or ShapeDtypeStructs. Their NamedShardings, if any, become the plan's.
        rng: the loss takes a PRNG key as third argument.
        extra: mutable state that is not differentiated (batch statistics, caches).
        mesh, param_specs, batch_spec: a Mesh or AbstractMesh, a tree of PartitionSpecs shaped like ``params`` (or a
            function of the leaf's path and shape), and the spec of every batch leaf's leading axes.
        reduction: how losses of parts of a batch combine, which allows microbatches: ``"mean"`` (parts of equal size), ``"sum"``, or
            ``"weight:NAME"``, weighted by ``aux["NAME"]`` (a number of tokens, say). None: microbatches are refused.
        name: what to call the workload in plans.

    Raises:
        InputError: the loss is not a floating scalar, a leaf is not an array, or specs and shapes disagree.
    """
    shaped = jax.tree.map(_shape_of, (params, batch, extra))
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng else None
    shape = sharding.mesh_shape(mesh) if mesh is not None else sharding.mesh_of((params, batch))
    specs, batch_specs = _specs(shaped[0], shaped[1], shape, param_specs, batch_spec)
    args = Arguments(params=_bare(shaped[0]), batch=_bare(shaped[1]), extra=_bare(shaped[2]), key=key)
    _check_params(args.params)
    opt_state = jax.eval_shape(optimizer.init, args.params)
    abstract = None if shape is None else shape.abstract()
    program = programs.build(loss_fn, args, abstract, specs)
    update = trace_update(optimizer, args.params, opt_state, program.jaxpr.out_avals[0].dtype)
    families, stored_state = make_families(update, program.stored)
    tensors = (
        *_state_tensors(args, opt_state, program, update, families, stored_state, specs),
        *_batch_tensors(args.batch, batch_specs),
        *_activation_tensors(program, args, outside.discover(program, args, abstract)),
    )
    return Workload(
        loss_fn=loss_fn, optimizer=optimizer, args=args, opt_state=opt_state, mesh=shape, batch_specs=batch_specs, tensors=tensors,
        program=program, update=update, families=families, stored=program.stored, stored_state=stored_state, name=name,
        reduction=_reduction(reduction, program),
    )  # fmt: skip


def _reduction(reduction: str | None, program) -> str:
    if reduction is None or reduction in ("mean", "sum"):
        return reduction or ""
    aux = jax.tree.unflatten(program.out_tree, program.jaxpr.out_avals)[1]
    name = reduction.removeprefix("weight:")
    if not reduction.startswith("weight:") or not isinstance(aux, dict) or name not in aux or aux[name].shape != ():
        raise InputError(f"reduction={reduction!r} is not 'mean', 'sum' or 'weight:NAME' with aux['NAME'] a scalar of the loss's aux")
    return reduction


def _shape_of(leaf):
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    spec = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec if isinstance(spec, jax.sharding.NamedSharding) else None)


def _bare(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _check_params(params):
    if not jax.tree.leaves(params):
        raise InputError("params has no leaves: there is nothing to train")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(
                f"parameter {where} is {leaf.dtype}{list(leaf.shape)}, which cannot be differentiated; pass it in extra= instead"
            )


def _specs(params, batch, shape, param_specs, batch_spec):
    leaves = jax.tree.leaves(params)
    if param_specs is None:
        specs = [sharding.spec_of(leaf) for leaf in leaves]
    elif callable(param_specs):
        specs = [sharding.pad_spec(param_specs(n, leaf.shape), len(leaf.shape)) for n, leaf in zip(leaf_names(params), leaves, strict=True)]
    else:
        is_spec = lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec)  # noqa: E731
        found = jax.tree.leaves(param_specs, is_leaf=is_spec)
        if len(found) != len(leaves):
            raise InputError(
                f"param_specs has {len(found)} specs for {len(leaves)} parameters; give one for each leaf, P() where unsharded"
            )
        specs = [sharding.pad_spec(s, len(leaf.shape)) for s, leaf in zip(found, leaves, strict=True)]
    rows = jax.tree.leaves(batch)
    found = [
        sharding.spec_of(leaf) if batch_spec is None else sharding.pad_spec(tuple(batch_spec)[: len(leaf.shape)], len(leaf.shape))
        for leaf in rows
    ]
    if shape is None:
        if any(s is not None for s in (*specs, *found)):
            raise InputError("specs were given without a mesh: pass mesh= or put NamedShardings on the ShapeDtypeStructs")
        return (None,) * len(leaves), None
    specs = [s or (None,) * len(leaf.shape) for s, leaf in zip(specs, leaves, strict=True)]
    found = [s or (None,) * len(leaf.shape) for s, leaf in zip(found, rows, strict=True)]
    for name, leaf, spec in zip((*leaf_names(params), *leaf_names(batch)), (*leaves, *rows), (*specs, *found), strict=True):
        sharding.local_shape(leaf.shape, spec, shape, name)
    return tuple(specs), tuple(found)


def _state_tensors(args, opt_state, program, update, families, stored_state, specs):
    params, states = jax.tree.leaves(args.params), jax.tree.leaves(opt_state)
    names, members = stored_names(program.stored, args.params), leaf_names(args.params)
    param_spec = []
    for s, name in zip(program.stored, names, strict=True):
        leaf, spec = params[s.members[0]], specs[s.members[0]]
        shape, spec = stacked(leaf.shape, spec, s)
        param_spec.append(spec)
        common = _state_array(shape, leaf.dtype, spec, tuple(members[k] for k in s.members))
        yield Tensor(name=f"parameter:{name}", role="parameter", **common)
        frozen = all(update.frozen[k] for k in s.members)
        none = {"bytes": 0, "movable": False, "note": "frozen: the optimizer never changes this parameter, so it has no gradient"}
        yield Tensor(name=f"gradient:{name}", role="gradient", **(common | (none if frozen else {})))
    owner = {j: f.params[0] for f in families if f.params for j in f.state}
    state_members = leaf_names(opt_state)
    for j, (s, name) in enumerate(zip(stored_state, stored_names(stored_state, opt_state), strict=True)):
        leaf = states[s.members[0]]
        shape, _ = stacked(leaf.shape, None, s)
        spec = None
        if specs[0] is not None:
            spec = _state_spec(shape, owner.get(j), program.stored, params, param_spec)
        yield Tensor(
            name=f"optimizer:{name}", role="optimizer", **_state_array(shape, leaf.dtype, spec, tuple(state_members[k] for k in s.members))
        )


def _state_array(shape, dtype, spec, members) -> dict[str, Any]:
    scalar = math.prod(shape) <= 1
    return {
        "shape": shape, "dtype": str(dtype), "bytes": sharding.nbytes(shape, dtype), "spec": spec, "members": members,
        "movable": not scalar, "note": "a scalar stays on the device" if scalar else "",
    }  # fmt: skip


def stacked(shape, spec, stored: Stored):
    """Shape and spec of a stored array, with the axis of its stack in front."""
    if not stored.stacked:
        return tuple(shape), spec
    return (len(stored.members), *shape), None if spec is None else (None, *spec)


def _state_spec(shape, param, stored, params, param_spec):
    """The spec of a state array: its parameter's, on the axes that it shares with it in order."""
    if param is None:
        return (None,) * len(shape)
    full, _ = stacked(params[stored[param].members[0]].shape, None, stored[param])
    return follow_spec(shape, full, param_spec[param])


def follow_spec(shape, full, spec) -> tuple:
    """``spec`` of an array of shape ``full``, for an array whose axes are some of its axes in the same order (factored state)."""
    out, at = [], 0
    for n in shape:
        match = next((k for k in range(at, len(full)) if full[k] == n), None)
        out.append(None if match is None else spec[match])
        at = at if match is None else match + 1
    return tuple(out)


def _batch_tensors(batch, specs):
    for k, (name, leaf) in enumerate(zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)):
        yield Tensor(
            name=f"batch:{name}", role="batch", shape=leaf.shape, dtype=str(leaf.dtype), bytes=sharding.nbytes(leaf.shape, leaf.dtype),
            spec=None if specs is None else specs[k], members=(name,),
        )  # fmt: skip


def _activation_tensors(program, args: Arguments, around: outside.Outside):
    """One tensor per residual path; a name that stands in several loops, or several times outside of them, is one tensor."""
    found: dict[str, Tensor] = {}
    for tensor in (*_inside(program, args), *_outside(args, around)):
        if (old := found.get(tensor.name)) is not None:
            tensor = dataclasses.replace(
                old, bytes=old.bytes + tensor.bytes, count=old.count + tensor.count, movable=old.movable or tensor.movable,
                needed=old.needed or tensor.needed, recompute_flops=old.recompute_flops + tensor.recompute_flops,
                recompute_bytes=old.recompute_bytes + tensor.recompute_bytes,
            )  # fmt: skip
        found[tensor.name] = tensor
    yield from found.values()


def _inside(program, args: Arguments):
    for loop, graph in zip(program.loops, graphs(program), strict=True):
        for r in loop.body.residuals:
            yield _activation(r, graph, *movability(r, graph.length), batched=r.shape[:1] == _rows(args))


def _outside(args: Arguments, around: outside.Outside):
    kept = around.body.residuals
    graph = recompute.Graph(loop=-1, length=1, nodes=recompute.named(around.body.nodes, kept), carry="")
    for r in kept:
        yield _activation(r, graph, False, outside.WHY_NOT, batched=r.mark in around.batched or r.shape[:1] == _rows(args))


def _rows(args: Arguments) -> tuple[int, ...] | None:
    """The batch's first axis."""
    return next((leaf.shape[:1] for leaf in jax.tree.leaves(args.batch) if leaf.shape), None)


def _activation(r, graph: recompute.Graph, movable: bool, note: str, *, batched: bool) -> Tensor:
    chain = graph.chain(r.node) if r.node >= 0 else set()
    return Tensor(
        name=f"activation:{r.path}", role="activation", shape=r.shape, dtype=str(r.dtype), count=graph.length,
        bytes=sharding.nbytes(r.shape, r.dtype) * graph.length, members=(r.path, *r.aliases), written=r.written, movable=movable,
        note=note, batched=batched, needed=r.needed, source=r.source, named=r.user_named, consumers=r.consumers, born=r.born, dies=r.dies,
        recompute_flops=graph.length * sum(graph.nodes[n].flops for n in chain),
        recompute_bytes=graph.length * sum(graph.nodes[n].moved_bytes for n in chain),
        recompute_from=graph.nearest(r.node) if r.node >= 0 else (),
    )  # fmt: skip


def graphs(program: Program) -> tuple[recompute.Graph, ...]:
    """The recompute graph of each loop; a node has a name where it can be placed."""
    out = []
    for number, loop in enumerate(program.loops):
        found, length = loop.body.residuals, loop.loop.length
        largest = max((r for r in found if r.carry), key=lambda r: sharding.nbytes(r.shape, r.dtype), default=None)
        carry = f"activation:{largest.path}" if largest else ""
        nodes = recompute.named(loop.body.nodes, found if length > 1 else ())
        out.append(recompute.Graph(loop=number, length=length, nodes=nodes, carry=carry))
    return tuple(out)


def movability(r, length: int) -> tuple[bool, str]:
    """Whether a residual can be placed at all, and why not."""
    if not r.needed:
        return (
            False,
            "it only leaves the loop's body (a block's output), so differentiation never keeps it; place the next block's input instead",
        )
    if length == 1:
        return False, "its loop has a single iteration, for which the compiler drops an offload"
    return True, ""
