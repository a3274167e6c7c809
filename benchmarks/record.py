"""One compiled program as a row of a table: what the benchmarks print, and what they keep as JSON beside the versions that made it."""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forebay.records.verdict import HOST_TO_HOST, Verdict

RESULTS = Path(__file__).parent / "results"
NOT_COMPILED = "-"
WIDTH = 140


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes per device of one program. ``host_to_host_in_loops`` counts copies inside loops whose two ends are host memory."""

    theme: str
    form: str
    target: str
    hbm_bytes: int | None
    hbm_temp_bytes: int | None
    host_bytes: int | None
    host_temp_bytes: int | None
    host_to_host_in_loops: int
    compile_seconds: float
    fits: bool | None
    reason: str
    note: str = ""
    bound_bytes: int | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def within(self) -> bool | None:
        """Whether the HBM is at most the bound that it is held against; None without a bound."""
        return None if self.bound_bytes is None else self.hbm_bytes is not None and self.hbm_bytes <= self.bound_bytes


def row(theme: str, form: str, verdict: Verdict, **more: Any) -> Row:
    """A row of what the compiler said."""
    hbm, host = verdict.hbm, verdict.host
    return Row(
        theme=theme, form=form, target=verdict.target,
        hbm_bytes=hbm and hbm.total_bytes, hbm_temp_bytes=hbm and hbm.temp_bytes,
        host_bytes=host and host.total_bytes, host_temp_bytes=host and host.temp_bytes,
        host_to_host_in_loops=sum(c.direction == HOST_TO_HOST and c.loop is not None for c in verdict.host_copies),
        compile_seconds=verdict.compile_seconds, fits=verdict.fits, reason=verdict.reason, **more,
    )  # fmt: skip


def show(title: str, rows: Sequence[Row], unit: int, name: str, console: Console | None = None) -> None:
    """Print rows, sizes in ``unit`` bytes called ``name``; "host to host" counts copies inside loops between two places in host memory."""
    table = Table(title=f"{title} ({name} per device, compiled)", title_justify="left")
    for heading in ("", "form"):
        table.add_column(heading, no_wrap=True)
    for heading in ("HBM", "temp", "host", "temp", "host to host", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for k, r in enumerate(rows):
        size = lambda value: NOT_COMPILED if value is None else f"{value / unit:.2f}"  # noqa: E731
        said = {None: "", True: "yes", False: "NO"}[r.within]
        bound = "" if r.bound_bytes is None else f"{size(r.bound_bytes)} {said}"
        counted = (size(r.hbm_bytes), size(r.hbm_temp_bytes), size(r.host_bytes), size(r.host_temp_bytes), str(r.host_to_host_in_loops))
        last = k + 1 == len(rows) or rows[k + 1].theme != r.theme
        table.add_row(r.theme, r.form, *counted, bound, r.note if r.hbm_bytes is not None else r.reason[:160], end_section=last)
    (console or Console(width=WIDTH)).print(table)


def path_of(theme: str, machine: str, folder: Path = RESULTS) -> Path:
    """The file of today's results."""
    return folder / f"{theme}_{machine.replace(':', '-')}_{datetime.date.today().isoformat()}.json"


def keep(theme: str, machine: str, rows: Sequence[Row], versions: dict, folder: Path = RESULTS, **facts: Any) -> Path:
    """Write ``<theme>_<machine>_<date>.json`` and return its path."""
    path = path_of(theme, machine, folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"theme": theme, "machine": machine, "date": datetime.date.today().isoformat(), "versions": dict(versions), **facts}
    record["rows"] = [dataclasses.asdict(r) | {"within": r.within} for r in rows]
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that all tables have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--only", default="", help="only rows whose name holds this text")
    return parser
