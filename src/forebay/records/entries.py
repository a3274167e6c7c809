"""One entry of a plan: a thing that occupies memory, where it stands, and why."""

import dataclasses

ROLES = ("parameter", "gradient", "optimizer", "accumulator", "activation", "batch", "communication")
PLACEMENTS = ("hbm", "host", "recompute")
NO_DISK = "state on a disk (NVMe) is not offered yet: the host's RAM is the farthest place where a tensor can stand"
"""What is said to someone who asks for ``disk`` or ``nvme``."""
LEGAL = {
    "parameter": ("hbm", "host"),
    "gradient": ("hbm", "host"),
    "optimizer": ("hbm", "host"),
    "accumulator": ("hbm", "host"),
    "activation": ("hbm", "host", "recompute"),
    "batch": ("hbm", "host"),
    "communication": ("hbm",),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A placed tensor. ``name`` is ``role:path``; ``bytes_per_device`` counts all of its copies (each layer of a stack).

    ``placement`` is one of ``hbm``, ``host``, ``recompute``. ``layers`` is ``(start, stop)`` where the entry covers
    only part of a stack. ``exposed_ms``, ``ms_per_gib`` and ``runner_up`` are forecasts and stay ``None`` until one is made.
    ``copy_of`` names the entry whose values, cast to ``dtype``, this one holds.
    """

    name: str
    role: str
    bytes_per_device: int
    placement: str
    reason: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    spec: tuple[str | tuple[str, ...] | None, ...] = ()
    layers: tuple[int, int] | None = None
    exposed_ms: float | None = None
    ms_per_gib: float | None = None
    runner_up: str | None = None
    copy_of: str | None = None

    def __post_init__(self):
        assert self.role in ROLES, f"{self.role!r} is no role"
        assert self.placement in LEGAL[self.role], f"{self.name} cannot stand in {self.placement!r}"
        assert self.name.startswith(self.role + ":"), f"{self.name!r} is not the name of a tensor of role {self.role}"
        assert self.bytes_per_device >= 0 and all(n >= 0 for n in self.shape), f"{self.name} has a negative size"
        assert (self.exposed_ms is None) == (self.ms_per_gib is None), f"{self.name} has only one of exposed_ms and ms_per_gib"
