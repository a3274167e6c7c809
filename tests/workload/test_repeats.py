"""What is taken for a repeated layer, where the cuts fall, and what is said about the rest."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.errors import InputError
from forebay.workload.flat import flatten
from forebay.workload.repeats import find_repeats, survey
from forebay.workload.roll import roll
from forebay.workload.tandem import tandem_runs

pytestmark = pytest.mark.oldest

X = jax.ShapeDtypeStruct((3, 4), np.float32)


def square(count, width=4):
    return [jax.ShapeDtypeStruct((width, width), np.float32)] * count


def look(loss, leaves, *rest, specs=None, names=None):
    """Survey of ``loss(list of leaves, *rest)``; nothing is compiled."""

    def flat(*arguments):
        return loss(list(arguments[: len(leaves)]), *arguments[len(leaves) :])

    jaxpr = jax.make_jaxpr(flat)(*leaves, *rest)
    specs = [()] * len(leaves) if specs is None else specs
    return survey(jaxpr, [*specs, *[None] * len(rest)], names)


def chain(leaves, x):
    for w in leaves:
        x = jnp.tanh(x @ w)
    return x.sum()


def counts(found):
    return [repeat.count for repeat in found.repeats]


def test_tandem_runs_are_found_with_their_period():
    best = tandem_runs(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 8]))[0]
    assert (best.start, best.period, best.length, best.count) == (1, 3, 8, 2)


def test_a_repeat_says_where_it_starts_and_what_it_passes_on():
    (repeat,) = look(chain, square(4), X).repeats
    assert (repeat.start, repeat.period, repeat.count) == (0, 2, 4)
    assert repeat.groups == ((0, 1, 2, 3),)
    assert (len(repeat.carry), repeat.invariants, repeat.collected, repeat.last) == (1, (), (), ())


def test_the_cut_carries_least():
    """The final norm continues the pattern, so the blocks could begin at either norm; between layers only x is carried."""

    def loss(leaves, x):
        for scale, w in zip(leaves[0:6:2], leaves[1:6:2], strict=True):
            x = x + jnp.tanh((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))) * scale @ w)
        return ((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))) * leaves[6]).sum()

    scale = jax.ShapeDtypeStruct((4,), np.float32)
    found = look(loss, [leaf for w in square(3) for leaf in (scale, w)] + [scale], X)
    assert counts(found) == [3]
    assert len(found.repeats[0].carry) == 1
    assert found.alone == (6,)


def test_blocks_with_leaves_of_another_spec_are_other_blocks():
    found = look(chain, square(5), X, specs=["a", "a", "b", "b", "b"])
    assert [repeat.groups for repeat in found.repeats] == [((0, 1),), ((2, 3, 4),)]
    assert any("the leaf's sharding spec is b, was a" in reason for reason in found.reasons) is False  # nothing is left to explain
    found = look(chain, square(4), X, specs=["a", "a", "b", "a"])
    assert (counts(found), found.alone) == ([2], (2, 3))
    assert any("the leaf's sharding spec is b, was a" in reason for reason in found.reasons)


def test_a_leaf_read_outside_the_loop_is_not_grouped():
    found = look(lambda leaves, x: chain(leaves, x) + leaves[2].sum(), square(4), X, names=["w0", "w1", "w2", "w3"])
    assert (counts(found), found.alone) == ([4], (0, 1, 2, 3))
    assert found.reasons == ("w0, w1, w2 and 1 more are not stored stacked: w2 used outside the loop too",)


def test_a_leaf_shared_by_some_blocks_is_named():
    found = look(lambda leaves, x: chain([leaves[i] for i in (0, 1, 1, 2)], x), square(3), X)
    assert found.gathered == ((0, 1, 1),)
    assert found.repeats[0].groups == ()
    assert any("shared by several blocks but not all" in reason for reason in found.reasons)


def test_an_irregular_block_splits_the_loop_and_is_named():
    def loss(leaves, x):
        for a, b in zip(leaves[::2], leaves[1::2], strict=True):
            x = jnp.tanh(x @ a @ b)
        return x.sum()

    leaves = square(10)
    leaves[4:6] = [jax.ShapeDtypeStruct((4, 7), np.float32), jax.ShapeDtypeStruct((7, 4), np.float32)]
    found = look(loss, leaves, X)
    assert (counts(found), found.alone) == ([2, 2], (4, 5))
    assert any("block 2 of 5 differs at dot_general" in r and "float32[4,7], was float32[4,4]" in r for r in found.reasons)


def test_names_that_differ_are_a_difference():
    def loss(leaves, x):
        for number, w in enumerate(leaves):
            x = checkpoint_name(jnp.tanh(x @ w), f"layer_{number}")
        return x.sum()

    found = look(loss, square(3), X)
    assert (counts(found), found.alone) == ([], (0, 1, 2))
    assert any("differs at name" in reason and "layer_1, was layer_0" in reason for reason in found.reasons)


@pytest.mark.parametrize("ordered", [True, False])
def test_ordered_effects_are_refused_and_unordered_ones_kept(ordered):
    def loss(leaves, x):
        for w in leaves:
            x = jnp.tanh(x @ w)
            jax.debug.callback(print, x.sum(), ordered=ordered)
        return x.sum()

    found = look(loss, square(3), X)
    touched = {leaf for repeat in found.repeats for group in repeat.groups for leaf in group}
    if not ordered:
        assert (counts(found), touched) == ([3], {0, 1, 2})
        return
    assert all(flatten_has_no_effect(loss, repeat) for repeat in found.repeats)
    assert any("an effect that a loop must not repeat or reorder" in reason for reason in found.reasons)


def flatten_has_no_effect(loss, repeat):
    program = flatten(jax.make_jaxpr(lambda *a: loss(list(a[:3]), a[3]))(*square(3), X))
    return not any(program.equations[index].source.effects for index in repeat.equations)


def test_custom_derivatives_that_differ_are_a_difference():
    def loss(leaves, x):
        for number, w in enumerate(leaves):

            @jax.custom_vjp
            def product(a, w):
                return a @ w

            product.defvjp(lambda a, w: (a @ w, (a, w)), lambda kept, g, n=number: (n * g @ kept[1].T, kept[0].T @ g))
            x = product(x, w)
        return x.sum()

    found = look(loss, square(3), X)
    assert counts(found) == []
    assert any("derivative rule" in reason for reason in found.reasons)


def test_policies_that_differ_are_a_difference_and_equal_ones_are_not():
    def loss(names):
        def run(leaves, x):
            for name, w in zip(names, leaves, strict=True):
                policy = jax.checkpoint_policies.save_only_these_names(name)
                x = jax.checkpoint(lambda x, w: checkpoint_name(jnp.tanh(x @ w), "h"), policy=policy)(x, w)
            return x.sum()

        return run

    assert counts(look(loss("hhhh"), square(4), X)) == [4]
    assert counts(look(loss("hghg"), square(4), X)) == [2]


def test_independent_branches_are_not_layers():
    found = look(lambda leaves, x: jnp.concatenate([jnp.tanh(x @ w) for w in leaves]).sum(), square(4), X)
    assert (counts(found), found.alone) == ([], (0, 1, 2, 3))
    assert any("do not feed one another" in reason for reason in found.reasons)


def test_a_value_computed_once_inside_the_first_block_leaves_that_block_out():
    def loss(leaves, x):
        table = None
        for w in leaves:
            x = jnp.tanh(x @ w)
            table = jnp.cos(x).sum() if table is None else table
            x = x * table
        return x.sum()

    found = look(loss, square(5), X)
    assert (counts(found), found.alone) == ([4], (0,))


def test_the_number_of_specs_is_checked():
    jaxpr = jax.make_jaxpr(lambda a, b: a + b)(1.0, 2.0)
    with pytest.raises(InputError, match="2 inputs, but 3 leaf specs"):
        find_repeats(jaxpr, [None] * 3)


def test_deep_models_are_rolled_quickly():
    def block(x, w):
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        q, k, v = h @ w, jnp.sin(h) @ w, jnp.cos(h) @ w
        x = x + jax.nn.softmax(q @ k.T, -1) @ v
        return x + jax.nn.silu(x @ w) * (x @ w.T)

    def loss(*arguments):
        x = arguments[-1]
        for w in arguments[:-1]:
            x = block(x, w)
        return x.sum()

    jaxpr = jax.make_jaxpr(loss)(*square(32), X)
    start = time.process_time()
    found = survey(jaxpr, [()] * 32 + [None])
    roll(jaxpr, found.repeats)
    assert counts(found) == [32]
    assert time.process_time() - start < 2.0  # 0.1 s on an idle core
