"""What is stored: plain dataclasses of plan.json and of verdicts, and the table of version hazards. No logic beyond reading and writing."""

from forebay.records.entries import LEGAL, NO_DISK, PLACEMENTS, ROLES, Entry
from forebay.records.forecast import CopyTime, Forecast, LoopTime
from forebay.records.verdict import Fact, Hazard, HostCopy, Memory, Verdict

__all__ = [
    "LEGAL",
    "NO_DISK",
    "PLACEMENTS",
    "ROLES",
    "CopyTime",
    "Entry",
    "Fact",
    "Forecast",
    "Hazard",
    "HostCopy",
    "LoopTime",
    "Memory",
    "Verdict",
]
