"""Preflight on made-up machines: the files of /proc and /sys in their real formats, and what each line says of them."""

import dataclasses

import pytest

from forebay.hardware import Hardware
from forebay.records import Entry
from forebay.trust.preflight import preflight
from forebay.trust.preflight_machine import read_machine
from forebay.trust.report import FAILED, PASSED, WARNING
from forebay.units import GIB

pytestmark = pytest.mark.oldest

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {memlock}                65536                bytes
Max address space         unlimited            unlimited            bytes
"""


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def tree(root, **changes):
    """A host of two NUMA nodes with 512 GiB and a GPU at node 1, no container, in the kernel's formats."""
    files = {
        "proc/meminfo": "MemTotal:       536870912 kB\nMemFree:        10000000 kB\nMemAvailable:   503316480 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/limits": LIMITS.format(memlock="unlimited"),
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-31\nMems_allowed_list:\t0-1\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       268435456 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-15\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       268435456 kB\n",
        "sys/devices/system/node/node1/cpulist": "16-31\n",
        "sys/bus/pci/devices/0000:41:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:41:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:02:00.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:02:00.0/class": "0x020000\n",
        "sys/bus/pci/devices/0000:02:00.0/numa_node": "0\n",
    }
    return write(root, files | changes)


@dataclasses.dataclass(frozen=True)
class FakePlan:
    """What preflight reads of a plan."""

    entries: tuple
    hardware: dict | None
    verdict: object = None


def plan(host_gib=20, hbm_gib=10, machine="h100-sxm:1"):
    def entry(name, role, gib, place):
        count = gib * GIB // 4
        return Entry(name=name, role=role, bytes_per_device=gib * GIB, placement=place, shape=(count,), dtype="float32", reason="rule")

    entries = (entry("parameter:w", "parameter", hbm_gib, "hbm"), entry("optimizer:m", "optimizer", host_gib, "host"))
    return FakePlan(entries=entries, hardware=Hardware.named(machine).to_json())


def look(root, made=None, folder=None, environment=None):
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} if environment is None else environment
    facts = read_machine(folder, root=root, environment=environment)
    return preflight(made or plan(), machine=dataclasses.replace(facts, backend_ready=False))  # whatever a test before this has started


def test_a_host_with_room_has_no_failed_line(tmp_path):
    report = look(tree(tmp_path))
    assert report.passed
    assert report["host RAM"].outcome == PASSED
    assert "20.00 GiB on the host (20.00 GiB x 1 devices)" in report["host RAM"].detail
    assert "480.00 GiB free of 512.00 GiB (/proc/meminfo, MemTotal)" in report["host RAM"].detail


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": f"{16 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon {4 * GIB}\ninactive_file {1 * GIB}\n",
            },
            "/sys/fs/cgroup/job/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{16 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.stat": f"cache 0\ntotal_inactive_file {1 * GIB}\n",
            },
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes",
        ),
    ],
)
def test_a_container_limit_is_named_with_the_command_that_raises_it(tmp_path, files, source):
    line = look(tree(tmp_path, **files))["host RAM"]
    assert line.outcome == FAILED
    assert f"12.00 GiB free of 16.00 GiB ({source})" in line.detail  # what the kernel would give back is not counted as used
    assert "docker run --memory=26g" in line.mend


def test_locked_memory_stops_a_tpu_and_not_one_gpu(tmp_path):
    root = tree(tmp_path, **{"proc/self/limits": LIMITS.format(memlock="65536")})
    assert look(root)["locked memory"].outcome == PASSED
    tpu = look(root, plan(machine="tpu-v5p:2x2x1"))["locked memory"]
    assert tpu.outcome == FAILED
    assert "64.0 KiB (RLIMIT_MEMLOCK) for 80.00 GiB" in tpu.detail
    assert "ulimit -l unlimited" in tpu.mend
    many = look(root, plan(machine="h100-sxm:2x8", host_gib=1))["locked memory"]
    assert many.outcome == WARNING


def test_the_host_pool_is_sized_from_the_plan(tmp_path):
    root = tree(tmp_path)
    line = look(root, plan(host_gib=100))["XLA's host pool"]
    assert line.outcome == FAILED
    assert line.mend == "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110"
    given = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "110"}
    assert look(root, plan(host_gib=100), environment=given)["XLA's host pool"].outcome == PASSED


