"""What a run measured, a line a step: metrics.jsonl for machines, a progress line for people, TensorBoard where it is installed.

Everything here was measured on the machine at hand and says so (``"kind": "measured"``); nothing is a forecast.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from forebay.errors import CheckpointError
from forebay.records.reading import Unreadable, build, parse

METRICS_FILE = "metrics.jsonl"
_PLAIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step. ``step`` counts the steps done, this one included; the first of a process includes its compile."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second: float
    includes_compile: bool = False

    def to_json(self) -> str:
        """The line of metrics.jsonl. JSON has no nan: a value that is not finite is null."""
        values = {**dataclasses.asdict(self), "kind": "measured"}
        return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()})

    def shown(self, steps: int) -> str:
        """The line for a person."""
        first = " (with the compile)" if self.includes_compile else ""
        return (
            f"step {self.step}/{steps}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3g}  learning rate {self.learning_rate:.2e}  "
            f"{self.step_seconds:.3f} s/step{first}  {self.tokens_per_second:,.0f} tokens/s  measured"
        )


class MetricsLog:
    """The open log of a run folder, a context manager. Steps after ``done`` that an earlier process wrote are dropped."""

    def __init__(self, folder: Path, *, done: int, steps: int, console: Console | None = None):
        self.path = folder / METRICS_FILE
        self._steps, self._shown_at, self._newest = steps, -math.inf, ""
        self._console = console or Console()
        keep_until(self.path, done)
        self._file = self.path.open("a")
        self._board = _open_board(folder)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> "MetricsLog":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live:
            self._live.stop()
        elif self._newest:
            self._say(self._newest)
        with contextlib.suppress(OSError):  # what a full disk did not take was said when it was written
            self._file.close()
        if self._board:
            self._board.close()

    def write(self, metrics: StepMetrics) -> None:
        """Keep and show one step. On a terminal a line that changes; elsewhere a line at most every five seconds."""
        try:
            self._file.write(metrics.to_json() + "\n")
            self._file.flush()
        except OSError as problem:
            raise CheckpointError(
                f"step {metrics.step} cannot be written to {self.path} ({problem.strerror}). The checkpoints are untouched: free space "
                "there and go on with --resume"
            ) from problem
        if self._board:
            for tag in ("loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second"):
                self._board.add_scalar(tag, getattr(metrics, tag), metrics.step)
        line = metrics.shown(self._steps)
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        self._newest = line
        if time.monotonic() - self._shown_at >= _PLAIN_SECONDS:
            self._say(line)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._shown_at, self._newest = time.monotonic(), ""


def read(path: Path) -> list[dict]:
    """The steps of a metrics.jsonl, oldest first. A last line that a killed process left unfinished is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = build(dict[str, float | bool | str | None], parse(line))
            build(int, row.get("step"), "step")
        except Unreadable:
            break
        rows.append(row)
    return rows


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of a metrics.jsonl after ``step``: a resumed run does those steps again."""
    if path.exists():
        kept = [row for row in read(path) if row["step"] <= step]
        fresh = path.with_suffix(".jsonl.new")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(fresh, path)


def _open_board(folder: Path):
    """TensorBoard's writer, or None where the optional package is not installed (extra ``tensorboard``)."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from tensorboard.summary import Writer  # half a second: only where a run is written

    return Writer(str(folder / "tensorboard"))
