"""Whether a plan can be believed and will run here. In: a plan, its step, the machine, an error. Out: reports for a person.

``preflight`` looks at this host before training; ``explain_oom`` reads an out-of-memory error, a log or an HLO dump. ``check`` runs a small
twin of the user's step, planned beside resident: ``twin`` makes it, ``reference`` and ``planned`` run it, ``compare`` measures, ``gate``
says what came of it; ``forebay.testing`` is the same for pytest. Imports the stages before it; loads jax only where a program has to be
compiled or run.
"""

from forebay.trust.oom import OomReport, explain_oom
from forebay.trust.preflight import preflight
from forebay.trust.report import Check, Report

__all__ = ["Check", "OomReport", "Report", "check", "explain_oom", "preflight"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name != "check":
        raise AttributeError(f"module 'forebay.trust' has no attribute {name!r}")
    from forebay.trust.gate import check

    return check
