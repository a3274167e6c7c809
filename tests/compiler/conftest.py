"""What the tests of the compiler stage share: the programs of ``compiler_programs``, two machines, and a cache of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # compiler_programs is also run as a script, outside pytest

import compiler_programs

from forebay.compiler import judge, pool
from forebay.hardware import Hardware

MACHINES = ("h100-sxm:8", "tpu-v5p:2x2x1")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty compile cache for each test."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def hardware():
    return Hardware.named("h100-sxm:8")


@pytest.fixture(scope="session", params=MACHINES)
def machine(request):
    return Hardware.named(request.param)


@pytest.fixture(scope="session")
def judged(machine):
    """The verdict of each program of ``compiler_programs`` on ``machine``, without the cache."""
    programs = compiler_programs.programs(machine.devices)
    return {name: judge(fn, args, machine, donate_argnums=donated, cache=False) for name, (fn, args, donated) in programs.items()}


@pytest.fixture(scope="session")
def compiled_here(machine, tmp_path_factory):
    """The sizes of the same programs by jax's own compile, in one process without forebay."""
    config = tmp_path_factory.mktemp("target") / "config"
    config.write_text(machine.target.target_config or "")
    command = [sys.executable, compiler_programs.__file__, machine.target.platform, machine.target.topology, str(machine.devices), config]
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session", autouse=True)
def _no_worker_is_left():
    yield
    pool.close_workers()
