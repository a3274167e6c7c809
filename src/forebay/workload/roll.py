"""Turn repeated blocks into loops: one ``lax.scan`` per repeat, over parameters that are stored stacked.

    rolled(stored):
        for each step of the schedule:
            plain equations  evaluated as they were written (their names and source lines with them)
            a repeat         lax.scan(block, carry, xs)   xs: stacked leaves exactly as stored, constants, values stacked here

A stacked leaf enters the scan untouched - no cast, no reshape, no slice before it - since it may live in host memory, where all of
that would run on the host. Everything else is as it was: checkpoints keep their policy and flags, custom derivatives their rules.
The mathematics is unchanged; sums of gradients over blocks that share a parameter may be added in another order.

Known limits: names in the loop are those of the first block; a result read from the last block alone is carried, starting from zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from forebay.workload.flat import Program, as_open, consts_of, flatten
from forebay.workload.loop import Repeat, Stacked, Storage, schedule, storage_of

Values = dict[int | tuple[int, ...], Any]  # a group's stack stands under the tuple of its leaves
Step = Callable[[Values], None]


def roll(jaxpr: Any, repeats: Sequence[Repeat]) -> tuple[Callable[[Sequence[Any]], list[Any]], Storage]:
    """The program of ``jaxpr`` with ``repeats`` (of the same jaxpr) as loops: ``rolled(stored) -> outputs``, and how to store.

    ``stored`` has one entry per slot of the ``Storage``: a group's leaves stacked as ``[count, ...]``, or the input itself. Outputs are
    the jaxpr's, in order. Raises InputError where the number of stored arguments is wrong.
    """
    if not repeats:
        return _as_written(jaxpr)
    program = flatten(jaxpr)
    storage = storage_of(program.inputs, repeats)
    steps = _steps(program, repeats)

    def rolled(stored: Sequence[Any]) -> list[Any]:
        storage.require(stored)
        values: Values = {**program.constants}
        values.update({(slot if len(slot) > 1 else min(slot)): value for slot, value in zip(storage.slots, stored, strict=True)})
        for step in steps:
            step(values)
        return [_read(program, values, value) for value in program.outputs]

    return rolled, storage


def _as_written(jaxpr: Any) -> tuple[Callable[[Sequence[Any]], list[Any]], Storage]:
    storage = storage_of(len(as_open(jaxpr).invars), ())

    def rolled(stored: Sequence[Any]) -> list[Any]:
        storage.require(stored)
        return eval_jaxpr(as_open(jaxpr), consts_of(jaxpr), *stored)

    return rolled, storage


def _read(program: Program, values: Values, value: int) -> Any:
    if value in values:
        return values[value]
    return jnp.asarray(np.asarray(program.literals[value].val), dtype=program.avals[value].dtype)


def _steps(program: Program, repeats: Sequence[Repeat]) -> list[Step]:
    """The schedule as functions on the table of values; equations that nothing reads any more are left out."""
    producer = [-1] * len(program.avals)
    for index, equation in enumerate(program.equations):
        for value in equation.outputs:
            producer[value] = index
    order = schedule(program, producer, [repeat.equations for repeat in repeats])
    assert order is not None, "repeats that wait for themselves are refused when they are sought"
    needed = set(program.outputs)
    after = set(needed)  # what is read after the stretch of plain equations that is being collected
    steps: list[Step] = []
    plain: list[int] = []
    for node in [*reversed(order), None]:
        if node is not None and node >= 0:
            equation = program.equations[node]
            if equation.source.effects or needed.intersection(equation.outputs):
                plain.append(node)
                needed.update(equation.inputs)
            continue
        if plain:
            steps.append(_plain_step(program, plain[::-1], after))
            plain = []
        if node is not None:
            steps.append(_loop_step(program, repeats[-1 - node]))
            needed.update(_outer_inputs(repeats[-1 - node]))
            after = set(needed)
    return steps[::-1]


def _outer_inputs(repeat: Repeat) -> set[int]:
    read = {carry.start for carry in repeat.carry} | set(repeat.invariants)
    for item in repeat.stacked:
        read.update(item.values if item.kind == "value" else [item.base] if item.base is not None else [])
    return read


def _plain_step(program: Program, indices: list[int], needed: set[int]) -> Step:
    equations = [program.equations[index] for index in indices]
    made = [value for equation in equations for value in equation.outputs]
    here = set(made)
    read = dict.fromkeys(value for equation in equations for value in equation.inputs)
    inputs = [value for value in read if value not in here and value not in program.literals]
    outputs = [value for value in made if value in needed]
    jaxpr = program.jaxpr(equations, inputs, outputs)

    def step(values: Values) -> None:
        values.update(zip(outputs, eval_jaxpr(jaxpr, (), *(values[value] for value in inputs)), strict=True))

    return step


def _loop_step(program: Program, repeat: Repeat) -> Step:
    body = _body(program, repeat)
    dummies, collected = _last_results(program, repeat)

    def step(values: Values) -> None:
        start = [_read(program, values, carry.start) for carry in repeat.carry]
        start += [jnp.zeros(program.avals[value].shape, program.avals[value].dtype) for value in dummies.values()]
        invariants = [values[value] for value in repeat.invariants]
        shared, xs = _inputs(program, repeat.stacked, values)

        def block(carried: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            enters = [_enter(item, whole, part) for item, whole, part in zip(repeat.stacked, shared, x, strict=True)]
            results = body(carried[: len(repeat.carry)], invariants, enters)
            kept = len(repeat.carry) + len(dummies)
            return results[:kept], results[kept:]

        carried, stacks = jax.lax.scan(block, start, xs, length=repeat.count)
        _publish(program, repeat, values, carried, dict(zip(collected, stacks, strict=True)), list(dummies))

    return step


def _last_results(program: Program, repeat: Repeat) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]]]:
    """Results of the last block alone: carried if zeros can stand for them (not PRNG keys), else collected with the others."""
    made = {place: _made(program, repeat, 0, place) for place in repeat.last}
    plain = {place: value for place, value in made.items() if _has_zeros(program.avals[value])}
    return plain, [*repeat.collected, *(place for place in repeat.last if place not in plain)]


def _has_zeros(aval: Any) -> bool:
    """Whether plain zeros have this type: not for PRNG keys, nor for types that carry a sharding."""
    meshless = getattr(getattr(aval.sharding, "mesh", None), "empty", True)
    return meshless and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _made(program: Program, repeat: Repeat, block: int, place: tuple[int, int]) -> int:
    return program.equations[repeat.blocks[block][place[0]]].outputs[place[1]]


def _body(program: Program, repeat: Repeat) -> Callable[[list, list, list], list]:
    """Block 0 as a function of carry, invariants and stacked parts; gives updates, last results, collected results."""
    dummies, collected = _last_results(program, repeat)
    renamed, inputs = _by_part(program, repeat)
    places = [*(carry.update for carry in repeat.carry), *dummies, *collected]
    jaxpr = renamed.jaxpr(renamed.equations, inputs, [_made(program, repeat, 0, place) for place in places])

    def body(carried: list[Any], invariants: list[Any], enters: list[Any]) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *carried, *invariants, *enters)

    return body


def _by_part(program: Program, repeat: Repeat) -> tuple[Program, list[int]]:
    """Block 0 with one fresh number per part: there a value may play two parts (it starts two carries, or is also an invariant)."""
    keys = [*((carry.start, carry.update) for carry in repeat.carry), *repeat.invariants, *(item.values for item in repeat.stacked)]
    fresh = {key: len(program.avals) + number for number, key in enumerate(keys)}
    firsts = [carry.start for carry in repeat.carry] + list(repeat.invariants) + [item.values[0] for item in repeat.stacked]
    made = {
        value: (position, result)
        for position, index in enumerate(repeat.blocks[0])
        for result, value in enumerate(program.equations[index].outputs)
    }

    def part(per_block: tuple[int, ...]) -> int:
        if per_block[0] in made:
            return per_block[0]
        key = (per_block[0], made[per_block[1]]) if per_block[1] in made else per_block
        return fresh.get(key, fresh.get(per_block[0], per_block[0]))

    equations = []
    for position, index in enumerate(repeat.blocks[0]):
        equation = program.equations[index]
        slots = zip(*(program.equations[block[position]].operands for block in repeat.blocks), strict=True)
        operands = [part(per_block) for per_block in slots]
        split = len(equation.inputs)
        equations.append(replace(equation, inputs=tuple(operands[:split]), hidden=tuple(operands[split:])))
    avals = (*program.avals, *(program.avals[value] for value in firsts))
    return replace(program, equations=tuple(equations), avals=avals), list(fresh.values())


def _enter(item: Stacked, whole: Any, part: Any) -> Any:
    """What the block sees of a stacked input."""
    if whole is not None:
        return jax.lax.dynamic_index_in_dim(whole, part, keepdims=False)
    return jnp.expand_dims(part, 0) if item.kept_axis else part


def _inputs(program: Program, stacked: Sequence[Stacked], values: Values) -> tuple[list[Any], list[Any]]:
    """For each stacked input: a shared stack to index (values that several blocks share), and what the scan walks over."""
    shared: list[Any] = []
    xs: list[Any] = []
    for item in stacked:
        distinct = list(dict.fromkeys(item.values))
        if item.kind == "value" and len(distinct) < len(item.values):
            shared.append(jnp.stack([_read(program, values, value) for value in distinct]))
            xs.append(np.array([distinct.index(value) for value in item.values], dtype=np.int32))
            continue
        shared.append(None)
        xs.append(_stack(program, item, values))
    return shared, xs


def _stack(program: Program, item: Stacked, values: Values) -> Any:
    if item.kind == "leaf":
        return values[item.values]
    if item.base is not None:
        return values[item.base]
    if item.kind == "literal":
        dtype = program.avals[item.values[0]].dtype
        return np.stack([np.asarray(program.literals[value].val) for value in item.values]).astype(dtype)
    return jnp.stack([_read(program, values, value) for value in item.values])


def _publish(
    program: Program, repeat: Repeat, values: Values, carried: list[Any], stacks: dict[tuple[int, int], Any], dummies: list[tuple[int, int]]
) -> None:
    """Put what the program reads after the loop where it will look for it."""
    places = [*(carry.update for carry in repeat.carry), *dummies]
    for place, result in zip(places, carried, strict=True):
        values[_made(program, repeat, repeat.count - 1, place)] = result
    for place, stack in stacks.items():
        for block in range(repeat.count):
            values[_made(program, repeat, block, place)] = jax.lax.index_in_dim(stack, block, keepdims=False)
