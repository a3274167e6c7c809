"""``check``: the numerics gate. A planned run of the twin is held against a resident one, line by line."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.compiler.hlo import read_hlo
from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.plan.state import unstack
from forebay.runtime import place, train_step, value_and_grad
from forebay.trust import compare, compiled, planned
from forebay.trust.planned import Run
from forebay.trust.reference import Outcome, Resident, nudged, plain
from forebay.trust.report import Check, Report, line, skipped
from forebay.trust.twin import Twin, make_twin

STEPS = 4
ONE_MEMORY = "a CPU has one memory and drops every offload; only the accelerator can show this"


def check(
    loss_fn: Callable,
    optimizer: Any,
    plan: Plan,
    params: Any = None,
    batch: Any = None,
    *,
    extra: Any = None,
    steps: int = STEPS,
    seed: int = 0,
    integers: int = 2,
    hardware: Hardware | None = None,
) -> Report:
    """Run some steps under ``plan`` beside the same steps resident in plain jax and Optax, on the machine at hand, and compare.

    Args:
        loss_fn, optimizer: the user's own, as for ``train_step``.
        plan: bound to its workload (a plan from a file: ``Plan.load(path, fb.trace(...))``).
        params, batch, extra: arrays, or shapes for which random values are drawn; None: the plan's own shapes. Sizes may be smaller
            than the plan's (fewer layers, narrower, fewer rows): the twin. Its tensors stand where those of the same names stand.
        steps: how many steps are compared.
        seed: of the random values.
        integers: random integers of a batch are drawn below this (2 suits every vocabulary).
        hardware: the machine at hand; default ``Hardware.here()``.

    Returns: a ``Report``; ``report.passed`` is False if any line failed. A line that this machine cannot show is skipped, never passed.

    Raises:
        InputError: the resident run does not fit on this machine, or its loss is not finite.
        PlanError: the plan is not bound, or is a plan of another model.
    """
    if steps < 2 or integers < 1:
        raise InputError(f"a check needs at least 2 steps and integers of at least 1; these are steps={steps} and integers={integers}")
    with contextlib.ExitStack() as settings:
        # A GPU may round fp32 products to tf32, each kernel in its own way; the comparison is about the plan, not about that.
        settings.enter_context(jax.default_matmul_precision("highest"))
        hardware = hardware or Hardware.here()
        twin = make_twin(loss_fn, optimizer, plan, params, batch, extra, steps=steps, seed=seed, integers=integers, hardware=hardware)
        step = train_step(loss_fn, optimizer, twin.plan, mesh=twin.mesh)
        run = planned.run(twin, step)  # first: the highest point of memory is the process's, and must be this run's
        yardstick = Yardstick(twin)
        checks = [
            *numerics(twin, run.outcome, yardstick),
            _gradients(twin, yardstick),
            donation(twin, run, planned.run(twin, planned.undonated(twin, step)).outcome, yardstick),
            _compiles(run),
            _placement(twin, run),
            *_compiled(plan, twin, step, run),
        ]
    return Report(title=_title(twin), checks=tuple(checks))


class Yardstick:
    """The resident run and, from parameters one rounding away, the nudged one: made once for any number of planned runs."""

    def __init__(self, twin: Twin):
        self.least = compare.tolerance(twin.compute_dtype)
        runs, start = Resident(twin), nudged(twin.params, float(jnp.finfo(twin.compute_dtype).eps) / 2)
        self.resident, self.gradients = runs.run(twin.params)
        other, self.nudged_gradients = runs.run(start)
        # The nudge itself is no effect of it: what counts is how much further apart the parameters have moved.
        params = jax.tree.map(lambda end, a, b: compare.wide(end) - compare.wide(a) + compare.wide(b), other.params, start, twin.params)
        self.nudged = dataclasses.replace(other, params=params)


def numerics(twin: Twin, got: Outcome, yardstick: Yardstick) -> list[Check]:
    """Losses, gradient norms, and the state after the last step."""
    wanted, nudged = yardstick.resident, yardstick.nudged
    checks = [
        _series("losses", got.losses, wanted.losses, nudged.losses, yardstick.least),
        _series("gradient norms", got.norms, wanted.norms, nudged.norms, yardstick.least),
    ]
    params = compare.distances("parameter", got.params, wanted.params, nudged.params)
    checks.append(_parameters(twin, params, wanted))
    state = compare.distances("optimizer", got.opt_state, wanted.opt_state, nudged.opt_state)
    checks.append(_leaves("optimizer state", state) if state else skipped("optimizer state", "this optimizer has none"))
    if twin.extra is not None:
        checks.append(_leaves("extra state", compare.distances("extra", got.extra, wanted.extra, nudged.extra, yardstick.least)))
    return checks


def _series(name: str, got: np.ndarray, wanted: np.ndarray, nudged: np.ndarray, relative: float) -> Check:
    allowed = relative * np.abs(wanted) + compare.NUDGES * np.abs(nudged - wanted).mean()
    away = np.abs(got - wanted)
    faults = [
        f"{name} of step {k}: {got[k]:.9g} planned, {wanted[k]:.9g} resident, {allowed[k]:.2g} allowed"
        for k in range(len(got))
        if not away[k] <= allowed[k]
    ]
    return line(name, faults, f"{len(got)} steps, from {wanted[0]:.6g} to {wanted[-1]:.6g}; at most {away.max():.2g} apart")


def _leaves(name: str, found: list[compare.Distance]) -> Check:
    furthest = max(found, key=lambda d: d.distance / d.allowed if d.allowed else d.distance)
    return line(name, [str(d) for d in found if not d.close], f"{len(found)} arrays; {furthest}")


def _parameters(twin: Twin, found: list[compare.Distance], wanted: Outcome) -> Check:
    """The parameters; skipped where an update is so small that its loss would not show."""
    said = _leaves("parameters", found)
    if any(not d.close for d in found):
        return said
    still = compare.unmoved(twin.params, wanted.params, found, tuple(twin.work.update.frozen))
    if not still:
        return said
    why = f"{len(still)} of {len(found)} arrays, such as {still[0]}, hardly move in {len(twin.batches)} steps"
    return skipped(
        "parameters",
        f"{why}, so a lost update would not show; check more steps, or a larger learning rate. As far as seen they are equal",
    )


def _gradients(twin: Twin, yardstick: Yardstick) -> Check:
    """Each gradient of the first step, by ``forebay.value_and_grad``."""
    plan = twin.plan
    state = place(twin.params, twin.work.optimizer, plan, key=twin.key, mesh=twin.mesh, extra=twin.extra)
    batch = jax.device_put(twin.batches[0], planned.batch_shardings(twin))
    key = None if state.key is None else jax.random.fold_in(state.key, 0)
    if plan.options["microbatches"] > 1 and (key is not None or state.extra is not None):
        return skipped("gradients", "keys and extra state go by microbatches, which value_and_grad does not; the norms above hold them")
    _, grads = jax.jit(value_and_grad(twin.work.loss_fn, plan))(state.stored_params, batch, key, state.extra)
    wanted, nudged = (jax.tree.leaves(tree) for tree in (yardstick.gradients, yardstick.nudged_gradients))
    members = [m for s, g in zip(plan.layout.params, grads, strict=True) if g is not None for m in s.members]
    zeros = [
        np.zeros((len(s.members), *wanted[s.members[0]].shape) if s.stacked else wanted[s.members[0]].shape) for s in plan.layout.params
    ]
    leaves = unstack(plan.layout.params, [z if g is None else g for z, g in zip(zeros, grads, strict=True)])
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_flatten_with_path(twin.params)[0]]
    pick = lambda flat: {names[m]: flat[m] for m in members}  # noqa: E731
    return _leaves("gradients", compare.distances("gradient", plain(pick(leaves)), pick(wanted), pick(nudged), yardstick.least))


def donation(twin: Twin, run: Run, kept: Outcome, yardstick: Yardstick) -> Check:
    """The canary: the old state is consumed, and the step gives the same where nothing is donated (``kept``)."""
    faults = [f"{name} was donated and is still there" for name in run.kept]
    apart = [c for c in numerics(twin, kept, yardstick) if c.outcome == "failed"]
    ours = [c for c in numerics(twin, run.outcome, yardstick) if c.outcome == "failed"]
    if ours and not apart:
        faults.append("without donation the step is equal to the resident one, with it not: it reads memory that it has given away")
    for name, a, b in (("loss", run.outcome.losses, kept.losses), ("gradient norm", run.outcome.norms, kept.norms)):
        if not np.allclose(a, b, rtol=yardstick.least, atol=0):
            faults.append(f"the {name} with donation is {a[-1]:.9g} and without {b[-1]:.9g}")
    return line("donation", faults, "the old state is consumed, freed memory holds NaN, and without donation the steps are the same")


def _compiles(run: Run) -> Check:
    faults = [] if run.compiles == 1 else [f"{run.compiles} compilations while the steps ran; one is expected, at the first"]
    return line("compiles", faults, "one compilation, at the first step")


def _placement(twin: Twin, run: Run) -> Check:
    """Each array of the state after the last step: memory kind and bytes as its entry says."""
    entries = (*twin.plan.role("parameter"), *twin.plan.role("optimizer"))
    hosted = sum(e.placement == "host" for e in entries)
    said = f"{len(entries)} arrays of the state have the memory kind and the bytes of their entries, {hosted} of them on the host"
    found = line("placement", list(run.misplaced), said)
    if found.outcome == "passed" and hosted and twin.platform == "cpu":
        return skipped("placement", f"{said}, by name alone: {ONE_MEMORY}")
    return found


def _compiled(plan: Plan, twin: Twin, step: Any, run: Run) -> list[Check]:
    """What only an accelerator shows, from the twin as it is compiled here; the plan's own verdict speaks for the full size."""
    if twin.platform == "cpu":
        return [skipped("memory", ONE_MEMORY), skipped("overlap", ONE_MEMORY), compiled.ignored(plan, None)]
    program = step.lower(twin.plan.abstract_state(twin.mesh), twin.plan.abstract_batch(twin.mesh)).compile()
    sizes, text = program.memory_analysis(), program.as_text()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    entries = (*twin.plan.role("parameter"), *twin.plan.role("optimizer"), *twin.plan.copies.values())
    state_bytes = sum(e.bytes_per_device for e in entries if e.placement == "hbm")
    return [compiled.memory(run.used, state_bytes, total), compiled.overlap(text), compiled.ignored(twin.plan, read_hlo(text))]


def _title(twin: Twin) -> str:
    devices = twin.mesh.devices.size
    where = f"{devices} x {twin.mesh.devices.flat[0].device_kind} ({twin.platform})"
    what = f"{twin.work.name or 'the step'}, {twin.work.parameters:,} parameters, computing in {twin.compute_dtype}"
    return f"{what}: {len(twin.batches)} planned steps beside {len(twin.batches)} resident ones on {where}"
