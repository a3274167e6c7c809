"""``Report``: what was checked, line by line: passed, failed, or skipped because this machine cannot show it."""

import dataclasses

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: what was looked at, what came of it, and the numbers. ``detail`` is a text for a person."""

    name: str
    outcome: str
    detail: str

    def __post_init__(self):
        assert self.outcome in (PASSED, FAILED, SKIPPED), self.outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Checks in the order in which they were made. ``title`` says what was checked, and where."""

    title: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; a skipped one is no failure, and no proof either."""
        return not self.named(FAILED)

    def named(self, outcome: str) -> tuple[Check, ...]:
        """The checks of one outcome."""
        return tuple(check for check in self.checks if check.outcome == outcome)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{check.outcome:8s} {check.name:{width}s}  {check.detail}" for check in self.checks]
        counted = ", ".join(f"{len(self.named(outcome))} {outcome}" for outcome in (PASSED, FAILED, SKIPPED))
        return "\n".join([self.title, *lines, counted])


def line(name: str, faults: list[str], passed: str) -> Check:
    """A check that failed with the first few of ``faults``, or passed with the text ``passed``."""
    if not faults:
        return Check(name=name, outcome=PASSED, detail=passed)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Check(name=name, outcome=FAILED, detail="; ".join(faults[:3]) + more)


def skipped(name: str, why: str) -> Check:
    return Check(name=name, outcome=SKIPPED, detail=why)
