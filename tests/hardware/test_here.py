"""The machine of this process, found in files, an environment and commands that the tests give."""

from pathlib import Path

import pytest

from forebay.errors import InputError, UnsupportedError
from forebay.hardware import Hardware
from forebay.hardware.here import System, find_here
from forebay.hardware.memory import host_ram_bytes
from forebay.units import GIB

pytestmark = pytest.mark.oldest


def _machine(root: Path, *, smi: str | None = None, environment=None, tpus: tuple[str, ...] = (), ram_kib: int = 64 * 2**20) -> System:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {ram_kib} kB\nMemFree: 1 kB\n")
    for index, device in enumerate(tpus):
        folder = root / f"sys/bus/pci/devices/0000:00:0{index}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(device + "\n")
    return System(root=root, environment=environment or {}, ask=lambda words: smi if words[0] == "nvidia-smi" else None)


def test_this_very_machine_is_found():
    machine = Hardware.here()
    assert machine.hosts == 1 and machine.devices >= 1 and machine.host_ram_bytes > 2**30


def test_a_machine_without_an_accelerator_is_a_cpu(tmp_path):
    machine = find_here(_machine(tmp_path))
    assert (machine.name, machine.chip.platform, machine.devices, machine.target.target_config) == ("cpu", "cpu", 1, None)
    assert machine.host_ram_bytes == 64 * GIB
    assert machine.chip.cores >= 1
    assert machine.dram_bytes_per_second is None and machine.link.to_device_bytes_per_second is None
    assert Hardware.from_json(machine.to_json()) == machine


def test_gpus_are_counted_and_named(tmp_path):
    machine = find_here(_machine(tmp_path, smi="NVIDIA H100 80GB HBM3, 81559\n" * 8))
    assert (machine.name, machine.devices, machine.topology) == ("h100-sxm:8", 8, "1x1x8")
    assert machine.hbm_bytes == Hardware.named("h100-sxm").hbm_bytes
    assert machine.chip.host.ram_bytes.kind == "measured"
    assert machine.dram_bytes_per_second is None, "the reference host's DRAM is not this host's"


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("3", 1), ("0,9,1", 1), ("GPU-1234", 1)])
def test_only_visible_gpus_count(tmp_path, visible, count):
    system = _machine(tmp_path, smi="NVIDIA H200, 143771\n" * 4, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert find_here(system).name == f"h200:{count}"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_leave_the_cpu(tmp_path, visible):
    system = _machine(tmp_path, smi="NVIDIA H200, 143771\n", environment={"CUDA_VISIBLE_DEVICES": visible})
    assert find_here(system).name == "cpu"


def test_a_board_of_another_size_keeps_what_the_driver_says(tmp_path):
    machine = find_here(_machine(tmp_path, smi="NVIDIA GeForce RTX 4090, 49140\n"))
    assert machine.hbm_bytes == 49140 * 2**20
    assert machine.chip.hbm_bytes.kind == "measured"
    assert f"device_memory_size: {49140 * 2**20}" in machine.target.target_config


def test_a_gpu_that_the_catalog_does_not_know_is_named(tmp_path):
    with pytest.raises(UnsupportedError, match=r"1 x 'NVIDIA Unheard Of'.*h100-sxm"):
        find_here(_machine(tmp_path, smi="NVIDIA Unheard Of, 81559\n"))


def test_gpus_of_two_kinds_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        find_here(_machine(tmp_path, smi="NVIDIA H200, 143771\nNVIDIA L40S, 46068\n"))


@pytest.mark.parametrize(
    ("devices", "name", "count"),
    [
        (("0x0062",) * 4, "tpu-v5p:2x2x1", 4),
        (("0x0063",), "tpu-v5e:1x1", 1),
        (("0x006f",) * 8, "tpu-v6e:2x4", 8),
        (("0x0076",) * 4, "tpu-7x:2x2x1", 8),
    ],
)
def test_tpus_are_found_by_their_pci_devices(tmp_path, devices, name, count):
    machine = find_here(_machine(tmp_path, tpus=devices))
    assert (machine.name, machine.devices) == (name, count)
    assert machine.host_ram_bytes == 64 * GIB


def test_the_fraction_that_jax_will_obey_is_taken_from_the_environment(tmp_path):
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    machine = find_here(_machine(tmp_path, smi="NVIDIA H200, 143771\n", environment=environment))
    assert machine.memory_fraction == 0.8 and machine.budget.memory_fraction.kind == "given"


@pytest.mark.parametrize("text", ["much", "-1", "0", "nan"])
def test_a_fraction_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=text):
        find_here(_machine(tmp_path, smi="NVIDIA H200, 143771\n", environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": text}))


def _limit(root: Path, membership: str, file: str, text: str) -> None:
    (root / "proc/self/cgroup").write_text(membership)
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/\n", "sys/fs/cgroup/memory.max"),
        ("0::/work/job\n", "sys/fs/cgroup/work/memory.max"),
        ("4:cpu:/x\n5:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes"),
    ],
)
def test_ram_is_limited_by_the_control_group(tmp_path, membership, file):
    _machine(tmp_path)
    _limit(tmp_path, membership, file, f"{8 * GIB}\n")
    assert host_ram_bytes(tmp_path) == (8 * GIB, f"/{file}")


@pytest.mark.parametrize("text", ["max\n", f"{2**63 - 4096}\n"])
def test_a_control_group_without_a_limit_leaves_the_kernel_s_figure(tmp_path, text):
    _machine(tmp_path)
    _limit(tmp_path, "0::/\n", "sys/fs/cgroup/memory.max", text)
    assert host_ram_bytes(tmp_path)[0] == 64 * GIB
