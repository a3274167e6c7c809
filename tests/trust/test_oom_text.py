"""Out-of-memory messages in the forms in which XLA, libtpu, CUDA and the kernel write them: the memory named, and its numbers."""

from pathlib import Path

import pytest

from forebay.errors import InputError
from forebay.trust.oom_text import DISK, HBM, OUTSIDE, POOL, RAM, VMEM, read_shortage
from forebay.units import GIB, MIB

pytestmark = pytest.mark.oldest

FIXTURES = Path(__file__).parent / "fixtures"
ONE_LINE = [
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.", HBM, 32 * GIB, None),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32.00GiB.", HBM, 32 * GIB, None),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 1048576 bytes.", HBM, MIB, None),
    ("RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 2", HBM, 176 * MIB, 2),
    ("RESOURCE_EXHAUSTED: Attempting to allocate 3.14G. That was not possible. There are 2.05G free.; (0x0x0_HBM0)", HBM, 3371549327, 0),
    ("failed to alloc 67108864 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory", POOL, 64 * MIB, None),
    ("could not allocate pinned host memory of size: 67108864", POOL, 64 * MIB, None),
    ("INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", OUTSIDE, None, None),
    ("failed to allocate 2.00GiB (2147483648 bytes) from device: RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY", OUTSIDE, 2 * GIB, None),
    ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem while allocating.", VMEM, None, None),
    ("OSError: [Errno 28] No space left on device", DISK, None, None),
    ("Memory cgroup out of memory: Killed process 41 (python) total-vm:90kB, anon-rss:2097152kB, file-rss:0kB", RAM, None, None),
    ("RESOURCE_EXHAUSTED: something new", HBM, None, None),
    ("INTERNAL: CUDNN_STATUS_ALLOC_FAILED", OUTSIDE, None, None),
    ("NCCL operation failed: unhandled cuda error. Last error: 'Failed to CUDA calloc async 608 bytes'.", OUTSIDE, None, None),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.", RAM, None, None),
    ("numpy.core._exceptions._ArrayMemoryError: MemoryError: Unable to allocate 40.0 GiB for an array", RAM, 40 * GIB, None),
    ("RESOURCE_EXHAUSTED: CUDA error: Failed to allocate 1073741824 bytes for new constant", HBM, GIB, None),
    (
        (
            "RESOURCE_EXHAUSTED: Attempting to reserve 12.50G at the bottom of memory. That was not possible. There are 9.02G free, "
            "0B reserved, and 9.02G reservable. (0x0x0_HBM0)"
        ),
        HBM,
        int(12.5 * GIB),
        0,
    ),
]


def log(name):
    return (FIXTURES / f"oom_{name}.log").read_text()


def test_the_allocators_dump_gives_device_limit_and_use():
    said = read_shortage(log("device_pool"))
    assert (said.pool, said.device, said.when) == (HBM, 3, "run")
    assert (said.asked_bytes, said.limit_bytes, said.in_use_bytes) == (16 * GIB, 63744344064, 62502512384)


def test_the_host_pool_is_not_taken_for_the_device():
    said = read_shortage(log("host_pool"))
    assert said.pool == POOL
    assert (said.asked_bytes, said.limit_bytes, said.in_use_bytes) == (8 * GIB, 64 * 10**9, 60129542144)


def test_peak_buffers_are_read_with_their_source_lines():
    said = read_shortage(log("peak_buffers"))
    assert [(b.bytes, b.source) for b in said.buffers] == [(6 * MIB, "work/models.py:689"), (384 * 2**10, "")]
    assert said.buffers[1].operation == "an argument of the program"


def test_the_table_of_a_tpu_compile_is_read():
    said = read_shortage(log("tpu_compile"))
    assert (said.pool, said.when) == (HBM, "compile")
    assert said.needed_bytes == int(63.80 * GIB)
    assert said.limit_bytes == int(30.75 * GIB)
    assert [(b.bytes, b.shape, b.source) for b in said.buffers] == [
        (2 * GIB, "f32[32,4096,4096]", "work/attention.py:1059"),
        (512 * MIB, "bf16[8192,32768]", ""),
    ]


@pytest.mark.parametrize(("text", "pool", "asked", "device"), ONE_LINE)
def test_each_form_of_message_names_its_memory(text, pool, asked, device):
    said = read_shortage(text)
    assert (said.pool, said.asked_bytes, said.device) == (pool, asked, device)


def test_a_program_that_does_not_load_says_when_and_what_is_free():
    text = "RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 16.36G at the bottom of memory. That was not possible. "
    text += "There are 14.72G free, 0B reserved, and 14.72G reservable."
    said = read_shortage(text)
    assert (said.when, said.asked_bytes, said.limit_bytes) == ("load", int(16.36 * GIB), int(14.72 * GIB))


def test_a_text_without_such_a_message_is_refused_with_what_to_give():
    with pytest.raises(InputError, match=r"no out-of-memory message .* save the whole standard error"):
        read_shortage("ValueError: shapes do not match")
