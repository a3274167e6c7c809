"""A mesh and specs of the user's own, and the FSDP that forebay proposes: the same mathematics, and every shard where it belongs."""

import functools

import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import HIDDEN, LAYERS, WIDTH, apart, batch, scanned_loss, unrolled_loss, weights
from resident import Program, assert_equal, by_hand, planned, resident, trace

import forebay as fb
from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware

pytestmark = pytest.mark.usefixtures("small")

EVERYTHING = {"parameter": "host", "optimizer": "host", "activation": "host"}
SPECS = {
    "embed": P(None, ("fsdp", "tensor")),
    "layers": {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp"), "scale": P(None, "fsdp")},
    "head": P("fsdp", None),
}


def mesh_of(sizes=(2, 2, 2), names=("data", "fsdp", "tensor")):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def sharded(model="scanned", mesh=None):
    mesh = mesh or mesh_of()
    if model == "scanned":
        params, specs, loss = weights("float64"), SPECS, scanned_loss
    else:
        layer = {name: P(*spec[1:]) for name, spec in SPECS["layers"].items()}
        params, specs, loss = apart(weights("float64")), SPECS | {"layers": [layer] * LAYERS}, unrolled_loss
    return Program(loss_fn=loss, params=params, batch=batch, mesh=mesh, specs=specs, batch_spec=(("data", "fsdp"),))


@functools.cache
def baseline(model):
    program, optimizer = sharded(model), optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    return program, optimizer, trace(program, optimizer), resident(program, optimizer)


@pytest.mark.parametrize("model", ["scanned", "unrolled"])
@pytest.mark.parametrize("rules", [{"optimizer": "host"}, EVERYTHING], ids=["optimizer", "everything"])
def test_data_fsdp_and_tensor_axes(model, rules):
    program, optimizer, work, wanted = baseline(model)
    got, plan = planned(program, optimizer, rules, work=work)
    assert_equal(got, wanted, 1e-10)
    specs = {e.name: e.spec for e in plan.role("parameter")}
    up = next(name for name in specs if name.endswith("/up"))
    assert specs[up] == (None, "fsdp", "tensor")
    moment = next(e for e in plan.role("optimizer") if "/mu/" in e.name and e.name.endswith("/up"))
    assert moment.spec == (None, "fsdp", "tensor"), "state is sharded like its parameter"
    assert moment.bytes_per_device == LAYERS * WIDTH * HIDDEN * 8 // 4


def test_shardings_may_come_on_the_shapes_and_the_mesh_may_be_abstract():
    """ShapeDtypeStructs on an AbstractMesh say the same as mesh=, param_specs= and batch_spec=."""
    program, optimizer, work, _ = baseline("scanned")
    mesh = program.mesh.abstract_mesh
    like = lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(like, program.params, program.specs)
    rows = jax.tree.map(lambda leaf: like(leaf, P(*program.batch_spec)), program.batch(0))
    again = fb.trace(program.loss_fn, optimizer, params, rows)
    assert [(t.name, t.spec) for t in again.tensors] == [(t.name, t.spec) for t in work.tensors]
    assert again.mesh == work.mesh


def test_specs_by_a_function_of_the_path():
    program, optimizer, work, _ = baseline("scanned")
    chosen = lambda path, shape: P(*(None,) * (len(shape) - 1), "tensor") if path.startswith("layers/") else P()  # noqa: E731
    work = fb.trace(
        program.loss_fn, optimizer, program.params, program.batch(0), mesh=program.mesh, param_specs=chosen, batch_spec=P("data")
    )
    specs = {t.name: t.spec for t in work.tensors if t.role == "parameter"}
    assert specs["parameter:layers/up"] == (None, None, "tensor")
    assert specs["parameter:embed"] == (None, None)


def test_forebay_proposes_fsdp_over_the_machine():
    program = Program(loss_fn=scanned_loss, params=weights("float64"), batch=batch)
    plan = by_hand(program, trace(program, optax.adam(1e-2)), {})
    assert plan.workload["mesh"] == {"fsdp": 8}
    assert {e.name: e.spec for e in plan.role("parameter")} == {
        "parameter:embed": (None, "fsdp"),
        "parameter:head": ("fsdp", None),  # 23 words are not divided by 8 devices
        "parameter:layers/down": (None, "fsdp", None),
        "parameter:layers/scale": (None, None),  # too small to split
        "parameter:layers/up": (None, "fsdp", None),
    }
    assert {e.spec for e in plan.role("batch")} == {("fsdp", None)}


def test_refusals():
    program, optimizer, work, _ = baseline("scanned")
    with pytest.raises(InputError, match="sharded over a mesh of 8 devices and h100-sxm:4 has 4"):
        fb.Plan.by_hand(work, {}, hardware=Hardware.named("h100-sxm:4"))
    with pytest.raises(PlanError, match="is not the plan's"):
        fb.train_step(program.loss_fn, optimizer, by_hand(program, work, {}), mesh=mesh_of((4, 2), ("data", "fsdp")))
    with pytest.raises(InputError, match=r"needs 8 devices and there are 2"):
        by_hand(program, work, {}).make_mesh(jax.devices()[:2])
    wide = Program(loss_fn=scanned_loss, params=weights("float64"), batch=lambda step: jax.tree.map(lambda leaf: leaf[:6], batch(step)))
    with pytest.raises(
        InputError, match=r"has 6 rows, which 8 devices do not divide; .*\(8 or 8\)|has 6 rows, which 8 devices do not divide"
    ):
        by_hand(wide, trace(wide, optimizer), {})
