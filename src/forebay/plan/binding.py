"""Whether the entries of a plan from a file are those of the workload it is bound to: names, shapes, types, layers and specs."""

from typing import Any

from forebay.errors import InputError, PlanError
from forebay.records import Entry
from forebay.workload import Workload
from forebay.workload.parts import with_parts
from forebay.workload.sharding import local_shape

_STATE = ("parameter", "gradient", "optimizer", "batch")


def bound(plan: Any, work: Workload) -> Workload:
    """``work`` cut in layers as the plan's entries are.

    Raises:
        PlanError: an entry that the workload does not have, one that is missing, or one of another shape, type or spec.
    """
    known = {t.name: t for t in work.tensors}
    for e in plan.role("optimizer"):
        if e.layers is not None:
            tensor = known.get(e.name.rpartition("[")[0])
            if tensor is None or not tensor.shape or not 0 <= e.layers[0] < e.layers[1] <= tensor.shape[0]:
                raise _broken(e, f"covers layers {list(e.layers)} of no such state")
    work = with_parts(work, plan.role("optimizer"))
    for role in _STATE:
        tensors, entries = [t for t in work.tensors if t.role == role], plan.role(role)
        if [t.name for t in tensors] != [e.name for e in entries]:
            raise PlanError(f"the plan's entries of role {role} are not those of its model, one for each and in their order. {_AGAIN}")
        for t, e in zip(tensors, entries, strict=True):
            if (tuple(t.shape), t.dtype) != (e.shape, e.dtype):
                raise _broken(e, f"is {e.dtype}{list(e.shape)}, and {t.dtype}{list(t.shape)} in the model")
            _check_spec(plan, e)
    _check_made(plan)
    return work


_AGAIN = "Make the plan again with forebay plan --out"


def _broken(entry: Entry, what: str) -> PlanError:
    return PlanError(f"the plan's entry {entry.name} {what}. {_AGAIN}")


def _check_spec(plan: Any, entry: Entry) -> None:
    axes = [a for item in entry.spec if item is not None for a in (item if isinstance(item, tuple) else (item,))]
    if len(entry.spec) > len(entry.shape) or len(set(axes)) < len(axes) or (plan.mesh is None and axes):
        raise _broken(entry, f"has the spec {list(entry.spec)}, which its shape {list(entry.shape)} or the plan's mesh does not take")
    try:
        local_shape(entry.shape, entry.spec, plan.mesh, entry.name)
    except InputError as problem:
        raise _broken(entry, f"cannot be split: {problem}") from None


def _check_made(plan: Any) -> None:
    """Accumulators stand for the gradients, and copies for parameters on the host."""
    gradients = [e.name.partition(":")[2] for e in plan.role("gradient")]
    accumulators = [e.name.partition(":")[2] for e in plan.role("accumulator")]
    if accumulators not in ([], gradients) or bool(accumulators) != (plan.options.get("microbatches", 1) > 1):
        raise PlanError(f"the plan's accumulators are not one for each gradient of its microbatches. {_AGAIN}")
    hosted = {e.name for e in plan.role("parameter") if e.placement == "host"}
    copied = [e.copy_of for e in plan.entries if e.copy_of is not None]
    if not hosted.issuperset(copied) or len(set(copied)) < len(copied):
        raise PlanError(f"the plan's compute copies are not of different parameters on the host. {_AGAIN}")
