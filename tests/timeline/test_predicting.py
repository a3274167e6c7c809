import gzip
import json

import pytest
from trace_schema import SCHEMA, problems

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.records.forecast import Forecast
from forebay.timeline.perfetto import to_perfetto, write_perfetto
from forebay.timeline.predicting import events, predict, read_schedule, step_seconds, widened

pytestmark = pytest.mark.oldest

MACHINES = {"gpu": Hardware.named("h100-sxm:8"), "tpu": Hardware.named("tpu-v5p:2x2x1")}
LAYERS, MODEL, HIDDEN, TOKENS = 4, 512, 1024, 256
WEIGHT_BYTES = 2 * MODEL * HIDDEN * 2 * LAYERS


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_flops_of_a_rematerialised_step_are_the_hand_count(compiled, version, platform):
    forecast = predict(compiled("fsdp", platform, version), MACHINES[platform])
    products = 2 + 1 + 4  # forward; the first again for the backward pass; two gradients of each
    assert forecast.flops == {"matmul": products * 2 * TOKENS * MODEL * HIDDEN * LAYERS}


def test_fsdp_gathers_twice_and_scatters_once_the_weights(compiled, version):
    schedule = read_schedule(compiled("fsdp", "gpu", version))
    full = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for name, works in schedule.program.computations.items():
        times = 1 if name == schedule.program.entry else LAYERS
        for work in works:
            if work.collective and work.collective.operation in full:
                full[work.collective.operation] += times * work.collective.full_bytes
    assert full == {"all-gather": 2 * WEIGHT_BYTES, "reduce-scatter": WEIGHT_BYTES}
    moved = predict(schedule, MACHINES["gpu"]).bytes["collective"]
    assert moved == pytest.approx(3 * WEIGHT_BYTES * 7 / 8, rel=1e-3)  # and the small gradient norm


def test_offloaded_inputs_cross_the_link_once_each_way(compiled, version):
    forecast = predict(compiled("offload", "gpu", version), MACHINES["gpu"])
    carry = TOKENS * MODEL * 2
    assert forecast.bytes["to_host"] == forecast.bytes["to_device"] == LAYERS * carry
    assert {c.buffer for c in forecast.copies} == {next(iter(forecast.copies)).buffer}, "one buffer, two directions"
    assert all(c.held_bytes == LAYERS * carry and c.count == LAYERS for c in forecast.copies)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_streamed_state_is_charged_to_the_argument_by_name(compiled, version, platform):
    forecast = predict(compiled("stream", platform, version), MACHINES[platform])
    devices = MACHINES[platform].devices
    assert {(c.buffer, c.direction) for c in forecast.copies} == {("mu", "to_device"), ("mu", "to_host")}
    assert all(c.moved_bytes == LAYERS * 1024 * 1024 * 4 / devices for c in forecast.copies)
    assert forecast.exposed_copy_seconds == pytest.approx(sum(c.exposed_seconds for c in forecast.copies))
    assert forecast.exposed_ms_per_gib > 0
    loop = forecast.loops[0]
    assert loop.iterations == LAYERS
    assert loop.bound == "link, one way at a time"
    assert all(0 < share < 1 for share in loop.link_use.values())


def test_state_moved_whole_is_wholly_exposed_and_the_copy_out_keeps_its_name(compiled, version):
    forecast = predict(compiled("whole", "gpu", version), MACHINES["gpu"])
    assert {c.buffer for c in forecast.copies} == {"mu"}
    for copy in forecast.copies:
        assert copy.exposed_seconds == pytest.approx(copy.busy_seconds)


def test_a_forecast_states_its_unknowns_band_and_baseline(compiled, version):
    forecast = predict(compiled("control", "gpu", version), MACHINES["gpu"])
    assert {what for what, _, _ in forecast.unknowns} == {
        "custom call 'cusolver_potrf_ffi'",
        "trip count of while.12: one iteration assumed",
    }
    assert 0 < forecast.unknown_share < 0.2
    assert forecast.low_seconds < forecast.step_seconds < forecast.high_seconds
    assert forecast.baseline_seconds > 0
    longer = predict(compiled("control", "gpu", version), MACHINES["gpu"], trip_counts={"while.12": 10})
    assert longer.step_seconds > 2 * forecast.step_seconds


def test_tokens_and_mfu_come_only_from_stated_facts(compiled, version):
    text = compiled("fsdp", "gpu", version)
    assert predict(text, MACHINES["gpu"]).tokens_per_second is None
    tokens, per_token = TOKENS * 8, 6 * 2 * MODEL * HIDDEN * LAYERS
    forecast = predict(text, MACHINES["gpu"], tokens=tokens, flops_per_token=per_token)
    assert forecast.tokens_per_second == pytest.approx(tokens / forecast.step_seconds)
    assert forecast.mfu == pytest.approx(tokens * per_token / forecast.step_seconds / (8 * 989.4e12))


def test_a_faster_machine_is_faster(compiled, version):
    text = compiled("offload", "gpu", version)
    steps = [predict(text, Hardware.named(name)).step_seconds for name in ("a100-sxm-80:8", "h100-sxm:8", "gb200:8")]
    assert steps == sorted(steps, reverse=True)


def test_forecasts_survive_json(compiled, version):
    forecast = predict(compiled("stream", "gpu", version), MACHINES["gpu"])
    assert Forecast.from_json(json.loads(json.dumps(forecast.to_json()))) == forecast
    with pytest.raises(InputError, match="not a forecast"):
        Forecast.from_json({"step_seconds": 1})


