"""What differentiation keeps outside of layer loops: the same bytes as jax's own, under names and lines of the user's code."""

import importlib.util
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import forebay as fb
from forebay.errors import PlacementError
from forebay.workload import outside
from forebay.workload.sharding import nbytes

pytestmark = pytest.mark.oldest

ROWS, SEQ, WIDTH, HIDDEN, VOCAB, LAYERS = 8, 16, 32, 48, 256, 3
MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def found(loss, params, batch, **how):
    """The activations that stand outside of loops, by path."""
    work = fb.trace(loss, optax.sgd(0.1), params, batch, **how)
    inside = {f"activation:{r.path}" for loop in work.program.loops for r in loop.body.residuals}
    return {t.name.partition(":")[2]: t for t in work.tensors if t.role == "activation" and t.name not in inside}


def kept_by_jax(loss, params, batch):
    """Shapes and dtypes of what ``jax.vjp`` keeps and computed itself: no operand, no scalar, nothing twice."""
    traced = jax.make_jaxpr(lambda p, b: jax.tree.leaves(jax.vjp(lambda p: loss(p, b), p)[1]))(params, batch).jaxpr
    made = {v for eqn in traced.eqns for v in eqn.outvars}
    return sorted((v.aval.shape, str(v.aval.dtype)) for v in {v for v in traced.outvars if v in made} if v.aval.size > 1)


def line_of(function, text):
    """``file.py:12`` of the first line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"test_outside.py:{first + next(k for k, line in enumerate(lines) if text in line)}"


def decoder(params, batch):
    """A scanned decoder whose head is not cut into chunks."""
    h = params["embed"][batch["tokens"]]
    h, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)), h, params["layers"])
    normed = h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True))
    logits = jnp.einsum("bsd,dv->bsv", normed.astype(jnp.bfloat16), params["head"], preferred_element_type=jnp.float32)
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, batch["tokens"][..., None], -1))


DECODER = {
    "embed": like(VOCAB, WIDTH), "head": like(WIDTH, VOCAB, dtype=jnp.bfloat16),
    "layers": {"up": like(LAYERS, WIDTH, HIDDEN), "down": like(LAYERS, HIDDEN, WIDTH)},
}  # fmt: skip
TOKENS = {"tokens": like(ROWS, SEQ, dtype=jnp.int32)}


def test_the_logits_and_statistics_of_a_head_without_chunks_are_listed():
    listed = found(decoder, DECODER, TOKENS)
    logits = [t for t in listed.values() if t.shape == (ROWS, SEQ, VOCAB)]
    assert [(t.dtype, t.bytes, t.count, t.written) for t in logits] == [("float32", ROWS * SEQ * VOCAB * 4, 1, "hbm")]
    [logits] = logits
    assert logits.source == line_of(decoder, "log_softmax")
    assert logits.recompute_flops > 2 * ROWS * SEQ * WIDTH * VOCAB
    assert logits.recompute_flops < 2.2 * ROWS * SEQ * WIDTH * VOCAB, "from the loop's result on, not through the layers"
    assert not logits.movable and logits.note == outside.WHY_NOT
    statistics = [t for t in listed.values() if t.shape[:2] == (ROWS, SEQ) and t.shape[2:] == (1,) and "log_softmax" not in t.name]
    assert statistics, "of the norm and of the softmax"
    last = listed["decoder/scan/0"]
    assert (last.shape, last.source) == ((ROWS, SEQ, WIDTH), line_of(decoder, "jax.lax.scan"))
    normed = next(t for t in listed.values() if t.dtype == "bfloat16")
    assert "activation:decoder/scan/0" in normed.recompute_from and normed.consumers[0].startswith("dot_general@")


def test_the_first_carry_of_a_loop_stands_in_the_loops_stack_alone():
    """An embedding's rows enter the loop and are dead from there on; what is made of them before is kept."""
    assert not any(
        t.source == line_of(decoder, 'params["embed"]') and t.dtype == "float32" for t in found(decoder, DECODER, TOKENS).values()
    )

    def scaled(params, batch):
        h = jnp.sin(params["embed"][batch["tokens"]])
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), h, params["w"])[0] ** 2)

    params = {"embed": like(VOCAB, WIDTH), "w": like(LAYERS, WIDTH, WIDTH)}
    rows = [t for t in found(scaled, params, TOKENS).values() if t.shape == (ROWS, SEQ, WIDTH)]
    assert [t.source for t in rows] == [line_of(scaled, "jnp.sin"), line_of(scaled, "lax.scan")], "the gather's result and the loop's"


