"""Step time from the compiler's own schedule.

In: the scheduled HLO text of a ``Verdict`` (or plain text) and a ``Hardware``. Out: a ``Forecast``. The stages are one file each:
``shapes`` and ``parse`` read the text, ``groups`` reads device groups, ``kinds`` says what each instruction does (flops, bytes,
links), ``costs`` says how long that takes alone, ``replay`` runs the schedule on lanes, ``predicting`` joins them, ``exposure``
charges exposed copies to the entries of a plan, ``perfetto`` writes a trace.

Imports only ``errors``, ``units``, ``records`` and (for types) ``hardware``; loads no jax.
"""

from forebay.timeline.exposure import charge
from forebay.timeline.perfetto import write_perfetto
from forebay.timeline.predicting import events, predict, read_schedule, widened

__all__ = ["charge", "events", "predict", "read_schedule", "widened", "write_perfetto"]
