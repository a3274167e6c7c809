"""From a traced workload and a machine to the placement problem, for one form.

Bytes are those of plans by rule (everything kept, on the host, recomputed, and no update in the backward pass), so that whatever a plan
would refuse or leave alone is no choice here either: the rules of ``plan`` stay the one truth.
"""

import dataclasses
import math

from forebay.errors import PlacementError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.search.pricing import Prices
from forebay.search.problem import HBM, HOST, RECOMPUTE, Form, Group, Problem, Value
from forebay.workload import Workload
from forebay.workload.parts import cut, layers_of

EVERY_ACTIVATION = "activation:?*"  # a pattern, not the role: it reaches what the program recomputes as written
STREAM_BELOW = 2**20  # bytes of a stack on one device under which a copy's latency costs more than the bytes gain
MOST_PARTS = 8  # of a family's state: finer cuts gain little, and each cut family is updated behind the backward pass
BACKWARD = 2.0  # arithmetic of a backward pass over its forward pass


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sources:
    """The plans that a problem is read from."""

    kept: Plan
    hosted: Plan
    recomputed: Plan
    unfused: Plan


def formulate(work: Workload, hardware: Hardware, prices: Prices, form: Form) -> Problem:
    """The problem that the options in ``form`` leave open."""
    options = dict(form)
    everywhere = [EVERY_ACTIVATION] if any(t.role == "activation" for t in work.tensors) else []
    sources = Sources(
        kept=Plan.by_hand(work, dict.fromkeys(everywhere, HBM), hardware=hardware, options=options),
        unfused=Plan.by_hand(work, dict.fromkeys(everywhere, HBM), hardware=hardware, options=options | {"fuse_update": "never"}),
        hosted=Plan.by_hand(work, dict.fromkeys(["parameter", "optimizer", *everywhere], HOST), hardware=hardware, options=options),
        recomputed=Plan.by_hand(work, dict.fromkeys(everywhere, RECOMPUTE), hardware=hardware, options=options),
    )
    passes = options.get("microbatches", 1)
    share = 1 / hardware.devices
    values, forward = _values(work, sources, prices, share, passes)
    groups = tuple(_group(work, sources, f, prices, passes) for f, family in enumerate(work.families) if family.params or family.state)
    counted = sum(g.param_bytes + g.gradient_bytes + g.state_bytes for g in groups)
    standing = [e for e in sources.unfused.entries if e.role not in ("activation", "communication") and e.placement == HBM]
    phases = [seconds for loop in forward for seconds in (loop, BACKWARD * loop)]
    return Problem(
        values=values,
        groups=groups,
        compute_seconds=(*phases, prices.update(counted)),
        link=prices.link,
        hbm_fixed_bytes=max(0.0, sum(e.bytes_per_device for e in standing) - counted),
        hbm_budget_bytes=hardware.hbm_budget_bytes,
        host_budget_bytes=hardware.host_budget_bytes_per_device,
        form=form,
    )


