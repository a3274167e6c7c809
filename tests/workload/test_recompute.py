"""The recompute graph: flops against hand counts, what is folded, shared chains, what nested equations save, stable names."""

import importlib.util
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import forebay as fb
from forebay.errors import PlanError
from forebay.workload import jaxprs, residuals

pytestmark = pytest.mark.oldest

LAYERS, ROWS, SEQ, WIDTH, HIDDEN, HEADS = 3, 2, 8, 16, 24, 4
TOKENS, HEAD = ROWS * SEQ, WIDTH // HEADS


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(x, w):
    q, k, v = (jnp.reshape(x @ w[name], (ROWS, SEQ, HEADS, HEAD)) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k))
    return jnp.einsum("bnqk,bknh->bqnh", scores, v).reshape(ROWS, SEQ, WIDTH) @ w["o"]


def transformer(x, w):
    x = x + attention(x, w)
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


WEIGHTS = {name: like(LAYERS, WIDTH, WIDTH) for name in ("q", "k", "v", "o")} | {
    "up": like(LAYERS, WIDTH, HIDDEN), "down": like(LAYERS, HIDDEN, WIDTH)
}  # fmt: skip


def traced(body, params=WEIGHTS, shape=(ROWS, SEQ, WIDTH), dtype=jnp.float32):
    def loss(params, batch):
        return jnp.sum(jax.lax.scan(body, batch["x"], params)[0].astype(jnp.float32) ** 2)

    return fb.trace(loss, optax.sgd(0.1), params, {"x": like(*shape, dtype=dtype)})


def graph_of(body, **how):
    [graph] = traced(body, **how).recompute_graphs
    return graph


def tensors(work):
    return {t.name: t for t in work.tensors if t.role == "activation" and t.count > 1}


def test_products_of_a_transformer_block_cost_what_a_hand_counts():
    graph = graph_of(transformer)
    products = sorted(node.flops for node in graph.nodes if node.kind == "matmul")
    projection, scores, mlp = 2 * TOKENS * WIDTH * WIDTH, 2 * ROWS * HEADS * SEQ * SEQ * HEAD, 2 * TOKENS * WIDTH * HIDDEN
    assert products == sorted([projection] * 4 + [scores] * 2 + [mlp] * 2)
    assert (graph.length, graph.carry) == (LAYERS, "activation:traced.loss/carry/0")
    largest = max((node for node in graph.nodes if node.kind == "matmul"), key=lambda node: node.moved_bytes)
    assert largest.moved_bytes == 4 * (TOKENS * WIDTH + WIDTH * HIDDEN + TOKENS * HIDDEN)


def test_a_chain_that_two_values_share_is_charged_once():
    def body(x, w):
        shared = checkpoint_name(x @ w["q"], "shared")
        return checkpoint_name(jnp.sin(shared), "left") * checkpoint_name(jnp.cos(shared), "right"), None

    work = traced(body)
    [graph] = work.recompute_graphs
    number = {node.name: n for n, node in enumerate(graph.nodes)}
    left, right = graph.chain(number["activation:left"]), graph.chain(number["activation:right"])
    flops = lambda chain: sum(graph.nodes[n].flops for n in chain)  # noqa: E731
    product, one = 2 * TOKENS * WIDTH * WIDTH, TOKENS * WIDTH
    assert flops(left) == flops(right) == product + one
    assert flops(left | right) == product + 2 * one
    found = tensors(work)["activation:left"]
    assert (found.recompute_flops, found.recompute_from) == (LAYERS * (product + one), ("activation:shared",))
    assert found.recompute_bytes == LAYERS * 4 * (2 * TOKENS * WIDTH + WIDTH * WIDTH + TOKENS * WIDTH)
    assert any(user.startswith("mul@test_recompute.py:") for user in found.consumers)
    assert found.born < found.dies


def test_casts_and_views_fold_into_what_they_come_from_and_weights_are_at_hand():
    def body(x, w):
        w = {name: leaf.astype(jnp.bfloat16) for name, leaf in w.items()}
        wide = checkpoint_name((x @ w["q"]).astype(jnp.float32), "wide")
        narrow = (wide * wide).astype(jnp.bfloat16)
        return jnp.swapaxes(jnp.swapaxes(narrow, 0, 1) @ w["k"], 0, 1), None

    found = tensors(traced(body, dtype=jnp.bfloat16))
    assert found["activation:wide"].dtype == "bfloat16", "the product, from which its cast is free"
    kept = {t.name: t for t in found.values() if t.name not in ("activation:wide", "activation:traced.loss/carry/0")}
    assert [t.dtype for t in kept.values()] == ["bfloat16"], "the narrow cast, not the wide square; no weight and no view"


def test_values_without_a_trained_parameter_before_them_are_not_asked_for():
    """The table of angles is not differentiated, so the product's other operand is not kept for it."""
    angles = np.linspace(0, 1, WIDTH, dtype=np.float32)

    def body(x, w):
        return jnp.tanh((x @ w["q"]) * jnp.cos(angles)) @ w["k"], None

    assert {name for name in tensors(traced(body)) if "dot_general" in name} == set()


@jax.custom_vjp
def kernel(x, w):
    return jnp.tanh(x @ w)


