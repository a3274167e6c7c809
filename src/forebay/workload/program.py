"""The user's loss as a flat program over stored leaves: where its layer loops are and what feeds them.

    loss_fn --make_jaxpr--> jaxpr --roll--> scans over stacked leaves --inline--> Program(stored params, extra, batch, key)

A *stored* leaf is one array of the train state: a leaf of the user's tree, or a stack of the leaves that play the same
part in repeated blocks (see ``roll``).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from forebay.errors import InputError
from forebay.workload import activity, jaxprs, own_offload, repeats, residuals, roll, slicing
from forebay.workload.marking import Origin
from forebay.workload.names import leaf_names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One array of the state: the positions, in the user's flattened tree, of the leaves it holds. More than one: stacked on a new axis 0.

    ``part``: only these layers, ``(start, stop)`` of axis 0, of the leaf or stack.
    """

    members: tuple[int, ...]
    stacked: bool = False
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerLoop:
    """A scan of the program. ``params[i]`` is the stored parameter that feeds scanned input ``i`` (through casts at most), or None."""

    equation: Any
    loop: jaxprs.Loop
    params: tuple[int | None, ...]
    body: residuals.Body


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """``jaxpr``: (stored params, extra, batch[, key]) flat -> (loss, aux, new extra) flat.

    ``whole[p]``: the stored parameter p is also used outside loops. ``changed``: what of the user's own offloads could not stay as written.
    """

    jaxpr: Any
    stored: tuple[Stored, ...]
    out_tree: Any
    loops: tuple[LayerLoop, ...]
    whole: tuple[bool, ...]
    notes: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def loop_at(self, eqn) -> LayerLoop | None:
        return next((loop for loop in self.loops if loop.equation is eqn), None)

    def streams(self, p: int) -> bool:
        """Whether stored parameter ``p`` enters a loop layer by layer."""
        return any(p in loop.params for loop in self.loops)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The shapes a loss function is traced with; trees of ShapeDtypeStructs. ``extra`` and ``key`` may be None."""

    params: Any
    batch: Any
    extra: Any = None
    key: Any = None

    def flat(self) -> list[Any]:
        return jax.tree.leaves((self.params, self.extra, self.batch, self.key))


def call(loss_fn: Callable, params, extra, batch, key) -> tuple[Any, Any, Any]:
    """(loss, aux, new extra) of the user's function, whichever of the accepted forms it has."""
    args = (params, batch) if key is None else (params, batch, key)
    out = loss_fn(*args) if extra is None else loss_fn(*args, extra=extra)
    loss, aux = out if isinstance(out, tuple) else (out, None)
    if extra is None:
        return loss, aux, None
    if not (isinstance(aux, tuple) and len(aux) == 2):
        raise InputError("with extra state, loss_fn must return (loss, (aux, new_extra)); aux may be None")
    return loss, *aux


def build(loss_fn: Callable, args: Arguments, mesh=None, specs: tuple | None = None) -> Program:
    """Trace, roll and inspect a loss.

    ``mesh`` is the AbstractMesh in whose context the loss is traced; ``specs`` one spec per leaf of params.
    """
    tree = jax.tree.structure((args.params, args.extra, args.batch, args.key))
    out_tree = None

    def flat(*leaves):
        nonlocal out_tree
        out = call(loss_fn, *jax.tree.unflatten(tree, leaves))
        leaves, out_tree = jax.tree.flatten(out)
        return leaves

    with on_mesh(mesh):
        traced = jax.make_jaxpr(flat)(*(_standing_on(mesh, leaf) for leaf in args.flat()))
        _check_loss(traced)
        count = len(jax.tree.leaves(args.params))
        rolled, stored, notes = _rolled(jaxprs.inline(traced), count, specs or (None,) * count, leaf_names(args.params))
        whole_program, changed = own_offload.compilable(jaxprs.inline(rolled))
        loops, whole = _loops(whole_program, len(stored))
    return Program(
        jaxpr=whole_program, stored=stored, out_tree=out_tree, loops=loops, whole=whole, notes=notes, changed=changed
    )  # fmt: skip


def on_mesh(mesh) -> contextlib.AbstractContextManager:
    """The context of an abstract mesh, or of none."""
    return jax.sharding.use_abstract_mesh(mesh) if mesh is not None else contextlib.nullcontext()


