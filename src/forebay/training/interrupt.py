"""Ctrl-C and SIGTERM while training: the first asks the loop to stop after this step, the second ends the process at once.

Python runs signal handlers between bytecodes only, and a compile or a long step is one call into C++. So a thread reads the
signals from a pipe that the interpreter's C handler fills the moment they arrive, and ends the process itself on the second.
"""

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _left_to_the_thread(_number: int, _frame: object) -> None:
    """The Python handler: only there so that the interpreter's C handler, which feeds the pipe, is installed."""


class StopRequest:
    """A context in which SIGINT and SIGTERM set ``signal`` instead of raising. Does nothing outside of the main thread."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that ended by ``signal``; 0 where none came."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._old = {number: signal.signal(number, _left_to_the_thread) for number in _SIGNALS}
            self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="forebay-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._old:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old.items():
                signal.signal(number, handler)
            os.close(self._write_end)  # ends the thread's read
            self._thread.join()
            os.close(self._read_end)

    def _watch(self) -> None:
        while number := os.read(self._read_end, 1):
            if number[0] not in _SIGNALS:
                continue
            if self.signal is None:
                self.signal = number[0]
                name = signal.Signals(self.signal).name
                print(f"\n{name}: stopping after this step, with a checkpoint; again to stop at once", file=sys.stderr, flush=True)
            else:
                os._exit(128 + number[0])
