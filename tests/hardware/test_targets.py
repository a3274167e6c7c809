"""What the compiler is told: the text of XLA's description, and that the real compilers take every machine of the catalog."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.hardware import Hardware, catalog_names
from forebay.hardware.targets import tpu_host_bounds

pytestmark = pytest.mark.oldest

SIZE, ROWS, BF16_BYTES = 1024, 256, 2
GPUS = [name for name in catalog_names() if not name.startswith("tpu")]
TPUS = [name for name in catalog_names() if name.startswith("tpu")]


def test_a_gpu_is_described_as_text():
    target = Hardware.named("h100-sxm:16").target
    assert (target.platform, target.topology) == ("cuda", "1x2x8")
    for line in (
        "core_count: 132",
        "device_memory_size: 84942979072",
        "memory_bandwidth: 3352320000000",
        "clock_rate_ghz: 1.98",
        "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }",
        "device_interconnect_info { active_links: 18 }",
        'platform_name: "CUDA"',
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in target.target_config


@pytest.mark.parametrize("name", GPUS)
def test_integer_fields_are_written_as_integers(name):
    """A field such as ``memory_bandwidth: 8.64e+11`` does not parse."""
    fields = [
        line.split(": ") for line in Hardware.named(name).target.target_config.splitlines() if line.startswith("  ") and "{" not in line
    ]
    assert len(fields) >= 20
    assert all(value.isdigit() for field, value in fields if field.strip() != "clock_rate_ghz")


def test_a_tpu_is_a_topology():
    target = Hardware.named("tpu-7x:4x4x4").target
    assert (target.platform, target.topology, target.target_config) == ("tpu", "tpu7x:4x4x4", None)


@pytest.mark.parametrize(
    ("topology", "bounds"),
    [("v5p:1x1x1", (1, 1, 1)), ("v5e:1x1", (1, 1, 1)), ("tpu7x:2x1x1", (2, 1, 1)), ("v5e:2x4", None), ("v5p:2x2x1", None)],
)
def test_a_slice_smaller_than_a_host_says_so(topology, bounds):
    assert tpu_host_bounds(topology) == bounds


def _compile(names: list[str]) -> dict:
    script = Path(__file__).with_name("compile_targets.py")
    done = subprocess.run([sys.executable, str(script), *names], capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _check(answers: dict) -> None:
    for name, answer in answers.items():
        machine = Hardware.named(name)
        assert (answer["devices"], answer["hosts"]) == (machine.devices, machine.hosts), name
        assert answer["host_argument_bytes"] == SIZE * SIZE * BF16_BYTES // machine.devices, name
        assert answer["device_argument_bytes"] == ROWS * SIZE * BF16_BYTES, name


@pytest.mark.compiler
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax-cuda13-plugin")
def test_xla_gpu_compiles_for_every_gpu_and_keeps_the_host_argument():
    _check(_compile([*GPUS, "h100-sxm:16"]))


@pytest.mark.compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_libtpu_compiles_for_every_tpu_and_keeps_the_host_argument():
    _check(_compile([*TPUS, "tpu-v5e:4x4", "tpu-v5p:2x2x2", "tpu-7x:1x1x1", "tpu-v5p:1x1x1"]))
