"""``trace``: every thing that occupies memory, by name, role and bytes; what cannot be traced is refused by name; nothing is allocated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import forebay as fb
from forebay.errors import InputError
from forebay.workload.sharding import MeshShape, local_shape, nbytes, pad_spec

pytestmark = pytest.mark.oldest

LAYERS, WIDTH, ROWS = 3, 16, 8


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def block(x, w):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return x + jnp.tanh(hidden) @ w["down"]


def scanned(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (block(checkpoint_name(x, "layer_input"), w), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def written(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = block(x, w)
    return jnp.mean((x @ params["head"]) ** 2)


def shapes(form):
    layer = {"up": like(WIDTH, 32), "down": like(32, WIDTH)}
    stack = jax.tree.map(lambda leaf: like(LAYERS, *leaf.shape), layer)
    return {"layers": stack if form is scanned else [layer] * LAYERS, "head": like(WIDTH, 4)}, {"x": like(ROWS, WIDTH)}


def tensors(work, role):
    return {t.name: t for t in work.tensors if t.role == role}


@pytest.mark.parametrize("form", [scanned, written])
def test_every_role_has_its_tensors_and_their_bytes(form):
    work = fb.trace(form, optax.adamw(1e-3), *shapes(form), name="small")
    parameters = tensors(work, "parameter")
    middle = "layers/" if form is scanned else "layers/*/"
    assert set(parameters) == {f"parameter:{middle}up", f"parameter:{middle}down", "parameter:head"}
    up = parameters[f"parameter:{middle}up"]
    assert (up.shape, up.dtype, up.bytes) == ((LAYERS, WIDTH, 32), "float32", LAYERS * WIDTH * 32 * 4)
    assert set(up.members) == ({"layers/up"} if form is scanned else {f"layers/{k}/up" for k in range(LAYERS)})
    assert {name.replace("gradient", "parameter") for name in tensors(work, "gradient")} == set(parameters)
    state = tensors(work, "optimizer")
    assert state[f"optimizer:0/mu/{middle}up"].shape == (LAYERS, WIDTH, 32)
    assert state["optimizer:0/count"].movable is False
    assert tensors(work, "batch")["batch:x"].bytes == ROWS * WIDTH * 4
    hidden = tensors(work, "activation")["activation:hidden"]
    assert (hidden.shape, hidden.count, hidden.bytes) == ((ROWS, 32), LAYERS, LAYERS * ROWS * 32 * 4)
    assert hidden.source.startswith("test_trace.py:")
    assert work.parameters == 2 * LAYERS * WIDTH * 32 + WIDTH * 4
    assert all(t.spec is None for t in work.tensors), "no shardings were given"


def test_residuals_without_a_name_are_named_by_their_function():
    work = fb.trace(scanned, optax.sgd(0.1), *shapes(scanned))
    found = tensors(work, "activation")
    assert found["activation:block/tanh/0"].source.startswith("test_trace.py:"), list(found)


def test_the_fingerprint_depends_on_shapes_and_names_and_not_on_the_moment():
    base = fb.trace(scanned, optax.adamw(1e-3), *shapes(scanned))
    assert fb.trace(scanned, optax.adamw(1e-3), *shapes(scanned)).fingerprint == base.fingerprint
    params, _ = shapes(scanned)
    assert fb.trace(scanned, optax.adamw(1e-3), params, {"x": like(2 * ROWS, WIDTH)}).fingerprint != base.fingerprint
    assert fb.trace(scanned, optax.lion(1e-3), *shapes(scanned)).fingerprint != base.fingerprint


def test_arrays_numpy_and_numbers_are_as_good_as_shapes():
    params, batch = shapes(scanned)
    full = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    assert fb.trace(scanned, optax.adamw(1e-3), full, batch).fingerprint == fb.trace(scanned, optax.adamw(1e-3), params, batch).fingerprint
    assert fb.trace(lambda p, b: p["w"] * b["scale"], optax.sgd(0.1), {"w": 2.0}, {"scale": 3.0}).parameters == 1


def test_a_larger_model_than_this_machine_is_traced_without_allocating():
    layer = {"up": like(400, 16384, 65536, dtype=jnp.bfloat16), "down": like(400, 65536, 16384, dtype=jnp.bfloat16)}
    work = fb.trace(
        scanned, optax.adamw(1e-3), {"layers": layer, "head": like(16384, 4, dtype=jnp.bfloat16)}, {"x": like(8, 16384, dtype=jnp.bfloat16)}
    )
    assert work.parameters > 8e11


@pytest.mark.parametrize(
    ("loss", "params", "text"),
    [
        (lambda p, b: p["w"], {"w": like(3)}, r"must return a floating scalar loss.*float32\[3\]"),
        (lambda p, b: jnp.int32(1), {"w": like()}, "must return a floating scalar loss"),
        (lambda p, b: p["w"], {"w": like(dtype=jnp.int32)}, r"parameter w is int32\[\], which cannot be differentiated; pass it in extra="),
        (lambda p, b: 0.0, {}, "params has no leaves"),
    ],
    ids=["vector", "integer loss", "integer parameter", "empty"],
)
def test_what_cannot_be_trained_is_refused(loss, params, text):
    with pytest.raises(InputError, match=text):
        fb.trace(loss, optax.sgd(0.1), params, {"x": like(4)})


def test_extra_state_must_come_back():
    with pytest.raises(InputError, match=r"must return \(loss, \(aux, new_extra\)\)"):
        fb.trace(lambda p, b, extra: p["w"].sum(), optax.sgd(0.1), {"w": like(3)}, {"x": like(4)}, extra={"n": like()})


MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_specs_come_with_a_mesh_and_fit_the_arrays():
    params, batch = shapes(scanned)
    given = {"layers": {"up": P(None, "model", None), "down": P()}, "head": P("model")}
    work = fb.trace(scanned, optax.adamw(1e-3), params, batch, mesh=MESH, param_specs=given, batch_spec=P("data"))
    specs = {t.name: t.spec for t in work.tensors if t.spec is not None}
    assert work.mesh == MeshShape(sizes=(2, 4), names=("data", "model"))
    assert specs["parameter:layers/up"] == specs["gradient:layers/up"] == specs["optimizer:0/nu/layers/up"] == (None, "model", None)
    assert specs["parameter:head"] == ("model", None)
    assert specs["batch:x"] == ("data", None)
    for wrong, text in (
        ({"param_specs": given}, "specs were given without a mesh"),
        ({"mesh": MESH, "param_specs": {"head": P()}}, "param_specs has 1 specs for 3 parameters"),
        ({"mesh": MESH, "batch_spec": P("rows")}, r"names the mesh axis 'rows', but the mesh has \{'data': 2, 'model': 4\}"),
        (
            {"mesh": MESH, "param_specs": lambda path, shape: P(*(None,) * (len(shape) - 1), ("data", "model"))},
            "axis 1 of head has 4 elements, which the 8 devices",
        ),
    ):
        with pytest.raises(InputError, match=text):
            fb.trace(scanned, optax.adamw(1e-3), params, batch, **wrong)


def test_leaves_on_two_meshes_are_refused():
    params, batch = shapes(scanned)
    other = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params["head"] = jax.ShapeDtypeStruct((WIDTH, 4), jnp.float32, sharding=NamedSharding(MESH, P()))
    batch["x"] = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(other, P("data")))
    with pytest.raises(InputError, match="sharded over different meshes"):
        fb.trace(scanned, optax.adamw(1e-3), params, batch)


def test_shards_and_bytes():
    mesh = MeshShape(sizes=(2, 4), names=("data", "model"))
    assert local_shape((8, 12), (("data", "model"), None), mesh) == (1, 12)
    assert local_shape((8, 12), (None, "model"), mesh) == (8, 3)
    assert local_shape((8,), (None,), None) == (8,)
    assert pad_spec(P("data"), 3) == ("data", None, None)
    assert pad_spec(P(("data",), None), 2) == ("data", None)
    with pytest.raises(InputError, match="has 2 parts for an array of rank 1"):
        pad_spec(P("data", "model"), 1)
    assert nbytes((3, 5), jnp.bfloat16) == 30
    assert nbytes((), jax.random.key(0).dtype) == 8