def test_a_program_that_does_nothing_is_an_error(module):
    with pytest.raises(InputError, match="does nothing that takes time"):
        predict(module("ROOT %a = f32[8]{0} parameter(0)"), MACHINES["gpu"])


def test_the_trace_follows_the_format(compiled, version, tmp_path):
    text = compiled("offload", "gpu", version)
    path = write_perfetto(events(text, MACHINES["gpu"]), tmp_path / "trace.json")
    data = json.loads(path.read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "collectives", "host to device", "device to host"} <= set(tracks.values())
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert slices
    for event in slices:
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert event["tid"] in tracks
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    by_track = {}
    for event in sorted(slices, key=lambda e: e["ts"]):
        assert event["ts"] >= by_track.get(event["tid"], 0) - 1e-3, "slices of one lane do not overlap"
        by_track[event["tid"]] = event["ts"] + event["dur"]
    step = predict(text, MACHINES["gpu"]).step_seconds * 1e6
    assert max(by_track.values()) == pytest.approx(step, rel=0.02)
    assert to_perfetto([])["traceEvents"]


def test_the_band_can_hold_another_schedule(compiled):
    one, other = (predict(compiled("offload", "gpu", version), MACHINES["gpu"]) for version in ("0.10.2", "0.12.0.1"))
    both = widened(one, other)
    assert both.step_seconds == one.step_seconds
    assert both.low_seconds <= other.low_seconds
    assert both.high_seconds >= other.high_seconds


def test_a_machine_of_another_size_is_refused_where_devices_talk(compiled, version):
    with pytest.raises(InputError, match="compiled for 8 devices and h100-sxm:64 has 64"):
        predict(compiled("fsdp", "gpu", version), Hardware.named("h100-sxm:64"))
    assert predict(compiled("stream", "gpu", version), Hardware.named("h100-sxm:1")).step_seconds > 0


@pytest.mark.parametrize("name", ["offload", "stream", "fsdp"])
def test_a_trace_keeps_to_the_schema(compiled, version, name):
    trace = to_perfetto(events(compiled(name, "gpu", version), MACHINES["gpu"]))
    assert problems(json.loads(json.dumps(trace)), SCHEMA) == []


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ({"ph": "X", "pid": 1, "tid": 1, "name": "k", "ts": -1.0, "dur": 1.0}, "ts: -1.0 is not 0 or more"),
        ({"ph": "X", "pid": 1, "tid": 1, "name": "k", "ts": 0}, "lacks 'dur'"),
        ({"ph": "X", "pid": 1, "tid": "one", "name": "k", "ts": 0, "dur": float("nan")}, "'one' is no integer"),
        ({"ph": "M", "pid": 1, "tid": 1, "name": "colour", "args": {}}, "'colour' is none of"),
    ],
)
def test_the_schema_refuses_what_is_no_trace(event, complaint):
    assert any(complaint in problem for problem in problems({"traceEvents": [event]}, SCHEMA))


def test_a_trace_is_gzipped_by_its_name(compiled, version, tmp_path):
    bars = events(compiled("stream", "gpu", version), MACHINES["gpu"])
    plain, packed = write_perfetto(bars, tmp_path / "t.json"), write_perfetto(bars, tmp_path / "t.json.gz")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_twice_the_layers_take_twice_the_time(compiled, version, platform):
    schedule = read_schedule(compiled("stream", platform, version))
    loop = next(w.name for w in schedule.program.computations[schedule.program.entry] if w.kind == "loop")
    once, twice = (predict(schedule, MACHINES[platform], trip_counts={loop: n}).step_seconds for n in (16, 32))
    assert twice == pytest.approx(2 * once, rel=0.05)


@pytest.mark.parametrize("name", ["fsdp", "offload", "stream", "whole", "attention"])
def test_more_hbm_is_never_slower(compiled, version, name):
    text = compiled(name, "gpu", version)
    small, large = (predict(text, Hardware.named("h100-sxm:8", hbm=size)).step_seconds for size in ("80GiB", "141GiB"))
    assert large <= small


def test_one_replay_is_the_middle_of_the_forecast(compiled, version):
    schedule = read_schedule(compiled("fsdp", "gpu", version))
    assert step_seconds(schedule, MACHINES["gpu"]) == predict(schedule, MACHINES["gpu"]).step_seconds


def test_the_picture_is_as_busy_as_the_lanes(compiled, version):
    forecast = predict(compiled("stream", "gpu", version), MACHINES["gpu"])
    assert set(forecast.picture) >= {"compute", "to_device", "to_host"}
    for lane, shares in forecast.picture.items():
        assert sum(shares) / len(shares) == pytest.approx(forecast.lanes[lane] / forecast.step_seconds, abs=0.01)


@pytest.mark.parametrize("groups", ["replicas(3)", "[3,4]<=[8]"])
def test_a_group_syntax_that_is_not_known_stops_the_forecast(module, groups):
    text = module(
        f"%a = f32[8,128]{{1,0}} parameter(0)\nROOT %g = f32[64,128]{{1,0}} all-gather(%a), replica_groups={groups}, dimensions={{0}}"
    )
    with pytest.raises(InputError, match=r"replica_groups|not a split"):
        predict(text, MACHINES["gpu"])
