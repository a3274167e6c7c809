"""Step time from the compiler's own schedule.

In: the scheduled HLO text of a ``Verdict`` (or plain text) and a ``Hardware``. Out: a ``Forecast``. The stages are one file each:
``shapes`` and ``parse`` read the text, ``groups`` reads device groups, ``kinds`` says what each instruction does (flops, bytes, links),
``costs`` says how long that takes alone, ``replay`` runs the schedule on lanes, ``predict`` joins them, ``perfetto`` writes a trace.

Imports only ``errors``, ``units``, ``records`` and (for types) ``hardware``; loads no jax.
"""
