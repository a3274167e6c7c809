"""What the target's compiler said of a program: sizes, host copies, hazards, and whether it fits."""

import dataclasses
import gzip
from collections.abc import Mapping

from forebay.errors import InputError
from forebay.records.reading import build
from forebay.units import show_bytes

TO_DEVICE, TO_HOST, HOST_TO_HOST = "to_device", "to_host", "host_to_host"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device of one memory space of a compiled program. ``code_bytes`` is not part of the total.

    ``allocated_bytes``: what the compiler allocates in all, where it tells. XLA:TPU does, and its temp size then counts some buffers
    twice: its own limit is held against what it allocates (docs/evidence.md).
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    allocated_bytes: int | None = None

    @property
    def sum_bytes(self) -> int:
        """argument + output - alias + temp."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def total_bytes(self) -> int:
        """What the program needs at once: what the compiler allocates, or the sum of the parts where it does not tell."""
        return self.sum_bytes if self.allocated_bytes is None else self.allocated_bytes

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    @classmethod
    def from_json(cls, data: Mapping) -> "Memory":
        return build(cls, {key: value for key, value in data.items() if key != "total_bytes"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """One copy that touches host memory. ``bytes`` is per device and per execution.

    ``work_between`` counts the instructions with work of their own that are scheduled between its start and its end (``None`` where it
    has no start). ``loop`` names the innermost while body around it (``None`` outside loops); ``trip_count`` is how often the copy runs in
    one call of the program, over all loops around it (``None`` where the compiler does not know).
    """

    name: str
    direction: str
    bytes: int
    asynchronous: bool
    loop: str | None = None
    trip_count: int | None = 1
    work_between: int | None = None

    def __post_init__(self):
        assert self.direction in (TO_DEVICE, TO_HOST, HOST_TO_HOST), self.direction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A known trap that this program meets with this version of the compiler, and what to do about it."""

    id: str
    message: str
    action: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that every compiled program is looked at for: whether it ``held``, and what was found, as a sentence."""

    name: str
    held: bool
    found: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The compiler's answer. ``fits`` is ``None`` where nobody knows: the compile was stopped before it ended.

    ``hbm`` and ``host`` are per device and ``None`` where nothing was compiled. ``attention`` counts the attention kernels in
    the program by their custom call. ``honoured`` and ``ignored`` name what was asked onto the host and does, or does not, stand there.
    """

    fits: bool | None
    reason: str
    hbm: Memory | None
    host: Memory | None
    hbm_budget_bytes: int
    host_budget_bytes: int
    host_copies: tuple[HostCopy, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    facts: tuple[Fact, ...] = ()
    honoured: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    attention: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remat_instructions: int = 0
    compile_seconds: float = 0.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    target: str = ""
    fingerprint: str = ""
    cached: bool = False
    hlo_gzip: bytes = dataclasses.field(default=b"", repr=False, compare=False)

    @property
    def compiled(self) -> bool:
        """Whether the compiler ended and gave sizes."""
        return self.hbm is not None

    @property
    def hlo(self) -> str:
        """The scheduled HLO text. Raises InputError where there is none: a failed compile, or a verdict read from a file."""
        if not self.hlo_gzip:
            raise InputError(f"this verdict holds no HLO ({self.reason}); judge the program again to have it")
        return gzip.decompress(self.hlo_gzip).decode()

    def to_json(self) -> dict:
        """Everything but the HLO, of types that json writes."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "hlo_gzip"}
        for name in ("hbm", "host"):
            data[name] = data[name] and data[name].to_json()
        for name in ("host_copies", "hazards", "facts"):
            data[name] = [dataclasses.asdict(item) for item in data[name]]
        for name in ("honoured", "ignored", "messages"):
            data[name] = list(data[name])
        for name in ("attention", "versions", "compiler_options"):
            data[name] = dict(data[name])
        return data

    @classmethod
    def from_json(cls, data: Mapping) -> "Verdict":
        """The verdict that ``to_json`` wrote, without its HLO. Raises InputError on a missing, unknown or mistyped field."""
        data = dict(data)
        for name in ("hbm", "host"):
            if isinstance(data.get(name), dict):
                data[name] = {key: value for key, value in data[name].items() if key != "total_bytes"}
        try:
            return build(cls, data)
        except InputError as problem:
            raise InputError(f"this is not a verdict that forebay wrote: {problem}; judge the program again") from None

    def __str__(self) -> str:
        words = {True: "fits", False: "does not fit", None: "unknown"} if self.compiled else {False: "does not compile", None: "unknown"}
        lines = [f"{words[self.fits]}{' (compiled)' if self.compiled else ''}: {self.reason}"]
        for title, memory, budget in (("HBM", self.hbm, self.hbm_budget_bytes), ("host", self.host, self.host_budget_bytes)):
            if memory is not None:
                parts = ("argument", "output", "alias", "temp")
                detail = ", ".join(f"{part} {show_bytes(getattr(memory, part + '_bytes'))}" for part in parts)
                lines.append(f"  {title:4s} {show_bytes(memory.total_bytes)} of {show_bytes(budget)} per device ({detail})")
        lines += [f"  not held: {fact.name}: {fact.found}" for fact in self.facts if not fact.held]
        lines += [f"  hazard {hazard.id}: {hazard.message} -> {hazard.action}" for hazard in self.hazards]
        return "\n".join(lines)
