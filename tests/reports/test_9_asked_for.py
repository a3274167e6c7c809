"""Reports of theme 9, asked for and not had: optimizer state by fraction, by layer, by pattern; frozen parameters too."""

import dataclasses
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import scanned
from resident import assert_equal, by_hand, planned, resident, trace

import forebay as fb
from forebay.errors import InputError
from forebay.hardware import xla_flags
from forebay.search import asking
from forebay.training.placing import placement_rules
from forebay.training.questions import Question, _found

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]


@pytest.fixture
def work():
    program = scanned()
    return program, trace(program, optax.adam(1e-2))


def on_host(plan):
    return {e.name for e in plan.entries if e.role == "optimizer" and e.placement == "host"}


def test_optimizer_state_by_pattern(work):
    assert on_host(by_hand(*work, {"optimizer:*/mu/*": "host"})) == {
        "optimizer:0/mu/embed", "optimizer:0/mu/head", "optimizer:0/mu/layers/down", "optimizer:0/mu/layers/scale",
        "optimizer:0/mu/layers/up",
    }  # fmt: skip


def places(plan, path):
    """Where each layer of a stack of optimizer state stands."""
    parts = [e for e in plan.entries if e.role == "optimizer" and path in e.name]
    return [e.placement for e in sorted(parts, key=lambda e: e.layers) for _ in range(*e.layers)]


def test_optimizer_state_by_layer(work):
    plan = by_hand(*work, {"optimizer:*/layers/up": "host[0:2]"})
    assert places(plan, "mu/layers/up") == ["host", "host", "hbm"]


def test_optimizer_state_by_fraction(work):
    plan = by_hand(*work, {"optimizer:*/layers/up": "host:67%"})
    assert places(plan, "nu/layers/up") == ["host", "host", "hbm"]


def test_a_fraction_of_all_state_trains_as_the_resident_run(work):
    program, optimizer = work[0], optax.adam(1e-2)
    got, _ = planned(program, optimizer, {"optimizer": "host:50%", "activation": "recompute"}, steps=2)
    assert_equal(got, resident(program, optimizer, steps=2), 1e-10)


def test_frozen_parameters_train_under_offload_as_in_lora():
    labels = lambda p: jax.tree_util.tree_map_with_path(lambda path, _: "own" if "head" in jax.tree_util.keystr(path) else "base", p)  # noqa: E731
    optimizer = optax.multi_transform({"own": optax.adam(1e-2), "base": optax.set_to_zero()}, labels)
    program = scanned()
    got, plan = planned(program, optimizer, {"parameter": "host", "optimizer": "host"}, steps=2)
    assert_equal(got, resident(program, optimizer, steps=2), 1e-10, norms=False)
    np.testing.assert_array_equal(got.params["embed"], program.params["embed"])
    assert all(e.bytes_per_device == 0 for e in plan.role("gradient") if "head" not in e.name)


@pytest.mark.parametrize("place", ["disk", "nvme"])
def test_miles_1793_and_radixark_63_a_disk_is_not_offered_yet_and_that_is_said(work, place):
    said = r"state on a disk \(NVMe\) is not offered yet: the host's RAM is the farthest place where a tensor can stand"
    with pytest.raises(InputError, match=said):
        by_hand(*work, {"optimizer": place})
    with pytest.raises(InputError, match=said):
        placement_rules([f"optimizer={place}"])


def small(batch=64):
    loss = lambda p, b: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b, p)[0] ** 2)  # noqa: E731
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    return fb.trace(loss, optax.adam(0.1), shape(4, 128, 128), shape(batch, 128))


@pytest.mark.compiler
def test_unsloth_3867_where_offloading_does_not_help_the_answer_is_to_keep_everything():
    plan = fb.choose(small(), fb.Hardware.named("h100-sxm:1"), budget_seconds=60)
    assert plan.verdict.fits
    assert {e.placement for e in plan.entries} == {"hbm"}
    state = next(e for e in plan.entries if e.name.startswith("optimizer:0/mu"))
    assert state.reason.startswith("kept in HBM: it would not be faster on the host (forecast)")
    assert state.runner_up.startswith("host: +")


