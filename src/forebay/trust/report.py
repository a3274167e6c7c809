"""``Report``: what was checked, line by line: passed, failed, a warning, or skipped because this machine cannot show it."""

import dataclasses

PASSED, WARNING, FAILED, SKIPPED = "passed", "warning", "failed", "skipped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: what was looked at, what came of it, and the numbers. ``detail`` is a text for a person; ``mend``, where it is known, the
    command or the change that mends it. A warning will run, slower or nearer the edge than planned."""

    name: str
    outcome: str
    detail: str
    mend: str = ""

    def __post_init__(self):
        assert self.outcome in (PASSED, WARNING, FAILED, SKIPPED), self.outcome
        assert not self.mend or self.outcome in (WARNING, FAILED), (self.name, self.outcome, self.mend)


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
        lines = []
        for check in self.checks:
            lines.append(f"{check.outcome:8s} {check.name:{width}s}  {check.detail}")
            lines += [f"{'':{width + 10}s} do: {check.mend}"] if check.mend else []
        counts = {outcome: len(self.named(outcome)) for outcome in (PASSED, WARNING, FAILED, SKIPPED)}
        counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome in (PASSED, FAILED))
        return "\n".join([self.title, *lines, counted])


def line(name: str, faults: list[str], passed: str) -> Check:
    """A check that failed with the first few of ``faults``, or passed with the text ``passed``."""
    if not faults:
        return Check(name=name, outcome=PASSED, detail=passed)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Check(name=name, outcome=FAILED, detail="; ".join(faults[:3]) + more)


def skipped(name: str, why: str) -> Check:
    return Check(name=name, outcome=SKIPPED, detail=why)
