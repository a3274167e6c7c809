"""The training loop, through the public verbs alone: trace, Plan.by_hand, init, train_step.

    model, text      -> loss function, optimizer, shapes
    trace, by_hand   -> plan (saved as plan.json)
    init or restore  -> state, each leaf where the plan puts it
    for each step:      batch(step) -> device; state, metrics = step(state, batch); metrics of the step before are written

A batch is a function of (seed, step) and the step is in the state, so a resumed run goes on exactly. The loop reads the metrics of
a step only after the next one is under way; not so on CPU, whose virtual devices can starve each other's collectives. Limits: one
process; text as bytes; the Llama family (other models go through the same verbs in a loop of their own).
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import forebay as fb
from forebay.errors import ForebayError, InputError, OutOfMemoryError, UnsupportedError
from forebay.hardware import xla_flags
from forebay.training import config as settings
from forebay.training import data, recipe
from forebay.training.checkpoints import Checkpoints
from forebay.training.config import TrainConfig
from forebay.training.interrupt import StopRequest
from forebay.training.metrics import METRICS_FILE, MetricsLog, StepMetrics
from forebay.training.models import llama, presets
from forebay.training.profile import WARM_UP, ProfiledStep, forecast_plan, keep, residual
from forebay.training.resume import check_same_run, note_new_plan
from forebay.trust.oom import explain_oom, is_oom

PLAN_FILE = "plan.json"
CHECKPOINTS = "checkpoints"
OOM_FILE = "out-of-memory.txt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `train` did: steps ``first_step + 1`` to ``final_step``, and the loss of each, in nats per token.

    ``unigram_entropy_nats`` is the loss of a model that knows only how often each byte occurs. ``exit_code`` is 0 for a run that
    reached its last step, 128 + the signal for one that was asked to stop. ``profile`` is the line of residuals.jsonl of a run that was
    profiled.
    """

    folder: Path
    first_step: int
    final_step: int
    losses: tuple[float, ...]
    metrics: Path
    unigram_entropy_nats: float
    exit_code: int = 0
    profile: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that a run needs before its state exists."""

    config: TrainConfig
    model: Any
    optimizer: Any
    loss_fn: Callable
    train: data.Batches
    plan: Any
    mesh: Any
    record: dict[str, Any]


def machine() -> fb.Hardware:
    """This machine, with the devices that jax has on it: a CPU may have been split into virtual ones.

    Raises:
        UnsupportedError: the job has several processes.
    """
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"forebay train runs in one process and this job has {jax.process_count()}; "
            "write the loop around forebay.init and forebay.train_step, which take a mesh over all of them"
        )
    seen, devices = fb.Hardware.here(), jax.device_count()
    return seen if devices == seen.devices else dataclasses.replace(seen, name=f"{seen.chip.name}:{devices}", devices_per_host=devices)


def prepare(config: TrainConfig) -> Setup:
    """Model, text and plan of ``config``; nothing is allocated on a device.

    Raises:
        InputError: text, model, batch or rules that do not fit each other.
        PlanError: the plan cannot be made.
    """
    model = presets.find(config.model)
    data.check_vocabulary(model.vocab, config.model)
    corpus = data.open_corpus(config.data.paths)
    train, _ = data.split(
        corpus, batch=config.data.batch, seq=config.data.seq, seed=config.seed, validation_fraction=config.data.validation_fraction
    )
    optimizer = recipe.optimizer(config.optimizer, config.schedule_steps())
    loss_fn, optimizer, params, batch = llama.make(model, batch=config.data.batch, seq=config.data.seq, optimizer=optimizer)
    name = str(Path(config.model).resolve()) if presets.is_file(config.model) else config.model
    work = fb.trace(loss_fn, optimizer, params, batch, name=name)
    plan = fb.Plan.by_hand(work, config.rules(), hardware=machine())
    plan = dataclasses.replace(plan, workload={**plan.workload, "sequence_length": config.data.seq})  # a row holds one token more
    record = {"model": dataclasses.asdict(model), "data_fingerprint": corpus.fingerprint}
    return Setup(
        config=config, model=model, optimizer=optimizer, loss_fn=loss_fn, train=train, plan=plan, mesh=plan.make_mesh(), record=record
    )


def train(config: TrainConfig) -> Run:
    """Train as ``config`` says and leave the run's folder behind: config.json, plan.json, metrics.jsonl, checkpoints/.

    The first Ctrl-C (or SIGTERM) saves a checkpoint and returns, the second ends the process at once.

    Raises:
        InputError: settings or text that cannot be used.
        PlanError: a resumed run whose model is another.
        CheckpointError: a checkpoint cannot be written or read.
        OutOfMemoryError: device or host memory ran out; the run's folder keeps the explanation and the runtime's own words.
        ForebayError: the loss is no longer a number.
    """
    console = Console()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with StopRequest() as stop, closing(_open_checkpoints(config)) as checkpoints:
        setup = prepare(config)
        entropy = data.unigram_entropy_nats(setup.train)
        if config.resume:
            check_same_run(config, setup.record, checkpoints.record(), say)
            note_new_plan(config.out / PLAN_FILE, setup.plan, say)
        say("\n".join([str(setup.plan), *(f"warning: {warning}" for warning in _at_odds(setup.plan))]))
        say(f"text: {setup.train.corpus.name}, {setup.train.corpus.length:,} bytes, unigram entropy {entropy:.4f} nats")
        checkpoints.check_space(setup.plan.abstract_tree())
        say(str(fb.preflight(setup.plan, machine(), folder=config.out)))
        with _explained(setup):
            state = _restored(setup, checkpoints) if config.resume else _born(setup)
            settings.save(config)  # only now: what cannot be resumed leaves the run's own settings as they were
            setup.plan.save(config.out / PLAN_FILE)
            first = int(state.step)
            if first >= config.steps:
                say(f"nothing to do: step {first} of {config.steps} is done; ask for more with --steps")
            step_fn = _step_fn(setup, first)
            losses = _steps(setup, step_fn, state, checkpoints, stop, console)
        profile = _profile(setup, step_fn, say) if isinstance(step_fn, ProfiledStep) else None
    return Run(
        folder=config.out,
        first_step=first,
        final_step=first + len(losses),
        losses=tuple(losses),
        metrics=config.out / METRICS_FILE,
        unigram_entropy_nats=entropy,
        exit_code=stop.exit_code,
        profile=profile,
    )


@contextmanager
def _explained(setup: Setup) -> Iterator[None]:
    """An out-of-memory error of XLA becomes its explanation, kept in the run's folder beside XLA's own words."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_oom(error):
            raise
        report = str(explain_oom(error, setup.plan))
        try:
            (setup.config.out / OOM_FILE).write_text(f"{report}\n\nthe runtime said:\n{error}\n")
            kept = f"kept in {setup.config.out / OOM_FILE}"
        except OSError as problem:
            kept = f"not kept: {setup.config.out / OOM_FILE} cannot be written ({problem.strerror})"
        raise OutOfMemoryError(f"{report}\n{kept}") from error


