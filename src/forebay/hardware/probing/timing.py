"""Repeating a measurement. What is to be timed waits for its own end (``block_until_ready``), so that no dispatch is taken for work."""

import time
from collections.abc import Callable

REPETITIONS, FEWEST = 9, 3


class Clock:
    """The time that a measuring process may take; once it has passed, no further reading begins."""

    def __init__(self, seconds: float):
        self._until = time.perf_counter() + seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether work of ``seconds`` would end in time."""
        return time.perf_counter() + seconds < self._until


def repeated(work: Callable, prepare: Callable[[], tuple] = tuple, seconds: float = 1.0) -> tuple[float, ...]:
    """Seconds of each of up to ``REPETITIONS`` runs of ``work(*prepare())``; at least ``FEWEST``, and no more once ``seconds`` have passed.

    A run before the first, which compiles and allocates, is not counted, nor is ``prepare``.
    """
    work(*prepare())
    found, until = [], time.perf_counter() + seconds
    while len(found) < FEWEST or (len(found) < REPETITIONS and time.perf_counter() < until):
        arguments = prepare()
        began = time.perf_counter()
        work(*arguments)
        found.append(max(time.perf_counter() - began, 1e-9))
    return tuple(found)


def rates(amount: float, seconds: tuple[float, ...]) -> tuple[float, ...]:
    """``amount`` over each of ``seconds``."""
    return tuple(amount / each for each in seconds)
