"""Checkpoints: what comes back is what was saved, wherever it is placed; and nothing that goes wrong costs an earlier one."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from forebay.errors import CheckpointError
from forebay.training.checkpoints import Checkpoints, stored_bytes

pytestmark = pytest.mark.oldest
SIZE = 64


def mesh(devices):
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def shardings(devices, memory_kind):
    """The shardings of `values`: stacks over the mesh in `memory_kind`, the rest on every device."""
    big = NamedSharding(mesh(devices), PartitionSpec(None, "data"), memory_kind=memory_kind)
    small = NamedSharding(mesh(devices), PartitionSpec())
    return lambda leaf: big if leaf.ndim == 3 else small


def values(seed=0, size=SIZE):
    """A state's tree as `State.to_tree` gives it: nested dicts, an optax state, a typed key, bfloat16, an absent part."""
    weight = np.random.default_rng(seed).normal(size=(4, size, 32)).astype(np.float32)
    params = {"layers": {"w": jnp.asarray(weight)}, "norm": jnp.full(size, seed + 0.5, jnp.bfloat16)}
    return {
        "step": jnp.int32(seed),
        "params": params,
        "opt_state": optax.adamw(1e-3).init(params),
        "key": jax.random.key(seed),
        "extra": None,
    }


def placed(tree, devices=8, memory_kind="pinned_host"):
    where = shardings(devices, memory_kind)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where(leaf)), tree)


def abstract(tree, devices=8, memory_kind="pinned_host"):
    where = shardings(devices, memory_kind)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where(leaf)), tree)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(("devices", "memory_kind"), [(8, "pinned_host"), (1, "device"), (2, "pinned_host")])
def test_any_plan_reads_what_another_wrote(tmp_path, devices, memory_kind):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, placed(values(3)), {"model": "m"})
    got = checkpoints.restore(abstract(values(3), devices, memory_kind))
    assert_same(got, values(3))
    weight = got["params"]["layers"]["w"]
    assert (weight.sharding.memory_kind, weight.sharding.num_devices) == (memory_kind, devices)
    assert got["step"].sharding.memory_kind == "device"
    assert checkpoints.record() == {"model": "m", "step": 3}
    checkpoints.close()


def test_a_part_can_be_read_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed(values(1)), {})
    assert_same(checkpoints.restore({"params": abstract(values(1))["params"]}), {"params": values(1)["params"]})
    checkpoints.close()


def test_the_files_are_a_plain_orbax_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed(values(1)), {})
    checkpoints.close()
    got = ocp.StandardCheckpointer().restore(tmp_path / "1" / "state")
    np.testing.assert_array_equal(got["params"]["layers"]["w"], values(1)["params"]["layers"]["w"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_stay(tmp_path, asynchronous):
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=asynchronous)
    for step in (1, 2, 3, 3):
        checkpoints.save(step, placed(values(step)), {})
    checkpoints.close()
    again = Checkpoints(tmp_path)
    assert again.steps() == [2, 3]
    assert_same(again.restore(abstract(values(2)), step=2), values(2))
    again.close()


def test_a_restored_state_needs_no_second_compile(tmp_path):
    @jax.jit
    def step(tree):
        return {**tree, "step": tree["step"] + 1}

    tree = step(placed(values(1), 8, "device"))
    tree = step(tree)
    compiled = step._cache_size()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, tree, {})
    step(checkpoints.restore(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)))
    checkpoints.close()
    assert step._cache_size() == compiled


def test_no_checkpoint_and_the_wrong_step_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*start the run without --resume"):
        checkpoints.restore(abstract(values()))
    checkpoints.save(5, placed(values(5)), {})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 in .*; there are those of 5"):
        checkpoints.restore(abstract(values()), step=4)
    checkpoints.close()


def test_leaves_of_another_model_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed(values(1)), {})
    with pytest.raises(
        CheckpointError, match=r"params.layers.w is float32\[4, 64, 32\] in the checkpoint of step 1 .*and float32\[4, 128, 32\] in"
    ):
        checkpoints.restore(abstract(values(1, size=128)) | {"step": abstract(values())["step"]})
    more, less = abstract(values(1)), abstract(values(1))
    more["params"]["layers"]["wq"] = more["params"]["layers"]["w"]
    del less["params"]["norm"]
    with pytest.raises(CheckpointError, match=r"has no params\.layers\.wq, which .* did you mean 'params\.layers\.w'"):
        checkpoints.restore(more)
    with pytest.raises(CheckpointError, match=r"holds params\.norm, which this model and optimizer do not have"):
        checkpoints.restore(less)
    checkpoints.close()


def test_a_damaged_checkpoint_says_what_to_go_back_to(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, placed(values(step)), {})
    for file in (tmp_path / "2" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 2 in .* is damaged: .* cannot be read: .*; remove .*/2 to go on from step 1"
    ):
        checkpoints.restore(abstract(values()))
    (tmp_path / "2" / "record" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match=r"step 2 in .* is damaged: its record cannot be read"):
        checkpoints.record()
    assert_same(checkpoints.restore(abstract(values(1)), step=1), values(1))
    checkpoints.close()


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed(values(1)), {})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(
        CheckpointError, match=r"needs 4\.1 MiB in .* and 1\.0 MiB are free; free 3\.1 MiB .* complete checkpoint is that of step 1"
    ):
        checkpoints.save(2, placed(values(2)), {})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_sizes_count_every_leaf():
    weight, norm = 4 * SIZE * 32 * 4, SIZE * 2
    assert stored_bytes(values()) == 3 * (weight + norm) + 4 + 4 + 8


def in_a_process(code, folder):
    """Runs `code` with this file's names, and `folder`, in a process of its own."""
    head = f"import os, resource, signal, sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_checkpoints import *\n"
    program = head + f"folder = Path({str(folder)!r})\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_a_write_that_fails_keeps_the_checkpoint_before(tmp_path):
    done = in_a_process(
        """
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, placed(values(1)), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # as a full disk: writes fail half way
        try:
            checkpoints.save(2, placed(values(2, size=8192)), {})
        except CheckpointError as error:
            print(error)
        checkpoints.save(3, placed(values(3)), {})
        checkpoints.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2 could not be written to" in done.stdout
    assert "needed, " in done.stdout
    assert "The newest complete checkpoint is that of step 1." in done.stdout
    again = Checkpoints(tmp_path)
    assert again.steps() == [1, 3]
    assert_same(again.restore(abstract(values(1)), step=1), values(1))
    assert_same(again.restore(abstract(values(3))), values(3))
    again.close()


def test_a_killed_save_loses_nothing(tmp_path):
    done = in_a_process(
        """
        checkpoints = Checkpoints(folder, asynchronous=True)
        checkpoints.save(1, placed(values(1)), {})
        checkpoints.wait()
        checkpoints.save(2, placed(values(2, size=32768)), {})
        while not any(name.startswith("2") for name in os.listdir(folder)):
            time.sleep(0.001)
        time.sleep(0.005)  # into the writing
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -9, done.stderr
    again = Checkpoints(tmp_path)
    wanted = {1: values(1), 2: values(2, size=32768)}
    assert again.steps() in ([1], [1, 2])  # as a rule the first; a save that beat the signal is whole
    for step in again.steps():
        assert_same(again.restore(abstract(wanted[step]), step=step), wanted[step])
    again.save(3, placed(values(3)), {})
    again.close()
    assert {path.name for path in tmp_path.iterdir()} <= {"1", "2", "3"}  # nothing half written stays
