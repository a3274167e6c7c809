"""The user's ``XLA_FLAGS`` held against a plan: which of them contradict its compiler options, or turn off what it was judged with.

A compiler option travels with the program and goes over the flag of the same name, a list of passes as a whole. (Seen on jaxlib 0.10.2 and
0.12.0.1 in the dumped debug options of a program compiled with both.) The compile worker drops the user's flags, so a flag that the plan
has no option for changes the program that runs, and not the one that was judged. Flags that this table does not know are left alone.
"""

import dataclasses
import shlex
from collections.abc import Mapping

PASSES = "xla_disable_hlo_passes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relied:
    """A flag that plans rely on: the value they are judged with, and what another value does."""

    judged: str
    otherwise: str


RELIED_ON = {
    "xla_gpu_enable_host_memory_offloading": Relied(
        judged="false", otherwise="XLA's memory limit then counts host memory otherwise, and the schedule is another"
    ),
    "xla_gpu_enable_pipelined_host_offloading": Relied(
        judged="false", otherwise="host copies move by one iteration; a loss regression was reported with it (openxla/xla 37979, 45393)"
    ),
    "xla_gpu_experimental_parallel_async_compute_limit": Relied(judged="2", otherwise="another number of host slices is in flight"),
    "xla_gpu_memory_limit_slop_factor": Relied(
        judged="95", otherwise="the scheduler's memory limit, and with it HBM and the schedule, are others"
    ),
    "xla_gpu_enable_analytical_sol_latency_estimator": Relied(
        judged="true", otherwise="the scheduler that hides copies behind compute is off"
    ),
    "xla_gpu_disable_async_collectives": Relied(judged="", otherwise="collectives that the forecast hides behind compute are waited for"),
}
OFFLOAD_PASSES = {
    "host-offloader": "nothing is moved to host memory as the plan asks",
    "host-offload-legalize": "copies to and from the host are refused or made on the host",
}


def read_flags(text: str) -> dict[str, str]:
    """``--name=value`` words of XLA_FLAGS as a dict; a word without a value is ``true``. The last of a name counts, as in XLA."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    pairs = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return {name: value if equals else "true" for name, equals, value in pairs}


def contradictions(options: Mapping[str, object], flags_text: str) -> tuple[str, ...]:
    """A line for each flag that is at odds with the plan's compiler ``options`` or with what plans rely on: both values, and which wins."""
    found = []
    for name, value in read_flags(flags_text).items():
        if name in options:
            if not _same(value, options[name]):
                found.append(
                    f"XLA_FLAGS has {name}={value} and the plan {_plain(options[name])}: the plan's wins, it travels with the program"
                )
        elif name == PASSES:
            found += _passes(value)
        elif name in RELIED_ON and not _same(value, RELIED_ON[name].judged):
            relied = RELIED_ON[name]
            found.append(
                f"XLA_FLAGS has {name}={value} and the plan was judged with {relied.judged or 'none'}: yours wins, the plan sets none; "
                f"{relied.otherwise}. Take it out of XLA_FLAGS, or give it to the plan as a compiler option"
            )
    return tuple(found)


def _passes(value: str) -> list[str]:
    off = [name for name in value.split(",") if name in OFFLOAD_PASSES]
    return [f"XLA_FLAGS turns off the pass {name}, which the plan relies on, and yours wins: {OFFLOAD_PASSES[name]}" for name in off]


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _same(flag: str, option: object) -> bool:
    truth = {"1": "true", "0": "false"} if _plain(option) in ("true", "false") else {}
    return truth.get(flag.lower(), flag.lower()) == _plain(option).lower()
