"""What the compiled twin says on the accelerator at hand: bytes as promised, placements that were ignored, copies that overlap.

Only a platform with a host memory of its own can show any of it; a CPU drops every offload, so there each line is skipped, never passed.
"""

from collections.abc import Sequence

from forebay.compiler.hlo import Findings, read_hlo
from forebay.compiler.honour import compare
from forebay.compiler.lines import Module, read_lines
from forebay.plan import Plan
from forebay.records import Verdict
from forebay.trust.report import Check, line, skipped
from forebay.units import MIB, show_bytes

SLACK_BYTES = 4 * MIB  # what an allocator rounds up to, over a few hundred arrays, and the metrics
_NO_WORK = set("parameter constant tuple get-tuple-element bitcast opt-barrier after-all add-dependency".split())


def ignored(plan: Plan, findings: Findings | None) -> Check:
    """Placements on the host that the compiler ignored: in the twin compiled here, else in the verdict that the plan carries."""
    name, verdict = "ignored placements", plan.verdict
    if not any(e.placement == "host" and e.role in ("parameter", "optimizer", "activation", "accumulator") for e in plan.entries):
        return skipped(name, "the plan asks for nothing on the host")
    if findings is not None:
        honoured, dropped = compare((), findings, plan.entries)
        return line(name, _named(dropped), f"{len(honoured)} host placements are in the program compiled here")
    if isinstance(verdict, Verdict) and verdict.compiled:
        where = f"the verdict for {verdict.target}"
        return line(name, _named(verdict.ignored), f"{len(verdict.honoured)} host placements are honoured in {where} (compiled)")
    return skipped(name, "this machine has no host memory apart, and the plan carries no verdict; forebay.judge gives one")


def _named(names: Sequence[str]) -> list[str]:
    return [f"{name} was asked onto the host and the compiled program does not put it there" for name in names]


def overlap(text: str) -> Check:
    """Whether the host copies in the loops of a scheduled program run beside other work.

    A twin's layers are small, and the scheduler may find nothing to put beside some of its copies: those are named, and the line fails
    only where no copy overlaps. What the rest costs at full size is the forecast's to say.
    """
    copies = [copy for copy in read_hlo(text).host_copies if copy.loop]
    if not copies:
        return skipped("overlap", "the compiled program has no host copies in loops")
    module = read_lines(text)
    alone = [copy for copy in copies if not _apart(module, copy)]
    if len(alone) == len(copies):
        said = [f"{copy.name} ({copy.direction}, {show_bytes(copy.bytes)}) is waited for at once" for copy in alone]
        return line("overlap", said, "")
    named = f"; not {', '.join(copy.name for copy in alone[:3])}{', ...' if len(alone) > 3 else ''}" if alone else ""
    return line("overlap", [], f"{len(copies) - len(alone)} of {len(copies)} host copies in loops have work beside them (compiled){named}")


def _apart(module: Module, copy) -> bool:
    """Whether other work is scheduled between the start of a copy and the instruction that waits for it."""
    if not copy.asynchronous:
        return False
    start = module.by_name[copy.name]
    scheduled = module.members[start.computation]
    behind = scheduled[scheduled.index(start) + 1 :]
    done = next((k for k, item in enumerate(behind) if copy.name in item.operands), len(behind))
    return any(item.opcode not in _NO_WORK and not item.opcode.endswith(("-start", "-done")) for item in behind[:done])


def memory(used: tuple[tuple[int, int, int], ...] | None, state_bytes: int, step_bytes: int) -> Check:
    """Bytes of HBM that the devices say are in use, against the plan's for the state and the compiler's for the whole step.

    ``used``: of each device before the state, with it, and at the highest point; None where the backend does not tell.
    """
    if used is None:
        return skipped("memory", "this backend does not count the memory that is in use")
    before, with_state, highest = (max(column) for column in zip(*used, strict=True))
    state, step = with_state - before, highest - before
    faults = []
    if abs(state - state_bytes) > SLACK_BYTES:
        faults.append(f"the state takes {show_bytes(state)} of HBM per device (measured), {show_bytes(state_bytes)} planned")
    if step > step_bytes + SLACK_BYTES:
        faults.append(f"the step takes {show_bytes(step)} of HBM per device (measured), {show_bytes(step_bytes)} compiled")
    said = f"state {show_bytes(state)}, step {show_bytes(step)} of HBM per device (measured), {show_bytes(step_bytes)} compiled"
    return line("memory", faults, said)
