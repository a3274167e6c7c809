"""A trace read back: CUDA streams by the names of their events, a CPU by its thunks, anything else refused with the reason."""

import gzip
import json

import pytest

from forebay.errors import InputError
from forebay.training.tracing import busy_seconds, covered, kind_of, read_trace

pytestmark = pytest.mark.oldest


def names(pid, process, *threads):
    rows = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}]
    return rows + [{"ph": "M", "pid": pid, "tid": n, "name": "thread_name", "args": {"name": t}} for n, t in enumerate(threads)]


def event(pid, tid, name, begin, end, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": end - begin, "args": args}


def test_streams_of_a_gpu_are_lanes_and_overlaps_count_once():
    streams = ("Stream #13(Compute)", "Stream #20(MemcpyH2D)", "Stream #21(MemcpyD2H)", "Stream #22(Compute)", "XLA Ops")
    events = [
        *names(1, "/device:GPU:0", *streams), *names(2, "/device:GPU:1", *streams), *names(9, "/host:CPU", "python"),
        event(1, 0, "gemm_fusion_dot", 0, 100), event(1, 3, "loop_fusion", 50, 120),
        event(1, 3, "ncclDevKernel_AllGather_RING_LL", 120, 150),
        event(1, 1, "MemcpyH2D", 0, 40), event(1, 2, "MemcpyD2H", 0, 30), event(1, 0, "MemcpyD2D", 200, 210),
        event(2, 0, "gemm_fusion_dot", 0, 80), event(1, 4, "all-gather.1", 0, 1000), event(9, 0, "python", 0, 5000, hlo_op="dot"),
    ]  # fmt: skip
    busy = busy_seconds({"traceEvents": events})
    wanted = {"compute": (120 + 80) / 2, "collective": 15, "to_device": 20, "to_host": 15, "device": 5}
    assert busy == pytest.approx({kind: micro * 1e-6 for kind, micro in wanted.items()})


def test_thunks_of_a_cpu_are_summed_without_the_loops_that_hold_them():
    events = [
        *names(7, "/host:CPU", "tf_XLAExecute/1", "tf_XLAExecute/2"),
        event(7, 0, "while.5", 0, 100, hlo_op="while.5"), event(7, 0, "dot.1", 0, 60, hlo_op="dot.1"),
        event(7, 1, "dot.1", 10, 60, hlo_op="dot.1"), event(7, 1, "all-reduce.2", 60, 70, hlo_op="all-reduce.2"),
        event(7, 0, "ThreadpoolListener", 0, 900),
    ]  # fmt: skip
    assert busy_seconds({"traceEvents": events}) == pytest.approx({"compute": 110e-6, "collective": 10e-6})


def test_a_trace_without_either_is_refused_by_what_it_has():
    with pytest.raises(InputError, match="no CUDA streams and no thunks of a CPU; it has rows of /device:TPU:0"):
        busy_seconds({"traceEvents": [*names(1, "/device:TPU:0", "XLA Ops"), event(1, 0, "fusion", 0, 1)]})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MemcpyH2D", "to_device"), ("Memcpy D2H", "to_host"), ("MemcpyD2D", "device"), ("MemcpyP2P", "collective"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "collective"), ("sm90_xmma_gemm_bf16", "compute"), ("copy_fusion", "compute"),
    ],
)  # fmt: skip
def test_the_kind_of_an_event(name, kind):
    assert kind_of(name) == kind


def test_the_union_of_intervals():
    assert covered([(5, 9), (0, 4), (3, 6), (20, 21), (3, 4)]) == 10
    assert covered([]) == 0


def put(folder, content: bytes):
    target = folder / "plugins/profile/2026_01_01/host.trace.json.gz"
    target.parent.mkdir(parents=True)
    target.write_bytes(content)
    return folder


def test_reading_a_trace(tmp_path):
    whole = {"traceEvents": []}
    assert read_trace(put(tmp_path, gzip.compress(json.dumps(whole).encode()))) == whole


DAMAGED = [b"not gzip", *(gzip.compress(text, mtime=0) for text in (b"{", b"[]")), gzip.compress(b"{}", mtime=0)[:-6]]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_trace_is_one_message(tmp_path, content):
    with pytest.raises(InputError, match="cannot be read as a trace"):
        read_trace(put(tmp_path, content))


def test_no_trace_is_one_message(tmp_path):
    with pytest.raises(InputError, match=r"left no trace.json.gz below"):
        read_trace(tmp_path)
