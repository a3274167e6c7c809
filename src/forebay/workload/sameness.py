"""When are two equations the same computation? A hashable key for each, compared by structure and never by object.

Idea: every layer of an unrolled model is traced afresh, so nothing is the *same object*: checkpointed bodies are new jaxprs, policies
new closures, custom derivative rules new thunks. A key is built from the primitive, the operand and result types (weak types aside),
the parameters, the effects and the tracing context; jaxprs inside parameters are numbered canonically; functions compare by code
and closure; a custom derivative compares by what it *does*, the jaxpr of its jvp or vjp, since its thunks cannot be compared.

    key(equation) = (primitive, types, parameters without positions, effects, context)      detail(equation) = the positions of a slice

A slice's start is left out of its key: ``keys[i]`` and ``stack[i]`` with a Python ``i`` are the same part of every block.
Known limits: derivative rules are compared as first derivatives;
objects without value equality compare by identity, which may refuse a repetition and never invents one.
"""

import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import effects as jax_effects  # jax exports no public list of the effects that a loop body may have
from jax.extend import core

from forebay.workload.flat import Equation, array_key, as_open, consts_of

_RULE_PARAMS = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")
_CONTEXT = ("compute_type", "threefry_partitionable", "cur_abstract_mesh", "xla_metadata", "cur_layout_mode")
_SLICE_POSITION = ("start_indices", "limit_indices")


class Sameness:
    """Keys of equations, jaxprs and parameters; interned, so equal keys are equal small integers."""

    def __init__(self) -> None:
        self._interned: dict[Hashable, int] = {}
        self._jaxprs: dict[tuple[int, bool], tuple[Any, Hashable]] = {}
        self._rules: dict[int, tuple[Any, Hashable]] = {}
        self._in_rule = False
        self._open_functions: set[int] = set()

    def key(self, equation: Equation) -> int:
        """One integer per computation: equal for equations that do the same to operands of the same types."""
        source = equation.source
        if refused_effects(source):
            return self._intern(("effect", id(equation)))
        return self._intern((_types(source), self._params(equation), _effects(source), _context(source)))

    def keys(self, equations: Sequence[Equation]) -> list[int]:
        """The key of each equation; what is inside is looked at only where another has its primitive and types."""
        alike = Counter(_types(equation.source) for equation in equations)
        return [self.key(e) if alike[_types(e.source)] > 1 else self._intern(("alone", id(e))) for e in equations]

    def coarse_key(self, equation: Equation) -> int:
        """One integer per primitive and number of operands: what a block would have in common with a *nearly* equal one."""
        return self._intern(("coarse", equation.name, len(equation.inputs), len(equation.outputs)))

    def _intern(self, key: Hashable) -> int:
        return self._interned.setdefault(key, len(self._interned))

    def _params(self, equation: Equation) -> Hashable:
        params = dict(equation.source.params)
        if equation.name == "slice":
            for name in _SLICE_POSITION:
                params.pop(name)
        if equation.body is not None:
            params["jaxpr"] = _Hidden(equation.body)
        return self._mapping(params, equation.source)

    def _mapping(self, params: dict[str, Any], source: core.JaxprEqn) -> Hashable:
        rules = [name for name in _RULE_PARAMS if name in params]
        items = [(name, self.value(value)) for name, value in sorted(params.items()) if name not in rules]
        if rules:
            items.append(("rule", self._rule(source)))
        return tuple(items)

    def value(self, value: Any) -> Hashable:
        """A hashable key of one parameter."""
        if isinstance(value, _Hidden):
            return ("body", self._program(value.program))
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            return ("jaxpr", self._jaxpr(value))
        if isinstance(value, (tuple, list)):
            return (type(value), tuple(self.value(item) for item in value))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(self.value(item) for item in value))
        if isinstance(value, dict):
            return (dict, tuple(sorted(((repr(name), self.value(item)) for name, item in value.items()), key=lambda pair: pair[0])))
        if isinstance(value, float):
            return (float, value.hex())
        if isinstance(value, functools.partial):
            return ("partial", self.value(value.func), self.value(value.args), self.value(value.keywords))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._leaf(value)

    def _leaf(self, value: Any) -> Hashable:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return array_key(value)
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        return (type(value), value)

    def _function(self, function: types.FunctionType) -> Hashable:
        cells = function.__closure__ or ()
        if id(function) in self._open_functions or any(_is_empty(cell) for cell in cells):
            return ("object", id(function))  # functions that hold one another equal only themselves
        self._open_functions.add(id(function))
        held = tuple(self.value(cell.cell_contents) for cell in cells)
        defaults = (self.value(function.__defaults__), self.value(function.__kwdefaults__))
        self._open_functions.discard(id(function))
        return ("function", function.__module__, function.__code__, held, defaults)

    def _jaxpr(self, jaxpr: Any) -> Hashable:
        memo = (id(jaxpr), self._in_rule)
        if memo not in self._jaxprs:
            self._jaxprs[memo] = (jaxpr, self._intern(self._canonical(as_open(jaxpr), consts_of(jaxpr))))
        return self._jaxprs[memo][1]

    def _canonical(self, jaxpr: core.Jaxpr, consts: Any) -> Hashable:
        numbers: dict[Any, int] = {}

        def number(variable: Any) -> int:
            return numbers.setdefault(variable, len(numbers))

        def atom(operand: Any) -> Hashable:
            if isinstance(operand, core.Literal):
                return ("literal", aval_key(operand.aval), array_key(operand.val) if hasattr(operand.val, "dtype") else repr(operand.val))
            return number(operand)

        heads = tuple((number(variable), aval_key(variable.aval)) for variable in (*jaxpr.constvars, *jaxpr.invars))
        body = []
        for source in jaxpr.eqns:
            operands = tuple(atom(operand) for operand in source.invars)
            results = tuple((number(variable), aval_key(variable.aval)) for variable in source.outvars)
            params = self._mapping(source.params, source)
            body.append((source.primitive, operands, results, params, _effects(source), _context(source)))
        constants = tuple(array_key(constant) for constant in consts)
        return (heads, constants, tuple(body), tuple(atom(operand) for operand in jaxpr.outvars))

    def _program(self, program: Any) -> Hashable:
        """A checkpointed body, its literals compared by type only (their values are hidden operands)."""
        memo = (id(program), self._in_rule)
        if memo not in self._jaxprs:
            body = tuple((equation.inputs, equation.outputs, self._exact(equation)) for equation in program.equations)
            literals = tuple((value, aval_key(literal.aval)) for value, literal in program.literals.items())
            self._jaxprs[memo] = (program, self._intern((program.inputs, literals, body, program.outputs)))
        return self._jaxprs[memo][1]

    def _exact(self, equation: Equation) -> Hashable:
        """Inside a checkpointed body nothing is soft: a slice has its position, a nested checkpoint its literals."""
        source = equation.source
        types_out = tuple(aval_key(variable.aval) for variable in source.outvars)
        return (source.primitive, types_out, self._mapping(source.params, source), _effects(source), _context(source))

    def _rule(self, source: core.JaxprEqn) -> Hashable:
        # A rule often calls its own function again (relu's does), which would trace for ever. Inside a rule only values matter, and they
        # come from the call's own body: further rules would count in second derivatives alone.
        if self._in_rule:
            return None
        thunk = source.params.get("jvp_jaxpr_fun", source.params.get("fwd_jaxpr_thunk"))
        if id(thunk) not in self._rules:
            self._in_rule = True
            try:
                self._rules[id(thunk)] = (thunk, self._traced_rule(source))
            finally:
                self._in_rule = False
        return self._rules[id(thunk)][1]

    def _traced_rule(self, source: core.JaxprEqn) -> Hashable:
        avals: list[Any] = [atom.aval for atom in source.invars]
        operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        trace = _tangents if "jvp_jaxpr_fun" in source.params else _cotangents
        try:
            with source.ctx.manager:
                traced = jax.make_jaxpr(trace(source))(*operands)
        except Exception:  # a rule is the user's code and may raise anything; then it equals only itself
            return ("object", id(source))
        return self._jaxpr(traced)


