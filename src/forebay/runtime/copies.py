"""Compute copies at work: loops fetch the copy, the update of a layer rewrites it from the new master (``plan.copies`` says where and why).

    forward, backward   w = float32(fetch(copy, i));  the program's own cast gives back the very bits that were fetched
    update of layer i   master' = update(fetch(master, i), gradient, state);   write(master', i);   write(bfloat16(master'), i)

Idea: the layer is differentiated with respect to the widened value, so that its cotangent is the one of the master, through the
program's own cast. A widening followed by the narrowing is nothing to XLA, which drops the pair.

Cost: as in ``plan.copies``; the weights of two layers stand in HBM in the copy's dtype.
Limits: a copy exists only in a State, not between ``value_and_grad`` and ``update``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from forebay.errors import PlanError
from forebay.plan import Plan
from forebay.plan.copies import NotCopied, cast_of
from forebay.runtime.streaming import Job, Port
from forebay.workload.program import Program


def travelling(plan: Plan, program: Program, stored_params, stored_copies) -> tuple[Any, ...]:
    """The stored arrays that the loss reads: a parameter's copy where it has one.

    Raises:
        PlanError: the program uses such a parameter in another way than the one that the plan was made for.
    """
    params = list(stored_params)
    for (p, entry), copy in zip(plan.copies.items(), stored_copies, strict=True):
        try:
            same = str(cast_of(program, p)) == entry.dtype
        except NotCopied:
            same = False
        if not same:
            raise PlanError(
                f"the plan lets {entry.copy_of} travel as {entry.dtype}, and this loss does not only use it so: make a new plan for it"
            )
        params[p] = copy
    return tuple(params)


def widened(plan: Plan, params: Mapping[Any, int], weights: dict[Any, Any]) -> dict[Any, Any]:
    """A layer's fetched ``weights`` in their masters' dtypes; ``params`` gives the stored parameter of each."""
    return {k: w.astype(plan.role("parameter")[params[k]].dtype) if params[k] in plan.copies else w for k, w in weights.items()}


def slot_of(plan: Plan, p: int) -> tuple[str, int]:
    """The slot of the stack that loops fetch for stored parameter ``p``."""
    return ("copies" if p in plan.copies else "params", p)


def follow(plan: Plan, job: Job) -> Job:
    """A job that also writes the copies of the masters that it writes."""
    of = [(k, port) for k, port in enumerate(job.writes) if port.slot[0] == "params" and port.slot[1] in plan.copies]
    if not of:
        return job
    ports = tuple(Port(slot=("copies", port.slot[1]), axis=port.axis, host=True, copy_of=port.slot) for _, port in of)
    dtypes = [plan.copies[port.slot[1]].dtype for _, port in of]

    def compute(start, size, slices):
        new, sums = job.compute(start, size, slices)
        return [*new, *(new[k].astype(dtype) for (k, _), dtype in zip(of, dtypes, strict=True))], sums

    return dataclasses.replace(job, writes=(*job.writes, *ports), compute=compute)