def test_what_a_loop_reads_through_all_its_layers_is_kept_outside_and_what_it_only_adds_is_not():
    def loss(params, batch):
        mask = jnp.sin(jnp.arange(float(WIDTH * WIDTH))).reshape(WIDTH, WIDTH)
        bias = jnp.cos(batch["x"])
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ (w * mask)) + bias, None), batch["x"], params)
        return jnp.sum(x)

    listed = found(loss, like(LAYERS, WIDTH, WIDTH), {"x": like(ROWS, WIDTH)})
    [(path, mask)] = listed.items()
    assert path.endswith(".loss/sin/0") and mask.shape == (WIDTH * WIDTH,)
    assert mask.consumers == (f"scan@{line_of(loss, 'lax.scan')}",)


def mlp(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.sin(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def cnn(params, batch):
    x = batch["x"]
    for k in params["kernels"]:
        x = jnp.sin(jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.mean((x.mean((1, 2)) @ params["head"] - batch["y"]) ** 2)


def checkpointed(params, batch):
    """Each layer's input is kept, and nothing inside but the named half of the second."""
    x = batch["x"]
    for k, w in enumerate(params):
        policy = jax.checkpoint_policies.save_only_these_names("kept") if k == 1 else None
        x = jax.checkpoint(lambda x, w: jnp.tanh(checkpoint_name(jnp.sin(x @ w), "kept")), policy=policy)(x, w)
    return jnp.mean((x - batch["y"]) ** 2)


@jax.custom_vjp
def own_rule(x):
    return jnp.sin(x) * 2


own_rule.defvjp(lambda x: (jnp.sin(x) * 2, jnp.cos(x)), lambda cosine, g: (2 * cosine * g,))


def with_own_rule(params, batch):
    return jnp.mean(jax.jit(jnp.sin)(own_rule(batch["x"] @ params[0]) @ params[1]))


def mapped(params, batch):
    layer = jax.shard_map(lambda x, w: jnp.sin(x @ w), mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"))
    return jnp.mean(layer(batch["x"], params[0]) @ params[1])


PLAIN = [like(32, 48), like(48, 40), like(40, 24), like(24, 16)]
BATCH = {"x": like(64, 32), "y": like(64, 16)}
IMAGES = {"x": like(8, 16, 16, 3), "y": like(8, 10)}
KERNELS = {"kernels": [like(3, 3, 3, 16), like(3, 3, 16, 32), like(3, 3, 32, 24)], "head": like(24, 10)}


@pytest.mark.parametrize(
    ("loss", "params", "batch"),
    [
        (mlp, PLAIN, BATCH),
        (cnn, KERNELS, IMAGES),
        (checkpointed, PLAIN, BATCH),
        (with_own_rule, PLAIN[:2], BATCH),
        (mapped, PLAIN[:2], BATCH),
    ],
    ids=["mlp", "cnn", "checkpoints", "custom_vjp and jit", "shard_map"],
)
def test_a_model_without_loops_keeps_the_shapes_that_jax_keeps(loss, params, batch):
    listed = found(loss, params, batch)
    kept = [t for t in listed.values() if t.written == "hbm"]
    assert sorted((t.shape, t.dtype) for t in kept) == kept_by_jax(loss, params, batch)
    assert all(t.source.startswith("test_outside.py:") for t in listed.values())
    assert all(t.bytes == nbytes(t.shape, t.dtype) for t in listed.values())


def test_what_a_checkpoint_recomputes_is_listed_so_and_its_input_is_kept():
    listed = found(checkpointed, PLAIN, BATCH)
    written = {path: t.written for path, t in listed.items()}
    assert written["checkpointed.lambda/dot_general/0"] == "recompute"
    assert written["checkpointed.lambda/tanh/0"] == "hbm", "it enters the second layer, whose recomputation starts from it"
    assert {"hbm", "recompute"} <= set(written.values())
    plan = fb.Plan.by_hand(fb.trace(checkpointed, optax.sgd(0.1), PLAIN, BATCH))
    stands = {e.name: e.bytes_per_device for e in plan.role("activation")}
    assert stands["activation:checkpointed.lambda/dot_general/0"] == 0
    assert stands["activation:checkpointed.lambda/tanh/0"] == 64 * 48 * 4


@pytest.mark.parametrize("loop", ["scan", "unrolled"])
def test_a_value_between_two_checkpoints_of_a_layer_is_kept_as_written(loop):
    """What a checkpoint would recompute is kept all the same where the next one starts from it."""
    half = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))

    def layer(x, w):
        return half(half(x, w["a"]), w["b"]), None

    def loss(params, batch):
        if loop == "scan":
            x, _ = jax.lax.scan(layer, batch["x"], params)
        else:
            x = layer(batch["x"], params)[0]
        return jnp.sum(x)

    lead = (LAYERS,) if loop == "scan" else ()
    params = {"a": like(*lead, WIDTH, HIDDEN), "b": like(*lead, HIDDEN, WIDTH)}
    work = fb.trace(loss, optax.sgd(0.1), params, {"x": like(ROWS, WIDTH)})
    kept = [t.name for t in work.tensors if t.role == "activation" and t.written == "hbm" and "carry" not in t.name]
    assert [name.split("/")[1] for name in kept] == ["sin"]


def test_values_of_parameters_scalars_and_what_is_tiny_beside_the_rest_are_left_out():
    def loss(params, batch):
        direction = params["w"] / jnp.linalg.norm(params["w"])
        x = jnp.sin(batch["x"] @ direction)
        return jnp.sum(x**2) * jnp.exp(jnp.sum(params["scale"])) + jnp.sum(jnp.sin(batch["x"][:1, :2] * params["scale"]))

    listed = found(loss, {"w": like(WIDTH, 512), "scale": like(2)}, {"x": like(64, WIDTH)})
    assert {t.shape for t in listed.values()} == {(64, 512)}


MODEL = """
import jax
import jax.numpy as jnp

def loss(params, batch):
    x = jnp.tanh(batch["x"] @ params["a"])
    x = jnp.tanh(x * x)
    return jnp.mean((x @ params["b"]) ** 2)
"""


def test_a_print_has_no_result_and_a_loop_of_prints_neither():
    def loss(params, batch):
        x = jnp.sin(batch["x"] @ params)
        jax.debug.print("mean {}", x.mean())
        jax.lax.scan(lambda _, row: (None, jax.debug.print("row {}", row.mean())), None, x)
        return jnp.sum(x**2)

    assert {t.shape for t in found(loss, like(WIDTH, HIDDEN), {"x": like(ROWS, WIDTH)}).values()} == {(ROWS, HIDDEN)}


def test_names_survive_comments_other_variables_and_a_new_metric(tmp_path):
    def names(text):
        path = tmp_path / "model.py"
        path.write_text(text)
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("edited_outside", path))
        exec(compile(text, path, "exec"), module.__dict__)
        return fb.trace(module.loss, optax.sgd(0.1), {"a": like(8, 8), "b": like(8, 4)}, {"x": like(16, 8)}).signature

    edited = MODEL.replace("x = jnp.tanh(b", "# first\n\n    hidden = jnp.tanh(b").replace("x * x", "hidden * hidden")
    metric = edited.replace("    return jnp", "    noise = jnp.max(jnp.tanh(batch['x'] * batch['x']))\n    return noise * 0 + jnp")
    before = names(MODEL)
    assert {"activation:loss/tanh/0", "activation:loss/tanh/1"} <= before.keys()
    assert names(edited) == before
    moved = metric.replace('noise * 0 + jnp.mean((x @ params["b"]) ** 2)', 'jnp.mean((x @ params["b"]) ** 2), {"noise": noise}')
    first = moved.replace("    # first", "    early = jnp.tanh(batch['x'] * batch['x'])\n")
    assert names(moved) == names(first) == before


def test_a_helper_used_in_a_loop_and_behind_it_has_a_name_in_each():
    def norm(x):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(norm(x) @ w), None), batch["x"], params["w"])
        return jnp.mean((norm(x) @ params["head"]) ** 2)

    params = {"w": like(LAYERS, WIDTH, WIDTH), "head": like(WIDTH, WIDTH)}
    work = fb.trace(loss, optax.sgd(0.1), params, {"x": like(ROWS, WIDTH)})
    names = [t.name for t in work.tensors]
    assert len(names) == len(set(names))
    assert {n for n in names if n.endswith("/outside")} == {f"{n}/outside" for n in names if ".norm/" in n and not n.endswith("/outside")}


