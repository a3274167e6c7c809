"""What came of one compile: the raw answer that the cache keeps and from which a Verdict is made."""

import dataclasses

from forebay.records.reading import build

COMPILED, REFUSED, ABORTED, KILLED, TIMED_OUT, OVER_MEMORY = "compiled", "refused", "aborted", "killed", "timed out", "over memory"
LASTING = (COMPILED, REFUSED)  # what the same program will meet again; the rest depends on the machine and the moment


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``sizes`` maps ``hbm`` and ``host`` to the fields of ``records.Memory``; ``None`` unless ``status`` is ``compiled``."""

    status: str
    reason: str = ""
    sizes: dict[str, dict[str, int]] | None = None
    messages: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    versions: dict = dataclasses.field(default_factory=dict)
    hlo_gzip: bytes = dataclasses.field(default=b"", repr=False)

    def to_json(self) -> dict:
        """Everything but the HLO."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "hlo_gzip"}

    @classmethod
    def from_json(cls, data: dict, hlo_gzip: bytes = b"") -> "Outcome":
        """What ``to_json`` wrote, with its HLO. Raises Unreadable on a field that is not of its type."""
        return dataclasses.replace(build(cls, data), hlo_gzip=hlo_gzip)
