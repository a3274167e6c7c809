"""The parent's side of the workers: start, ask, watch time and memory, and turn any way of dying into an Outcome.

Workers are kept for the next program (starting one costs about 1.5 s). A worker serves one platform, because libtpu and the CUDA
plugin must not share a process, and dies with this process.
"""

import atexit
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from forebay.compiler import outcome as kinds
from forebay.compiler.outcome import Outcome
from forebay.compiler.worker import FOLDER_PREFIX
from forebay.errors import CompilerError
from forebay.units import show_bytes

KEPT_WORKERS = 2
KEPT_SECONDS = 600  # less than the worker's own IDLE_SECONDS, so that none ends just as it is asked
RETIRE_RSS_BYTES = 4 * 2**30  # a worker that has grown past this is not kept: XLA gives little memory back
_POLL_SECONDS = 0.05
_MARKER = "forebay-compile-begins"
_FULL = "the compiler's files cannot be written to {} ({}); free some space there, or set TMPDIR to a folder on another disk"

_lock = threading.Lock()
_idle: dict[tuple[str, int], list["Worker"]] = {}
_of_the_parent: dict = {}
_PLACES = max(2, os.cpu_count() or 2)
_places = threading.BoundedSemaphore(_PLACES)
_LOG_STAMP = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:[\d.]+\s+\d+ ")  # date, time and process of a line of XLA's log


