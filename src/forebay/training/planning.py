"""From the words of ``forebay plan`` to a plan that the compiler has judged.

    model, seq, batch --make--> (loss_fn, optimizer, shapes) --trace--> Workload --by_hand, judge--> Plan with its Verdict    (--place)
                                                                        Workload --choose--> Plan with its Verdict             (else)

In: a `PlanCommand`. Out: an `Answer`, the text of plan.json. Loads jax only where the answer is not already on disk.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

import forebay as fb
from forebay.errors import ForebayError, InputError, ModelError, PlanError, nearest
from forebay.hardware import Hardware
from forebay.training import answers
from forebay.training.models import presets
from forebay.training.placing import placement_rules
from forebay.units import parse_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """What a train step needs on a machine that is not here, from that machine's real compiler: HBM and host bytes per device.

    Exit code 0: it fits; 1: it does not; 2: the question cannot be used. --seq and --batch are needed for a preset or a config.json.
    """

    model: Annotated[str, arg(metavar="MODEL")]
    """A preset (llama-3.1-8b), a Hugging Face config.json, or module:function returning (loss_fn, optimizer, params, batch) as shapes."""
    hardware: Annotated[str, arg(metavar="NAME:COUNT")]
    """h100-sxm:8, h100-sxm:16x8 (hosts x devices), tpu-v5p:2x2x1. `forebay hardware` lists the names."""
    seq: Annotated[int | None, arg(metavar="TOKENS")] = None
    """Tokens of a sequence."""
    batch: Annotated[int | None, arg(metavar="SEQUENCES")] = None
    """Global batch, in sequences."""
    place: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="RULE")] = ()
    """A placement rule, ROLE_OR_PATTERN=hbm|host|recompute; repeat the flag for more, the last match wins. None: the plan is searched."""
    budget: Annotated[str, arg(metavar="TIME")] = "60s"
    """How long the search may take, such as 60s or 5min. What would fit, where nothing does, is looked for after that."""
    maximize: Literal["batch", "seq"] | None = None
    """The largest batch, or the longest sequence, that fits; searched from --batch or --seq on. The other one is kept."""
    minimize: Literal["devices"] | None = None
    """The fewest devices of this kind that the model fits on."""
    hbm: Annotated[str | None, arg(metavar="SIZE")] = None
    """Raw HBM of one chip, such as 24GiB, instead of the catalog's."""
    host_ram: Annotated[str | None, arg(metavar="SIZE")] = None
    """RAM of one host, such as 2TiB, instead of the catalog's."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write plan.json here."""
    trace: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the forecast step here as a trace for ui.perfetto.dev (.json or .json.gz)."""
    as_json: Annotated[bool, arg(name="json")] = False
    """Print plan.json and nothing else on standard output."""
    env: bool = False
    """Print what must be set before jax is imported, for a shell: eval "$(forebay plan ... --env)"."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``text`` is plan.json; ``cached`` says that it was found on disk."""

    text: str
    cached: bool

    @property
    def record(self) -> dict[str, Any]:
        """The fields of plan.json."""
        return json.loads(self.text)


def answer(command: PlanCommand) -> Answer:
    """The plan that ``command`` asks for, judged by the compiler of its hardware, and written to ``command.out``.

    Raises:
        InputError: a name, size, rule, file or count that cannot be used.
        CompilerError: the compiler of that hardware is not installed, or the step cannot be lowered for it.
    """
    hardware = Hardware.named(command.hardware, host_ram=command.host_ram, hbm=command.hbm)
    rules = placement_rules(command.place)
    for flag, path in (("--out", command.out), ("--trace", command.trace)):
        if path is not None:
            _check_writable(flag, path)
    if command.maximize and command.minimize:
        raise InputError("--maximize and --minimize are two questions: ask one of them")
    budget_seconds = parse_seconds(command.budget)
    key = _key(command, hardware)
    text = answers.read(key) if key and command.trace is None else None  # a trace needs the schedule, which no answer holds
    cached = text is not None
    if text is None:
        plan = _made(command, hardware, rules, budget_seconds)
        text = json.dumps(plan.to_json(), indent=1) + "\n"
        if key and plan.verdict.fits is not None:  # a compile that was stopped may end another time
            answers.write(key, text)
    if command.out is not None:
        _write(command.out, text)
    return Answer(text=text, cached=cached)


def _made(command: PlanCommand, hardware: Hardware, rules: dict[str, str], budget_seconds: float) -> Any:
    """The plan by hand that rules ask for, or the searched one; a CPU has no device memory to search placements for."""
    if rules or hardware.target.platform == "cpu":
        if command.maximize or command.minimize:
            raise InputError("--maximize and --minimize search for a plan and --place writes one by hand: leave one of them out")
        from forebay.search.proving import judged  # not at the top: this loads jax

        plan = judged(fb.Plan.by_hand(_traced(command.model, command.seq, command.batch), rules, hardware=hardware), hardware)
        plan = dataclasses.replace(plan, workload={**plan.workload, **_described(command)})
        return with_forecast(plan, hardware, _work_done(command))
    from forebay.training import questions  # not at the top: the search loads jax

    return questions.searched(
        questions.Question(
            trace=lambda seq, batch: _traced(command.model, seq, batch),
            work_done=lambda seq, batch: _work_done(dataclasses.replace(command, seq=seq, batch=batch)),
            described=lambda seq, batch: _described(dataclasses.replace(command, seq=seq, batch=batch)),
            hardware=hardware,
            seq=command.seq,
            batch=command.batch,
            budget_seconds=budget_seconds,
        ),
        command.maximize or command.minimize,
    )


