"""Plans by hand: every tensor placed, with the bytes of one device and the reason; what a machine refuses stays and says why."""

import optax
import pytest
from small import LAYERS, LENGTH, ROWS, WIDTH, WORDS, traced

from forebay import Hardware, Plan
from forebay.errors import InputError, PlacementError

pytestmark = pytest.mark.oldest

H100 = Hardware.named("h100-sxm:8")


def entries(plan):
    return {e.name: e for e in plan.entries}


def test_without_rules_everything_is_resident_and_every_entry_has_a_reason(work):
    plan = Plan.by_hand(work)
    assert {e.placement for e in plan.entries} <= {"hbm"}
    assert all(e.reason for e in plan.entries)
    assert [e.name for e in plan.role("parameter")] == [
        "parameter:embed",
        "parameter:layers/down",
        "parameter:layers/up",
        "parameter:scale",
    ]
    assert plan.mesh is None and plan.compiler_options == {}
    assert plan.workload["parameters"] == work.parameters == WORDS * WIDTH + 4 * LAYERS * WIDTH * WIDTH + 1
    assert (plan.workload["global_batch"], plan.workload["sequence_length"]) == (ROWS, LENGTH)


def test_bytes_are_those_of_one_device(work):
    one, eight = entries(Plan.by_hand(work)), entries(Plan.by_hand(work, hardware=H100))
    assert one["parameter:layers/up"].bytes_per_device == LAYERS * WIDTH * 2 * WIDTH * 4
    assert eight["parameter:layers/up"].bytes_per_device == one["parameter:layers/up"].bytes_per_device // 8
    assert eight["optimizer:0/mu/layers/up"].spec == eight["parameter:layers/up"].spec == (None, "fsdp", None)
    assert eight["parameter:scale"].bytes_per_device == 4, "what is too small to split stands on every device"
    assert eight["batch:x"].bytes_per_device == ROWS * LENGTH * 4 // 8
    assert eight["activation:hidden"].bytes_per_device == LAYERS * ROWS * LENGTH * 2 * WIDTH * 4 // 8


NEVER = {"fuse_update": "never"}


def test_gradients_follow_their_parameters(work):
    plan = entries(Plan.by_hand(work, {"parameter:layers/*": "host"}, options=NEVER))
    assert plan["gradient:layers/up"].placement == "host"
    assert plan["gradient:embed"].placement == "hbm"
    with pytest.raises(PlacementError, match="gradient:embed belongs to a parameter in HBM"):
        Plan.by_hand(work, {"gradient": "host"})
    with pytest.raises(PlacementError, match="the gradient of a host parameter leaves with its layer"):
        Plan.by_hand(work, {"parameter": "host", "gradient:layers/up": "hbm"})
    assert entries(Plan.by_hand(work, {"*layers*": "host"}, options=NEVER))["gradient:layers/down"].placement == "host"


def test_a_gradient_that_the_backward_pass_consumes_is_one_layer(work):
    entry = entries(Plan.by_hand(work, {"parameter:layers/*": "host"}))["gradient:layers/up"]
    assert (entry.placement, entry.bytes_per_device) == ("hbm", 2 * WIDTH * WIDTH * 4)
    clipped = entries(Plan.by_hand(traced(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))), {"parameter:layers/*": "host"}))
    assert clipped["gradient:layers/up"].placement == "host"
    assert "clipping" in clipped["gradient:layers/up"].reason


def test_scalars_stay_on_the_device(work):
    plan = entries(Plan.by_hand(work, {"optimizer": "host", "parameter": "host", "activation": "host"}))
    for name in ("optimizer:0/count", "parameter:scale", "optimizer:0/mu/scale", "activation:size"):
        assert plan[name].placement == "hbm", name
        assert "scalar" in plan[name].reason, name
    for rule in ("optimizer:0/count", "parameter:scale", "activation:size"):
        with pytest.raises(PlacementError, match="cannot stand on the host: a scalar"):
            Plan.by_hand(work, {rule: "host"})


def test_what_the_tpu_compiler_refuses_stays_and_says_why():
    """A tiny minor axis cannot stand in the host memory of a TPU; its gradient then stays as well."""
    work = traced(width=64, rows=16)
    tpu = Hardware.named("tpu-v5p:2x2x1")
    plan = entries(Plan.by_hand(work, {"parameter": "host", "optimizer": "host"}, hardware=tpu, options=NEVER))
    assert plan["parameter:layers/up"].placement == "host"
    for name in ("parameter:layers/down", "optimizer:0/nu/layers/down"):
        assert plan[name].placement == "hbm"
        assert "minor axis has 64 elements" in plan[name].reason
    assert plan["gradient:layers/down"].placement == "hbm"
    assert plan["gradient:layers/up"].placement == "host"


def test_activations_are_as_written_until_a_rule_names_them(work):
    plan = entries(Plan.by_hand(work, {"activation:hidden": "host"}))
    assert plan["activation:hidden"].placement == "host"
    assert plan["activation:layer_input"].placement == "hbm"
    assert plan["activation:layer_input"].reason.startswith("as written")
    plan = entries(Plan.by_hand(work, {"activation": "recompute"}))
    assert (plan["activation:hidden"].placement, plan["activation:hidden"].bytes_per_device) == ("recompute", 0)
    assert plan["activation:layer_input"].placement == "hbm", "the carry, from which everything is recomputed"


def test_the_batch_stays_on_the_device_and_says_so(work):
    entry = entries(Plan.by_hand(work, {"batch": "host"}))["batch:x"]
    assert entry.placement == "hbm"
    assert "arrives from the loader" in entry.reason


def test_options_of_the_compiler_come_with_their_reason(work):
    resident = Plan.by_hand(work, hardware=H100)
    hosted = Plan.by_hand(work, {"optimizer": "host"}, hardware=H100)
    assert set(resident.compiler_options) < set(hosted.compiler_options)
    assert hosted.options["reasons"]
    own = Plan.by_hand(work, {"optimizer": "host"}, hardware=H100, options={"compiler": {"xla_some_flag": True}})
    assert own.compiler_options == hosted.compiler_options | {"xla_some_flag": True}


def test_a_batch_that_the_machine_does_not_divide():
    with pytest.raises(
        InputError, match=r"batch:x has 12 rows, which 8 devices do not divide; make the global batch a multiple of 8 \(8 or 16\)"
    ):
        Plan.by_hand(traced(rows=12), hardware=H100)


def test_it_prints_bytes_by_role_and_place(work):
    text = str(Plan.by_hand(work, {"optimizer": "host"}, hardware=H100))
    assert "plan for small" in text and "h100-sxm:8" in text
    assert "on host" in next(line for line in text.splitlines() if line.strip().startswith("optimizer"))
    assert text.endswith("no compiler has judged it yet")


def test_an_unstreamable_update_is_said_in_the_plan():
    plan = Plan.by_hand(traced(optax.flatten(optax.adamw(1e-3))), {"optimizer": "host"})
    assert [s.mode for s in plan.streams] == ["whole"]
    assert "joint" in plan.streams[0].reason
