"""One figure and where it comes from. Nothing in a forecast rests on a number whose origin cannot be printed."""

from dataclasses import dataclass, replace

from forebay.records.reading import build

KINDS = ("datasheet", "publication", "compiler", "measured", "derived", "assumption", "given")
"""Where figures come from: a maker's page, a third party's measurement, the target's compiler, a measurement on this
machine, arithmetic from a relative in the same family, a choice of forebay's, or the user."""
_LARGEST = 1e30  # beyond any byte, rate or count of a machine, and products of two are still numbers


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value in the unit that the field's name states, with its source, the date of the source, and what kind of source it is."""

    value: float
    source: str
    date: str | None = None
    kind: str = "datasheet"

    def __post_init__(self):
        assert self.source, f"a figure of {self.value} without a source"
        assert self.kind in KINDS, f"{self.kind!r} is not one of {KINDS}"
        assert 0 <= self.value < _LARGEST, f"a figure of {self.value} from {self.source}"

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def per(self, count: int) -> "Quantity":
        """This figure divided evenly over ``count`` devices; itself when there is one."""
        if count == 1:
            return self
        exact = isinstance(self.value, int) and self.value % count == 0
        return replace(self, value=self.value // count if exact else self.value / count, source=f"{self.source}, over {count} devices")

    def to_json(self) -> dict:
        """A dict of plain values."""
        record = {"value": self.value, "source": self.source, "kind": self.kind}
        return record | ({"date": self.date} if self.date else {})

    @classmethod
    def from_json(cls, record: dict) -> "Quantity":
        """The figure that ``to_json`` wrote."""
        return build(cls, record)

    @classmethod
    def known_or_none(cls, record: dict | None) -> "Quantity | None":
        """The figure that ``to_json`` wrote, or None for one that is unknown."""
        return None if record is None else cls.from_json(record)