def _traced(model: str, seq: int | None, batch: int | None) -> Any:
    loss_fn, optimizer, params, batch_shapes = load_program(model, seq, batch)
    with _users_own(model, seq, batch):
        return fb.trace(loss_fn, optimizer, params, batch_shapes, name=model)


def with_forecast(plan: Any, hardware: Hardware, work_done: dict[str, float]) -> Any:
    """``plan`` with the replay of its compiled schedule: step seconds, and each host entry's exposed time. Without a schedule, as it is.

    A machine whose figures are not known has no forecast, which is then said among the verdict's messages.
    """
    from forebay.search import proving  # not at the top: this loads jax

    if not plan.verdict.compiled or hardware.target.platform == "cpu":
        return plan
    forecast, why_not = proving.forecast_of(plan.verdict, hardware, work_done)
    if forecast is None:
        verdict = dataclasses.replace(plan.verdict, messages=(*plan.verdict.messages, f"no forecast: {why_not}"))
        return dataclasses.replace(plan, verdict=verdict)
    return proving.with_forecast(plan, forecast)


def _work_done(command: PlanCommand) -> dict[str, float]:
    """Tokens of a step and the model's arithmetic for each, of a model that forebay knows."""
    if ":" in command.model or command.seq is None or command.batch is None:
        return {}
    from forebay.training.models import llama  # after the name: this loads jax

    config = presets.find(command.model)
    return {"tokens": command.batch * command.seq, "flops_per_token": llama.train_flops_per_token(config, command.seq)}


def _described(command: PlanCommand) -> dict[str, Any]:
    sizes = {"global_batch": command.batch, "sequence_length": command.seq}
    return {"model": command.model} | {name: size for name, size in sizes.items() if size is not None}


def load_program(model: str, seq: int | None, batch: int | None) -> tuple:
    """``(loss_fn, optimizer, params, batch)`` of a preset's name, a Hugging Face config.json, or ``module:function``.

    Raises:
        InputError: no such model, or sizes that are missing or that it does not take.
    """
    sizes = given(seq, batch)
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"--{name} is {value}; it must be at least 1")
    if ":" in model:
        with _users_own(model, seq, batch):
            return call_model(model, sizes)
    if seq is None or batch is None:
        missing = "--seq" if seq is None else "--batch"
        raise InputError(f"{missing} is missing: {model} needs the tokens of a sequence (--seq) and the sequences of a batch (--batch)")
    config = presets.find(model)
    from forebay.training.models import llama  # after the name: this loads jax

    return llama.make(config, batch=batch, seq=seq)


def given(seq: int | None, batch: int | None) -> dict[str, int]:
    """The sizes that a person gave, by name."""
    return {name: size for name, size in (("seq", seq), ("batch", batch)) if size is not None}


@contextlib.contextmanager
def _users_own(model: str, seq: int | None, batch: int | None) -> Iterator[None]:
    """What the model in ``module:function`` raises is an answer about it, and about the sizes that it was given."""
    try:
        yield
    except ForebayError:
        raise
    except Exception as error:
        if ":" not in model:
            raise
        sizes = ", ".join(f"{name} {size}" for name, size in given(seq, batch).items())
        said = next(iter(str(error).splitlines()), "")
        raise ModelError(f"{model}{' with ' * bool(sizes)}{sizes} raised {type(error).__name__}: {said}") from error


def call_model(model: str, sizes: dict[str, int]) -> tuple:
    """What the user's function returns; it is given ``seq`` and ``batch`` where it takes them."""
    function = _find(model)
    taken = inspect.signature(function).parameters
    if extra := [name for name in sizes if not _takes(taken, name)]:
        raise InputError(f"{model} takes no {' and no '.join(extra)}; leave --{' and --'.join(extra)} out, or give it such a parameter")
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [name for name in needed if name not in sizes]:
        flags = [f"--{name}" if name in ("seq", "batch") else f"--small {name}=NUMBER (of forebay check)" for name in missing]
        raise InputError(f"{model} needs {' and '.join(missing)}: give {' and '.join(flags)}, or give it a default")
    program = function(**sizes)
    if not isinstance(program, tuple) or len(program) != 4:
        raise InputError(f"{model} returned {type(program).__name__}; it must return a tuple (loss_fn, optimizer, params, batch)")
    return program


def taken_by(model: str, sizes: dict[str, int]) -> dict[str, int]:
    """Those of ``sizes`` that the function of ``module:function`` has a parameter for."""
    taken = inspect.signature(_find(model)).parameters
    return {name: size for name, size in sizes.items() if _takes(taken, name)}


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _find(model: str) -> Callable:
    module_name, _, function_name = model.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: a module beside the user is found
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise InputError(f"--model {model}: there is no module {error.name!r} on the path or in {os.getcwd()}") from None
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"--model {model}: {module_name} has no function {function_name!r}; {nearest(function_name, callables)}")
    return function


def _key(command: PlanCommand, hardware: Hardware) -> str | None:
    """The key of the answer on disk; None where the model is code that no key covers."""
    if ":" in command.model:
        return None
    try:
        model = hashlib.sha256(Path(command.model).read_bytes()).hexdigest() if presets.is_file(command.model) else command.model
    except OSError:
        return None  # load_config says what is wrong with the file
    asked = {name: getattr(command, name) for name in ("seq", "batch", "budget", "maximize", "minimize")}
    question = {"model": model, "place": list(command.place)} | asked
    return answers.key_of(question | {"hardware": hardware.to_json()})


def _check_writable(flag: str, path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir():
        raise PlanError(f"{flag} {path} is a folder; name a file in it, such as {path / 'plan.json'}")
    if not path.parent.is_dir():
        raise PlanError(f"{flag} {path}: there is no folder {path.parent}; make it first")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(text)
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise PlanError(f"{path} cannot be written ({error.strerror}); what stood there before is untouched") from error
