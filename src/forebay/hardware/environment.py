"""What must stand in the environment before jax starts its backend: jax and XLA read these variables once, for the first device.

In: a machine, the bytes of each array that a plan keeps on the host, and the environment as it is. Out: ``Setting``s. Nothing here
changes a process but ``fill``, which is given the environment to change. On a TPU libtpu gives the whole HBM to programs, and on a CPU
there is no pool, so nothing is to be set there.
"""

import dataclasses
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from forebay.hardware import pool
from forebay.hardware.hardware import Hardware
from forebay.units import GIB, show_bytes

FRACTION, NEW_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
FRACTIONS = NEW_FRACTION, FRACTION
"""In the order in which jax reads them."""
DEFAULT_FRACTION = 0.75
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
HOST_LIMIT, HOST_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable, its value (None: leave it as it is), and the reason with its numbers."""

    name: str
    value: str | None
    reason: str


def host_arrays(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Bytes per device of each array that the plan of a plan.json keeps in host memory.

    Arguments of the step by their entries, and what the compiler found beyond those (activations, temporaries) as one array. Without a
    verdict every entry on the host by its planned size.
    """
    hosted = [entry for entry in record["entries"] if entry["placement"] == "host" and entry["bytes_per_device"]]
    total = (record.get("verdict") or {}).get("host_bytes")
    if total is None:
        return tuple(entry["bytes_per_device"] for entry in hosted)
    stored = [entry["bytes_per_device"] for entry in hosted if entry["role"] in ("parameter", "optimizer")]
    rest = total - sum(stored)
    return (*stored, rest) if rest > 0 else tuple(stored)


