"""A traced program as a flat list of equations over numbered values, nested ``jit`` calls opened.

Idea: a repeated layer shows only when ``jit``-ed blocks are opened and every operand, literals too, is a plain number that can be
compared between blocks. Value ``i`` is the program's input ``i`` for ``i < inputs``; constants, literals and results follow.
Calls whose boundary means something (checkpoint, custom derivatives, loops, ``jit`` with shardings, layouts or donation) stay whole.

    flatten(jaxpr):  for each equation:  a plain jit?  flatten its body in place
                                         otherwise     number its operands and results, keep the equation

Scalar literals inside a checkpointed body become *hidden* operands of its equation: a layer index or a drop rate that differs from
block to block can then enter the body as an operand (``Program.rebind``), the checkpoint itself untouched.
Known limits: a ``jit``'s own XLA metadata context is not merged into the equations it held; their own contexts are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

COMPARED_BYTES = 1 << 24  # Constants up to this size are compared by value, larger ones by identity.


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """One equation: the jaxpr equation it came from and the numbers of its operands, hidden operands and results."""

    source: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    body: "Program | None" = None

    @property
    def operands(self) -> tuple[int, ...]:
        """Operands, then the literals inside a checkpointed body."""
        return self.inputs + self.hidden

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.source.primitive.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A flat program: values are integers; ``literals`` and ``constants`` give the known ones."""

    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    inputs: int
    outputs: tuple[int, ...]
    literals: Mapping[int, core.Literal]
    constants: Mapping[int, Any]
    debug_info: Any

    def jaxpr(self, equations: Sequence[Equation], inputs: Sequence[int], outputs: Sequence[int]) -> core.Jaxpr:
        """A jaxpr of some equations, from the values ``inputs`` to the values ``outputs``; literals stay literals unless listed."""
        atoms: dict[int, Any] = {value: core.Var(self.avals[value]) for value in inputs}

        def atom(value: int) -> Any:
            if value not in atoms:
                atoms[value] = self.literals[value] if value in self.literals else core.Var(self.avals[value])
            return atoms[value]

        built = []
        for equation in equations:
            given = tuple(value for value in equation.hidden if value in atoms)
            source = self.rebind(equation, given)
            operands = [atom(value) for value in (*equation.inputs, *given)]
            built.append(source.replace(invars=operands, outvars=[atom(value) for value in equation.outputs]))
        return core.Jaxpr(
            constvars=(),
            invars=[atoms[value] for value in inputs],
            outvars=[atom(value) for value in outputs],
            eqns=built,
            effects=set().union(*(equation.effects for equation in built)),
            debug_info=self.debug_info,
        )

    @staticmethod
    def rebind(equation: Equation, given: tuple[int, ...]) -> core.JaxprEqn:
        """The equation's source; with ``given`` hidden literals, its checkpointed body takes them as operands after its own."""
        if not given:
            return equation.source
        inner = equation.body
        assert inner is not None, "only a checkpointed body has hidden operands"
        lifted = [value for value, outer in zip(inner.literals, equation.hidden, strict=True) if outer in given]
        body = inner.jaxpr(inner.equations, (*range(inner.inputs), *lifted), inner.outputs)
        return equation.source.replace(params={**equation.source.params, "jaxpr": body})


