"""The README does what it says: its Python runs, its commands parse, its targets exist."""

import re
import shlex
from pathlib import Path

import pytest

from forebay import cli

pytestmark = pytest.mark.oldest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def _commands(program: str) -> list[str]:
    lines = [line for block in _blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(program + " ")]


def test_the_python_blocks_run_and_train():
    import numpy as np

    names: dict = {}
    for block in _blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    batch = {name: np.full((32, 64), 0.5, np.float32) for name in ("x", "y")}
    losses = []
    for _ in range(3):
        names["state"], metrics = names["step"](names["state"], batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]


@pytest.mark.parametrize("line", _commands("forebay"))
def test_the_commands_name_real_commands_and_flags(line, capsys):
    words = shlex.split(line)
    assert words[1] in cli.COMMANDS
    with pytest.raises(SystemExit):
        cli.main([words[1], "--help"])
    help_text = capsys.readouterr().out
    for flag in re.findall(r"--[a-z-]+", line):
        assert flag in help_text


@pytest.mark.parametrize("line", _commands("make"))
def test_the_targets_of_make_exist(line):
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"\]\(([A-Za-z/.]+)\)", TEXT) + re.findall(r"constraints/[a-z]+\.txt", TEXT):
        assert (ROOT / name).is_file(), name
