"""What every compiled program is looked at for, whatever was planned: five facts, each held or not, with what was found."""

from collections.abc import Sequence

from forebay.compiler.hlo import Findings
from forebay.records.verdict import HOST_TO_HOST, Fact
from forebay.units import show_bytes


def validate(findings: Findings, honoured: Sequence[str], ignored: Sequence[str]) -> tuple[Fact, ...]:
    """The facts of a program whose findings are ``findings``; ``honoured`` and ``ignored`` name what was asked onto the host."""
    looped = [copy for copy in findings.host_copies if copy.loop]
    inside = [f"{c.name} ({show_bytes(c.bytes)} in {c.loop})" for c in looped if c.direction == HOST_TO_HOST]
    waiting = [f"{c.name} ({c.direction}, {show_bytes(c.bytes)})" for c in looped if not c.asynchronous or c.work_between == 0]
    again = findings.remat_instructions
    return (
        _fact("host memory where asked", ignored, f"{len(honoured)} of {len(honoured)} asked onto the host stand there"),
        _fact("no copies from host to host in loops", inside, "none"),
        _fact("no computation on the host", findings.host_compute, "none"),
        _fact("host copies in loops run beside work", waiting, f"{len(looped)} of {len(looped)} have work between start and end"),
        _fact("no rematerialisation that nobody asked for", [f"{again} .remat instructions of XLA's own pass"] if again else [], "none"),
    )


def _fact(name: str, faults: Sequence[str], good: str) -> Fact:
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    return Fact(name=name, held=not faults, found=", ".join(faults[:5]) + more if faults else good)
