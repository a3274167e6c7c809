import dataclasses

import pytest

from forebay.records.forecast import CopyTime, Forecast, LoopTime
from forebay.report.lanes import copy_table, exposed_table, lane_picture, step_table

pytestmark = pytest.mark.oldest


def forecast(**changes):
    base = Forecast(
        hardware="h100-sxm:8", step_seconds=2.0, low_seconds=1.8, high_seconds=2.3, path={"matmul": 1.5, "wait for to_device": 0.5},
        lanes={}, domains={}, bytes={}, flops={}, copies=(), exposed_copy_seconds=0.5, exposed_collective_seconds=0.0, baseline_seconds=1.4,
        unknown_share=0.0, unknowns=(), launches=3,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_picture_shades_columns_by_how_busy_a_lane_is():
    picture = {"to_device": (0.0, 0.0, 1.0), "compute": (1.0, 1.0, 0.0), "to_host": (0.5, 0.0, 0.01)}
    head, *lines = lane_picture(forecast(picture=picture)).splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["compute", "to_device", "to_host"], "the order of the lanes is fixed"
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in lines}
    assert rows["compute"] == "@@ "
    assert rows["to_device"] == "  @"
    assert rows["to_host"][0] not in " @"
    assert "2 s (forecast)" in head
    assert lane_picture(forecast()) == ""


def test_entries_are_told_by_exposed_time_and_what_a_gib_costs():
    entries = [{"name": f"optimizer:{n}", "bytes_per_device": 2**30, "exposed_ms": float(n), "ms_per_gib": float(n)} for n in range(4)] + [
        {"name": "parameter:w", "bytes_per_device": 2**30, "exposed_ms": None}
    ]
    lines = exposed_table(entries, count=2).splitlines()
    assert lines[1].split() == ["3", "ms", "1.00", "GiB", "3.00", "optimizer:3"]
    assert lines[2].split() == ["2", "ms", "1.00", "GiB", "2.00", "optimizer:2"]
    assert lines[3].split() == ["1", "ms", "2.00", "GiB", "0.50", "2", "more"]
    assert exposed_table(entries[-1:]) == ""


def test_the_step_is_told_with_its_band_and_causes():
    text = step_table(forecast())
    assert text.splitlines()[0] == "step 2 s (forecast, 1.8 s to 2.3 s) on h100-sxm:8"
    assert "matmul" in text.splitlines()[1]
    assert "75.0 %" in text
    loop = LoopTime(name="while.1", iterations=8, seconds=1.0, path={}, link_use={"to_device": 0.44}, bound="link, one way at a time")
    text = step_table(forecast(loops=(loop,), tokens_per_second=1000.0, mfu=0.4, unknowns=(("opcode 'x'", 1, 0.1),), unknown_share=0.05))
    assert "host link full to_device 44 %; bound by link, one way at a time" in text
    assert "1,000 tokens/s, MFU 40.0 % (attention counted causally)" in text
    assert "costed by bytes only: 5.00 % of the step (opcode 'x')" in text


def test_the_copies_are_told_with_ms_per_gib():
    copy = CopyTime(
        buffer="mu", direction="to_host", held_bytes=2**31, moved_bytes=2.0**31, count=4, busy_seconds=0.1, exposed_seconds=0.016
    )
    lines = copy_table(forecast(copies=(copy, copy)), count=1).splitlines()
    assert lines[1].split() == ["16", "ms", "100", "ms", "2.00", "GiB", "8.00", "to_host", "mu"]
    assert lines[2].strip() == "and 1 more"
    assert copy_table(forecast()) == "no host copies in this program"
