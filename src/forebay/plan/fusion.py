"""Which layers can be updated inside the backward pass, and why others cannot.

A family is fused where its parameter enters exactly one loop, layer by layer; where its update runs slice by slice along that
axis; and where nothing that the update reads (a clip factor, a trust ratio of the whole stack) depends on a gradient: such a
value is known only when the backward pass is over. By itself forebay fuses what has its parameter or its state on the host: the copies
of the state then run beside the backward pass. With ``fuse_update="always"`` what stands in HBM is fused too: no stack of gradients.

With the option ``fuse_update="two_pass"`` such families are fused as well: a first backward pass takes the sums that those
values need and throws each layer's gradient away, a second one updates. It is exact, and costs the backward pass twice (about
3/4 more compute of a step with full recomputation) where stacking the gradient costs its bytes on the host and two more copies of it.
"""

from typing import Any

from forebay.plan.streams import Stream
from forebay.workload import jaxprs
from forebay.workload.families import Family
from forebay.workload.program import Program
from forebay.workload.update import Update, outside


def gradient_dependent(update: Update) -> set[Any]:
    """Variables of the update that depend on a gradient."""
    tainted = {update.invar("grads", k) for k in range(update.leaves)}
    for eqn in update.jaxpr.jaxpr.eqns:
        if any(not jaxprs.is_literal(v) and v in tainted for v in eqn.invars):
            tainted.update(eqn.outvars)
    return tainted


def why_not(work, family: Family, stream: Stream, tainted: set[Any], two_pass: bool) -> str:
    """The reason why a family is not updated in the backward pass; empty where it is."""
    if stream.mode != "items" and not stream.layered:
        return "its update does not run layer by layer"
    [p] = family.params
    if not loop_layers(work.program, p) or (family.window is None and loop_layers(work.program, p) != stream.count):
        return "it is used in more than one place"
    if not two_pass and shared_reads(work.update, family, stream) & tainted:
        return (
            "its update needs a value of the whole gradient first (clipping, a norm); "
            "fuse_update=two_pass pays for that with a second backward pass"
        )
    if two_pass and family.kind != "stack" and any(_read_by_sum(work.update, stream, i) & tainted for i in stream.along.reductions):
        return "its update needs sums that depend on other sums of the gradient, which two passes cannot give"
    return "its state is kept in parts" if family.window is not None else ""


def loop_layers(program: Program, p: int) -> int:
    """Layers of the one loop that uses a stored parameter, once and nowhere else, so that its gradient is complete there; else 0."""
    loops = [loop for loop in program.loops if p in loop.params]
    once = len(loops) == 1 and loops[0].params.count(p) == 1 and not program.whole[p]
    return loops[0].loop.length if once else 0


def _read_by_sum(update: Update, stream: Stream, equation: int) -> set[Any]:
    """Values that one of the update's sums over slices reads and that are not the slices' own."""
    return set(outside(update, stream.along, [v for v in update.jaxpr.jaxpr.eqns[equation].invars if not jaxprs.is_literal(v)]))


def shared_reads(update: Update, family: Family, stream: Stream) -> set[Any]:
    """Values that the update of one layer of a family reads and that are not the layer's own."""
    if family.kind == "stack":
        return set().union(*(item.imports for item in family.items))
    component = family.items[0].component
    wanted = [update.outvar("params", k) for k in component.params] + [update.outvar("state", k) for k in component.state]
    return set(outside(update, stream.along, wanted))
