"""Signals while training: the first is a request, the second is the end, whatever Python is busy with."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from forebay.training.interrupt import StopRequest

pytestmark = pytest.mark.oldest


def wait_for(condition):
    stop = time.monotonic() + 10
    while not condition() and time.monotonic() < stop:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_request(number, code, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert wait_for(lambda: stop.signal == number)
    assert stop.exit_code == code
    assert signal.getsignal(number) is before
    assert "stopping after this step" in capfd.readouterr().err


TWICE_IN_A_LONG_CALL = """
import ctypes, os, signal, threading, time
from forebay.training.interrupt import StopRequest
with StopRequest():
    def twice():
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=twice, daemon=True).start()
    until, poll = time.monotonic() + 40, ctypes.CDLL(None).poll
    while time.monotonic() < until:
        poll(None, 0, 20_000)  # a call into C, as a compile is: the interpreter runs no handler meanwhile
"""


def test_the_second_ends_the_process_even_inside_a_long_call():
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", TWICE_IN_A_LONG_CALL], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert "SIGINT: stopping after this step, with a checkpoint; again to stop at once" in done.stderr
    assert time.monotonic() - begun < 30


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def run():
        with StopRequest() as stop:
            seen.append(stop.exit_code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [0]
