"""From the words of ``forebay check`` to a report: the plan that is asked about, and a small twin of its model.

A preset or a config.json is scaled down to a model of the same structure: layers stay several, heads share keys and values in the same
ratio, widths keep their ratios, and what the layers compute in stays. A ``module:function`` is the user's: it is called with ``--small``.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

import forebay as fb
from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware
from forebay.training import config as settings
from forebay.training.models import presets
from forebay.training.models.config import LlamaConfig
from forebay.training.placing import placement_rules
from forebay.training.planning import call_model, given, load_program, taken_by

LAYERS, VOCAB, SEQ, BATCH = 4, 256, 16, 8
HEAD_DIM = {"cpu": 8, "cuda": 64, "tpu": 64}
"""A TPU keeps no array in host memory whose last axis is shorter than 128: two key/value heads of 64."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckCommand:
    """Some steps of a small twin of a model on this machine, under a plan and beside it resident, line by line.

    Exit code 0: every line passed or is skipped, because this machine cannot show it; 1: a line failed; 2: the question cannot be used.
    """

    plan: Annotated[Positional[Path | None], arg(metavar="[PLAN]")] = None
    """A plan.json of `forebay plan --out`; or ask with the words of `forebay plan`."""
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """A preset (llama-3.1-8b), a Hugging Face config.json, or module:function. Default: the plan's."""
    hardware: Annotated[str, arg(metavar="NAME:COUNT")] = "here"
    """The machine of the plan; the check itself always runs here."""
    seq: Annotated[int | None, arg(metavar="TOKENS")] = None
    """Tokens of a sequence of the plan."""
    batch: Annotated[int | None, arg(metavar="SEQUENCES")] = None
    """Global batch of the plan."""
    place: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="RULE")] = ()
    """A placement rule, ROLE_OR_PATTERN=hbm|host|recompute; repeat the flag for more."""
    small: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=NUMBER")] = ()
    """An argument of module:function that makes the twin small, such as layers=2; repeat the flag for more."""
    steps: Annotated[int, arg(metavar="STEPS")] = 4
    """Steps that are compared."""


def report(command: CheckCommand) -> Any:
    """The ``trust.Report`` that ``command`` asks for.

    Raises:
        InputError: no model, a name, a size or a rule that cannot be used.
        PlanError: the plan.json is not one of this model.
    """
    from forebay.plan import planfile  # not at the top: this loads jax

    described = {} if command.plan is None else planfile.read(command.plan).get("workload")
    if not isinstance(described, dict):
        raise PlanError(f"{command.plan}: the field 'workload' is missing or is not an object")
    model = command.model or described.get("model")
    if not isinstance(model, str) or not model:
        raise InputError("there is no model: name a plan.json that was made with --model, or give --model, --seq and --batch")
    seq, batch = command.seq or described.get("sequence_length"), command.batch or described.get("global_batch")
    sizes = given(seq, batch)
    sizes = taken_by(model, sizes) if ":" in model else sizes
    loss_fn, optimizer, params, rows = load_program(model, sizes.get("seq"), sizes.get("batch"))
    optimizer = _of_the_run(command.plan) or optimizer
    work = fb.trace(loss_fn, optimizer, params, rows, name=model)
    if command.plan is not None:
        plan = fb.Plan.load(command.plan, work)
    else:
        hardware = Hardware.here() if command.hardware == "here" else Hardware.named(command.hardware)
        plan = fb.Plan.by_hand(work, placement_rules(command.place), hardware=hardware)
    loss_fn, of_the_twin, params, rows, integers = _twin(model, command.small, sizes)
    optimizer = of_the_twin if ":" in model else optimizer
    return fb.check(loss_fn, optimizer, plan, params, rows, steps=command.steps, integers=integers)


def _of_the_run(plan: Path | None) -> Any:
    """The optimizer of the `forebay train` run whose plan.json this is; None for any other plan."""
    from forebay.training import metrics, recipe  # not at the top: these load jax

    if plan is None or not (plan.parent / metrics.METRICS_FILE).is_file():
        return None
    config = settings.load(plan.parent)
    return recipe.optimizer(config.optimizer, config.schedule_steps())


def _twin(model: str, small: tuple[str, ...], sizes: dict[str, int]) -> tuple:
    """(loss_fn, optimizer, params, batch, integers) of the twin; a user's own has the plan's ``sizes`` where ``small`` gives none."""
    if ":" in model:
        return (*call_model(model, sizes | _numbers(small)), 2)
    if small:
        raise InputError(f"--small is for module:function; the twin of {model} is made by forebay")
    import jax

    from forebay.training.models import llama  # these load jax

    config = scaled_down(presets.find(model), HEAD_DIM[Hardware.here().chip.platform])
    loss_fn, optimizer, _, rows = llama.make(config, batch=BATCH, seq=SEQ)
    return loss_fn, optimizer, llama.init_params(config, jax.random.key(0)), rows, config.vocab


def scaled_down(config: LlamaConfig, head_dim: int) -> LlamaConfig:
    """A small model of the structure of ``config``, with heads of ``head_dim``."""
    kv_heads = min(config.kv_heads, 2)
    heads = kv_heads * (config.heads // config.kv_heads)
    model = max(head_dim, round(heads * head_dim * config.model / (config.heads * config.head_dim)))
    mlp = max(head_dim, round(model * config.mlp / config.model / head_dim) * head_dim)
    return dataclasses.replace(
        config, name=f"a small {config.name}", vocab=min(config.vocab, VOCAB), layers=min(config.layers, LAYERS), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, model=model, mlp=mlp, window=None if config.window is None else SEQ // 2,
    )  # fmt: skip


def _numbers(small: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for text in small:
        name, _, number = text.partition("=")
        if not name or not number.isdigit():
            raise InputError(f"--small {text!r} is not NAME=NUMBER, such as layers=2")
        found[name] = int(number)
    return found