def question(monkeypatch, hbm, hardware="h100-sxm:8"):
    """A question whose compiler is a stand-in: a step of ``(seq, batch)`` on a machine needs ``hbm(seq, batch, devices)`` bytes."""

    def frugal(work, machine, deadline):
        needed = hbm(*work.sizes, machine.devices)
        memory = types.SimpleNamespace(total_bytes=needed)
        verdict = types.SimpleNamespace(hbm=memory, host=types.SimpleNamespace(total_bytes=0), reason="", compiled=True)
        return types.SimpleNamespace(verdict=verdict, fits=needed <= machine.hbm_budget_bytes)

    monkeypatch.setattr(asking, "frugal", frugal)
    monkeypatch.setattr(asking, "least_hbm_bytes", lambda work, machine: hbm(*work.sizes, machine.devices))
    rows = lambda batch: types.SimpleNamespace(role="batch", shape=(batch,))  # noqa: E731
    trace = lambda seq, batch: types.SimpleNamespace(sizes=(seq, batch), mesh=None, tensors=[rows(batch)])  # noqa: E731
    return Question(
        trace=trace, work_done=lambda *_: {}, described=lambda *_: {}, hardware=fb.Hardware.named(hardware),
        seq=4096, batch=16, budget_seconds=1e6,
    )  # fmt: skip


def test_the_largest_batch_the_longest_sequence_and_the_smallest_machine_are_answered_without_the_accelerator(monkeypatch):
    need = lambda seq, batch, devices: int(2**33 + seq * batch * 2**21 / devices)  # noqa: E731
    asked = question(monkeypatch, need)
    budget = asked.hardware.hbm_budget_bytes
    batch = _found(asked, "batch", None, math.inf).size
    assert batch % 8 == 0 and need(4096, batch, 8) <= budget < need(4096, batch + max(8, batch // 25), 8)
    seq = _found(asked, "seq", None, math.inf).size
    assert seq % 128 == 0 and need(seq, 16, 8) <= budget < need(seq + max(128, seq // 25), 16, 8)
    fewest = _found(asked, "devices", None, math.inf).size
    assert need(4096, 16, fewest.devices) <= budget < need(4096, 16, fewest.devices // 2)


@pytest.mark.parametrize(
    ("variable", "count"), [("SLURM_NTASKS_PER_NODE", "8"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8")]
)
def test_maxtext_865_and_jax_16788_what_a_launcher_says_is_shown_with_its_variable_and_another_overrides_it(host, variable, count):
    from forebay.trust.preflight_machine import read_machine

    plan = fb.Plan.by_hand(small(), {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm:8"))
    found = read_machine(environment={variable: count})
    facts = dataclasses.replace(host, local_processes=found.local_processes, local_processes_source=found.local_processes_source)
    assert f"8 processes for 8 devices ({variable}={count})" in fb.preflight(plan, machine=facts)["processes per host"].detail
    over = read_machine(environment={"SLURM_TASKS_PER_NODE": "4(x2)", variable: count})
    assert over.local_processes == 8  # what is said of this very host goes before what is said of the job


def test_which_xla_flags_and_why_and_contradictions_are_named():
    plan = fb.Plan.by_hand(small(), {"optimizer": "host"}, hardware=fb.Hardware.named("h100-sxm:8"))
    for name in plan.compiler_options:
        assert any(reason.startswith(name) or f"{name}=" in reason for reason in plan.options["reasons"]), name
    [said] = xla_flags.contradictions(plan.compiler_options, "--xla_gpu_experimental_parallel_async_compute_limit=2")
    assert "2" in said and "xla_gpu_experimental_parallel_async_compute_limit" in said


def test_the_environment_can_be_set_before_jax_is_imported():
    program = """
import sys
from forebay.hardware import Hardware, environment
machine = Hardware.named("h100-sxm:8")
values = {}
environment.fill(values, machine)
assert values["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92", values
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
