"""One rate that was measured: every repetition is kept, so that its value, its range and its steadiness can be read off again."""

import math
import statistics
from dataclasses import dataclass

STEADY = 0.10
"""A rate is steady where the middle half of its repetitions lies within this part of their median."""
GROUPS = ("dram", "link", "hbm", "matmul", "not a link")
STATISTICS = ("median", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Rates of one measurement, one per repetition: bytes per second, or for ``matmul`` operations per second.

    ``kind``: of a link ``to_device``, ``to_host``, ``both in one program`` or ``both as two copies``; of a matmul its dtype; else the
    kernel. ``size``: bytes that one repetition counts; of a matmul the side of its square matrices. ``memory`` (link): ``pinned_host``,
    ``unpinned_host`` or ``pageable``. ``beside``: what ran at the same time, if anything. ``node``: the NUMA node that the process was
    bound to. ``not a link`` is what copies between memory kinds give where host and device memory are one.
    """

    group: str
    kind: str
    size: int
    rates: tuple[float, ...]
    statistic: str = "median"
    memory: str = ""
    beside: str = ""
    node: int | None = None

    def __post_init__(self):
        assert self.group in GROUPS and self.statistic in STATISTICS and self.size > 0 and self.rates, self
        assert all(math.isfinite(rate) and rate > 0 for rate in self.rates), self

    @property
    def value(self) -> float:
        """The median or the best of the repetitions, as ``statistic`` says."""
        return max(self.rates) if self.statistic == "best" else statistics.median(self.rates)

    @property
    def low(self) -> float:
        """The slowest repetition."""
        return min(self.rates)

    @property
    def high(self) -> float:
        """The fastest repetition."""
        return max(self.rates)

    @property
    def steady(self) -> bool:
        """Whether the middle half of the repetitions lies within ``STEADY`` of the median; never of fewer than three."""
        if len(self.rates) < 3:
            return False
        first, middle, third = statistics.quantiles(self.rates, n=4, method="inclusive")
        return third - first <= STEADY * middle

    def to_json(self) -> dict:
        """A dict of plain values, the derived ones beside the repetitions for who reads the file."""
        record = {name: getattr(self, name) for name in ("group", "kind", "size", "statistic", "memory", "beside", "node")}
        return record | {"value": self.value, "steady": self.steady, "rates": list(self.rates)}

    @classmethod
    def from_json(cls, record: dict) -> "Reading":
        """The reading that ``to_json`` wrote."""
        fields = ("group", "kind", "size", "statistic", "memory", "beside", "node")
        return cls(rates=tuple(float(rate) for rate in record["rates"]), **{name: record[name] for name in fields})
