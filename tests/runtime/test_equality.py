"""Ten planned steps equal ten resident ones in double precision: the common optimizers, two models, every kind of placement.

Not a full cross: each optimizer meets each model under "everything on the host" and under one of the other placements in turn.
"""

import functools

import optax
import pytest
from programs import MODELS
from resident import assert_equal, planned, resident, trace

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))),
}
PLACEMENTS = {
    "resident": {},
    "optimizer": {"optimizer": "host"},
    "layers": {"parameter:layers/*": "host", "optimizer:*layers*": "host"},
    "parameters": {"parameter": "host"},
    "pattern": {"optimizer": "host", "optimizer:*/embed": "hbm", "parameter:*up": "host", "activation": "recompute"},
    "everything": {"parameter": "host", "optimizer": "host", "activation": "host"},
}
OTHERS = [name for name in PLACEMENTS if name != "everything"]
CASES = [(model, name, "everything") for model in MODELS for name in OPTIMIZERS]
CASES += [(model, name, OTHERS[(k + 2 * m) % len(OTHERS)]) for m, model in enumerate(MODELS) for k, name in enumerate(OPTIMIZERS)]


@functools.cache
def baseline(model, name):
    """The program, its optimizer, its traced workload, and the resident outcome: once for all placements."""
    program, optimizer = MODELS[model](), OPTIMIZERS[name]()
    return program, optimizer, trace(program, optimizer), resident(program, optimizer)


@pytest.mark.parametrize(("model", "name", "placement"), sorted(CASES))
def test_ten_planned_steps_equal_ten_resident_ones(model, name, placement):
    program, optimizer, work, wanted = baseline(model, name)
    got, plan = planned(program, optimizer, PLACEMENTS[placement], work=work)
    assert_equal(got, wanted, 1e-10)
    assert wanted.losses[-1] < wanted.losses[0] - 1e-3
    on_host = {e.role for e in plan.entries if e.placement == "host"}
    assert ("optimizer" in on_host) == (placement not in ("resident", "parameters"))
    assert ("parameter" in on_host) == (placement not in ("resident", "optimizer"))


def test_host_arrays_are_streamed_and_not_moved_whole():
    """The equalities above would hold for whole moves too: here each family streams, in several slices and with a rest."""
    program, optimizer, work, _ = baseline("scanned", "adamw")
    _, plan = planned(program, optimizer, PLACEMENTS["everything"], work=work, steps=1)
    assert {s.mode for s in plan.streams} == {"slices"}
    assert all(s.count > 1 for s in plan.streams)
    assert any(s.rest for s in plan.streams)
    program, optimizer, work, _ = baseline("unrolled", "adamw")
    _, plan = planned(program, optimizer, PLACEMENTS["everything"], work=work, steps=1)
    assert [s.mode for s in plan.streams].count("items") == 3


@pytest.mark.parametrize(("model", "name"), [(model, name) for model in MODELS for name in OPTIMIZERS])
def test_resident_layers_updated_inside_the_backward_pass(model, name):
    """No gradient stack although nothing is moved; what clipping needs first keeps its stack."""
    program, optimizer, work, wanted = baseline(model, name)
    got, plan = planned(program, optimizer, {}, work=work, options={"fuse_update": "always"})
    assert_equal(got, wanted, 1e-10)
    assert bool(plan.fused) == (name != "clipped")
    assert {e.placement for e in plan.entries} <= {"hbm", "recompute"}
    smaller = [e.bytes_per_device < p.bytes_per_device for e, p in zip(plan.role("gradient"), plan.role("parameter"), strict=True)]
    assert sum(smaller) == len(plan.fused)


def test_state_on_the_host_is_updated_inside_the_backward_pass():
    program, optimizer, work, wanted = baseline("scanned", "adamw")
    got, plan = planned(program, optimizer, {"optimizer": "host"}, work=work)
    assert_equal(got, wanted, 1e-10)
    assert plan.fused and {e.placement for e in plan.role("parameter")} == {"hbm"}