def settings(hardware: Hardware, host_arrays: Sequence[int], environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """What a plan on ``hardware`` needs. ``host_arrays``: bytes per device of each array in host memory, temporaries included."""
    platform = hardware.target.platform
    if platform == "tpu":
        return (Setting(name=FRACTION, value=None, reason="libtpu gives all of its HBM to programs and knows no such fraction"),)
    if platform == "cpu":
        return (Setting(name=FRACTION, value=None, reason="a CPU has no pool of device memory"),)
    return (_fraction(hardware, environment), _preallocate(), *_host_pool(hardware, host_arrays), _flags())


def _fraction(hardware: Hardware, environment: Mapping[str, str]) -> Setting:
    part, raw = hardware.memory_fraction, hardware.hbm_bytes
    reason = (
        f"the plan's budget of {show_bytes(hardware.hbm_budget_bytes)} is {part:g} of {show_bytes(raw)} less a reserve of "
        f"{show_bytes(hardware.hbm_reserve_bytes)}; jax's own {DEFAULT_FRACTION} would give {show_bytes(raw * DEFAULT_FRACTION)}"
    )
    if NEW_FRACTION in environment:  # jax refuses to start with both names
        return Setting(name=FRACTION, value=None, reason=f"{NEW_FRACTION}={environment[NEW_FRACTION]} stands already; {reason}")
    return Setting(name=FRACTION, value=f"{part:g}", reason=reason)


def _preallocate() -> Setting:
    return Setting(
        name=PREALLOCATE, value="true", reason="one pool from the start: one that grows is left in pieces, and the plan fills it"
    )


def _host_pool(hardware: Hardware, host_arrays: Sequence[int]) -> tuple[Setting, ...]:
    total, count = sum(host_arrays), hardware.devices_per_host
    if not total:
        return (Setting(name=HOST_LIMIT, value=None, reason="the plan keeps nothing in host memory"),)
    growing, budget = pool.needed_gib(host_arrays), hardware.host_budget_bytes_per_device
    needs = f"{show_bytes(total)} in {len(host_arrays)} array{'s' if len(host_arrays) > 1 else ''} per device"
    if growing <= pool.DEFAULT_GIB and budget >= pool.DEFAULT_GIB * GIB:
        return (Setting(name=HOST_LIMIT, value=None, reason=f"{needs}; the default of {pool.DEFAULT_GIB} GiB for each device is enough"),)
    if growing * GIB <= budget:
        reason = (
            f"{needs}, {growing} GiB with the pool's own tails and a tenth; the default is {pool.DEFAULT_GIB}; {count} devices to a host"
        )
        return (Setting(name=HOST_LIMIT, value=str(growing), reason=reason),)
    whole = pool.preallocated_gib(host_arrays)
    reason = (
        f"{needs} and a tenth. A pool that grows would need {growing} GiB, and each device's share of the host is {show_bytes(budget)}"
        + ("" if whole * GIB <= budget else ", which is less than even this")
    )
    pinned = "one region from the start, with no tails; all of it is pinned then"
    return Setting(name=HOST_LIMIT, value=str(whole), reason=reason), Setting(name=HOST_PREALLOCATE, value="true", reason=pinned)


def _flags() -> Setting:
    return Setting(name="XLA_FLAGS", value=None, reason="the plan's options travel with the program, as compiler options")


def render(chosen: Sequence[Setting], notes: Sequence[str] = ()) -> str:
    """Lines for a shell to evaluate: ``export NAME=value`` under a comment, and comments alone for what is left as it is."""
    lines = []
    for setting in chosen:
        lines.append(_comment(f"{setting.name}: {'' if setting.value else 'not set; '}{setting.reason}"))
        if setting.value is not None:
            lines.append(f"export {setting.name}={shlex.quote(setting.value)}")
    return "\n".join([*lines, *map(_comment, notes)]) + "\n"


def _comment(text: str) -> str:
    return "# " + " ".join(text.split())


def fill(environment: MutableMapping[str, str], hardware: Hardware) -> None:
    """Set in ``environment`` what any plan on ``hardware`` needs, before jax is loaded and a plan is made. What stands there stays.

    The host pool may grow to the device's share of the host's budget: no plan that fits needs more, and nothing is taken before it is used.
    """
    if hardware.target.platform != "cuda":
        return
    for setting in (_fraction(hardware, environment), _preallocate()):
        if setting.value is not None:
            environment.setdefault(setting.name, setting.value)
    environment.setdefault(HOST_LIMIT, str(max(1, hardware.host_budget_bytes_per_device // GIB)))


def too_small(hardware: Hardware, host_arrays: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each variable of ``environment`` that leaves a plan less than it needs, with both numbers."""
    if hardware.target.platform != "cuda":
        return ()
    found = []
    name, fraction = standing_fraction(environment)
    if fraction < hardware.memory_fraction:
        gives, wants = fraction * hardware.hbm_bytes, hardware.memory_fraction * hardware.hbm_bytes
        found.append(
            f"{name} is {_said(environment, name)}: {show_bytes(gives)} of each device; the plan counts on {show_bytes(wants)}. "
            f"Set it to {hardware.memory_fraction:g}"
        )
    limit, needed = host_pool(host_arrays, environment)
    if needed > limit:
        found.append(
            f"{HOST_LIMIT} is {_said(environment, HOST_LIMIT)}: {limit:g} GiB of pinned memory for each device; the plan keeps "
            f"{show_bytes(sum(host_arrays))} there and its pool needs {needed} GiB. Set it to {needed}"
        )
    return tuple(found)


def standing_fraction(environment: Mapping[str, str]) -> tuple[str, float]:
    """The variable that jax reads, and the part of a device's memory that it gives to the pool."""
    name = NEW_FRACTION if NEW_FRACTION in environment else FRACTION
    return name, _number(environment.get(name), DEFAULT_FRACTION)


def host_pool(host_arrays: Sequence[int], environment: Mapping[str, str]) -> tuple[float, int]:
    """GiB of pinned memory that each device may take, as ``environment`` stands, and that arrays of these bytes need."""
    one_region = environment.get(HOST_PREALLOCATE, "").lower() in ("true", "1")
    limit = _number(environment.get(HOST_LIMIT), 16 if one_region else pool.DEFAULT_GIB)
    return limit, (pool.preallocated_gib if one_region else pool.needed_gib)(host_arrays) if sum(host_arrays) else 0


def _number(text: str | None, otherwise: float) -> float:
    try:
        return float(text) if text else otherwise
    except ValueError:
        return 0.0  # XLA and jax refuse it: nothing is enough


def _said(environment: Mapping[str, str], name: str) -> str:
    return repr(environment[name]) if name in environment else "not set"
