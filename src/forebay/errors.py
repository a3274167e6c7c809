"""Errors that a user can act on: each says what happened, the numbers, which tensor, and what to do next."""

import difflib
from collections.abc import Iterable


class ForebayError(Exception):
    """Base of every error that forebay raises on purpose. Its text is a complete message for a person."""


class InputError(ForebayError):
    """What the user gave cannot be used: a name, a number, a file, a rule."""


class ModelError(InputError):
    """The user's own model raised an exception, which is the ``__cause__``."""


class PlanError(ForebayError):
    """A plan is broken, stale, or belongs to another model or machine."""


class PlacementError(ForebayError):
    """A tensor cannot stand where it was asked to stand."""


class CompilerError(ForebayError):
    """The target's compiler could not be asked at all (a compile that *fails* is a verdict, not an error)."""


class CheckpointError(ForebayError):
    """A checkpoint could not be written or read; what was saved before is untouched."""


class MeasurementError(ForebayError):
    """A measurement on this machine failed, or what was measured could not be kept."""


class UnsupportedError(ForebayError):
    """A construct that forebay recognises and refuses by name."""


class OutOfMemoryError(ForebayError):
    """Device or host memory ran out; the text says which, what was alive, and what to do. The runtime's own error is its ``__cause__``."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A clause such as ``did you mean 'h100-sxm' or 'h100-pcie'?``, or the whole (short) list of known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(known[:40]) + (", ..." if len(known) > 40 else "")
    return f"known: {shown}" if known else "there is none"
