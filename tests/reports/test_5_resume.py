"""Reports of theme 5, "resume breaks": a run goes on under another plan, from the same numbers, with memory kinds of the new plan."""

import jax
import numpy as np
import optax
import pytest
from programs import scanned
from resident import by_hand, key, stands_as_planned, trace

import forebay as fb
from forebay.errors import CheckpointError
from forebay.training.checkpoints import Checkpoints

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.oldest]
RESIDENT, HOST = {}, {"parameter": "host", "optimizer": "host"}


def started(rules):
    program, optimizer = scanned(), optax.adamw(1e-2)
    plan = by_hand(program, trace(program, optimizer), rules)
    return program, plan, fb.train_step(program.loss_fn, optimizer, plan), fb.place(program.params, optimizer, plan, key=key())


def losses(program, step, state, numbers):
    out = []
    for number in numbers:
        state, metrics = step(state, program.batch(number))
        out.append(float(metrics["loss"]))
    return out, state


@pytest.mark.parametrize(("before", "after"), [(HOST, RESIDENT), (RESIDENT, HOST)], ids=["host to device", "device to host"])
def test_orbax_2090_and_marin_8441_saved_under_one_plan_restored_under_another(tmp_path, before, after):
    program, _, step, state = started(before)
    _, state = losses(program, step, state, range(2))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state.to_tree(), {})
    wanted, _ = losses(program, step, state, range(2, 4))

    program, plan, step, _ = started(after)
    restored = fb.State.from_tree(checkpoints.restore(plan.abstract_tree(plan.make_mesh()), 2), plan)
    stands_as_planned(plan, restored)
    got, _ = losses(program, step, restored, range(2, 4))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert step.compiles() == 1  # marin 8515: a scalar that comes back in another memory would compile the step twice
    checkpoints.close()


def test_jax_18617_memory_kinds_follow_the_new_plan_and_not_the_checkpoint(tmp_path):
    _, _, _, state = started(HOST)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state.to_tree(), {})
    _, plan, _, _ = started(RESIDENT)
    tree = checkpoints.restore(plan.abstract_tree(plan.make_mesh()), 1)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)} == {"device"}
    checkpoints.close()


def test_megatron_1842_a_killed_save_loses_nothing(tmp_path):
    _, _, _, state = started(RESIDENT)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state.to_tree(), {})
    (tmp_path / "2.orbax-checkpoint-tmp-7").mkdir()
    (tmp_path / "2.orbax-checkpoint-tmp-7" / "half").write_bytes(b"x" * 100)
    assert Checkpoints(tmp_path).steps() == [1]
    checkpoints.check_space(state.to_tree())
    assert not list(tmp_path.glob("*tmp*"))
    checkpoints.close()


def test_marin_6774_a_checkpoint_of_another_model_is_refused_leaf_by_leaf(tmp_path):
    _, plan, _, state = started(RESIDENT)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": {"other": state.params["head"]}}, {})
    with pytest.raises(CheckpointError, match=r"has no params\.embed, which this model and optimizer need"):
        checkpoints.restore({"params": plan.abstract_tree(plan.make_mesh())["params"]}, 1)
    checkpoints.close()


def test_maxtext_1322_and_marin_8443_a_run_goes_on_on_another_mesh(tmp_path):
    program, _, step, state = started(HOST)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state.to_tree(), {})
    wanted, _ = losses(program, step, state, range(2))

    optimizer = optax.adamw(1e-2)
    plan = fb.Plan.by_hand(trace(program, optimizer), HOST, hardware=fb.Hardware.named("h100-sxm:4"), options={"whole_below_bytes": 0})
    restored = fb.State.from_tree(checkpoints.restore(plan.abstract_tree(plan.make_mesh()), 1), plan)
    assert {len(leaf.sharding.device_set) for leaf in restored.stored_params} == {4}
    got, _ = losses(program, fb.train_step(program.loss_fn, optimizer, plan), restored, range(2))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    checkpoints.close()


def test_marin_8480_what_a_save_takes_from_host_memory_has_a_cap(tmp_path, monkeypatch):
    """The state is written in batches of leaves of at most so many bytes, and none of it goes through the pinned pool of the plan."""
    from forebay.training import checkpoints as module

    asked = {}
    handler = module.ocp.PyTreeCheckpointHandler
    monkeypatch.setattr(module.ocp, "PyTreeCheckpointHandler", lambda **options: asked.update(options) or handler(**options))
    Checkpoints(tmp_path, host_bytes=3 * 10**9).close()
    assert asked["save_device_host_concurrent_gb"] == 3
    assert asked["enable_pinned_host_transfer"] is False
