"""Damaged files at each door, some hundreds in all; and every input that was once a finding."""

import importlib
from pathlib import Path

import pytest

SEEDS = Path(__file__).parent / "fuzz_seeds"
INPUTS = 40
NAMES = (
    "plan.json",
    "run config.json",
    "model config.json",
    "machine record",
    "compile cache",
    "checkpoint record",
    "HLO",
    "log of a run out of memory",
)


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    fuzz = importlib.import_module("fuzz")
    return fuzz, {target.name: target for target in fuzz.targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_used_or_refused(doors, name):
    fuzz, targets = doors
    outcome = fuzz.run(targets[name], INPUTS, seed=1)
    wrong = [finding.what for finding in outcome.findings if not finding.what.startswith(("used", "refused"))]  # a slow machine is no fault
    assert wrong == []
    assert outcome.used + outcome.refused == INPUTS


def test_every_door_is_tried(doors):
    assert tuple(doors[1]) == NAMES


@pytest.mark.parametrize("path", sorted(SEEDS.iterdir()), ids=lambda path: path.name)
def test_what_was_once_a_finding_stays_mended(doors, path):
    fuzz, targets = doors
    name = path.name.rpartition("-")[0].replace("_", " ")
    assert fuzz.attempt(targets[name], path.read_bytes()) in ("used", "refused")


def test_an_exception_that_is_not_forebays_is_a_finding(doors):
    fuzz, _ = doors

    def broken(data):
        raise KeyError("a traceback")

    target = fuzz.Target(name="broken", samples=(b"x",), mutate=fuzz.mutated_bytes, use=broken)
    outcome = fuzz.run(target, 3, seed=0)
    assert len(outcome.findings) == 3
    assert outcome.findings[0].what.startswith("KeyError")
