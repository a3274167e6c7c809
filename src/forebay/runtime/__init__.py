"""Making a plan true: a ``Plan`` and the user's functions come in, a train step and its state go out. One technique a file.

May import: errors, units, records, hardware, workload, plan.
"""

from forebay.plan import State
from forebay.runtime.birth import init, place
from forebay.runtime.pieces import update, value_and_grad
from forebay.runtime.step import TrainStep, train_step

__all__ = ["State", "TrainStep", "init", "place", "train_step", "update", "value_and_grad"]