def kernel_forward(x, w):
    product = x @ w
    return jnp.tanh(product), (x, w, jnp.cosh(product))


def kernel_backward(saved, dy):
    x, w, cosh = saved
    dz = dy / cosh**2
    return dz @ w.T, jnp.einsum("bsi,bsj->ij", x, dz)


kernel.defvjp(kernel_forward, kernel_backward)


def with_kernel(x, w):
    return x + kernel(x, w["q"]) @ w["o"], None


def with_inner_loop(x, w):
    def step(h, row):
        h = jnp.tanh(h @ w["q"] + row)
        return h, h

    return x + jnp.swapaxes(jax.lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))[1], 0, 1) @ w["o"], None


def with_branches(x, w):
    return x + jax.lax.cond(jnp.sum(x) > 0, lambda y: jnp.tanh(y @ w["q"]), lambda y: jnp.sin(y @ w["k"]), x), None


NESTED = {"custom_vjp_call": with_kernel, "scan": with_inner_loop, "cond": with_branches}


@pytest.mark.parametrize("primitive", NESTED)
def test_what_a_nested_equation_saves_is_found_named_and_kept(primitive):
    """Keeping what is saved inside spares the second run of the equation; its results are those of the body as it was written."""
    work = traced(NESTED[primitive])
    [loop] = work.program.loops
    inside = [r for r in loop.body.residuals if f"/{primitive}/0/" in r.path]
    assert inside
    assert all(r.read for r in inside)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.3 * rng.normal(size=v.shape), v.dtype) for v in loop.loop.body.in_avals]
    floats = [k for k, v in enumerate(args) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def grads(run):
        def of(*values):
            given = dict(zip(floats, values, strict=True))
            return sum(jnp.sum(out**2) for out in run([given.get(k, v) for k, v in enumerate(args)]))

        return jax.make_jaxpr(jax.grad(of, argnums=tuple(range(len(floats)))))(*(args[k] for k in floats))

    def planned(marks):
        policy = jax.checkpoint_policies.save_only_these_names(*marks)
        return jax.checkpoint(lambda values: residuals.apply_marks(loop.body, {m: m for m in marks}, values), policy=policy)

    wanted = jaxprs.evaluate(grads(lambda values: jaxprs.evaluate(loop.loop.body, values)), [args[k] for k in floats])
    everything = grads(planned([r.mark for r in loop.body.residuals]))
    nothing = grads(planned([]))
    for program in (everything, nothing):
        for a, b in zip(jaxprs.evaluate(program, [args[k] for k in floats]), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert products(everything) < products(nothing)


def products(jaxpr) -> int:
    inner = (part for eqn in jaxprs.closed(jaxpr).jaxpr.eqns for part in jaxprs.inner_jaxprs(eqn))
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxprs.closed(jaxpr).jaxpr.eqns) + sum(map(products, inner))


MODEL = """
import jax
import jax.numpy as jnp


def block(x, w):
    h = jnp.tanh(x @ w["up"])
    return x + jnp.sin(h @ w["down"])


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"], params)
    return jnp.mean(x**2)
"""


def plan_of(path, text, width=16, plan=None):
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location("edited_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), path, "exec"), module.__dict__)  # no bytecode cache: the file changes within a second
    params = {"up": like(LAYERS, WIDTH, width), "down": like(LAYERS, width, WIDTH)}
    work = fb.trace(module.loss, optax.sgd(0.1), params, {"x": like(ROWS, WIDTH)})
    return fb.Plan.by_hand(work, {"activation:block/tanh/0": "host"}) if plan is None else fb.Plan.load(plan, work)


def test_a_plan_survives_comments_and_renamed_variables_and_not_another_shape(tmp_path):
    model, saved = tmp_path / "model.py", tmp_path / "plan.json"
    plan_of(model, MODEL).save(saved)
    edited = (
        MODEL.replace("    h =", "    # a comment\n\n    hidden =").replace("h @", "hidden @").replace("def block", "N = 1\n\n\ndef block")
    )
    assert plan_of(model, edited, plan=saved).placement("activation:block/tanh/0") == "host"
    with pytest.raises(PlanError, match=r"made for another model.*up was float32\[3, 16, 16\] and is float32\[3, 16, 32\]"):
        plan_of(model, MODEL, width=32, plan=saved)
    with pytest.raises(PlanError, match=r"activation:block/tanh/0 is not in the model any more"):
        plan_of(model, MODEL.replace("jnp.tanh", "jnp.exp"), plan=saved)


def test_unnamed_residuals_of_two_loops_in_one_function_are_told_apart():
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["a"])
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["b"])
        return jnp.sum(x**2)

    params = {"a": like(LAYERS, WIDTH, WIDTH), "b": like(LAYERS + 1, WIDTH, WIDTH)}
    found = tensors(fb.trace(loss, optax.sgd(0.1), params, {"x": like(ROWS, WIDTH)}))
    counts = {name: t.count for name, t in found.items() if "dot_general" in name}
    assert sorted(counts.values()) == [LAYERS, LAYERS + 1], counts
    first = next(name for name, count in counts.items() if count == LAYERS)
    assert counts[f"{first}/loop1"] == LAYERS + 1
