"""Measuring: DRAM on small arrays, copies and matmuls through the CPU backend (whose copies are no link), and the whole of `probe`."""

import subprocess

import jax
import numpy as np
import pytest

import forebay as fb
from forebay.errors import InputError, MeasurementError
from forebay.hardware import Hardware
from forebay.hardware.probing import arithmetic, dram, link, probing, topology
from forebay.hardware.probing.timing import FEWEST, REPETITIONS, Clock, repeated
from forebay.hardware.reading import Reading
from forebay.units import GIB, KIB, MIB

pytestmark = pytest.mark.oldest
LONG = 600.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_MACHINES", str(tmp_path))
    return tmp_path


def test_arrays_are_four_times_the_cache_and_fit_into_free_memory():
    assert dram.array_bytes(100 * MIB, 64 * GIB) == 400 * MIB
    assert dram.array_bytes(MIB, 64 * GIB) == dram.LEAST_BYTES
    assert dram.array_bytes(None, 64 * GIB) == 4 * dram.CACHE_UNKNOWN_BYTES
    with pytest.raises(MeasurementError, match=r"three arrays of 400.0 MiB.*free memory is 512.0 MiB"):
        dram.array_bytes(100 * MIB, GIB)


@pytest.mark.parametrize("elements", [1, 1000, 2**20])
def test_arrays_begin_on_a_cache_line(elements):
    array = dram.aligned(elements)
    assert array.ctypes.data % 64 == 0 and array.shape == (elements,) and array.dtype == np.float64


def test_a_triad_adds_every_element_once_and_counts_24_bytes_of_it(monkeypatch):
    arrays, aligned = [], dram.aligned
    monkeypatch.setattr(dram, "aligned", lambda count: arrays.append(aligned(count)) or arrays[-1])
    triad = dram.Triad(MIB, cores=[*topology.cores()[:1], *topology.cores()[:1]], nodes={})
    assert triad.run() > 0
    triad.close()
    a, b, c = arrays[:3]
    assert len(arrays) == 6 and (a == 2.0).all() and (b == 1.0).all() and (c == 1.0).all()
    assert triad.counted_bytes == 24 * sum(len(array) for array in arrays[::3])


def test_dram_is_read_as_the_best_of_several_passes():
    reading = dram.measure(free_bytes=64 * GIB, seconds=0.0)
    assert (reading.group, reading.kind, reading.statistic) == ("dram", "triad", "best")
    assert len(reading.rates) == 5 and 1e8 < reading.value < 1e13
    cache = topology.last_level_cache_bytes(topology.cores()) or dram.CACHE_UNKNOWN_BYTES
    assert reading.size >= 3 * 4 * cache * 0.99


