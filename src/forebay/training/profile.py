"""``forebay train --profile``: the step as it runs, beside the step as it was forecast.

    steps of the run:   WARM_UP (compile, first touch) | measured, each waited for | TRACED by jax's profiler | the rest, untouched

In: the train step, a run folder. Out: a ``Measurement``, and where the machine has one the forecast of the very same plan. What differs
(measured over forecast) is appended, a line a run, to ``residuals.jsonl`` in the run's folder and in forebay's own folder of this user:
that is what the forecast's constants are calibrated on. Limits: the trace names CUDA streams or a CPU's thunks; times are this host's.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import forebay as fb
from forebay.compiler.folder import folder as user_folder
from forebay.compiler.versions import installed
from forebay.errors import CompilerError, InputError
from forebay.hardware import Hardware
from forebay.training.planning import with_forecast
from forebay.training.tracing import busy_seconds, read_trace

WARM_UP, MEASURED, TRACED = 2, 10, 2
PROFILE_FOLDER, RESIDUALS_FILE = "profile", "residuals.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of each measured step; busy seconds of each lane in one traced step, or why they are not known; a device's peak bytes."""

    seconds: tuple[float, ...]
    lanes: Mapping[str, float]
    lanes_missing: str = ""
    hbm_peak_bytes: int | None = None

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest."""
        return min(self.seconds), max(self.seconds)


class ProfiledStep:
    """The train step with a watch on it: called like the step itself, ``steps`` times in all.

    A step that is measured starts when its inputs are there and ends when its outputs are; that takes away the overlap of a step's launch
    with the step before, so a profiled run is a little slower.
    """

    def __init__(self, step: Callable, out: Path, steps: int):
        self._step, self._folder = step, out / PROFILE_FOLDER
        traced = min(TRACED, max(0, steps - WARM_UP - 1))
        self._trace_from = min(WARM_UP + MEASURED, steps - traced)
        self._trace_until = self._trace_from + traced
        self._done = 0
        self._seconds: list[float] = []

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        number, self._done = self._done, self._done + 1
        if number < WARM_UP or number >= self._trace_until:
            return self._step(state, batch)
        jax.block_until_ready((state, batch))
        if number == self._trace_from:
            jax.profiler.start_trace(str(self._folder))
        begin = time.perf_counter()
        result = jax.block_until_ready(self._step(state, batch))
        if number < self._trace_from:
            self._seconds.append(time.perf_counter() - begin)
        if self._trace_from <= number == self._trace_until - 1:
            jax.profiler.stop_trace()
        return result

    def close(self) -> None:
        """End a trace that a stopped run left open."""
        if self._trace_from < self._done < self._trace_until:
            jax.profiler.stop_trace()

    def measurement(self) -> Measurement:
        """What was seen.

        Raises:
            InputError: the run was too short to measure a step.
        """
        if not self._seconds:
            raise InputError(
                f"--profile measured nothing: {WARM_UP} steps are left out as warm-up and this process did {self._done}; "
                f"give --steps {WARM_UP + MEASURED + TRACED} or more"
            )
        lanes, missing = self._lanes()
        return Measurement(seconds=tuple(self._seconds), lanes=lanes, lanes_missing=missing, hbm_peak_bytes=_peak_bytes())

    def _lanes(self) -> tuple[dict[str, float], str]:
        traced = max(0, min(self._done, self._trace_until) - self._trace_from)
        if not traced:
            return {}, "no step was traced"
        try:
            busy = busy_seconds(read_trace(self._folder))
        except InputError as unreadable:
            return {}, str(unreadable)
        return {kind: seconds / traced for kind, seconds in busy.items()}, ""


def _peak_bytes() -> int | None:
    """The most bytes that any device of this process had in use, where its backend counts them."""
    counted = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((count for count in counted if count is not None), default=None)


def plan_fingerprint(plan: Any) -> str:
    """Names a plan by what decides its program: the workload, placements and specs, options, mesh."""
    said = plan.to_json()
    entries = [[e["name"], e["placement"], e["spec"], e["layers"]] for e in said["entries"]]
    parts = [said["workload"], entries, {k: v for k, v in said["options"].items() if k != "reasons"}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def forecast_plan(plan: Any, loss_fn: Callable, optimizer: Any, hardware: Hardware, work_done: Mapping[str, float]) -> tuple[Any, str]:
    """``plan`` with the verdict and the forecast of its step on ``hardware``, and why it has no forecast (empty where it has one)."""
    if hardware.target.platform == "cpu":
        return plan, "there is no forecast for a CPU: a schedule can be replayed for GPU and TPU targets only"
    step = fb.train_step(loss_fn, optimizer, plan)
    try:
        verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan)
    except CompilerError as problem:
        return plan, f"no forecast: {problem}"
    judged = with_forecast(dataclasses.replace(plan, verdict=verdict), hardware, dict(work_done))
    if judged.forecast is not None:
        return judged, ""
    return judged, next((said for said in judged.verdict.messages if said.startswith("no forecast")), f"no forecast: {verdict.reason}")


def residual(plan: Any, hardware: Hardware, measured: Measurement, work_done: Mapping[str, float], missing: str = "") -> dict[str, Any]:
    """A line of residuals.jsonl, from a plan that has its forecast or a reason why it has none.

    ``ratio`` is measured over forecast: of the step, and of each lane that both know.
    """
    step, peak = measured.step_seconds, hardware.peak_flops.get("bf16")
    flops, tokens = work_done["tokens"] * work_done["flops_per_token"], work_done["tokens"]
    row: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "hardware": hardware.name, "chip": hardware.chip.name,
        "devices": hardware.devices, "versions": installed(), "model": plan.workload.get("model"), "plan": plan_fingerprint(plan),
        "measured": {
            "step_seconds": step, "fastest_seconds": measured.spread[0], "slowest_seconds": measured.spread[1],
            "steps": len(measured.seconds),
            "tokens_per_second": tokens / step, "mfu": flops / (step * hardware.devices * float(peak)) if peak else None,
            "hbm_bytes": measured.hbm_peak_bytes, "lanes": dict(measured.lanes), "lanes_missing": measured.lanes_missing,
        },
        "forecast": None, "forecast_missing": missing, "ratio": None,
    }  # fmt: skip
    if plan.forecast is not None:
        names = ("step_seconds", "low_seconds", "high_seconds", "tokens_per_second", "mfu", "exposed_copy_seconds", "lanes")
        row["forecast"] = {name: plan.forecast[name] for name in names} | {"hbm_bytes": plan.verdict.hbm.total_bytes}
        lanes = plan.forecast["lanes"]
        shared = {kind: seconds / lanes[kind] for kind, seconds in measured.lanes.items() if lanes.get(kind)}
        row["ratio"] = {"step": step / plan.forecast["step_seconds"], "lanes": shared}
    return row


def keep(row: Mapping[str, Any], out: Path) -> tuple[Path, ...]:
    """Append ``row`` to the run's own residuals, and where it holds a forecast to this user's; the files written.

    Raises:
        InputError: a file cannot be written.
    """
    files = [out / RESIDUALS_FILE] + ([user_folder() / RESIDUALS_FILE] if row["forecast"] else [])
    line = (json.dumps(row) + "\n").encode()
    for path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, line)  # one write: lines of two runs that end together do not mix
            finally:
                os.close(file)
        except OSError as problem:
            raise InputError(f"the residuals cannot be written to {path}: {problem.strerror}") from None
    return tuple(files)