def test_the_host_pool_is_sized_with_the_tails_that_few_large_arrays_leave(tmp_path):
    one = plan(host_gib=70).entries[1]
    seven = dataclasses.replace(plan(), entries=tuple(dataclasses.replace(one, name=f"optimizer:{k}") for k in range(7)))
    line = look(tree(tmp_path), seven, environment={"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "539"})["XLA's host pool"]
    assert line.outcome == FAILED
    assert "490.00 GiB for each device of a pool of 539.00 GiB" in line.detail
    assert int(line.mend.rpartition("=")[2]) > 652
    whole = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "539", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "true"}
    assert look(tree(tmp_path), seven, environment=whole)["XLA's host pool"].outcome == PASSED


def test_processes_of_a_launcher_are_counted_and_must_divide_the_devices(tmp_path):
    root = tree(tmp_path)
    assert "1 process for 1 devices" in look(root)["processes per host"].detail
    eight = plan(machine="h100-sxm:8", host_gib=1)
    good = look(root, eight, environment={"SLURM_NTASKS_PER_NODE": "8"})
    assert good["processes per host"].outcome == PASSED
    assert "8 processes for 8 devices (SLURM_NTASKS_PER_NODE=8)" in good["processes per host"].detail
    assert "16.00 GiB for processes" in good["host RAM"].detail
    bad = look(root, eight, environment={"OMPI_COMM_WORLD_LOCAL_SIZE": "3"})["processes per host"]
    assert bad.outcome == FAILED
    assert "divides 8" in bad.mend


def test_numa_names_the_node_of_the_gpu(tmp_path):
    line = look(tree(tmp_path))["NUMA"]
    assert line.outcome == WARNING
    assert "accelerators at node 1, CPUs of this process at 0,1" in line.detail
    assert "numactl --cpunodebind=1 --membind=1" in line.mend
    bound = tree(tmp_path, **{"proc/self/status": "Cpus_allowed_list:\t16-31\nMems_allowed_list:\t1\n"})
    assert look(bound)["NUMA"].outcome == PASSED
    assert "--preferred-many=1" in look(tree(tmp_path), plan(host_gib=300))["NUMA"].mend


def test_one_node_or_a_firmware_that_does_not_say_is_no_warning(tmp_path):
    files = {"sys/bus/pci/devices/0000:41:00.0/numa_node": "-1\n"}
    assert look(tree(tmp_path, **files))["NUMA"].outcome == PASSED


def test_the_memory_fraction_is_held_against_the_plan(tmp_path):
    root = tree(tmp_path)
    unset = look(root, environment={})["memory fraction"]
    assert unset.outcome == WARNING
    assert unset.mend == "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"
    assert look(root, plan(hbm_gib=65), environment={})["memory fraction"].outcome == FAILED
    platform = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    assert look(root, environment=platform)["memory fraction"].mend == "unset XLA_PYTHON_CLIENT_ALLOCATOR"
    assert look(root)["memory fraction"].outcome == PASSED


def test_variables_that_come_too_late_fail(tmp_path):
    facts = read_machine(root=tree(tmp_path), environment={})
    early = preflight(plan(host_gib=100), machine=dataclasses.replace(facts, backend_ready=False))
    assert early["environment"].outcome == PASSED
    late = preflight(plan(host_gib=100), machine=dataclasses.replace(facts, backend_ready=True))["environment"]
    assert late.outcome == FAILED
    assert "start again with XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 before the command" in late.mend


def test_the_disk_is_measured_and_left_as_it_was(tmp_path):
    root, out = tree(tmp_path / "root"), tmp_path / "runs" / "first"
    facts = read_machine(out, root=root, environment={})
    assert facts.write_bytes_per_second > 0
    assert not list(tmp_path.glob(".forebay*"))
    roomy = dataclasses.replace(facts, disk_free_bytes=100 * GIB, write_bytes_per_second=float(GIB))
    line = preflight(plan(), machine=roomy)["checkpoint disk"]
    assert line.outcome == PASSED
    assert "30.00 GiB a checkpoint, 100.00 GiB free" in line.detail
    assert "30 s a checkpoint" in line.detail
    outcome = lambda **changes: preflight(plan(), machine=dataclasses.replace(roomy, **changes))["checkpoint disk"].outcome  # noqa: E731
    assert outcome(disk_free_bytes=40 * GIB) == WARNING
    assert outcome(disk_free_bytes=20 * GIB) == FAILED
    assert outcome(write_bytes_per_second=2.0**20) == WARNING


def test_the_report_prints_each_line_and_what_to_do(tmp_path):
    said = str(look(tree(tmp_path), plan(host_gib=100)))
    assert said.startswith("preflight on h100-sxm:1\n")
    assert "do: export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110" in said
    assert said.endswith("\n5 passed, 1 warning, 1 failed")


def test_this_very_host_can_be_read(tmp_path):
    report = preflight(plan(host_gib=1, hbm_gib=1), Hardware.named("h100-sxm:1"), folder=tmp_path)
    assert {"host RAM", "NUMA", "checkpoint disk"} <= {line.name for line in report.checks}