def _processor(root, lists: dict[int, str]):
    for node, cpus in lists.items():
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (root / f"sys/devices/system/node/node{node}/cpulist").write_text(cpus + "\n")
    for core in range(4):
        for index, (level, kind, size, shared) in enumerate(
            [(1, "Instruction", "32K", core), (2, "Unified", "1M", core), (3, "Unified", "8M", core // 2)]
        ):
            folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items():
                (folder / name).write_text(f"{text}\n")


def test_nodes_hold_the_cores_that_this_process_may_use(tmp_path):
    _processor(tmp_path, {0: "0-1,8", 1: "2-3", 2: "", 10: "4"})
    assert topology.nodes([0, 1, 2], tmp_path) == {0: [0, 1], 1: [2]}
    assert topology.nodes([0, 4], tmp_path) == {0: [0], 10: [4]}
    assert topology.nodes([0], tmp_path / "nothing") == {}


def test_the_last_caches_are_added_once_each(tmp_path):
    _processor(tmp_path, {})
    assert topology.last_level_cache_bytes([0, 1], tmp_path) == 8 * MIB
    assert topology.last_level_cache_bytes([0, 1, 2], tmp_path) == 16 * MIB
    assert topology.last_level_cache_bytes([0], tmp_path / "nothing") is None


def test_a_repetition_is_prepared_each_time_and_the_first_is_not_counted():
    prepared, done = [], []
    seconds = repeated(done.append, lambda: (prepared.append(1) or len(prepared),), seconds=0.0)
    assert len(seconds) == FEWEST and done == list(range(1, FEWEST + 2))
    assert len(repeated(lambda: None)) == REPETITIONS


def test_copies_are_sized_by_the_free_memory():
    assert link.sizes(64 * GIB, 64 * GIB) == list(link.SIZES)
    assert link.sizes(64 * GIB, GIB) == [128 * MIB, 16 * MIB, MIB, 64 * KIB]
    assert link.sizes(1000, GIB) == []


def test_every_kind_of_copy_runs_on_the_cpu_and_is_no_link(monkeypatch):
    monkeypatch.setattr(link, "PRODUCT_SIDE", 64)
    monkeypatch.setattr(link, "IN_TURNS", 100.0)  # a CPU has one set of cores: its copy and product always take turns
    copied = [4 * MIB, 64 * KIB]
    readings, absent = link.measure(jax.devices()[0], Clock(LONG), copied)
    assert absent == []
    assert {r.group for r in readings} == {"not a link", "matmul"}
    found = {(r.kind, r.memory, r.size, r.beside) for r in readings}
    for size in copied:
        for kind in ("to_device", "to_host"):
            for memory in ("pinned_host", "unpinned_host", "pageable"):
                assert (kind, memory, size, "") in found
    for kind in ("both in one program", "both as two copies"):
        assert (kind, "pinned_host", 8 * MIB, "") in found
    for kind in ("to_device", "to_host"):
        assert (kind, "pinned_host", 4 * MIB, "matmul") in found
        assert ("bf16", "", 64, kind) in found
    assert all(r.value > 0 and len(r.rates) >= FEWEST for r in readings)


def test_of_a_single_numa_node_only_the_figures_that_decide_are_read():
    readings, _ = link.measure(jax.devices()[0], Clock(LONG), [MIB, 64 * KIB], node=3)
    assert {r.node for r in readings} == {3}
    assert {(r.kind, r.size) for r in readings} == {
        ("to_device", MIB), ("to_host", MIB), ("both in one program", 2 * MIB), ("both as two copies", 2 * MIB),
    }  # fmt: skip


def test_a_copy_that_waits_for_the_matmul_gives_no_rate(monkeypatch):
    monkeypatch.setattr(link, "PRODUCT_SIDE", 64)
    monkeypatch.setattr(link, "IN_TURNS", 0.0)
    readings, absent = link.measure(jax.devices()[0], Clock(LONG), [MIB])
    assert not [r for r in readings if r.beside]
    assert absent == [f"{way} beside a matmul: the copy and the matmul ran one after the other" for way in ("to_device", "to_host")]


def test_what_there_is_no_time_or_memory_for_is_said():
    readings, absent = link.measure(jax.devices()[0], Clock(0.0), [MIB])
    assert readings == [] and all("out of time" in why for why in absent) and absent
    assert link.measure(jax.devices()[0], Clock(LONG), [])[1] == ["host link: too little memory is free"]
    readings, absent = arithmetic.matmuls(jax.devices()[0], Clock(LONG), 0, {})
    assert readings == [] and "matmul fp32 512: too little memory is free" in absent


def test_a_triad_on_the_device_counts_two_arrays_read_and_one_written():
    reading = arithmetic.hbm(jax.devices()[0], 32 * MIB)
    assert (reading.group, reading.size) == ("hbm", 3 * 4 * MIB)
    assert 1e7 < reading.value < 1e14


def test_a_chain_of_products_is_timed_by_its_operations(monkeypatch):
    monkeypatch.setattr(arithmetic, "repeated", lambda work: work() is None or (0.5, 0.25, 0.5))
    one = arithmetic.matmul(jax.devices()[0], "fp32", 64, peak=None)
    assert (one.kind, one.size, one.value) == ("fp32", 64, 2 * 64**3 / 0.5)
    chained = arithmetic.matmul(jax.devices()[0], "bf16", 64, peak=5 * 2 * 64**3 / arithmetic.CHAIN_SECONDS * 1.01)
    assert chained.value == 5 * 2 * 64**3 / 0.5


def test_the_sides_of_a_gpu_start_with_the_largest(monkeypatch):
    asked = []

    def fake(device, dtype, side, peak):
        asked.append((dtype, side))
        return Reading(group="matmul", kind=dtype, size=side, rates=(1e15,))

    monkeypatch.setattr(arithmetic, "matmul", fake)
    arithmetic.matmuls(None, Clock(LONG), 100 * GIB, {"bf16": 1e15, "fp8": 2e15, "fp32": 6e13})
    assert asked == [*(("bf16", side) for side in arithmetic.SIDES), ("fp32", 8192), ("fp32", 2048)]


def test_probe_measures_this_machine_and_its_figures_are_used_from_then_on(folder, monkeypatch):
    if Hardware.here().chip.platform != "cpu":
        pytest.skip("this machine has an accelerator")
    monkeypatch.setattr(probing, "ARITHMETIC_SECONDS", 2.0)
    told = []
    found = fb.probe("this-box", tell=told.append)
    assert told == ["host DRAM", "matmuls and device memory"]
    assert {r.group for r in found.readings} == {"dram", "matmul"}
    assert "host link: not on this machine, whose host and device memory are one" in found.absent
    here, named = Hardware.here(), Hardware.named("this-box")
    assert here.name == "cpu" and named.name == "this-box"
    assert here.dram_bytes_per_second == named.dram_bytes_per_second
    assert here.dram_bytes_per_second.kind == "measured"
    assert here.link.to_device_bytes_per_second is None
    assert named.chip.sustained.matmul_flops["fp32"][512].value > 0
    assert found.versions["jax"] == jax.__version__


def test_the_name_of_a_chip_is_not_a_machine_s(folder):
    with pytest.raises(InputError, match=r"'h100-sxm' is a chip of the catalog.*my-h100-sxm"):
        fb.probe("h100-sxm")


def test_each_numa_node_is_measured_by_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(topology, "nodes", lambda usable: {0: [0, 1], 1: [2, 3]})
    tasks = probing._tasks(Hardware.named("h100-sxm:8"))
    assert [(t["measure"], t["node"], t["cores"]) for t in tasks] == [
        ("arithmetic", None, []), ("link", None, []), ("link", 0, [0, 1]), ("link", 1, [2, 3]),
    ]  # fmt: skip
    assert tasks[0]["peaks"]["bf16"] == 989.4e12
    monkeypatch.setattr(topology, "nodes", lambda usable: {0: [0, 1]})
    assert len(probing._tasks(Hardware.named("h100-sxm:8"))) == 2, "one node is the whole machine"


def test_a_process_that_fails_is_a_message_with_its_last_words(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: Unable to initialize backend 'cuda'")
    monkeypatch.setattr(probing.subprocess, "run", lambda *_, **__: failed)
    base = Hardware.named("h100-sxm:8")
    with pytest.raises(MeasurementError, match=r"host link of h100-sxm:8 failed: .*Unable to initialize.*forebay\[cuda13\]"):
        probing._measured(probing._tasks(base)[1], base)
