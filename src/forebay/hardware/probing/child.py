"""The process that measures with jax: ``python -m forebay.hardware.probing.child TASK ANSWER``, both paths of JSON files.

It binds itself to the cores of a NUMA node before jax starts its threads, where the task names them. The answer holds the readings,
what was not measured and why, and jax's version.
"""

import json
import os
import sys
from pathlib import Path


def main(task_file: str, answer_file: str) -> None:
    """Do the task of one file and write the other."""
    task = json.loads(Path(task_file).read_text())
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])
    import jax

    from forebay.hardware.probing.timing import Clock

    device = jax.local_devices()[0]
    readings, absent = MEASURE[task["measure"]](device, Clock(task["seconds"]), task)
    answer = {"readings": [reading.to_json() for reading in readings], "absent": absent, "versions": {"jax": jax.__version__}}
    Path(answer_file).write_text(json.dumps(answer))


def _free_device_bytes(device, task: dict) -> int:
    """What the driver calls free, within what jax may take; on a CPU the host's free memory."""
    stats = device.memory_stats() or {}
    allowed = stats.get("bytes_limit", task["free_host_bytes"]) - stats.get("bytes_in_use", 0)
    return min(allowed, task["free_device_bytes"] or allowed)


def _link(device, clock, task: dict):
    from forebay.hardware.probing import link

    copied = link.sizes(_free_device_bytes(device, task), task["free_host_bytes"])
    return link.measure(device, clock, copied, task["node"])


def _arithmetic(device, clock, task: dict):
    from forebay.hardware.probing import arithmetic

    free = _free_device_bytes(device, task)
    memory = [arithmetic.hbm(device, free)] if device.platform != "cpu" else []
    products, absent = arithmetic.matmuls(device, clock, free, task["peaks"])
    return memory + products, absent


MEASURE = {"link": _link, "arithmetic": _arithmetic}

if __name__ == "__main__":
    main(*sys.argv[1:])
