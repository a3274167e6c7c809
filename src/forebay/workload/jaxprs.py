"""Reading and re-evaluating jaxprs: the one place that knows how this and the last jax lay out their equations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from jax._src import source_info_util  # no public door: keeps the user's source lines on re-evaluated equations
from jax.extend import core

INLINED = ("jit", "pjit", "closed_call", "core_call", "core_closed_call")
REMAT = ("checkpoint", "remat", "remat2")


def subjaxpr(eqn) -> core.ClosedJaxpr | None:
    """The jaxpr that a call-like equation runs, closed, or None."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return None if inner is None else closed(inner)


def closed(jaxpr) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def is_literal(atom) -> TypeGuard[core.Literal]:
    return isinstance(atom, core.Literal)


def bind(eqn, args: Sequence[Any], params: Any = None, traceback: Any = None) -> list[Any]:
    """Evaluate one equation on ``args`` under the source line and names it was written with, or with other ``params`` or another
    ``traceback``; always a list."""
    bound = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(traceback or info.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(
    jaxpr: core.ClosedJaxpr, args: Sequence[Any], rule: Callable[[Any, list[Any]], list[Any] | None] = lambda e, a: None
) -> list[Any]:
    """Run ``jaxpr`` on ``args``; ``rule(eqn, inputs)`` may answer for an equation, or give None to have it bound as it is."""
    env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        values = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        out = rule(eqn, values)
        env.update(zip(eqn.outvars, bind(eqn, values) if out is None else out, strict=True))
    return [v.val if is_literal(v) else env[v] for v in jaxpr.jaxpr.outvars]


def run_equations(eqns: Sequence[Any], env: dict[Any, Any]) -> None:
    """Evaluate equations in order, reading and writing ``env`` (variable to value)."""
    for eqn in eqns:
        values = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, values), strict=True))


def inline(jaxpr: core.ClosedJaxpr, also: Sequence[str] = ()) -> core.ClosedJaxpr:
    """The same program with its nested jits (and the calls named in ``also``) written out in place.

    What a library's jitted function made bears the user's line that called it.
    """
    names = (*INLINED, *also)

    def run(within, args, caller):
        def rule(eqn, values):
            traceback = eqn.source_info.traceback if caller is None or source_line(eqn) else caller
            if eqn.primitive.name in names and (inner := subjaxpr(eqn)) is not None:
                return run(inner, values, traceback)
            return bind(eqn, values, traceback=traceback)

        return evaluate(within, args, rule)

    return jax.make_jaxpr(lambda *args: run(jaxpr, args, None))(*jaxpr.in_avals)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a ``scan`` equation splits its operands and results: constants, carry, then scanned inputs; carry, then stacked outputs."""

    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: int
    body: core.ClosedJaxpr


def loop_of(eqn) -> Loop:
    """The parts of a scan equation, on either layout of its parameters."""
    params = eqn.params
    if "ft_in" in params:
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    return Loop(
        consts=consts,
        carry=carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        body=closed(params["jaxpr"]),
    )


def cone(variables, made: dict[Any, Any]) -> set[Any]:
    """All variables that ``variables`` are computed from, themselves too; ``made`` maps a variable to the equation that makes it."""
    stack, seen = [v for v in variables if not is_literal(v)], set()
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack.extend(u for u in (made[v].invars if v in made else ()) if not is_literal(u))
    return seen


def source_line(eqn) -> str:
    """``file.py:12`` of the user's line that made this equation, or the empty string."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}" if frame else ""


def function_name(eqn) -> str:
    """The user's function that made this equation, ``Block.attention``, or the empty string: it does not change when lines move."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    skipped = ("<locals>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # Python 3.12 has no frames for most of them
    return ".".join(part.strip("<>") for part in frame.function_name.split(".") if part not in skipped)


def contains(jaxpr, wanted: Callable[[Any], bool]) -> bool:
    """Whether any equation, at any depth, is ``wanted``."""
    for eqn in closed(jaxpr).jaxpr.eqns:
        if wanted(eqn) or any(contains(inner, wanted) for inner in inner_jaxprs(eqn)):
            return True
    return False


def inner_jaxprs(eqn):
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
                yield item
