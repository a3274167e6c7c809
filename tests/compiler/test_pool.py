"""However a compile ends, judge answers: limits, kills, aborts, a compiler that is not there, and a parent that dies."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from forebay.compiler import judge, pool, versions
from forebay.errors import CompilerError

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]
ARGS = (jax.ShapeDtypeStruct((64, 64), jnp.float32),)


def slow(x):
    """About ten seconds of compiling: two hundred fusions that are all different."""
    for i in range(100):
        x = jnp.tanh(x @ x[:, ::-1] + i) * jax.nn.softmax(x, axis=i % 2)
    return x


def when_compiling(monkeypatch, act):
    """Call ``act(worker)`` once the worker has begun to compile; later requests are left alone."""
    wait, done = pool.Worker._wait, threading.Event()

    def watch(worker, *limits):
        if not done.is_set():
            done.set()
            while pool._MARKER not in worker.log.read_text():
                assert worker.process.poll() is None
                time.sleep(0.01)
            act(worker)
        return wait(worker, *limits)

    pool.close_workers()  # a worker that has served before holds the marker of that request
    monkeypatch.setattr(pool.Worker, "_wait", watch)


def test_a_time_limit_is_a_reason_with_the_limit(hardware):
    start = time.monotonic()
    verdict = judge(slow, ARGS, hardware, time_limit_seconds=0.5)
    assert verdict.fits is None
    assert verdict.reason.startswith("timed out: the compile was stopped after the time limit of 0.5 s")
    assert time.monotonic() - start < 30


def test_a_memory_limit_is_a_reason_with_both_sizes(hardware):
    verdict = judge(slow, ARGS, hardware, memory_limit_bytes=50 * 2**20)
    assert verdict.fits is None
    assert "over the limit of 50.0 MiB" in verdict.reason


def test_a_worker_killed_while_it_compiles_is_a_reason_and_the_next_compile_works(hardware, monkeypatch):
    when_compiling(monkeypatch, lambda worker: os.kill(worker.process.pid, signal.SIGKILL))
    killed = judge(slow, ARGS, hardware)
    assert killed.fits is None
    assert killed.hbm is None
    assert killed.reason.startswith("killed: the compiler process died of SIGKILL")
    assert judge(lambda x: x + 1, ARGS, hardware).fits


def test_an_abort_of_xla_is_a_reason_with_its_last_words(hardware):
    options = {"xla_gpu_override_gemm_autotuner": "not a text proto"}  # a failed check, on every version so far
    verdict = judge(lambda x: x @ x, ARGS, hardware, compiler_options=options)
    assert verdict.fits is None
    assert verdict.reason.startswith("aborted: the compiler process died of SIGABRT")
    assert "Check failed" in verdict.reason


def ended_by_itself(tmp_path, logged):
    """A worker whose process has ended with exit code 1 after it printed ``logged``."""
    worker = object.__new__(pool.Worker)
    worker.folder, worker.log = tmp_path, tmp_path / "stderr"
    worker.log.write_text(logged)
    ends = [sys.executable, "-c", "raise SystemExit(1)"]
    worker.process = subprocess.Popen(ends, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker._requests, worker._replies = worker.process.stdin, worker.process.stdout
    return worker


def test_llvm_ending_the_process_is_a_reason_and_a_worker_that_never_began_an_error(tmp_path):
    stamp = "0101 00:00:00.0 1"
    said = f"E{stamp} xtile.cc:1] LLVM Fatal Error: size mismatch\nROOT x = f32[]\n}}\nF{stamp} a.cc:4] *** Begin stack trace ***\n"
    found = ended_by_itself(tmp_path, f"start-up noise\n{pool._MARKER}\n{said}")._died(0, time.monotonic())
    assert found.status == "aborted"
    assert found.reason.startswith("the compiler process ended by itself with exit code 1")
    assert found.reason.endswith("E xtile.cc:1] LLVM Fatal Error: size mismatch")
    tmp_path.mkdir()  # a worker that has ended takes its folder with it
    with pytest.raises(CompilerError, match="did not start"):
        ended_by_itself(tmp_path, "no module named forebay")._died(0, time.monotonic())


def test_what_depends_on_the_moment_is_not_cached(hardware):
    assert judge(lambda x: x - 1, ARGS, hardware, time_limit_seconds=0.0).fits is None
    again = judge(lambda x: x - 1, ARGS, hardware)
    assert again.fits
    assert not again.cached


def test_a_target_that_the_compiler_does_not_know_is_a_compiler_error(hardware):
    class Target:
        platform, topology, target_config = "cuda", "1x1x8", "this is no target"

    class Machine:
        name, devices, target = "unknown", 8, Target()

    with pytest.raises(CompilerError, match="target's compiler cannot be started"):
        judge(lambda x: x, ARGS, Machine())


def test_a_missing_plugin_names_the_extra_to_install(hardware, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: {"jax": "0", "jaxlib": "0"})
    with pytest.raises(CompilerError, match=r"pip install 'forebay\[compile-gpu\]'"):
        judge(lambda x: x, ARGS, hardware)


def test_several_threads_judge_at_once_and_workers_are_kept(hardware):
    verdicts = {}

    def ask(number):
        verdicts[number] = judge(lambda x: x * number, ARGS, hardware, cache=False)

    threads = [threading.Thread(target=ask, args=(float(number),)) for number in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdicts[float(number)].fits for number in range(2, 6)] == [True] * 4
    assert len({verdict.fingerprint for verdict in verdicts.values()}) == 4
    kept = pool._idle["cuda", 1]
    assert 1 <= len(kept) <= pool.KEPT_WORKERS
    before = {worker.process.pid for worker in kept}
    judge(lambda x: x * 7, ARGS, hardware, cache=False)
    assert {worker.process.pid for worker in kept} == before


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_ends_when_its_parent_dies_in_the_middle_of_a_compile():
    program = """