def _at_odds(plan: Any) -> tuple[str, ...]:
    """The XLA_FLAGS of this process that contradict the plan. What is too small for it, preflight says."""
    flags = os.environ.get("XLA_FLAGS", "") if machine().target.platform == "cuda" else ""
    return xla_flags.contradictions(plan.compiler_options, flags)


def _step_fn(setup: Setup, first: int) -> Any:
    """The train step, with a watch on it where the run is profiled."""
    config, step_fn = setup.config, fb.train_step(setup.loss_fn, setup.optimizer, setup.plan, mesh=setup.mesh)
    if not config.profile:
        return step_fn
    if config.steps - first <= WARM_UP:
        raise InputError(
            f"--profile has nothing to measure: {WARM_UP} steps are left out as warm-up and this run has {config.steps - first} to do; "
            "ask for more with --steps"
        )
    return ProfiledStep(step_fn, config.out, config.steps - first)


def _profile(setup: Setup, watched: ProfiledStep, say: Callable[[str], Any]) -> dict[str, Any] | None:
    """What was measured, kept beside the forecast; None where the run was stopped before a step was."""
    watched.close()
    try:
        measured = watched.measurement()
    except InputError as nothing:
        say(str(nothing))
        return None
    hardware, sizes = machine(), setup.config.data
    work_done = {"tokens": sizes.batch * sizes.seq, "flops_per_token": llama.train_flops_per_token(setup.model, sizes.seq)}
    plan, missing = forecast_plan(setup.plan, setup.loss_fn, setup.optimizer, hardware, work_done)
    row = residual(plan, hardware, measured, work_done, missing)
    say("profile kept in " + " and ".join(map(str, keep(row, setup.config.out))))
    return row


