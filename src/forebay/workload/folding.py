"""Values of a marked body folded into the few that are worth keeping: a cast, a broadcast or a view costs nothing to make again.

Free equations hang the values that they make under the value that they read. At the root of each such tree stands a value that is made
by real work, the loop's carry, or something that is at hand anyhow (a parameter, a constant). Of what the backward pass asks for,

    under something at hand   nothing is kept: they are made again
    under the carry           the carry is kept
    under a made value        the few smallest values from which all follow: a bf16 value and not its fp32 cast, a whole and not its
                              two halves, a narrow cast and not the wide sum before it
"""

import collections
import dataclasses
from typing import Any

from forebay.workload import jaxprs
from forebay.workload.equations import FREE, value_bytes
from forebay.workload.marking import MARK, Marked


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """A value inside a nested equation, which no variable of the body is."""

    mark: str
    aval: Any


class Table:
    """The values of a marked body. A value is a variable, names taken off, or an ``Inner``.

    ``marks[v]``: its marks, the first where it is first made. ``parent[v]``: what a free equation made it from. ``given``: at hand
    without being kept. ``maker[v]``: its equation. ``only[v]``: True: made from parameters alone; None: from constants alone.
    ``of_mark``: the value of each mark. ``shut``: the equations that are not looked into.
    """

    def __init__(self, marked: Marked, head: tuple[int, int], weights: tuple[bool, ...]):
        self.marked, jaxpr = marked, marked.flat.jaxpr
        self.same: dict[Any, Any] = {}
        self.marks: dict[Any, list[str]] = collections.defaultdict(list)
        self.parent: dict[Any, Any] = {}
        self.maker: dict[Any, Any] = {}
        self.only: dict[Any, bool | None] = {}
        self.inner: dict[Any, list[Any]] = {}  # an equation's first result: the values saved inside it
        consts, carry = head
        self.carry = tuple(jaxpr.invars[consts : consts + carry])
        self.given = {*jaxpr.invars, *jaxpr.constvars} - set(self.carry)
        self.only.update((v, k >= consts + carry and weights[k - consts - carry]) for k, v in enumerate(jaxpr.invars))
        for eqn in jaxpr.eqns:
            self._read(eqn)
        self.of_mark = {mark: value for value, marks in self.marks.items() for mark in marks}
        self.shut = [self.maker[self.of_mark[mark]] for mark in marked.opaque]
        self.children: dict[Any, list[Any]] = collections.defaultdict(list)
        for v, above in self.parent.items():
            self.children[above].append(v)

    def value(self, v):
        """The value of a variable; None for a literal."""
        return None if jaxprs.is_literal(v) else self.same.get(v, v)

    def inputs(self, eqn) -> list[Any]:
        return [u for u in map(self.value, eqn.invars) if u is not None]

    def _read(self, eqn) -> None:
        inputs = self.inputs(eqn)
        if eqn.primitive.name == "name":
            value = self.same[eqn.outvars[0]] = self.value(eqn.invars[0]) or eqn.outvars[0]
            name = eqn.params["name"]
            if name.startswith(MARK):
                self.marks[value].append(name)
                self._open(name, value)
            return
        kinds = [self.only.get(u) for u in inputs]
        only = None if all(k is None for k in kinds) else all(k is not False for k in kinds)
        for out in eqn.outvars:
            self.maker[out], self.only[out] = eqn, only
            if eqn.primitive.name in FREE and len(set(inputs)) <= 1:
                if not inputs or inputs[0] in self.given:
                    self.given.add(out)
                else:
                    self.parent[out] = inputs[0]

    def _open(self, mark: str, first) -> None:
        """Values inside the nested equation whose first result bears ``mark``."""
        for inner, leaf in self.marked.saved.get(mark, ()):
            eqn = self.maker[first]
            if leaf.result is not None:
                self.marks[eqn.outvars[leaf.result]].insert(0, inner)  # named inside, so before any name on the result
            else:
                value = Inner(inner, leaf.aval)
                self.marks[value].append(inner)
                self.maker[value], self.only[value] = eqn, self.only[first]
                self.inner.setdefault(first, []).append(value)

    def source(self, v):
        """The input or constant that something at hand is, or is made from for nothing; any other value as it is."""
        while v in self.given and v in self.maker and (inputs := self.inputs(self.maker[v])):
            v = inputs[0]
        return v

    def root(self, v):
        while v in self.parent:
            v = self.parent[v]
        return v

    def above(self, v) -> list[Any]:
        """The values that ``v`` is made from for nothing, nearest first."""
        out = []
        while v in self.parent:
            v = self.parent[v]
            out.append(v)
        return out

    def below(self, v) -> list[Any]:
        """``v`` and all that is made from it for nothing."""
        out = [v]
        for u in out:
            out += self.children.get(u, ())
        return out

    def keepers(self, root, asked: set[Any]) -> list[Any]:
        """The values to keep of the tree under ``root``, so that each ``asked`` value is one of them or free to make."""
        if root in self.carry:
            return [root]
        return [] if root in self.given else self._cheapest(root, asked)

    def _cheapest(self, v, asked):
        below = [k for u in self.children.get(v, ()) for k in self._cheapest(u, asked)]
        if v in asked or (below and value_bytes(v) <= sum(map(value_bytes, below))):
            return [v]
        return below

    def home(self, v, kept: set[Any]):
        """The nearest kept value that ``v`` is made from for nothing, else the root of its tree."""
        path = [v, *self.above(v)]
        return next((u for u in path if u in kept), path[-1])
