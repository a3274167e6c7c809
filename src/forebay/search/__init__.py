"""The planner: from a traced workload and a machine to the plan that the compiler has proved.

In: ``Workload``, ``Hardware``. Out: a ``Plan`` with verdict, forecast, reasons and the candidates that lost. May import every stage
before it: records, hardware, workload, plan, runtime, compiler, timeline.
"""

from forebay.search.choosing import choose

__all__ = ["choose"]
