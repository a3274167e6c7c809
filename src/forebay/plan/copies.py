"""Compute copies: what layer loops fetch of a parameter that the program only uses in a lower precision.

Where the traced program reads a fp32 parameter on the host through a cast to bf16 and in no other way, its layers may travel
as bf16: beside the master stands a copy in that dtype, also on the host, and the update of a layer writes both. At all
times ``copy == cast(master)``, so the mathematics is the program's own. Bytes over the link for each parameter, a step with
Adam and m microbatches (to the device, to the host):

    fused, m = 1    master travels   forward 4, backward and update 4, state 8      16    update 4 + 8       12
                    copy travels     forward 2, backward 2, update 4 + 8            16    update 4 + 8 + 2   14
    not fused       master travels   8 m, update 4 + 8                        12 + 8 m    update 4 + 8       12    (gradients alike)
                    copy travels     4 m, update 4 + 8                        12 + 4 m    update 4 + 8 + 2   14

The option ``compute_copy`` says where: ``"auto"`` (the default) copies where the layers are read more often than a fused step
reads them, that is, for parameters that are not updated inside the backward pass (clipping, microbatches) or never (frozen);
with fusion alone a copy would save nothing on the link, in one pass or in two. ``"always"`` copies wherever it is legal, ``"never"``
nowhere. Cost: two more bytes of host memory for each parameter, 14 with Adam, beside a gradient stack where there is one; in HBM the
layers in flight take half.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import InputError, nearest
from forebay.records import Entry
from forebay.workload.program import Program
from forebay.workload.sharding import named

CHOICES = ("auto", "always", "never")


class NotCopied(Exception):
    """A parameter cannot have a compute copy; the text says why."""


def cast_of(program: Program, p: int) -> Any:
    """The one lower-precision dtype through which the program uses stored parameter ``p``, layer by layer in one loop.

    Raises:
        NotCopied: the program uses it in another way.
    """
    loops = [loop for loop in program.loops if p in loop.params]
    if program.whole[p] or len(loops) != 1 or loops[0].params.count(p) != 1:
        raise NotCopied("it is used in more than one place")
    [loop] = loops
    if loop.loop.length == 1:
        raise NotCopied("its loop has a single iteration")
    master = program.jaxpr.jaxpr.invars[p]
    readers = _readers(program.jaxpr.jaxpr, master)
    if loop.equation in readers:
        position = loop.loop.consts + loop.loop.carry + loop.params.index(p)
        readers = _readers(loop.body.flat.jaxpr, loop.body.flat.jaxpr.invars[position])
    found = {e.params["new_dtype"] if e is not None and e.primitive.name == "convert_element_type" else None for e in readers}
    dtype = found.pop() if len(found) == 1 else None
    if dtype is None or not _narrower(dtype, master.aval.dtype):
        raise NotCopied(f"the program uses it in {master.aval.dtype}, not only through one cast to a lower precision")
    return jnp.dtype(dtype)


def _readers(jaxpr, variable) -> list[Any]:
    """The equations that read a variable, through any name that it is given; None for a program that returns it."""
    found = [None] if any(v is variable for v in jaxpr.outvars) else []
    for e in jaxpr.eqns:
        if any(v is variable for v in e.invars):
            found += _readers(jaxpr, e.outvars[0]) if e.primitive.name == "name" else [e]
    return found


def _narrower(dtype, master) -> bool:
    """Whether values of ``dtype`` are values of ``master`` too, in fewer bytes (not below two: hosts keep no fp8 for a TPU)."""
    if not all(jnp.issubdtype(d, jnp.floating) for d in (dtype, master)):
        return False
    return jnp.promote_types(dtype, master) == master and 2 <= jnp.dtype(dtype).itemsize < jnp.dtype(master).itemsize


def with_copies(plan: Any) -> tuple[Entry, ...]:
    """The plan's entries, and behind its master's one for each compute copy. Where a copy is wanted and not legal, the master's says why.

    Raises:
        InputError: the option ``compute_copy`` is none of its choices.
    """
    choice = plan.options.get("compute_copy", "auto")
    if choice not in CHOICES:
        raise InputError(f"compute_copy={choice!r} is not a choice; {nearest(str(choice), CHOICES)}")
    entries = []
    masters = {e.name: p for p, e in enumerate(plan.role("parameter")) if e.placement == "host"}
    for e in plan.entries:
        wanted = e.name in masters and _wanted(plan, masters[e.name], choice)
        try:
            entries += [e, _entry(e, _legal(plan, masters[e.name]), wanted)] if wanted else [e]
        except NotCopied as why:
            entries.append(dataclasses.replace(e, reason=f"{e.reason}; no compute copy: {why}"))
    return tuple(entries)


def _wanted(plan: Any, p: int, choice: str) -> str:
    """Why a parameter on the host is to have a copy; empty where it is not."""
    if choice != "auto":
        return "the option compute_copy is always" if choice == "always" else ""
    if plan.bound.frozen[p]:
        return "it is read in each pass and never updated"
    fused = any(p in plan.bound.families[f].params for f in plan.fused)
    return "" if fused else "its layers are read more often than its update runs, which is not inside the backward pass"


def _legal(plan: Any, p: int) -> Any:
    work = plan.bound
    dtype = cast_of(work.program, p)
    updates = [stream for family, stream in zip(work.families, plan.streams, strict=True) if p in family.params]
    if not work.frozen[p] and not all(s.mode == "items" or s.layered for s in updates):
        raise NotCopied("its update does not run layer by layer")
    return dtype


def _entry(master: Entry, dtype, why: str) -> Entry:
    size = master.bytes_per_device // jnp.dtype(master.dtype).itemsize * dtype.itemsize
    return dataclasses.replace(
        master, name=f"{master.name}@{dtype}", dtype=str(dtype), bytes_per_device=size, copy_of=master.name,
        reason=f"what layer loops fetch, since the program only uses {master.name} as {dtype}: {why}",
    )  # fmt: skip


def abstract(plan: Any, mesh) -> tuple[Any, ...]:
    """The copies as ShapeDtypeStructs, on the specs and in the memory of their masters."""
    return tuple(jax.ShapeDtypeStruct(e.shape, jnp.dtype(e.dtype), sharding=named(mesh, e.spec, e.placement)) for e in plan.copies.values())


def rebuild(plan: Any, stored_params, wanted) -> tuple[Any, ...]:
    """The copies of masters that stand on the host: cast there, shard by shard. ``wanted``: what ``abstract`` gives."""
    return tuple(_cast(stored_params[p], like) for p, like in zip(plan.copies, wanted, strict=True))


def _cast(master, like):
    def where(index):
        return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, like.shape, strict=True))

    shards = {where(s.index): s.data for s in master.addressable_shards}
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.asarray(shards[where(index)]).astype(like.dtype))
