"""Out-of-memory messages in the forms in which XLA, libtpu, CUDA and the kernel write them: the memory named, and its numbers."""

import pytest

from forebay.errors import InputError
from forebay.trust.oom_text import DISK, HBM, OUTSIDE, POOL, RAM, VMEM, read_shortage
from forebay.units import GIB, MIB

pytestmark = pytest.mark.oldest

BFC = """2026-01-01 10:00:00.000000: W external/xla/xla/tsl/framework/bfc_allocator.cc:512] Allocator (GPU_3_bfc) ran out of memory \
trying to allocate 16.00GiB (rounded to 17179869184)requested by op
2026-01-01 10:00:00.100000: I external/xla/xla/tsl/framework/bfc_allocator.cc:1058] BFC Allocator dump for GPU_3_bfc
2026-01-01 10:00:00.100000: I external/xla/xla/tsl/framework/bfc_allocator.cc:1100] InUse at 7f1000000000 of size 4294967296 next 2
2026-01-01 10:00:00.100000: I external/xla/xla/tsl/framework/bfc_allocator.cc:1110] Sum Total of in-use chunks: 58.21GiB
2026-01-01 10:00:00.100000: I external/xla/xla/tsl/framework/bfc_allocator.cc:1112] total_region_allocated_bytes_: 63744344064 \
memory_limit_: 63744344064 available bytes: 0 curr_region_allocation_bytes_: 127488688128
2026-01-01 10:00:00.100000: I external/xla/xla/tsl/framework/bfc_allocator.cc:1117] Stats:
Limit:                     63744344064
InUse:                     62502512384
MaxInUse:                  62502512384
NumAllocs:                         812
MaxAllocSize:               4294967296
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.
"""
HOST_POOL = """W0101 10:00:00.0 bfc_allocator.cc:512] Allocator (xla_gpu_host_bfc) ran out of memory trying to allocate 8.00GiB (rounded
to 8589934592) I0101 10:00:00.0 bfc_allocator.cc:1117] Stats:
Limit:                     64000000000
InUse:                     60129542144
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.
"""
DEBUGGING = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    6.00MiB
Peak buffers:
	Buffer 1:
		Size: 384.0KiB
		Entry Parameter Subshape: f32[256,128,3]
		==========================

	Buffer 2:
		Size: 6.00MiB
		Operator: op_name="jit(step)/jit(main)/concatenate[dimension=0]" source_file="/home/me/work/models.py" source_line=689
		XLA Label: concatenate
		Shape: f32[4096,128,3]
		==========================
"""
TPU = """jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.

Total hbm usage >= 65.05G:
    reserved          1.25G
    program          63.80G
    arguments            0B

Program hbm requirement 63.80G:
    HLO temp         63.79G (100.0% utilization: Unpadded (63.58G) Padded (63.58G), 0.3% fragmentation (210.89M))

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="jit(train_step)/jvp(Model)/h/0/attention/dot_general" source_file="/home/me/work/attention.py" source_line=1059
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.1265 = fusion(custom-call.224), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[8192,32768]{1,0}
     Unpadded size: 512.00M
     XLA label: copy.4 = copy(param.3)
     Allocation type: HLO temp
     ==========================
"""
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
]


def test_the_allocators_dump_gives_device_limit_and_use():
    said = read_shortage(BFC)
    assert (said.pool, said.device, said.when) == (HBM, 3, "run")
    assert (said.asked_bytes, said.limit_bytes, said.in_use_bytes) == (16 * GIB, 63744344064, 62502512384)


def test_the_host_pool_is_not_taken_for_the_device():
    said = read_shortage(HOST_POOL)
    assert said.pool == POOL
    assert (said.asked_bytes, said.limit_bytes, said.in_use_bytes) == (8 * GIB, 64 * 10**9, 60129542144)


def test_peak_buffers_are_read_with_their_source_lines():
    said = read_shortage(DEBUGGING)
    assert [(b.bytes, b.source) for b in said.buffers] == [(6 * MIB, "work/models.py:689"), (384 * 2**10, "")]
    assert said.buffers[1].operation == "an argument of the program"


def test_the_table_of_a_tpu_compile_is_read():
    said = read_shortage(TPU)
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
