"""How a family of the update is carried out: by layers, in chunks with a rest, or whole, and why."""

import jax
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from small import LAYERS, loss_fn, shapes, traced

import forebay as fb
from forebay.plan import streams
from forebay.plan.fsdp import propose_spec
from forebay.plan.options import unsliced_axes
from forebay.plan.streams import chunk
from forebay.workload import Tensor

pytestmark = pytest.mark.oldest

HOST = {"optimizer": "host"}


def streams_of(work, rules=HOST, **options):
    plan = fb.Plan.by_hand(work, rules, options={"whole_below_bytes": 0} | options)
    names = [e.name.partition(":")[2] for e in plan.role("parameter")]
    return {names[f.params[0]]: s for f, s in zip(work.families, plan.streams, strict=True) if f.params}


@pytest.mark.parametrize(
    ("length", "limit", "size"), [(12, 100, 12), (12, 6, 6), (12, 5, 4), (13, 5, 5), (1, 1, 1), (100, 30, 25), (97, 10, 10)]
)
def test_a_chunk_divides_the_length_where_a_divisor_is_large_enough(length, limit, size):
    assert chunk(length, limit) == size
    assert size <= limit


def test_stacks_go_layer_by_layer_and_tables_in_chunks(work, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 2**16)
    found = streams_of(work)
    for name in ("layers/up", "layers/down"):
        assert (found[name].mode, found[name].count, found[name].size, found[name].axis) == ("slices", LAYERS, 1, 0)
        assert found[name].reason == f"streamed layer by layer, {LAYERS} layers"
    table = found["embed"]
    assert table.mode == "slices" and table.count * table.size + table.rest == 512
    assert table.count >= 8, "512 rows of 1 KiB, at most 64 KiB at once"
    assert "chunks along axis 0" in table.reason


def test_nothing_is_streamed_where_nothing_is_on_the_host(work):
    assert {s.mode for s in streams_of(work, {}).values()} == {"resident"}
    found = streams_of(work, {"optimizer:*/embed": "host"})
    assert (found["embed"].mode, found["layers/up"].mode) == ("slices", "resident")


def test_a_small_leaf_moves_whole(work):
    assert streams_of(work, whole_below_bytes=2**30)["embed"].reason == "moved whole: smaller than a useful slice"


def test_a_sharded_axis_is_never_streamed():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"embed": P("fsdp", None), "layers": {"up": P(None, "fsdp", None), "down": P("fsdp", None, None)}, "scale": P()}
    params, batch = shapes()
    params["layers"] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((8, *leaf.shape[1:]), leaf.dtype), params["layers"])
    work = fb.trace(loss_fn, optax.adamw(1e-3), params, batch, mesh=mesh, param_specs=specs, batch_spec=P("fsdp"))
    found = streams_of(work)
    assert found["embed"].axis == 1
    assert found["layers/up"].axis == 0
    assert found["layers/down"].axis == 1, "the caller shards the layers: they cannot be scanned one by one"


def test_a_norm_over_the_leaf_does_not_hinder_streaming_but_a_factorisation_does():
    assert {s.mode for s in streams_of(traced(optax.lamb(1e-3))).values()} == {"slices"}
    muon = streams_of(traced(optax.contrib.muon(1e-3)))
    assert muon["embed"].mode == "whole" and "dot_general" in muon["embed"].reason


@pytest.mark.parametrize(
    ("shape", "devices", "layered", "spec"),
    [
        ((4, 256, 512), 8, True, (None, "fsdp", None)),  # the input axis of a stack of matrices
        ((4, 250, 512), 8, True, (None, None, "fsdp")),  # the next that the devices divide
        ((80, 8192), 8, True, (None, "fsdp")),  # never the layers, however few
        ((4, 250, 251), 8, True, (None, None, None)),
        ((128256, 4096), 8, False, (None, "fsdp")),  # the shorter axis of a matrix: an embedding
        ((4096, 128256), 8, False, ("fsdp", None)),  # and a head
        ((512, 250), 8, False, ("fsdp", None)),
        ((4, 512), 8, True, (None, None)),  # too small
        ((4, 256, 512), 1, True, (None, None, None)),
    ],
)
def test_the_proposed_sharding_leaves_the_stacked_axis_whole(shape, devices, layered, spec):
    tensor = Tensor(name="parameter:w", role="parameter", shape=shape, dtype="float32", bytes=4)
    assert propose_spec(tensor, devices, layered) == spec


def test_a_minor_axis_that_the_compiler_updates_no_part_of_is_not_cut(monkeypatch):
    assert unsliced_axes("tpu", "0.10.2") == {-1}
    assert unsliced_axes("tpu", "0.12.0.1") == unsliced_axes("cuda", "0.10.2") == frozenset()
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")  # noqa: E731
    one = fb.trace(lambda p, b: ((b @ p[0]) ** 2).mean(), optax.adam(0.1), shape(1, 256, 512), shape(16, 256))
    modes = {}
    for unsliced in (frozenset(), frozenset({-1})):
        monkeypatch.setattr("forebay.plan.plan.unsliced_axes", lambda _, unsliced=unsliced: unsliced)
        plan = fb.Plan.by_hand(one, HOST, hardware=fb.Hardware.named("tpu-v5p:2x2x1"))
        [modes[unsliced]] = [s for s, f in zip(plan.streams, one.families, strict=True) if f.params]
    assert (modes[frozenset()].mode, modes[frozenset()].axis) == ("slices", 2)
    assert modes[frozenset({-1})].mode == "whole"
    assert "one of which this compiler updates no part" in modes[frozenset({-1})].reason