class Worker:
    """One worker process with a folder of its own for the module, the HLO and what XLA prints."""

    def __init__(self, devices: int):
        self.idle_since = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.log = self.folder / "stderr"
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forebay.compiler.worker", str(devices), str(self.folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=self.folder, start_new_session=True,
                # set here too: the CUDA plugin and libtpu may read their environment while python starts
                env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout

    def ask(self, request: dict, bytecode: bytes, time_limit_seconds: float, memory_limit_bytes: int) -> Outcome:
        """Compile ``bytecode`` as ``request`` says, or the reason why that came to no end."""
        module, hlo = self.folder / "module.mlirbc", self.folder / "hlo.gz"
        _unless_full(lambda: module.write_bytes(bytecode))
        request = request | {"module": str(module), "hlo": str(hlo), "marker": _MARKER}
        printed = self.log.stat().st_size
        start = time.monotonic()
        try:
            self._requests.write((json.dumps(request) + "\n").encode())
            self._requests.flush()
        except BrokenPipeError:
            return self._died(printed, start)
        stopped = self._wait(start, time_limit_seconds, memory_limit_bytes)
        if stopped:
            self.process.kill()
            messages = self._printed(printed)
            self.close()
            return Outcome(status=stopped[0], reason=stopped[1], messages=messages, compile_seconds=time.monotonic() - start)
        reply = self._replies.readline()
        if not reply.endswith(b"\n"):
            return self._died(printed, start)
        return self._outcome(json.loads(reply), hlo, printed)

    def _outcome(self, reply: dict, hlo: Path, printed: int) -> Outcome:
        if reply["status"] == "unwritten":
            raise CompilerError(_FULL.format(self.folder, reply["reason"]))
        if reply["status"] == "unavailable":
            raise CompilerError(f"the target's compiler cannot be started: {reply['reason']}")
        compressed = hlo.read_bytes() if reply["status"] == kinds.COMPILED else b""
        return Outcome(**reply, messages=self._printed(printed), hlo_gzip=compressed)

    def _wait(self, start: float, time_limit_seconds: float, memory_limit_bytes: int) -> tuple[str, str] | None:
        """``None`` once a reply or the end of the worker is there; otherwise which limit was passed."""
        while not select.select([self._replies], [], [], _POLL_SECONDS)[0]:
            if time.monotonic() > start + time_limit_seconds:
                said = f"the compile was stopped after the time limit of {time_limit_seconds:.3g} s"
                return kinds.TIMED_OUT, f"{said}; give time_limit_seconds= more"
            resident = self.resident_bytes()
            if resident > memory_limit_bytes:
                return kinds.OVER_MEMORY, (
                    f"the compile was stopped at {show_bytes(resident)} of this machine's memory, over the limit of "
                    f"{show_bytes(memory_limit_bytes)}; give memory_limit_bytes= more, or a machine with more memory"
                )
        return None

    def _died(self, printed: int, start: float) -> Outcome:
        code, began = self.process.wait(), _MARKER in self._logged(printed)
        messages = self._printed(printed)
        self.close()
        if code >= 0 and not began:
            raise CompilerError(f"the compile worker did not start (exit {code}): {' | '.join(messages[-3:])}")
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
        if code == -signal.SIGKILL:
            status, why = kinds.KILLED, "as the kernel does when memory runs out, or somebody did"
        else:
            status, why = kinds.ABORTED, f"XLA stops this way on an internal check; its last words: {_last_words(messages)}"
        reason = f"the compiler process {ended}: {why}"
        return Outcome(status=status, reason=reason, messages=messages, compile_seconds=time.monotonic() - start)

    def _logged(self, since: int) -> str:
        with open(self.log, "rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def _printed(self, since: int) -> tuple[str, ...]:
        lines = self._logged(since).rpartition(_MARKER)[2].splitlines()
        return tuple(dict.fromkeys(_LOG_STAMP.sub(r"\1 ", line.strip()) for line in lines if line.strip()))

    def resident_bytes(self) -> int:
        """Resident memory of the worker; 0 where the system does not say (there the memory limit does not bind)."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the process and remove its folder."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._requests, self._replies):
            with contextlib.suppress(OSError):  # unsent bytes of a request to a dead worker
                pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _last_words(messages: tuple[str, ...]) -> str:
    """The line of the failed check; without one the last line of an error, or the last that is not a frame of the stack trace after it."""
    spoken = [line for line in messages if not line.startswith("@") and "***" not in line]
    fatal, errors = ([line for line in spoken if line.startswith(level)] for level in ("F ", "E "))
    return next(iter((*fatal[:1], *errors[-1:], *spoken[-1:])), "none")


def compile_in_worker(request: dict, bytecode: bytes, time_limit_seconds: float, memory_limit_bytes: int) -> Outcome:
    """The Outcome of one compile, in an idle worker or a new one; several threads may ask at once."""
    key = (request["platform"], request["partitions"] if request["platform"] == "cpu" else 1)
    with _places:
        worker = _take(key)
        try:
            result = worker.ask(request, bytecode, time_limit_seconds, memory_limit_bytes)
        except BaseException:  # an interrupt leaves the worker in the middle of a compile
            worker.close()
            raise
        _give_back(key, worker)
    return result


def _take(key: tuple[str, int]) -> Worker:
    with _lock:
        idle = _idle.setdefault(key, [])
        while idle:
            worker = idle.pop()
            if worker.process.poll() is None and time.monotonic() - worker.idle_since < KEPT_SECONDS:
                return worker
            worker.close()
    return _unless_full(lambda: Worker(key[1]))


def _unless_full(act: Callable):
    """What ``act`` gives. Raises CompilerError where the folder for temporary files takes nothing."""
    try:
        return act()
    except OSError as problem:
        place = problem.filename or os.environ.get("TMPDIR", "/tmp")  # a full disk leaves tempfile itself without a folder
        raise CompilerError(_FULL.format(place, problem.strerror)) from problem


def _give_back(key: tuple[str, int], worker: Worker) -> None:
    if worker.process.poll() is not None:
        return
    with _lock:
        if len(_idle[key]) < KEPT_WORKERS and worker.resident_bytes() < RETIRE_RSS_BYTES:
            worker.idle_since = time.monotonic()
            _idle[key].append(worker)
            return
    worker.close()


@atexit.register
def close_workers() -> None:
    """End every idle worker."""
    with _lock:
        for idle in _idle.values():
            while idle:
                idle.pop().close()


def _forget_after_fork() -> None:
    # the forked child must neither use nor end its parent's workers
    global _lock, _places, _idle, _of_the_parent
    _lock, _places = threading.Lock(), threading.BoundedSemaphore(_PLACES)
    _of_the_parent, _idle = _idle, {}


os.register_at_fork(after_in_child=_forget_after_fork)
