"""The command line: what it loads, what it says, and its exit codes. The answers themselves: tests/training/test_planning.py."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay import cli
from forebay.hardware import Hardware
from forebay.training import planning
from forebay.units import GIB

pytestmark = pytest.mark.oldest

HEAVY = {"jax", "jaxlib", "numpy", "scipy", "optax", "orbax", "flax"}


def _run(*words: str, code: str = "from forebay.cli import main; sys.exit(main())") -> subprocess.CompletedProcess:
    """A fresh process, as a shell would start it; its last line on standard error names the modules that it loaded."""
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def _loaded(done: subprocess.CompletedProcess) -> set[str]:
    return set(done.stderr.splitlines()[-1].split())


def test_the_list_of_commands_loads_nothing_but_the_command_line():
    done = _run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert not _loaded(done) & (HEAVY | {"tyro", "rich"})


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command_loads_no_heavy_module(name):
    done = _run(name, "--help")
    assert done.returncode == 0
    assert f"usage: forebay {name}" in done.stdout
    assert not _loaded(done) & HEAVY


def test_the_command_is_installed_and_names_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("forebay 0.")


def test_no_command_is_help_on_standard_error(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "usage: forebay COMMAND" in said.err


PLAN = ["plan", "--model", "tiny", "--hardware", "h100-sxm:8", "--seq", "64", "--batch", "8"]


def _with(flag: str, *values: str) -> list[str]:
    words = list(PLAN)
    if flag in words:
        position = words.index(flag)
        words[position : position + 2] = []
    return [*words, *(word for value in values for word in (flag, value))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plann"], "there is no command 'plann'; did you mean 'plan'"),
        (_with("--model", "llama-3-8b"), "there is no model 'llama-3-8b'; did you mean 'llama-3.1-8b'"),
        (_with("--model", "missing/config.json"), "missing/config.json"),
        (_with("--model", "no_such_module:make"), "there is no module 'no_such_module'"),
        (_with("--model", "json:lods"), "json has no function 'lods'; did you mean 'loads'"),
        (_with("--hardware", "h100-smx:8"), "'h100-sxm'"),
        (_with("--hardware", "h100-sxm:0"), "at least one device"),
        (_with("--seq"), "--seq is missing"),
        (_with("--batch"), "--batch is missing"),
        (_with("--seq", "0"), "--seq is 0; it must be at least 1"),
        (_with("--batch", "-8"), "--batch is -8; it must be at least 1"),
        (_with("--hbm", "24 gigs"), "'24 gigs' is not a size"),
        (_with("--host-ram", "0GiB"), "the size '0GiB' is zero"),
        (_with("--place", "optimizer"), "--place 'optimizer' is not a rule"),
        (_with("--place", "optimizer=hsot"), "there is no placement 'hsot'; did you mean 'host'"),
        (_with("--out", "no/such/folder/plan.json"), "there is no folder no/such/folder"),
        (["explain", "missing.json"], "missing.json"),
        (["explain"], "explain needs a plan.json, or --oom"),
        (["explain", "--oom", "missing.log"], "there is no file missing.log"),
        (["preflight", "missing.json"], "missing.json"),
        (["hardware", "h100-smx"], "'h100-sxm'"),
    ],
)
def test_input_that_cannot_be_used_is_one_message_and_exit_code_2(words, message, capsys):
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("forebay: ")
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize("words", [["plan"], ["plan", "--model", "tiny", "--seq", "many"], ["preflight"], ["hardware", "--hbm", "1GiB"]])
def test_words_that_do_not_parse_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"forebay {words[0]}" in said.err


def test_ctrl_c_is_exit_code_130_and_no_traceback(monkeypatch, capsys):
    def stopped(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "answer", stopped)
    assert cli.main(PLAN) == 130
    assert capsys.readouterr().err == "forebay: stopped\n"


def test_a_full_disk_is_one_message_with_the_file(monkeypatch, capsys):
    def full(words):
        raise OSError(errno.ENOSPC, "No space left on device", "step.json")

    monkeypatch.setitem(cli.COMMANDS, "explain", cli.Command(run=full, summary=""))
    assert cli.main(["explain"]) == cli.BAD_INPUT
    assert capsys.readouterr().err == "forebay: step.json cannot be written (No space left on device); free some space there\n"


def test_a_reader_that_goes_away_is_no_traceback():
    # What `forebay hardware | head -1` meets: the pipe is closed before the text is written.
    words = [sys.executable, "-m", "forebay", "hardware"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == cli.PIPE_CLOSED


def _saved(folder, **changes) -> str:
    machine = Hardware.named("h100-sxm:8", host_ram="2TiB").to_json()
    entry = {"name": "optimizer:mu", "role": "optimizer", "bytes_per_device": 120 * GIB, "placement": "host"}
    record = {
        "schema": 1, "workload": {"model": "m", "mesh": None, "parameters": 1}, "signature": {}, "hardware": machine, "entries": [entry],
        "options": {"whole_below_bytes": 0, "compiler": {"xla_gpu_experimental_parallel_async_compute_limit": 16}}, "verdict": None,
    }  # fmt: skip
    path = folder / "plan.json"
    path.write_text(json.dumps(record | changes))
    return str(path)


def test_the_environment_of_a_saved_plan_is_text_for_a_shell(tmp_path, capsys, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_parallel_async_compute_limit=4 --xla_gpu_of_tomorrow=1")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    assert cli.main(["explain", _saved(tmp_path), "--env"]) == 0
    said = capsys.readouterr().out
    assert all(line.startswith(("# ", "export ")) for line in said.splitlines())
    assert "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92\n" in said
    assert "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=132\n" in said
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is '100'" in said
    assert "xla_gpu_experimental_parallel_async_compute_limit=4 and the plan 16: the plan's wins" in said
    assert "of_tomorrow" not in said


def test_a_plan_without_a_machine_has_no_environment(tmp_path, capsys):
    assert cli.main(["explain", _saved(tmp_path, hardware=None), "--env"]) == 2
    assert "this plan names no machine: make it with forebay plan --hardware" in capsys.readouterr().err


def test_plan_prints_the_environment_and_nothing_else(tmp_path, capsys, monkeypatch):
    text = Path(_saved(tmp_path)).read_text()
    fits = json.dumps(json.loads(text) | {"verdict": {"fits": True, "host_bytes": 120 * GIB}})
    monkeypatch.setattr(planning, "answer", lambda command: planning.Answer(text=fits, cached=True))
    assert cli.main([*PLAN, "--env"]) == 0
    said = capsys.readouterr().out
    assert all(line.startswith(("# ", "export ")) for line in said.splitlines())
    assert "120.00 GiB in 1 array per device" in said
