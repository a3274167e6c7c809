"""What a training step is made of: functions and shapes come in, a ``Workload`` of named tensors goes out.

May import: errors, units, records, hardware. Imports jax when it is used, never when ``forebay`` is imported.
"""

from forebay.workload.trace import Tensor, Workload, trace

__all__ = ["Tensor", "Workload", "trace"]