def _values(work: Workload, sources: Sources, prices: Prices, share: float, passes: int) -> tuple[tuple[Value, ...], list[float]]:
    """The values of all loops, and the seconds of each loop's forward pass."""
    values: list[Value] = []
    forward = []
    entries = {plan: {e.name: e for e in getattr(sources, plan).role("activation")} for plan in ("kept", "hosted", "recomputed")}
    inside = {f"activation:{r.path}" for loop in work.program.loops for r in loop.body.residuals}
    dtype = _compute_dtype(t for t in work.tensors if t.name in inside)
    for k, graph in enumerate(work.recompute_graphs):
        seconds = [prices.seconds(node, share, dtype) * graph.length for node in graph.nodes]
        first = bool(graph.carry)  # the carry stands in front of the nodes
        base, behind = len(values) + first, _behind(seconds)
        where = [_Place(loop=k, after=behind[n], ahead=_ahead(graph, n, behind)) for n in range(len(seconds))]
        if first:
            place = _Place(loop=k, after=sum(seconds), ahead=_ahead(graph, None, behind))
            values.append(_value(graph.carry, place, (), True, 0.0, graph, entries, prices, passes))
        for node, each, place in zip(graph.nodes, seconds, where, strict=True):
            inputs = (*((base - 1,) if first and node.carried else ()), *(base + u for u in node.inputs))
            size = node.bytes * share / passes if node.needed else 0.0  # what is made on the way is gone before the next is
            values.append(_value(node.name, place, inputs, node.needed, each, graph, entries, prices, passes, size))
        forward.append(sum(seconds))
    return tuple(values), forward


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a value stands in its loop: the seconds of forward work behind its birth, of backward work ahead of its first use there."""

    loop: int
    after: float
    ahead: float


def _behind(seconds: list[float]) -> list[float]:
    """For each node the seconds of the nodes behind it."""
    return [math.fsum(seconds[n + 1 :]) for n in range(len(seconds))]


def _ahead(graph, number: int | None, behind: list[float]) -> float:
    """The backward work before the derivative of the last node that reads node ``number``, or the carry, which goes first."""
    readers = [n for n, node in enumerate(graph.nodes) if not node.linear and (node.carried if number is None else number in node.inputs)]
    return BACKWARD * (behind[readers[-1]] if readers else behind[number] if number is not None else 0.0)


def _value(name, place: _Place, inputs, needed, seconds, graph, entries, prices, passes, slice_bytes=0.0) -> Value:
    kept = entries["kept"].get(name) if name else None
    if kept is None:
        return Value(
            name="", loop=place.loop, inputs=inputs, needed=needed, places=(), stack_bytes=0.0, slice_bytes=slice_bytes,
            rebuild_seconds=seconds,
        )  # fmt: skip
    stack = kept.bytes_per_device / passes
    places = [
        where for where, plan in ((HBM, "kept"), (HOST, "hosted"), (RECOMPUTE, "recomputed")) if entries[plan][name].placement == where
    ]
    if HOST in places and stack < STREAM_BELOW and len(places) > 1:
        places.remove(HOST)
    return Value(
        name=name, loop=place.loop, inputs=inputs, needed=needed, places=tuple(places), stack_bytes=stack, slice_bytes=stack / graph.length,
        rebuild_seconds=seconds, keep_seconds=prices.keeping(stack * passes), after_seconds=place.after, ahead_seconds=place.ahead,
    )  # fmt: skip


def _compute_dtype(activations) -> str:
    """The dtype in which most bytes of the loops' activations stand; a head's wide logits say nothing of the layers."""
    held: dict[str, int] = {}
    for tensor in activations:
        held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.bytes
    return max(held, key=held.__getitem__, default="float32")


def _group(work: Workload, sources: Sources, f: int, prices: Prices, passes: int) -> Group:
    family, plan, hosted = work.families[f], sources.kept, sources.hosted
    params, state, gradients = plan.role("parameter"), plan.role("optimizer"), sources.unfused.role("gradient")
    moved_params, moved_state = hosted.role("parameter"), hosted.role("optimizer")
    movable = [j for j in family.state if moved_state[j].placement == HOST]
    loop = next((k for k, loop in enumerate(work.program.loops) if set(family.params) & {p for p in loop.params if p is not None}), None)
    copies = sum(hosted.copies[p].bytes_per_device for p in family.params if p in hosted.copies)
    masters = sum(params[p].bytes_per_device for p in family.params)
    length = work.program.loops[loop].loop.length if loop is not None else 1
    layers = _layers(work, f) if movable else 1
    parts = max(n for n in range(1, MOST_PARTS + 1) if layers % n == 0)
    return Group(
        params=tuple(params[p].name for p in family.params),
        state=tuple(state[j].name for j in movable),
        param_moves=bool(family.params) and all(moved_params[p].placement == HOST for p in family.params),
        parts=parts if movable else 0,
        part_layers=layers // parts,
        loop=loop,
        param_bytes=masters,
        gradient_bytes=sum(gradients[p].bytes_per_device for p in family.params),
        state_bytes=sum(state[j].bytes_per_device for j in movable),
        travel_bytes=copies or masters,
        copy_bytes=copies,
        slice_bytes=3 * masters / length if loop is not None else 2 * masters,
        fused=f in hosted.fused,
        fuse_seconds=prices.update(masters + sum(state[j].bytes_per_device for j in movable)),
        passes=passes,
    )


def _layers(work: Workload, f: int) -> int:
    """The layers of a family by which its state can be cut, or one."""
    if len(work.families[f].params) != 1 or (layers := layers_of(work, f)) < 2:
        return 1
    try:
        cut(work, {f: {1}})
    except PlacementError:
        return 1
    return layers
