"""Plans: a ``Workload`` comes in with rules (or, later, a search), a ``Plan`` goes out: placements, reasons, options, plan.json.

May import: errors, units, records, hardware, workload.
"""

from forebay.plan.plan import Plan
from forebay.plan.state import State

__all__ = ["Plan", "State"]
