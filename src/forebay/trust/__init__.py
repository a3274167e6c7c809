"""Whether a plan can be believed and will run here. In: a plan, its step, the machine, an error. Out: reports for a person.

``preflight`` looks at this host before training; ``explain_oom`` reads an out-of-memory error, a log or an HLO dump. Imports the stages
before it; loads jax only where a program has to be compiled.
"""

from forebay.trust.oom import OomReport, explain_oom
from forebay.trust.preflight import Preflight, preflight

__all__ = ["OomReport", "Preflight", "explain_oom", "preflight"]
