"""``probe``: measure this machine and keep what was found under a name.

    here --> DRAM (this process) --> arithmetic, link, link of each NUMA node (a child process each) --> Machine, on disk

A CPU-only machine has no link and no HBM: they are said to be absent, and nothing is put in their place.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from forebay.errors import InputError, MeasurementError
from forebay.hardware import machine as machines
from forebay.hardware.catalog import catalog_names
from forebay.hardware.hardware import Hardware
from forebay.hardware.here import find_here
from forebay.hardware.machine import Machine
from forebay.hardware.memory import free_host_bytes
from forebay.hardware.probing import dram, topology
from forebay.hardware.reading import Reading
from forebay.hardware.store import check_name
from forebay.units import MIB

ARITHMETIC_SECONDS, LINK_SECONDS, NODE_SECONDS = 15.0, 15.0, 5.0
PATIENCE_SECONDS = 120.0
"""Longer than a child's readings take with the start of jax and its compiles: past it the child is stopped."""


def probe(name: str | None = None, *, tell: Callable[[str], None] = lambda _: None) -> Machine:
    """Measure this machine, keep the readings as ``name`` (default: the host's name), and return them.

    From then on ``Hardware.named(name)`` is this machine with its measured figures, and ``Hardware.here()`` uses them. ``tell`` hears
    what is being measured. Of several accelerators the first is measured while the others idle.

    Raises:
        InputError: a name that cannot be used.
        MeasurementError: the accelerator is not to be reached by jax, a measuring process failed, or the folder cannot be written.
    """
    hostname = platform.node()
    name = _usable(name or hostname or "here")
    base = find_here()
    tell("host DRAM")
    readings: list[Reading] = [dram.measure(free_host_bytes())]
    absent, versions = [], {"forebay": metadata.version("forebay"), "numpy": metadata.version("numpy"), "python": platform.python_version()}
    for task in _tasks(base):
        tell(task["said"])
        answer = _measured(task, base)
        readings += [Reading.from_json(r) for r in answer["readings"]]
        absent += answer["absent"]
        versions |= answer["versions"]
    if base.chip.platform == "cpu":
        absent.append("host link: not on this machine, whose host and device memory are one")
        absent.append("HBM: not on this machine")
    now = datetime.datetime.now().isoformat(timespec="seconds")
    found = Machine(
        name=name, measured_at=now, hostname=hostname, base=base, readings=tuple(readings), absent=tuple(absent), versions=versions
    )
    machines.save(found)
    return found


def _usable(name: str) -> str:
    """``name``, where it is no chip of the catalog: a plan for the catalog's chip must not turn into one for this machine."""
    check_name(name)
    if name.lower() in catalog_names():
        raise InputError(f"{name!r} is a chip of the catalog; name this machine otherwise: forebay probe --name my-{name}")
    return name


def _tasks(base: Hardware) -> list[dict[str, Any]]:
    """What is to be measured with jax, each in its own process."""
    common = {"cores": [], "node": None, "peaks": {dtype: float(peak) for dtype, peak in base.peak_flops.items()}}
    tasks = [common | {"measure": "arithmetic", "seconds": ARITHMETIC_SECONDS, "said": "matmuls and device memory"}]
    if base.chip.platform == "cpu":
        return tasks
    tasks.append(common | {"measure": "link", "seconds": LINK_SECONDS, "said": "host link"})
    nodes = topology.nodes(topology.cores())
    for node, cores in nodes.items() if len(nodes) > 1 else ():
        bound = {"measure": "link", "seconds": NODE_SECONDS, "said": f"host link from NUMA node {node}", "cores": cores, "node": node}
        tasks.append(common | bound)
    return tasks


def _measured(task: dict[str, Any], base: Hardware) -> dict[str, Any]:
    """The answer of a child process to ``task``."""
    environment = os.environ | {"JAX_PLATFORMS": base.chip.platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    task = task | {"free_host_bytes": free_host_bytes(), "free_device_bytes": _free_device_bytes(base)}
    with tempfile.TemporaryDirectory(prefix="forebay-probe-") as folder:
        question, answer = Path(folder, "task.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(task))
        words = [sys.executable, "-m", "forebay.hardware.probing.child", str(question), str(answer)]
        try:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"measuring the {task['said']} took longer than {PATIENCE_SECONDS:.0f} s and was stopped") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise MeasurementError(
                f"measuring the {task['said']} of {base.name} failed: {last[:300]}; is jax installed for it ({_extra(base)}), and is the "
                "device free?"
            )
        return json.loads(answer.read_text())


def _extra(base: Hardware) -> str:
    """The optional dependencies that bring jax for the machine."""
    return {"cuda": "pip install 'forebay[cuda13]'", "tpu": "pip install 'forebay[tpu]'"}.get(base.chip.platform, "pip install jax")


def _free_device_bytes(base: Hardware) -> int | None:
    """Free bytes of the first visible GPU by its driver; None where only jax knows."""
    if base.chip.platform != "cuda":
        return None
    words = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip():
        words.append(f"--id={chosen}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.split("\n")[0].strip()
    return int(first) * MIB if done.returncode == 0 and first.isdigit() else None
