import pytest

from forebay.hardware import Hardware
from forebay.records.entries import Entry
from forebay.timeline.exposure import charge
from forebay.timeline.predicting import predict

pytestmark = pytest.mark.oldest

GIB = 2**30


def copy(buffer, exposed, direction="to_host", held=GIB):
    from forebay.records.forecast import CopyTime

    return CopyTime(
        buffer=buffer, direction=direction, held_bytes=held, moved_bytes=held, count=1, busy_seconds=1.0, exposed_seconds=exposed
    )


def entry(name, size=GIB, placement="host"):
    return Entry(name=name, role=name.partition(":")[0], bytes_per_device=size, placement=placement)


@pytest.fixture
def forecast(compiled):
    import dataclasses

    plain = predict(compiled("stream", "gpu", "0.12.0.1"), Hardware.named("h100-sxm:8"))
    return lambda *copies: dataclasses.replace(plain, copies=copies)


def test_by_path_both_directions_together(forecast):
    copies = [copy("state.opt_state[0].mu['layers']['wq']", 0.01), copy("state.opt_state[0].mu['layers']['wq']", 0.02, "to_device")]
    charged = charge(
        forecast(*copies), [entry("parameter:layers/wq"), entry("optimizer:0/mu/layers/wk"), entry("optimizer:0/mu/layers/wq", 2 * GIB)]
    )
    assert [e.exposed_ms for e in charged.entries] == [None, None, pytest.approx(30)]
    assert charged.entries[2].ms_per_gib == pytest.approx(15)
    assert charged.rest == ()


def test_numbered_buffers_by_role_and_size_in_order(forecast):
    copies = [copy(f"state.stored_opt_state[{i}]", 0.001 * i) for i in (10, 2, 3)] + [copy("state.stored_params[0]", 0.5)]
    wanted = [entry(f"optimizer:0/mu/{name}") for name in "abc"] + [entry("parameter:a", placement="hbm")]
    charged = charge(forecast(*copies), wanted)
    assert [e.exposed_ms for e in charged.entries] == [pytest.approx(2), pytest.approx(3), pytest.approx(10), None]
    assert [c.buffer for c in charged.rest] == ["state.stored_params[0]"]


def test_activations_by_size(forecast):
    copies = [copy("offloaded bf16[4,8] (custom-call.1)", 0.004, held=64), copy("offloaded bf16[4,16] (custom-call.2)", 0.008, held=128)]
    charged = charge(forecast(*copies), [entry("activation:layer_input", 128), entry("activation:q", 64), entry("optimizer:x", 64)])
    assert [e.exposed_ms for e in charged.entries] == [pytest.approx(8), pytest.approx(4), None]
