"""The worker process: ``python -m forebay.compiler.worker VIRTUAL_CPU_DEVICES FOLDER``. It reads one request a line and compiles it.

In: JSON with the path of the StableHLO bytecode, the target and the options. Out: one line of JSON on the first standard output; what
XLA prints goes to standard error. It ends, and removes FOLDER, when its parent does; it ends after ``IDLE_SECONDS`` without a request.
"""

import gzip
import json
import os
import queue
import shutil
import sys
import threading
import time

IDLE_SECONDS = 900
FOLDER_PREFIX = "forebay-compile-"
_SETTINGS = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_DROPPED = ("LIBTPU_INIT_ARGS", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE")
XLA_FLAGS = "--xla_gpu_autotune_level=0"  # tuning would need the GPU itself


def set_environment(devices: int) -> None:
    """XLA reads its flags once per process: the user's are dropped (judge says so) and only ours stand."""
    for name in list(os.environ):
        if name.startswith("JAX_") or name in _DROPPED:
            del os.environ[name]
    os.environ.update(_SETTINGS, XLA_FLAGS=f"{XLA_FLAGS} --xla_force_host_platform_device_count={devices}")


def main(devices: int, folder: str) -> None:
    """Serve requests until standard input closes."""
    parent = os.getppid()
    channel = os.dup(1)
    os.dup2(2, 1)  # whatever XLA prints must not stand among the replies
    set_environment(devices)
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, folder), daemon=True).start()
    threading.Thread(target=_follow_parent, args=(parent, folder), daemon=True).start()
    import forebay.compiler.jaxcompat  # noqa: F401  before the first request, while the parent is still lowering

    while True:
        try:
            request = requests.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            return
        os.write(channel, (json.dumps(serve(json.loads(request))) + "\n").encode())


def _read_requests(requests: queue.SimpleQueue, folder: str) -> None:
    for line in sys.stdin:
        requests.put(line)
    _end(folder)  # the parent is gone or has closed the pipe; a compile in progress is of no use to anyone


def _follow_parent(parent: int, folder: str) -> None:
    # a child that the parent forked may hold the pipe open after the parent's death, so the pipe alone is not enough
    while os.getppid() == parent:
        time.sleep(1)
    _end(folder)


def _end(folder: str) -> None:
    if os.path.basename(folder).startswith(FOLDER_PREFIX):  # nothing else is ours to remove
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def serve(request: dict) -> dict:
    """Compile ``request``; a refusal of the compiler is an answer, and so is any error on the way to it."""
    from forebay.compiler import jaxcompat

    try:
        jaxcompat.apply_settings(request["settings"])
        devices = jaxcompat.topology_devices(request["platform"], request["topology"], request["target_config"], request["partitions"])
    except Exception as problem:  # the parent raises it as a CompilerError: the compiler cannot be asked
        return {"status": "unavailable", "reason": f"{type(problem).__name__}: {problem}"}
    if len(devices) < request["partitions"]:
        return {"status": "unavailable", "reason": f"the topology has {len(devices)} devices, the program {request['partitions']}"}
    print(request["marker"], file=sys.stderr, flush=True)  # what stands before it is start-up noise of the plugins
    start = time.perf_counter()
    try:
        with open(request["module"], "rb") as file:
            module = jaxcompat.parse(file.read())
        executable = jaxcompat.compile_module(module, devices, request)
        seconds = time.perf_counter() - start
        text = jaxcompat.hlo_text(executable)
        sizes = jaxcompat.sizes(executable, request["platform"])
    except Exception as problem:  # XLA raises many types; each is the compiler's answer to this program
        text = str(problem).strip() or type(problem).__name__
        print(text, file=sys.stderr, flush=True)  # the whole of it is kept among the messages
        return {"status": "refused", "reason": text.splitlines()[0], "compile_seconds": time.perf_counter() - start}
    try:
        with open(request["hlo"], "wb") as file:
            file.write(gzip.compress(text.encode(), compresslevel=3))
    except OSError as problem:
        return {"status": "unwritten", "reason": str(problem.strerror)}
    return {"status": "compiled", "sizes": sizes, "compile_seconds": seconds}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