@dataclass(slots=True)
class _Builder:
    equations: list[Equation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    literals: dict[int, core.Literal] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    known_constants: dict[Any, int] = field(default_factory=dict)
    bodies: dict[int, Program] = field(default_factory=dict)

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def literal(self, literal: core.Literal) -> int:
        value = self.value(literal.aval)
        self.literals[value] = literal
        return value

    def constant(self, constant: Any, aval: Any) -> int:
        """Equal constants get one number: a table that every layer builds for itself is one table."""
        key = array_key(constant)
        if key not in self.known_constants:
            self.known_constants[key] = self.value(aval)
            self.constants[self.known_constants[key]] = constant
        return self.known_constants[key]

    def body(self, jaxpr: core.Jaxpr) -> Program:
        if id(jaxpr) not in self.bodies:
            self.bodies[id(jaxpr)] = flatten(jaxpr, consts=())
        return self.bodies[id(jaxpr)]

    def inline(self, jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[int], prefix: Any) -> list[int]:
        """Append the equations of ``jaxpr``; give the numbers of its outputs. ``prefix``: the name stack of the calls around it."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, constant in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self.constant(constant, variable.aval)

        def read(atom: Any) -> int:
            return self.literal(atom) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(read(atom) for atom in equation.invars)
            source = equation
            if prefix is not None:
                info = equation.source_info
                source = equation.replace(source_info=info.replace(name_stack=prefix + info.name_stack))
            if is_plain_jit(equation):
                # jax's lowering names a nested call `jit(name)`; the flat equations keep that name in profiles and HLO.
                inner = source.source_info.name_stack.extend(f"jit({equation.params['name']})")
                outputs = self.inline(as_open(equation.params["jaxpr"]), consts_of(equation.params["jaxpr"]), inputs, inner)
                known.update(zip(equation.outvars, outputs, strict=True))
                continue
            self.append(source, inputs, known)
        return [read(atom) for atom in jaxpr.outvars]

    def append(self, source: core.JaxprEqn, inputs: tuple[int, ...], known: dict[Any, int]) -> None:
        outputs = tuple(self.value(variable.aval) for variable in source.outvars)
        known.update(zip(source.outvars, outputs, strict=True))
        body = self.body(source.params["jaxpr"]) if is_checkpoint(source) else None
        if body is not None and (body.constants or not body.literals):
            body = None
        hidden = tuple(self.literal(literal) for literal in body.literals.values()) if body is not None else ()
        self.equations.append(Equation(source=source, inputs=inputs, outputs=outputs, hidden=hidden, body=body))


def flatten(jaxpr: Any, consts: Sequence[Any] | None = None) -> Program:
    """Open the nested plain ``jit`` calls of a (closed) jaxpr. The same jaxpr always gives the same numbers."""
    consts = consts_of(jaxpr) if consts is None else consts
    opened = as_open(jaxpr)
    builder = _Builder()
    arguments = [builder.value(variable.aval) for variable in opened.invars]
    outputs = builder.inline(opened, consts, arguments, None)
    return Program(
        equations=tuple(builder.equations),
        avals=tuple(builder.avals),
        inputs=len(arguments),
        outputs=tuple(outputs),
        literals=builder.literals,
        constants=builder.constants,
        debug_info=opened.debug_info.with_unknown_names(),
    )


def as_open(jaxpr: Any) -> core.Jaxpr:
    """The jaxpr inside a closed one. jax 0.12 has a single class for both, and gives itself."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants a jaxpr carries; an open jaxpr of jax 0.10 carries none."""
    return jaxpr.consts if hasattr(jaxpr, "consts") else ()


def array_key(array: Any) -> tuple:
    """What identifies a constant: its type and bytes, or the object itself where it has no bytes to read or too many."""
    if isinstance(array, Tracer) or not hasattr(array, "dtype") or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return ("object", id(array))
    if not hasattr(array, "size"):  # a Python number that carries a dtype
        array = np.asarray(array, array.dtype)
    plain = np.asarray(array) if array.size * array.dtype.itemsize <= COMPARED_BYTES else None
    if plain is None or plain.dtype == object:
        return ("object", id(array))
    return ("array", plain.shape, str(plain.dtype), plain.tobytes())


def is_checkpoint(equation: core.JaxprEqn) -> bool:
    """Whether this is a ``jax.checkpoint`` call, whatever the version names its primitive."""
    return {"jaxpr", "policy", "prevent_cse"} <= equation.params.keys()


def is_plain_jit(equation: core.JaxprEqn) -> bool:
    """Whether this is a ``jit`` call that opening does not change: no shardings, layouts, donation or compiler options of its own."""
    params = equation.params
    if not {"jaxpr", "in_shardings", "out_shardings", "donated_invars"} <= params.keys():
        return False
    # The sentinel class for "unspecified" is private and has moved between versions; its name has not.
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not any(params["donated_invars"])
        and not params.get("compiler_options_kvs")
    )
