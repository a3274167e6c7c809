"""What a resumed run may change, and what it says about it.

The model must be the same: PlanError. The text must be the same unless other text is asked for: InputError. Everything else that a
person gives anew is theirs to change (steps, batch, learning rate, placement, mesh), and every change is printed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forebay as fb
from forebay.errors import InputError, PlanError
from forebay.training import config as settings
from forebay.training.config import TrainConfig


def check_same_run(config: TrainConfig, record: dict[str, Any], saved: dict[str, Any], say: Callable[[str], None]) -> None:
    """Say which settings differ from the run's config.json.

    Raises:
        PlanError: the checkpoint holds another model.
        InputError: the text is another and nobody asked for it.
    """
    differing = _differences(saved["model"], record["model"])
    if differing:
        raise PlanError(
            f"the checkpoint of step {saved['step']} in {config.out} is of another model: {'; '.join(differing)}. "
            "Resume with the model it was made with, or start another run with another --out"
        )
    before = settings.to_json(settings.load(config.out))
    changes = _differences(before, settings.to_json(config))
    if saved["data_fingerprint"] != record["data_fingerprint"] and before["data"]["paths"] == list(config.data.paths):
        raise InputError(
            f"the text is not what this run was trained on until step {saved['step']}: a file was added, removed or changed its size "
            f"(fingerprint {saved['data_fingerprint']}, now {record['data_fingerprint']}). Put the files back, or name other text: --data"
        )
    say(f"resuming {config.out} after step {saved['step']}")
    for change in changes:
        say(f"changed since: {change}")


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new and _plain(old) != _plain(new):
            found.append(f"{prefix}{key} was {old}, now {new}")
    return found


def _plain(value: Any) -> Any:
    """JSON has lists for tuples."""
    return list(value) if isinstance(value, tuple) else value


def note_new_plan(path: Path, plan: Any, say: Callable[[str], None]) -> None:
    """Say which entries stand elsewhere than in the plan.json of the run; the checkpoint is read into the new plan.

    Raises:
        PlanError: plan.json is not readable as a plan.
    """
    if not path.exists():
        return
    before = {entry.name: entry.placement for entry in fb.Plan.load(path).entries}
    moved = [entry for entry in plan.entries if before.get(entry.name, entry.placement) != entry.placement]
    for entry in moved[:10]:
        say(f"placed anew: {entry.name} {before[entry.name]} -> {entry.placement}")
    if len(moved) > 10:
        say(f"placed anew: {len(moved) - 10} more")