def test_one_name_on_several_values_that_are_alike_is_one_entry_and_on_others_numbered():
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.sin(checkpoint_name(jnp.cos(x) @ w, "product"))
        return jnp.sum(x)

    weights = [like(32, 48), like(48, 48), like(48, 24), like(24, 48)]
    listed = {path: (t.shape, t.count, t.bytes) for path, t in found(loss, weights, BATCH).items() if "product" in path}
    assert listed == {"product": ((64, 48), 3, 3 * 64 * 48 * 4), "product/1": ((64, 24), 1, 64 * 24 * 4)}
    entries = fb.Plan.by_hand(fb.trace(loss, optax.sgd(0.1), weights, BATCH)).role("activation")
    assert {e.name: e.bytes_per_device for e in entries}["activation:product"] == 3 * 64 * 48 * 4


def test_bytes_per_device_follow_the_rows_of_the_batch_through_reshapes():
    def loss(params, batch):
        tokens = jnp.sin(batch["x"] @ params["a"]).reshape(ROWS * SEQ, HIDDEN)
        table = jnp.cos(params["a"] * 2) @ jnp.sin(params["b"])
        turned = jnp.tanh(tokens @ params["b"]).T
        return jnp.mean(jnp.sin(turned) ** 2) + jnp.mean(table)

    batch, params = {"x": like(ROWS, SEQ, WIDTH)}, {"a": like(WIDTH, HIDDEN), "b": like(HIDDEN, WIDTH)}
    work = fb.trace(loss, optax.sgd(0.1), params, batch, mesh=MESH, batch_spec=P("data"), param_specs=lambda *_: P())
    plan = fb.Plan.by_hand(work)
    sizes = {t.name: t.bytes for t in work.tensors}
    entries = plan.role("activation")
    assert len(entries) >= 4
    assert [e.bytes_per_device for e in entries] == [sizes[e.name] // 4 for e in entries]


def test_a_rule_that_names_such_a_value_is_refused_and_a_pattern_leaves_it():
    work = fb.trace(decoder, optax.sgd(0.1), DECODER, TOKENS)
    with pytest.raises(
        PlacementError, match=r"activation:decoder/scan/0=host would do nothing: outside the layer loops it stays as the model"
    ):
        fb.Plan.by_hand(work, {"activation:decoder/scan/0": "host"})
    for rules in ({"activation": "host"}, {"activation:*": "recompute"}, {"activation:?*": "host"}, {"*scan*": "host"}):
        plan = fb.Plan.by_hand(work, rules)
        entry = next(e for e in plan.entries if e.name == "activation:decoder/scan/0")
        assert (entry.placement, entry.bytes_per_device) == ("hbm", ROWS * SEQ * WIDTH * 4)
        assert entry.reason.startswith("not moved by") and outside.WHY_NOT in entry.reason


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Eqx(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(32, 64, key=key), eqx.nn.Linear(64, 16, key=key)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def nnx_model():
    graph, params = nnx.split(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), nnx.Param)
    return lambda p, b: jnp.mean((nnx.merge(graph, p)(b["x"]) - b["y"]) ** 2), params


def eqx_model():
    params, static = eqx.partition(eqx.filter_eval_shape(Eqx, jax.random.key(0)), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda p, b: jnp.mean((jax.vmap(eqx.combine(p, static))(b["x"]) - b["y"]) ** 2), params


@pytest.mark.parametrize("make", [nnx_model, eqx_model])
def test_models_of_libraries_without_loops_are_listed(make):
    loss, params = make()
    listed = found(loss, params, BATCH)
    assert sorted((t.shape, t.dtype) for t in listed.values()) == kept_by_jax(loss, params, BATCH)
    hidden = next(t for path, t in listed.items() if path.endswith("__call__/tanh/0"))
    assert hidden.source.startswith("test_outside.py:")
