"""plan.json: what is written is read back, another model's plan is refused by what changed, and a broken file by what is broken."""

import json
import re

import jax
import optax
import pytest
from small import WIDTH, loss_fn, shapes, traced

import forebay as fb
from forebay.errors import PlanError

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def plan(work):
    rules = {"parameter:layers/*": "host", "optimizer": "host", "activation:hidden": "recompute"}
    return fb.Plan.by_hand(work, rules, hardware=fb.Hardware.named("h100-sxm:8"))


@pytest.fixture
def path(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_what_is_saved_is_read_back(plan, path, work):
    again = fb.Plan.load(path, work)
    for field in ("workload", "signature", "hardware", "mesh", "entries", "options", "verdict", "forecast", "candidates"):
        assert getattr(again, field) == getattr(plan, field), field
    assert [s.mode for s in again.streams] == [s.mode for s in plan.streams]
    assert again.abstract_state() == plan.abstract_state()


def test_the_file_has_the_fields_that_people_read(path):
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["workload"]["model"] == "small" and data["workload"]["mesh"] == {"fsdp": 8}
    assert {"workload", "signature", "hardware", "entries", "options", "verdict", "forecast", "candidates"} <= set(data)
    entry = next(e for e in data["entries"] if e["name"] == "optimizer:0/mu/layers/up")
    assert (entry["role"], entry["placement"], entry["reason"]) == ("optimizer", "host", "rule optimizer=host")


def test_the_same_model_traced_again_is_the_same(path, work):
    other = traced()
    assert other is not work and other.fingerprint == work.fingerprint
    assert fb.Plan.load(path, other).work is other


def with_a_table():
    params, batch = shapes()
    return fb.trace(lambda p, b: loss_fn(p, b) + p["table"].sum(), optax.adamw(1e-3), params | {"table": params["embed"]}, batch)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: traced(width=2 * WIDTH), rf"parameter:embed was float32\[512, {WIDTH}\] and is float32\[512, {2 * WIDTH}\].* more"),
        (lambda: traced(rows=32), r"batch:x was int32\[16, 8\] and is int32\[32, 8\]"),
        (lambda: traced(optax.sgd(0.1, 0.9)), r"optimizer:0/mu/embed is not in the model any more"),
        (lambda: with_a_table(), r"parameter:table \(float32\[512, 256\]\) is not in the plan"),
    ],
    ids=["wider", "larger batch", "another optimizer", "another name"],
)  # fmt: skip
def test_a_stale_plan_says_what_changed(path, change, text):
    with pytest.raises(PlanError, match="the plan was made for another model: ") as caught:
        fb.Plan.load(path, change())
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "Make a new plan" in str(caught.value)


def broken(path, **changes):
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))


def entry_with(path, **changes):
    entries = json.loads(path.read_text())["entries"]
    return [entries[0] | changes, *entries[1:]]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: p.write_text("{"), "is not a plan.json: .*make it again"),
        (lambda p: p.write_text("[1]"), "it holds a list, not an object"),
        (lambda p: p.write_text("[" * 100_000), "is not a plan.json"),
        (lambda p: p.write_text('{"a":' * 50 + "1" + "}" * 50), "nested more than 32 deep"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00\x01"), "is not a plan.json"),
        (lambda p: broken(p, schema=99), "has schema 99; this forebay reads schema 1"),
        (lambda p: broken(p, entries={}), r"entries is \{\}; it must be a list"),
        (lambda p: broken(p, hardware=[]), r"hardware is \[\]; it must be an object or null"),
        (lambda p: broken(p, options={}), "options.whole_below_bytes is missing"),
        (lambda p: broken(p, workload={"parameters": 1, "mesh": {"fsdp": -1}}), "must map axis names to positive sizes"),
        (lambda p: broken(p, entries=entry_with(p, placement="disk")), "entry 0, 'parameter:embed', cannot be used"),
        (lambda p: broken(p, entries=entry_with(p, colour="red")), r"entry 0, 'parameter:embed', cannot be used: colour is no field of it"),
        (lambda p: broken(p, entries=entry_with(p, bytes_per_device="many")), "bytes_per_device is 'many'; it must be a whole number"),
        (lambda p: broken(p, verdict={"fits": "perhaps"}), "the verdict cannot be read"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_broken_file_is_one_clear_error(path, damage, text):
    damage(path)
    with pytest.raises(PlanError, match=text) as caught:
        fb.Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        fb.Plan.load(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="cannot be read"):
        fb.Plan.load(tmp_path)


def test_a_full_disk_leaves_the_old_plan(plan, path, monkeypatch):
    before = path.read_text()

    def full(self, text, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(PlanError, match="No space left on device; what stood there before is untouched"):
        plan.save(path)
    assert path.read_text() == before


def test_a_loose_plan_answers_what_needs_no_model_and_refuses_the_rest(path):
    loose = fb.Plan.load(path)
    assert loose.placement("optimizer:0/mu/layers/up") == "host"
    assert loose.make_mesh(jax.devices()).size == 8
    with pytest.raises(PlanError, match="bind it to its model first"):
        loose.abstract_state()
