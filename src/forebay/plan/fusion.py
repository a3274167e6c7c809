"""Which layers can be updated inside the backward pass, and why others cannot.

A family is fused where its parameter enters exactly one loop, layer by layer, from the host; where its update runs slice by
slice along that axis; and where nothing that the update reads (a clip factor, a trust ratio of the whole stack) depends on
a gradient or on the loss: such a value is known only when the backward pass is over.
"""

from typing import Any

from forebay.plan.streams import Stream
from forebay.workload import jaxprs
from forebay.workload.families import Family
from forebay.workload.update import Update, outside


def gradient_dependent(update: Update) -> set[Any]:
    """Variables of the update that depend on a gradient or on the loss."""
    tainted = {update.invar("grads", k) for k in range(update.leaves)} | {update.loss_invar}
    for eqn in update.jaxpr.jaxpr.eqns:
        if any(not jaxprs.is_literal(v) and v in tainted for v in eqn.invars):
            tainted.update(eqn.outvars)
    return tainted


def why_not(work, family: Family, stream: Stream, tainted: set[Any]) -> str:
    """The reason why a host family is not updated in the backward pass; empty where it is."""
    if stream.mode != "items" and not stream.layered:
        return "its update does not run layer by layer"
    [p] = family.params
    loops = [loop for loop in work.program.loops if p in loop.params]
    if len(loops) != 1 or work.program.whole[p] or loops[0].params.count(p) != 1 or loops[0].loop.length != stream.count:
        return "it is used in more than one place"
    if family.kind == "stack":
        read = set(family.items[0].imports).union(*(item.imports for item in family.items))
    else:
        component = family.items[0].component
        wanted = [work.update.outvar("params", k) for k in component.params] + [work.update.outvar("state", k) for k in component.state]
        read = set(outside(work.update, stream.sliced, wanted))
    if read & tainted:
        return "its update needs a value of the whole gradient first (clipping, a norm, the loss)"
    return ""
