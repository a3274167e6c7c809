"""The Perfetto trace of a plan's compiled step. plan.json holds no HLO: the schedule is read from the compile cache, by fingerprint.

In: the record of a plan.json. Out: a file that ui.perfetto.dev opens; loops appear as their first, a steady and their last iteration.
"""

import gzip
from collections.abc import Mapping
from pathlib import Path

from forebay.compiler import cache
from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware
from forebay.timeline import events, write_perfetto


def write_trace(record: Mapping, path: Path) -> Path:
    """Write the forecast of the plan's step to ``path`` as a trace, gzipped where the name ends in ``.gz``.

    Raises:
        PlanError: the plan has no compiled step, the cache no longer holds it, or the file cannot be written.
        InputError: a figure of the machine that the forecast needs is not known.
    """
    verdict, hardware = record.get("verdict"), record.get("hardware")
    if not verdict or not hardware or not verdict.get("hbm"):
        raise PlanError("there is no trace to write: this plan has no compiled step for a machine; make it with `forebay plan`")
    found, said = cache.read(verdict["fingerprint"])
    if found is None:
        why = said[0] if said else "the compile cache no longer holds this plan's step"
        raise PlanError(f"there is no trace to write: {why}. Run `forebay plan` again with --trace {path}")
    machine = Hardware.from_json(dict(hardware))
    title = f"{record['workload'].get('model') or 'step'} on {machine.name} (forecast)"
    try:
        return write_perfetto(events(gzip.decompress(found.hlo_gzip).decode(), machine), path, title)
    except OSError as error:
        raise InputError(f"--trace {path} cannot be written ({error.strerror})") from error
