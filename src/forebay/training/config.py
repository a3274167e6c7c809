"""The one truth of a training run's settings: what the command line fills, what `train` reads, what config.json keeps.

In: command-line words, keyword arguments, or a saved config.json. Out: a frozen TrainConfig. Loads no jax.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import UseAppendAction, arg

from forebay.errors import InputError
from forebay.records.reading import Unreadable, build, read
from forebay.training.placing import placement_rules

CONFIG_FILE = "config.json"


def _require(value: float, holds: bool, flag: str, wanted: str) -> None:
    if not holds:
        raise InputError(f"{flag} is {value}; it must be {wanted}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is read, and in which pieces."""

    paths: Annotated[tuple[str, ...], arg(name="data")] = ()
    """Text files, folders (read recursively) or glob patterns. None: the Python standard library's sources."""
    batch: Annotated[int, arg(name="batch")] = 16
    """Global batch, in sequences."""
    seq: Annotated[int, arg(name="seq")] = 256
    """Tokens of a sequence (bytes are the tokens)."""
    validation_fraction: Annotated[float, arg(name="validation-fraction")] = 0.05
    """Part of the text that is never trained on."""

    def __post_init__(self):
        _require(self.batch, self.batch >= 1, "--batch", "at least 1 sequence")
        _require(self.seq, self.seq >= 2, "--seq", "at least 2 tokens")
        _require(self.validation_fraction, 0 <= self.validation_fraction < 1, "--validation-fraction", "at least 0 and below 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW: linear warm-up, cosine decay, no weight decay on norms and biases."""

    learning_rate: float = 3e-4
    """The peak, reached at the end of the warm-up."""
    final_fraction: float = 0.1
    """The learning rate at the end of the decay, as a part of the peak."""
    warmup_fraction: float = 0.05
    """Part of the schedule spent warming up."""
    decay_steps: int | None = None
    """Length of the schedule in steps. None: as long as the run."""
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    """Largest global gradient norm. None: no clipping."""

    def __post_init__(self):
        _require(self.learning_rate, self.learning_rate > 0, "--optimizer.learning-rate", "positive")
        _require(self.final_fraction, 0 <= self.final_fraction <= 1, "--optimizer.final-fraction", "between 0 and 1")
        _require(self.warmup_fraction, 0 <= self.warmup_fraction < 1, "--optimizer.warmup-fraction", "at least 0 and below 1")
        if self.decay_steps is not None:
            _require(self.decay_steps, self.decay_steps >= 1, "--optimizer.decay-steps", "at least 1")
        if self.clip_norm is not None:
            _require(self.clip_norm, self.clip_norm > 0, "--optimizer.clip-norm", "positive, or None for no clipping")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay. The last step is always saved."""

    every: int = 500
    """Steps between checkpoints. 0: only at the end (and when stopped)."""
    keep: int = 2
    """How many of the newest stay on disk."""
    asynchronous: bool = False
    """Write while training goes on. Costs host RAM for a whole copy of the state, so it is off by default."""

    def __post_init__(self):
        _require(self.every, self.every >= 0, "--checkpoint.every", "0 or more steps")
        _require(self.keep, self.keep >= 1, "--checkpoint.keep", "at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. Raises InputError where a value cannot be meant."""

    model: str = "tiny"
    """A preset's name, or the path of a Hugging Face config.json."""
    data: Annotated[DataConfig, arg(name="")] = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    steps: int = 1000
    """Optimizer steps of the whole run, those before a resume included."""
    place: UseAppendAction[tuple[str, ...]] = ()
    """A placement rule, ROLE_OR_PATTERN=hbm|host|recompute; repeat the flag for more. The last match wins."""
    out: Path = Path("runs/latest")
    """The run's folder: config.json, plan.json, metrics.jsonl, checkpoints/, tensorboard/."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's folder. Settings that are not given are the saved ones."""
    seed: int = 0
    """Decides the initial weights and the order of the data."""
    profile: bool = False
    """Measure some steps of this run and show them beside the forecast. A run that is measured is a little slower."""

    def __post_init__(self):
        _require(self.steps, self.steps >= 1, "--steps", "at least 1")
        _require(self.seed, 0 <= self.seed < 2**31, "--seed", "from 0 to 2147483647")
        self.rules()

    def rules(self) -> dict[str, str]:
        """The placement rules as ``Plan.by_hand`` takes them: ``{"optimizer": "host"}``."""
        return placement_rules(self.place)

    def schedule_steps(self) -> int:
        """Steps of the learning-rate schedule."""
        return self.optimizer.decay_steps or self.steps


def from_command_line(words: Sequence[str] | None = None, prog: str = "forebay train") -> TrainConfig:
    """The configuration that ``words`` (default: the process's own) describe; with ``--resume`` the saved one is the default.

    Raises:
        InputError: a value that cannot be meant, or ``--resume`` where nothing was saved.
    """
    words = list(sys.argv[1:] if words is None else words)
    default = TrainConfig()
    resume = "--resume" in words and not {"-h", "--help"} & set(words)
    if resume:
        default = dataclasses.replace(load(Path(_out_of(words))), resume=False)
        words.remove("--resume")  # tyro would offer only --no-resume where the default is True
    about = "Train a model under a plan: the state is born where the plan puts it, and every step keeps it there."
    config = tyro.cli(TrainConfig, args=words, prog=prog, description=about, default=default, config=(tyro.conf.FlagCreatePairsOff,))
    return dataclasses.replace(config, resume=resume)


def _out_of(words: list[str]) -> str:
    for position, word in enumerate(words):
        if word.startswith("--out="):
            return word.removeprefix("--out=")
        if word == "--out" and position + 1 < len(words):
            return words[position + 1]
    return str(TrainConfig().out)


def to_json(config: TrainConfig) -> dict[str, Any]:
    """``config`` as plain JSON values. ``resume`` and ``profile`` are left out: they say how a run was started, not what it is."""
    values = dataclasses.asdict(config)
    values["out"] = str(config.out)
    values["place"], values["data"]["paths"] = list(config.place), list(config.data.paths)
    del values["resume"], values["profile"]
    return values


def from_json(values: dict[str, Any], source: str) -> TrainConfig:
    """The configuration that ``values`` hold. ``source`` names the file in messages.

    Raises:
        InputError: a key that no setting bears, or a value that cannot be meant.
    """
    try:
        return build(TrainConfig, values)
    except Unreadable as problem:
        raise InputError(f"{source}: {problem}; mend the file, or start a new run in another folder") from None
    except InputError as problem:
        raise InputError(f"{source}: {problem}") from None


def save(config: TrainConfig) -> None:
    """Write ``config`` to config.json in its run folder, whole or not at all. Raises InputError where the folder takes nothing."""
    target = config.out / CONFIG_FILE
    fresh = target.with_suffix(".json.new")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(to_json(config), indent=2) + "\n")
        os.replace(fresh, target)
    except OSError as problem:
        raise InputError(f"{target} cannot be written ({problem.strerror}); free some space there, or choose another --out") from problem


def load(folder: Path) -> TrainConfig:
    """The configuration saved in a run folder, marked to be resumed.

    Raises:
        InputError: there is none, or it is not readable as one.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"there is no run to resume in {folder}: {path} does not exist; leave --resume out to start one")
    try:
        values = read(path)
    except Unreadable as problem:
        raise InputError(f"{path}: {problem}; restore it, or start a new run in another folder") from None
    config = from_json(values, str(path))
    return dataclasses.replace(config, out=folder, resume=True)
