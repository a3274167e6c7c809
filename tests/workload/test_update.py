"""The optimizer's update split: which arrays belong together, what is shared, how a stack's layers become one program."""

import jax
import jax.numpy as jnp
import optax
import pytest

from forebay.errors import InputError
from forebay.workload import slicing
from forebay.workload.families import make_families
from forebay.workload.program import Stored
from forebay.workload.update import slice_component, trace_update

pytestmark = pytest.mark.oldest

PARAMS = {
    "a": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    "b": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    "s": jax.ShapeDtypeStruct((), jnp.float32),
}


def traced(optimizer, params=None):
    params = params or PARAMS
    state = jax.eval_shape(optimizer.init, params)
    return trace_update(optimizer, params, state), [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def groups(optimizer, params=None):
    """For each component, its parameters and the names of its state."""
    update, names = traced(optimizer, params)
    return {c.params: sorted(names[j] for j in c.state) for c in update.components}


@pytest.mark.parametrize("name", ["adamw", "clip", "lamb", "every third", "schedule"])
def test_a_parameter_stands_with_its_own_state_and_no_other(name):
    optimizer = {
        "adamw": optax.adamw(1e-2),
        "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        "lamb": optax.lamb(1e-2),
        "every third": optax.MultiSteps(optax.adamw(1e-2), 3),
        "schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    }[name]
    found = groups(optimizer)
    assert set(found) == {(0,), (1,)}, "the scalar is shared, the two matrices are apart"
    for k, letter in ((0, "a"), (1, "b")):
        assert len(found[k,]) == (3 if name == "every third" else 2)
        assert all(f"'{letter}'" in state for state in found[k,])


def test_a_truly_joint_update_is_one_component():
    """Mixing two parameters elementwise, or laying all out flat, ties them."""
    swap = optax.GradientTransformation(lambda p: optax.EmptyState(), lambda g, s, p=None: ({**g, "a": g["b"], "b": g["a"]}, s))
    assert set(groups(optax.chain(swap, optax.sgd(0.1, 0.9)))) >= {(0, 1)}
    assert set(groups(optax.flatten(optax.adam(1e-2)), {k: PARAMS[k] for k in "ab"})) == {(0, 1)}


def test_a_table_that_all_leaves_read_ties_nothing():
    assert {(0,), (1,)} <= set(groups(optax.contrib.muon(1e-2)))


@pytest.mark.parametrize(
    ("optimizer", "frozen"),
    [
        (optax.adamw(1e-2), (False, False, False)),
        (optax.multi_transform({"x": optax.set_to_zero(), "y": optax.adam(1e-2)}, {"a": "x", "b": "y", "s": "y"}), (True, False, False)),
        (
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.multi_transform({"x": optax.set_to_zero(), "y": optax.sgd(1e-2)}, {"a": "x", "b": "y", "s": "y"}),
            ),
            (False, False, False),
        ),
    ],
    ids=["none", "one", "its gradient is read"],
)
def test_frozen_parameters_are_those_that_never_change_and_whose_gradient_nothing_reads(optimizer, frozen):
    assert traced(optimizer)[0].frozen == frozen


def test_state_that_changes_its_type_is_refused_by_name():
    grows = optax.GradientTransformation(
        lambda p: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), p),
        lambda g, s, p=None: (g, jax.tree.map(lambda m, x: m + x, s, g)),
    )
    with pytest.raises(
        InputError, match=r"turns a from bfloat16\[6, 4\] into float32\[6, 4\]; state that changes its type cannot be updated in place"
    ):
        traced(grows)


def test_state_that_changes_its_tree_is_refused():
    grows = optax.GradientTransformation(lambda p: (jnp.zeros(()),), lambda g, s, p=None: (g, (*s, jnp.zeros(()))))
    with pytest.raises(InputError, match="changes the structure of its state"):
        traced(grows)


def sliced(optimizer, axis, shape=(6, 4)):
    update, _ = traced(optimizer, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    component = next(c for c in update.components if c.params)
    return update, component, slice_component(update, component, axis)


def test_elementwise_updates_stream_along_any_axis_and_norms_become_sums():
    for axis in (0, 1):
        assert len(sliced(optax.adamw(1e-2), axis)[2].reductions) == 1, "the gradient's norm"
        assert len(sliced(optax.lamb(1e-2), axis)[2].reductions) >= 3, "the two norms of the trust ratio as well"


def test_factored_moments_follow_the_axis_or_stay_whole():
    """Adafactor's row moment is cut along the rows and its column moment is a sum over them."""
    update, component, rows = sliced(
        optax.adafactor(1e-2, min_dim_size_to_factor=2, multiply_by_parameter_scale=False, clipping_threshold=None), 0, (6, 4)
    )
    shapes = {update.invar("state", j).aval.shape: rows.axis.get(update.invar("state", j)) for j in component.state}
    assert shapes[6,] == 0
    assert shapes[4,] is None


def test_a_matrix_that_is_orthogonalised_does_not_stream():
    with pytest.raises(slicing.NotSeparable):
        sliced(optax.contrib.muon(1e-2), 0)


def layers(count, **other):
    return {"layers": [jax.tree.map(lambda leaf: leaf, {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}) for _ in range(count)], **other}


def families_of(optimizer, params, stored):
    update, _ = traced(optimizer, params)
    return make_families(update, stored)


def test_layers_of_one_program_are_a_stack_and_their_state_is_stored_like_them():
    families, state = families_of(optax.adamw(1e-2), layers(3), (Stored(members=(0, 1, 2), stacked=True),))
    assert [f.kind for f in families if f.params] == ["stack"]
    assert len(families[0].items) == 3
    assert sorted(s.members for s in state if s.stacked) == [(1, 2, 3), (4, 5, 6)], "mu and nu; the count is member 0"


def test_layers_with_different_updates_are_not_a_stack():
    params = layers(2)
    mask = {"layers": [{"w": True}, {"w": False}]}
    families, _ = families_of(optax.adamw(1e-2, weight_decay=0.1, mask=mask), params, (Stored(members=(0, 1), stacked=True),))
    assert "stack" not in [f.kind for f in families]