import os, signal, time
from forebay.compiler import judge, pool
from forebay.hardware import Hardware
from test_pool import ARGS, slow

def die(worker, *limits):
    while pool._MARKER not in worker.log.read_text():
        time.sleep(0.01)
    print(worker.process.pid, worker.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

pool.Worker._wait = die
judge(slow, ARGS, Hardware.named("h100-sxm:8"), cache=False)
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    pid, folder = done.stdout.split()
    worker, deadline = int(pid), time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)
    assert not Path(folder).exists()


def test_a_full_disk_is_said_with_the_folder_and_the_next_compile_works(hardware, monkeypatch):
    pool.close_workers()
    write = Path.write_bytes

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CompilerError, match=r"No space left on device\); free some space there, or set TMPDIR"):
        judge(lambda x: x + 3, ARGS, hardware, cache=False)
    monkeypatch.setattr(Path, "write_bytes", write)
    assert judge(lambda x: x + 3, ARGS, hardware, cache=False).fits


def test_an_answer_that_finds_no_room_is_said_and_the_next_compile_works(hardware, monkeypatch):
    pool.close_workers()
    start = pool.Worker.__init__

    def with_a_full_disk(worker, devices):
        start(worker, devices)
        (worker.folder / "hlo.gz").symlink_to("/dev/full")

    monkeypatch.setattr(pool.Worker, "__init__", with_a_full_disk)
    with pytest.raises(CompilerError, match=r"cannot be written to .* \(No space left on device\)"):
        judge(lambda x: x + 4, ARGS, hardware, cache=False)
    monkeypatch.setattr(pool.Worker, "__init__", start)
    pool.close_workers()
    assert judge(lambda x: x + 4, ARGS, hardware, cache=False).fits


def test_where_no_file_can_grow_the_command_says_so_and_the_next_run_works(tmp_path):
    program = """
import resource, sys
from forebay import cli
words = ["plan", "--model", "tiny", "--hardware", "h100-sxm:1", "--seq", "16", "--batch", "1", "--place", "optimizer=host"]
for most_bytes in 0, 100:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    assert cli.main([*words, "--out", sys.argv[1]]) == cli.BAD_INPUT
from forebay.compiler import pool
pool.close_workers()  # a worker inherits the limit, as it would not a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sys.exit(cli.main([*words, "--out", sys.argv[1]]))
"""
    around = os.environ | {"FOREBAY_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "plan.json")], capture_output=True, text=True, env=around, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("forebay: ")]
    assert len(said) == 2
    for line in said:
        assert line.startswith(f"forebay: the compiler's files cannot be written to {tmp_path} (")
        assert line.endswith("free some space there, or set TMPDIR to a folder on another disk")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "plan.json").is_file()