def _open_checkpoints(config: TrainConfig) -> Checkpoints:
    checkpoints = Checkpoints(config.out / CHECKPOINTS, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous)
    steps = checkpoints.steps()
    if steps and not config.resume:
        raise InputError(f"{config.out} already holds a run at step {steps[-1]}; go on with --resume, or choose another --out")
    return checkpoints


def _born(setup: Setup) -> Any:
    def init_fn(key: jax.Array) -> Any:
        return llama.init_params(setup.model, key)

    return fb.init(init_fn, setup.optimizer, setup.plan, jax.random.key(setup.config.seed), mesh=setup.mesh)


def _restored(setup: Setup, checkpoints: Checkpoints) -> Any:
    tree = checkpoints.restore(setup.plan.abstract_tree(setup.mesh))
    return fb.State.from_tree(tree, setup.plan, mesh=setup.mesh)


def _steps(setup: Setup, step_fn: Callable, state: Any, checkpoints: Checkpoints, stop: StopRequest, console: Console) -> list[float]:
    """Run to the last step, or until asked to stop; the state that remains is saved."""
    config, first = setup.config, int(state.step)
    in_flight = 0 if jax.devices()[0].platform == "cpu" else 1
    losses: list[float] = []
    with MetricsLog(config.out, done=first, steps=config.steps, console=console) as log:
        pending: list[dict] = []
        clock = _Clock(setup, first, log, losses)
        done = first
        while done < config.steps and stop.signal is None:
            state, metrics = step_fn(state, device_batch(setup, done))
            done += 1
            pending.append(metrics)
            due = config.checkpoint.every > 0 and done % config.checkpoint.every == 0
            while len(pending) > (0 if due else in_flight):
                clock.read(pending.pop(0))
            if due:
                checkpoints.save(done, state.to_tree(), setup.record)
                clock.restart()
        while pending:
            clock.read(pending.pop(0))
        if done > first:
            checkpoints.save(done, state.to_tree(), setup.record)
    return losses


class _Clock:
    """Turns the metrics of finished steps into lines of the log, with the seconds between one and the next."""

    def __init__(self, setup: Setup, first: int, log: MetricsLog, losses: list[float]):
        self._setup, self._first, self._log, self._losses = setup, first, log, losses
        self._schedule = recipe.schedule(setup.config.optimizer, setup.config.schedule_steps())
        self.restart()

    def restart(self) -> None:
        """Begin to count the next step's seconds now: what was done since the last step is none of it."""
        self._before = time.perf_counter()

    def read(self, metrics: dict[str, jax.Array]) -> None:
        """Wait for one step and write it. Raises ForebayError where the loss is not a number: nothing of it is saved."""
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        step, config = self._first + len(self._losses) + 1, self._setup.config
        self._losses.append(loss)
        self._log.write(
            StepMetrics(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=float(np.asarray(self._schedule(step - 1))),
                step_seconds=seconds,
                tokens_per_second=config.data.batch * config.data.seq / seconds,
                includes_compile=step == self._first + 1,
            )
        )
        if not np.isfinite(loss):
            raise ForebayError(
                f"the loss is {loss} at step {step} (gradient norm {grad_norm}); this state is not saved. Resume from the checkpoint "
                f"before with a lower --optimizer.learning-rate (now {config.optimizer.learning_rate:g}), or with less offloaded"
            )


def device_batch(setup: Setup, step: int) -> dict[str, jax.Array]:
    """The batch of ``step`` on the mesh: each process reads and places only the rows that its devices hold."""
    wanted = setup.plan.abstract_batch(setup.mesh)["tokens"]

    def rows(index: Any) -> np.ndarray:
        return setup.train.tokens(step, index[0])[(slice(None), *index[1:])]

    return {"tokens": jax.make_array_from_callback(wanted.shape, wanted.sharding, rows)}
