"""The ``forebay`` command: parse, call, print. Every command is one row of COMMANDS and loads only what it runs.

Exit codes: 0 done (and ``plan``: it fits); 1 ``plan``: the compiler's answer is not that it fits; 2 input that cannot be used, with one
message on standard error; 130 stopped by Ctrl-C.
"""

import dataclasses
import errno
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from forebay import __version__
from forebay.errors import ForebayError, InputError, ModelError, nearest

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
DONE, DOES_NOT_FIT, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that ``words`` (default: the process's own) name; the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ForebayError as error:
        if isinstance(error, ModelError):
            traceback.print_exception(error.__cause__)
        print(f"forebay: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("forebay: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`forebay hardware | head`): say nothing, now or when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        print(f"forebay: {problem.filename or 'a file'} cannot be written ({problem.strerror}); free some space there", file=sys.stderr)
        return BAD_INPUT


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return BAD_INPUT
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(_help())
        return DONE
    if name == "--version":
        print(f"forebay {__version__}")
        return DONE
    if name not in COMMANDS:
        raise InputError(f"there is no command {name!r}; {nearest(name, COMMANDS)} `forebay --help` lists them")
    return COMMANDS[name].run(rest)


def _help() -> str:
    width = max(map(len, COMMANDS)) + 3
    rows = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    head = "usage: forebay COMMAND [OPTIONS]\n\nTrain JAX models larger than GPU memory, by a plan that the real compiler has proved.\n"
    return "\n".join([head, *rows, "", "`forebay COMMAND --help` says more. Documentation: README.md and docs/."])


def _plan(words: list[str]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process asks another machine's compiler; it must not wake an accelerator of its own
    from forebay.training import planning

    command = _parse("plan", planning.PlanCommand, words)
    answer = planning.answer(command)
    _write_trace(answer.record, command.trace)
    if command.env:
        sys.stdout.write(_environment_of(answer.record))
    elif command.as_json:
        sys.stdout.write(answer.text)
    else:
        from forebay.report.tables import render_plan

        print(render_plan(answer.record, cached=answer.cached))
    return DONE if answer.record["verdict"]["fits"] else DOES_NOT_FIT


def _write_trace(record: dict, path: Path | None) -> None:
    if path is not None:
        from forebay.report.trace import write_trace

        write_trace(record, path)


def _environment_of(record: Mapping) -> str:
    """The lines of `--env` for a plan.json, beside the environment of this shell."""
    from forebay.hardware import Hardware, environment, xla_flags

    if record["hardware"] is None:
        raise InputError("this plan names no machine: make it with forebay plan --hardware")
    machine, arrays = Hardware.from_json(record["hardware"]), environment.host_arrays(record)
    notes = [*environment.too_small(machine, arrays, os.environ)]
    notes += xla_flags.contradictions(record["options"].get("compiler", {}), os.environ.get("XLA_FLAGS", ""))
    return environment.render(environment.settings(machine, arrays, os.environ), notes)


def _train(words: list[str]) -> int:
    from forebay.hardware import Hardware, environment
    from forebay.training.config import from_command_line

    config = from_command_line(words)
    here = Hardware.here()
    if here.chip.platform == "cpu":
        # jax, told nothing, would try each installed accelerator plugin first and print a traceback for each.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    environment.fill(os.environ, here)
    from forebay.training.loop import train  # only now: this loads jax

    run = train(config)
    if run.profile:
        from forebay.report.profile import render_profile

        print(render_profile(run.profile))
    return run.exit_code


def _explain(words: list[str]) -> int:
    from tyro.conf import arg

    def explain(
        plan: Annotated[Path | None, arg(metavar="[PLAN]")] = None,
        entry: Annotated[str | None, arg(metavar="[ENTRY]")] = None,
        /,
        *,
        oom: Annotated[Path | None, arg(metavar="LOG_OR_DUMP")] = None,
        trace: Annotated[Path | None, arg(metavar="FILE")] = None,
        env: bool = False,
    ) -> int:
        """Show a plan.json, or some of its entries; or say what ran out of memory.

        Args:
            plan: The file that `forebay plan --out` or a run wrote.
            entry: The name of an entry, a role, or a pattern such as optimizer:0/mu/*.
            oom: A saved log of a run that ran out of memory, or an HLO dump (*.after_optimizations.txt); PLAN names its buffers.
            trace: Write the forecast step here as a trace for ui.perfetto.dev (.json or .json.gz).
            env: Print what must be set before jax is imported, for a shell: eval "$(forebay explain plan.json --env)".
        """
        os.environ["JAX_PLATFORMS"] = "cpu"
        from forebay.plan import Plan

        loaded = None if plan is None else Plan.load(plan)
        if oom is not None:
            from forebay.trust.oom import explain_file

            print(explain_file(oom, loaded))
            return DONE
        if loaded is None:
            raise InputError("explain needs a plan.json, or --oom with a log or an HLO dump")
        _write_trace(loaded.to_json(), trace)
        return _show(loaded.to_json(), entry, env)

    return _parse("explain", explain, words)


def _show(record: dict, entry: str | None, env: bool) -> int:
    from forebay.report.tables import render_entries, render_plan

    if env:
        sys.stdout.write(_environment_of(record))
    else:
        print(render_entries(record, entry) if entry else render_plan(record))
    return DONE


def _preflight(words: list[str]) -> int:
    from tyro.conf import arg

    def preflight(plan: Annotated[Path, arg(metavar="PLAN")], /, *, out: Annotated[Path | None, arg(metavar="FOLDER")] = None) -> int:
        """What on this host could stop a plan: RAM and container limits, pinned memory, NUMA, memory fraction, disk.

        Exit code 0: nothing; 1: a line failed.

        Args:
            plan: The plan.json to be run here.
            out: The folder of the run, where checkpoints go; up to 128 MiB are written there and removed.
        """
        os.environ["JAX_PLATFORMS"] = "cpu"
        from forebay.plan import Plan
        from forebay.trust import preflight as look

        report = look(Plan.load(plan), folder=out)
        print(report)
        return DONE if report.passed else DOES_NOT_FIT

    return _parse("preflight", preflight, words)


def _check(words: list[str]) -> int:
    from forebay.hardware import Hardware

    if Hardware.here().chip.platform == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from forebay.training import checking

    report = checking.report(_parse("check", checking.CheckCommand, words))
    print(report)
    return DONE if report.passed else DOES_NOT_FIT


def _hardware(words: list[str]) -> int:
    from forebay.hardware import Hardware
    from forebay.report.hardware import HardwareCommand, render_catalog, render_hardware

    name = _parse("hardware", HardwareCommand, words).name
    print(render_hardware(Hardware.named(name)) if name else render_catalog())
    return DONE


def _probe(words: list[str]) -> int:
    from forebay.hardware import probe
    from forebay.report.probe import ProbeCommand, render_machine

    command = _parse("probe", ProbeCommand, words)
    print(render_machine(probe(command.name, tell=lambda what: print(f"measuring: {what}", file=sys.stderr))))
    return DONE


def _parse(name: str, what: Callable, words: list[str]):
    """What tyro makes of ``words``: an instance of a dataclass, or the result of a function."""
    import tyro

    return tyro.cli(what, args=words, prog=f"forebay {name}", config=(tyro.conf.FlagCreatePairsOff,))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: its function from words to an exit code, and its line in `forebay --help`."""

    run: Callable[[list[str]], int]
    summary: str


COMMANDS = {
    "plan": Command(run=_plan, summary="what a train step needs on a machine that is not here, from that machine's real compiler"),
    "explain": Command(run=_explain, summary="what a plan.json says: where each tensor stands, why, and what the compiler made of it"),
    "preflight": Command(run=_preflight, summary="what on this host could stop a plan, and the command that mends it"),
    "check": Command(run=_check, summary="some steps of a small twin of a model on this machine, planned beside resident, line by line"),
    "train": Command(run=_train, summary="train a Llama-family model on text, under a plan"),
    "probe": Command(
        run=_probe, summary="measure this machine: host link, DRAM, device memory, matmuls; kept and used from then on by name"
    ),
    "hardware": Command(run=_hardware, summary="the machines that forebay knows, every figure with its source"),
}