class _Hidden:
    """Marks the parameter whose literals are operands."""

    def __init__(self, program: Any) -> None:
        self.program = program


def _bind(source: core.JaxprEqn) -> Callable:
    params = source.primitive.get_bind_params(source.params)

    def call(*operands: Any) -> Any:
        return source.primitive.bind(*operands, **params)

    return call


def _along(source: core.JaxprEqn, operands: tuple) -> tuple[Callable, list]:
    """The call as a function of its inexact operands alone (integers have no tangents)."""
    places = [place for place, operand in enumerate(operands) if jnp.issubdtype(operand.dtype, jnp.inexact)]

    def call(*moving: Any) -> Any:
        full = list(operands)
        for place, operand in zip(places, moving, strict=True):
            full[place] = operand
        outputs = _bind(source)(*full)
        return [output for output in outputs if jnp.issubdtype(output.dtype, jnp.inexact)]

    return call, [operands[place] for place in places]


def _tangents(source: core.JaxprEqn) -> Callable:
    def derivative(*operands: Any) -> Any:
        call, moving = _along(source, operands)
        return jax.jvp(call, tuple(moving), tuple(jnp.ones_like(operand) for operand in moving))

    return derivative


def _cotangents(source: core.JaxprEqn) -> Callable:
    def derivative(*operands: Any) -> Any:
        call, moving = _along(source, operands)
        outputs, pull = jax.vjp(call, *moving)
        return outputs, pull([jnp.ones_like(output) for output in outputs])

    return derivative


def detail(equation: Equation) -> Hashable:
    """What the key leaves out: where a slice starts and stops; None for everything else."""
    return tuple(tuple(equation.source.params[name]) for name in _SLICE_POSITION) if equation.name == "slice" else None


def aval_key(aval: Any) -> Hashable:
    """A value's type without its weak flag: a Python 0.0 starts a sum just as an array does."""
    return aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval


def refused_effects(source: core.JaxprEqn) -> list[Any]:
    """The effects of an equation that cannot stand in a loop body: ordered ones, and those that jax's control flow refuses."""
    return [
        effect
        for effect in source.effects
        if jax_effects.ordered_effects.contains(effect) or not jax_effects.control_flow_allowed_effects.contains(effect)
    ]


def _types(source: core.JaxprEqn) -> Hashable:
    """The primitive, and the types of what it reads and makes."""
    return source.primitive, tuple(aval_key(v.aval) for v in source.invars), tuple(aval_key(v.aval) for v in source.outvars)


def _effects(source: core.JaxprEqn) -> Hashable:
    return frozenset(str(effect) for effect in source.effects)


def _context(source: core.JaxprEqn) -> Hashable:
    """The context an equation was traced in. Fields that only some jax versions have are None in the others."""
    return tuple(repr(getattr(source.ctx, name, None)) for name in _CONTEXT)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return True
    return False