def _standing_on(mesh, leaf):
    """An argument whose type names the mesh, as the types of computed values do: a block that reads it is then like those behind it."""
    if mesh is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def _rolled(jaxpr, count, specs, names):
    """The program with repeated blocks as loops over stacked parameters, and how those are stored."""
    leaf_specs = [("parameter", spec) for spec in specs] + [None] * (len(jaxpr.in_avals) - count)
    found = repeats.survey(jaxpr, leaf_specs, (*names, *(f"input {k}" for k in range(count, len(leaf_specs)))))
    if not found.repeats:
        return jaxpr, tuple(Stored(members=(k,)) for k in range(count)), found.reasons
    run, storage = roll.roll(jaxpr, found.repeats)
    avals = [_stacked_aval([jaxpr.in_avals[k] for k in slot]) for slot in storage.slots]
    stored = tuple(Stored(members=slot, stacked=len(slot) > 1) for slot in storage.slots if slot[0] < count)
    return jax.make_jaxpr(lambda *args: run(args))(*avals), stored, found.reasons


def _stacked_aval(avals):
    first = avals[0]
    return first if len(avals) == 1 else jax.ShapeDtypeStruct((len(avals), *first.shape), first.dtype)


def _check_loss(traced):
    loss = traced.out_avals[0] if traced.out_avals else None
    if loss is None or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise InputError(f"loss_fn must return a floating scalar loss, or (loss, aux); it returned {loss}")


def _loops(program, count):
    """The scans of the program and, for each stored parameter, whether it is used anywhere but as their scanned input."""
    origin: dict[Any, int] = {v: p for p, v in enumerate(program.jaxpr.invars[:count])}
    active = set(program.jaxpr.invars[:count])
    whole = [False] * count
    loops = []
    for eqn in program.jaxpr.eqns:
        fed = [None if jaxprs.is_literal(v) else origin.get(v) for v in eqn.invars]
        trained = activity.spread(eqn, active)
        if eqn.primitive.name == "scan":
            loop = jaxprs.loop_of(eqn)
            head = loop.consts + loop.carry
            loops.append(_layer_loop(eqn, loop, tuple(fed[head:]), trained))
            fed = fed[:head]
        elif (p := follows(eqn, fed)) is not None:
            origin[eqn.outvars[0]] = p
            continue
        for p in fed:
            if p is not None:
                whole[p] = True
    for v in program.jaxpr.outvars:
        if not jaxprs.is_literal(v) and v in origin:
            whole[origin[v]] = True
    return _apart(loops), tuple(whole)


def _layer_loop(eqn, loop, params, active):
    body = residuals.discover(loop, Origin.of(eqn), tuple(p is not None for p in params), active)
    return LayerLoop(equation=eqn, loop=loop, params=params, body=body)


def _apart(loops: list[LayerLoop]) -> tuple[LayerLoop, ...]:
    """The loops, with the paths of unnamed residuals that are written in other lines or shapes than those of a loop before told apart."""
    seen: dict[str, tuple] = {}
    out = []
    for number, loop in enumerate(loops):
        renamed = {}
        for r in loop.body.residuals:
            what = (r.source, r.shape, r.dtype)
            if not r.user_named and seen.setdefault(r.path, what) != what:
                renamed[r.mark] = f"{r.path}/loop{number}"
        out.append(dataclasses.replace(loop, body=residuals.renamed(loop.body, renamed)) if renamed else loop)
    return tuple(out)


def follows(eqn, fed) -> int | None:
    """The stored parameter that the result still is, layer by layer: one operand is of it and the rest are scalars (a cast, a scale)."""
    sources = [p for p in fed if p is not None]
    others = [v for v, p in zip(eqn.invars, fed, strict=True) if p is None]
    if len(sources) != 1 or len(eqn.outvars) != 1 or not eqn.outvars[0].aval.shape or any(v.aval.shape for v in others):
        return None
    if eqn.primitive.name == "scan" or any(isinstance(v, (core.Jaxpr, core.ClosedJaxpr)) for v in eqn.params.values()):
        return None
    try:
        outs = slicing.out_axes(eqn, [None if p is None else 0 for p in fed])
    except slicing.NotSeparable:
        return None
    stack = next(v.aval.shape for v, p in zip(eqn.invars, fed, strict=True) if p is not None)
    return sources.pop() if outs != "reduce" and outs[0] == 0 and eqn.outvars[0].aval.shape[0] == stack[0] else None


def stored_names(stored: tuple[Stored, ...], tree) -> tuple[str, ...]:
    """A name per stored leaf: the leaf's own path; of a stack, the path with the differing parts as ``*``."""
    names = leaf_names(tree)
    out = []
    for s in stored:
        parts = [names[k].split("/") for k in s.members]
        same = len({len(p) for p in parts}) == 1
        out.append("/".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True)) if same else names[s.members[0]] + "...")
    return tuple(out)
