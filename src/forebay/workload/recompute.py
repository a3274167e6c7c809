"""What each value of a loop's body is made from, and what making it again costs: the graph in which recomputation is planned.

    node       a value made by real work, or a kept value that something free is made into (a narrow cast)
    at hand    the loop's carry, parameters, scanned inputs, constants, and what is free to make from them: no nodes
    edge       value -> the values that it is made from

A value that is neither kept nor moved must be made again if the backward pass reads it or if something that is made again is made from it:
so a plan of recomputation is a set of nodes closed under ``inputs`` as far as the values that stay. An equation with several results is
one node that carries its cost, and one node of no cost for each result: whatever is made again of it, it runs once. What an opaque
equation (a loop that has a graph of its own) results in is made of nothing and costs nothing: chains end there, as at a loop's carry.

Cost: one pass over the equations. Limits: bytes and flops are of global shapes and of one iteration; a fusion's savings are estimated
(see ``equations``).
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from forebay.workload import equations, jaxprs
from forebay.workload.folding import Inner, Table

_CONSUMERS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One value of one iteration, global shapes.

    ``name``: its entry, ``activation:...``, where it has one, else empty. ``flops`` and ``moved_bytes``: to make it from ``inputs``
    (indices of nodes). ``bytes``: its size. ``needed``: the backward pass reads it, or something free to make from it.
    ``kind``: ``matmul attention elementwise other``. ``collective_bytes``: of explicit collectives in it. ``carried``: it is made from
    a carry of the loop directly. ``linear``: its derivative reads none of its inputs.
    """

    name: str
    flops: float
    moved_bytes: float
    bytes: float
    inputs: tuple[int, ...]
    needed: bool
    kind: str
    collective_bytes: float = 0.0
    carried: bool = False
    linear: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The nodes of one iteration of loop number ``loop``, in order. ``carry``: the entry of its largest carry."""

    loop: int
    length: int
    nodes: tuple[Node, ...]
    carry: str

    def chain(self, number: int) -> set[int]:
        """The node and all nodes that it is made from."""
        return {number} | ancestors(self.nodes, {number})

    def nearest(self, number: int) -> tuple[str, ...]:
        """The nearest entries that a node is made from; the carry where there is none between."""
        stack, found, seen = list(self.nodes[number].inputs), [], set()
        while stack:
            n = stack.pop(0)
            if n not in seen:
                seen.add(n)
                if self.nodes[n].name:
                    found.append(self.nodes[n].name)
                else:
                    stack += self.nodes[n].inputs
        return tuple(dict.fromkeys(found)) or ((self.carry,) if self.carry else ())


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Built:
    """Nodes, and by value: its node's number, whether it is read, the equation that makes it and the last that uses it, its users.

    ``asked``: all values that the backward pass reads. ``carried[n]``: the carries that node n is made from directly.
    """

    nodes: list[Node]
    number: dict[Any, int]
    asked: set[Any]
    carried: dict[int, set[Any]]
    read: dict[Any, bool]
    born: dict[Any, int]
    dies: dict[Any, int]
    consumers: dict[Any, tuple[str, ...]]


def build(table: Table, kept: Sequence[Any], asked: set[Any]) -> Built:
    """The graph over the values of ``table``; ``kept`` are its residuals, ``asked`` what the backward pass reads."""
    keep = set(kept)
    built = Built(nodes=[], number={}, asked=asked, carried={}, read={}, born={}, dies={}, consumers={})
    homes = {table.home(v, keep) for v in asked}
    built.read.update((v, v in homes) for v in kept)
    for eqn in table.marked.flat.jaxpr.eqns:
        if eqn.primitive.name != "name":
            _add_equation(built, table, keep, homes, eqn)
    _add_lives(built, table, kept)
    return built


def _add_equation(built: Built, table: Table, keep, homes, eqn) -> None:
    results = [v for v in (*eqn.outvars, *table.inner.get(eqn.outvars[0], ())) if v in table.marks] if eqn.outvars else []
    free = eqn.primitive.name in equations.FREE
    results = [v for v in results if v not in table.given and (v in keep or v not in table.parent)]
    if not results:
        return
    inputs, carried = set(), set()
    for u in table.inputs(eqn):
        home = table.home(u, keep)
        if home in built.number:
            inputs.add(built.number[home])
        elif home in table.carry:
            carried.add(home)
    if any(eqn is shut for shut in table.shut):
        inputs, carried, cost = set(), set(), equations.Cost()
    elif free:
        cost = equations.Cost(moved_bytes=float(equations.value_bytes(results[0])), kind="elementwise")
    else:
        cost = equations.cost_of(eqn)
    kind = "elementwise" if cost.kind == "free" else cost.kind
    alone = Node(
        name="", flops=cost.flops, moved_bytes=cost.moved_bytes, collective_bytes=cost.collective_bytes, kind=kind,
        bytes=float(sum(map(equations.value_bytes, results))), inputs=tuple(sorted(inputs)), needed=False, carried=bool(carried),
        linear=eqn.primitive.name in equations.LINEAR,
    )  # fmt: skip
    if len(results) > 1:
        built.carried[len(built.nodes)] = carried
        built.nodes.append(alone)
        part = dataclasses.replace(alone, flops=0.0, moved_bytes=0.0, collective_bytes=0.0, inputs=(len(built.nodes) - 1,))
    else:
        part = alone
    for v in results:
        built.number[v] = len(built.nodes)
        built.carried[len(built.nodes)] = carried if len(results) == 1 else set()
        size = float(equations.value_bytes(v))
        built.nodes.append(dataclasses.replace(part, bytes=size, needed=v in homes))


def _add_lives(built: Built, table: Table, kept) -> None:
    """Births, deaths and users of the kept values, by position among the body's equations."""
    eqns = [eqn for eqn in table.marked.flat.jaxpr.eqns if eqn.primitive.name != "name"]
    made, used = {}, collections.defaultdict(list)
    for at, eqn in enumerate(eqns):
        made.update((v, at) for v in (*eqn.outvars, *(table.inner.get(eqn.outvars[0], ()) if eqn.outvars else ())))
        for u in table.inputs(eqn):
            used[u].append(at)
    for v in kept:
        family = [v] if isinstance(v, Inner) else table.below(v)
        users = sorted({at for u in family for at in used[u] if eqns[at].primitive.name not in equations.FREE})
        built.born[v] = made.get(v, 0)
        built.dies[v] = max([built.born[v], *(at for u in family for at in used[u])])
        texts = (f"{eqns[at].primitive.name}@{_source(table, eqns[at])}" for at in users)
        built.consumers[v] = tuple(dict.fromkeys(texts))[:_CONSUMERS]


def _source(table: Table, eqn) -> str:
    """The user's line of an equation, or that which called the library's function around it."""
    marks = [m for v in eqn.outvars for m in table.marks.get(v, ())]
    return next((table.marked.marks[m].source for m in marks), jaxprs.source_line(eqn))


def ancestors(nodes: Sequence[Node], numbers: set[int]) -> set[int]:
    """The nodes from which any of ``numbers`` is made, not counting those that make none of the others."""
    stack, found = list(numbers), set()
    while stack:
        for n in nodes[stack.pop()].inputs:
            if n not in found:
                found.add(n)
                stack.append(n)
    return found


def named(nodes: Sequence[Node], residuals) -> tuple[Node, ...]:
    """The nodes with the names of the residuals that are needed."""
    names = {r.node: f"activation:{r.path}" for r in residuals if r.node >= 0 and r.needed}
    return tuple(dataclasses.replace(node, name=names.get(n, "")) for n, node in enumerate(nodes))
