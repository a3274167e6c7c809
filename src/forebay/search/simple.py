"""The plans that a person would try first: as written and with everything recomputed, each with its state, or all, on the host."""

from forebay.hardware import Hardware
from forebay.plan import Plan
from forebay.search import choices
from forebay.search.formulating import EVERY_ACTIVATION
from forebay.search.problem import HOST, RECOMPUTE, Choice, Problem
from forebay.search.proving import Candidate
from forebay.workload import Workload

AWAY = {"": (), ", optimizer state on host": ("optimizer",), ", parameters and optimizer state on host": ("parameter", "optimizer")}


def plans(work: Workload, hardware: Hardware, problem: Problem) -> dict[Choice, Candidate]:
    """Each by its choice in ``problem``, the one without an option; the step as written first."""
    everywhere = {EVERY_ACTIVATION: RECOMPUTE} if any(t.role == "activation" for t in work.tensors) else {}
    made: dict[Choice, Candidate] = {}
    for words, rules in (("as written", {}), ("everything recomputed", everywhere)):
        for away, roles in AWAY.items():
            placed = rules | dict.fromkeys(roles, HOST)
            choice = choices.choice_of(problem, Plan.by_hand(work, placed, hardware=hardware))
            made.setdefault(choice, Candidate(summary=words + away, choice=choice, rules=placed, form=()))
    return made
