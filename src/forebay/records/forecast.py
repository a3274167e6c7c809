"""What the replay of a compiled schedule says about time: step seconds with a band, lanes, exposed copies. Forecast, never measured."""

import dataclasses
from collections.abc import Mapping

from forebay.errors import InputError
from forebay.records.reading import build
from forebay.units import GIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """Host copies of one buffer in one step. ``buffer`` is the user's path of the argument that stands on the host, or says what
    else it is.

    ``held_bytes`` is the size of the host buffer per device, ``moved_bytes`` what crosses the link in a step, ``exposed_seconds``
    the time that the compute lane spends waiting for these copies."""

    buffer: str
    direction: str
    held_bytes: int
    moved_bytes: float
    count: int
    busy_seconds: float
    exposed_seconds: float

    @property
    def exposed_ms_per_gib(self) -> float:
        """Exposed milliseconds for each GiB that stands on the host."""
        return self.exposed_seconds * 1e3 / (self.held_bytes / GIB) if self.held_bytes else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopTime:
    """One loop of the program, all iterations. ``link_use`` is how full the host link is in each direction while the loop runs
    (bytes over rate x seconds); ``bound`` says what sets the pace: ``compute``, ``collectives``, ``link, one way at a time``,
    ``link`` or ``host DRAM``."""

    name: str
    iterations: int
    seconds: float
    path: Mapping[str, float]
    link_use: Mapping[str, float]
    bound: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One step of a compiled program on one machine, replayed. Seconds and bytes are per device and per step.

    ``path`` splits step_seconds by cause and adds up to it: kinds of work, ``contention`` (compute slowed by copies and
    collectives), ``launch gaps``, ``wait for LANE`` (nothing to do but wait). ``lanes`` is the busy time of each lane. ``flops``
    counts what is executed, recomputation included, causal attention as the half that is done. ``unknown_share`` is the part of
    step_seconds costed by bytes alone because the instruction is not known; ``unknowns`` lists those as (what, how many, seconds).
    ``picture`` is how busy each lane is, from 0 to 1, in columns of equal time over the step.
    """

    hardware: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    path: Mapping[str, float]
    lanes: Mapping[str, float]
    domains: Mapping[str, float]
    bytes: Mapping[str, float]
    flops: Mapping[str, float]
    copies: tuple[CopyTime, ...]
    exposed_copy_seconds: float
    exposed_collective_seconds: float
    baseline_seconds: float
    unknown_share: float
    unknowns: tuple[tuple[str, int, float], ...]
    launches: int
    loops: tuple[LoopTime, ...] = ()
    tokens_per_second: float | None = None
    mfu: float | None = None
    notes: tuple[str, ...] = ()
    replay_seconds: float = 0.0
    picture: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        assert self.low_seconds <= self.step_seconds <= self.high_seconds, (self.low_seconds, self.step_seconds, self.high_seconds)
        for lane, columns in self.picture.items():
            assert all(0 <= share <= 1 for share in columns), f"the columns of {lane} are not all from 0 to 1"

    @property
    def exposed_ms_per_gib(self) -> float:
        """Exposed milliseconds of host copies for each GiB that stands on the host; 0 where none does."""
        held = {c.buffer: c.held_bytes for c in self.copies}
        total = sum(held.values())
        return self.exposed_copy_seconds * 1e3 / (total / GIB) if total else 0.0

    def to_json(self) -> dict:
        """Plain values that json writes and ``from_json`` reads."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("path", "lanes", "domains", "bytes", "flops"):
            data[name] = dict(data[name])
        data["copies"] = [dataclasses.asdict(copy) for copy in self.copies]
        data["loops"] = [dataclasses.asdict(loop) for loop in self.loops]
        data["unknowns"] = [list(item) for item in self.unknowns]
        data["notes"] = list(self.notes)
        data["picture"] = {lane: list(columns) for lane, columns in self.picture.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping) -> "Forecast":
        """The forecast that ``to_json`` wrote. Raises InputError on a missing, unknown or mistyped field."""
        try:
            return build(cls, data)
        except InputError as problem:
            raise InputError(f"this is not a forecast that forebay wrote: {problem}; make the plan again") from None
