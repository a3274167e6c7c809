"""Each row of the table of hazards, met by a program that the real compiler compiles, on the versions that have it."""

import jax
import jax.numpy as jnp
import pytest
from compiler_programs import DEVICE, HOST, array, fsdp_args, fsdp_step, notebook, notebook_args

from forebay.compiler import judge
from forebay.records.hazards import HAZARDS, in_range
from forebay.records.verdict import TO_DEVICE, TO_HOST

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]
JAXLIB = jax.lib.__version__


def ids(verdict):
    assert verdict.compiled, verdict.reason
    return [hazard.id for hazard in verdict.hazards]


def exists(id, platform="cuda"):
    return in_range(next(row for row in HAZARDS if row.id == id), JAXLIB, platform)


def streamed(stacks):
    """Every stack is read and written in place on the host, a layer at a time."""

    def turn(i, stacks):
        read = jax.tree.map(lambda s: jax.device_put(jax.lax.dynamic_index_in_dim(s, i, 0), DEVICE), stacks)
        new = jax.device_put(jax.tree.map(lambda layer: jnp.tanh(layer) * 2, read), HOST)
        return jax.tree.map(lambda s, n: jax.lax.dynamic_update_index_in_dim(s, n, i, 0), stacks, new)

    return jax.lax.fori_loop(0, jax.tree.leaves(stacks)[0].shape[0], turn, stacks)


def stacks(*shapes):
    return [array(8, *shape, kind="pinned_host") for shape in shapes]


def test_more_host_slices_than_the_limit_are_two_in_flight(hardware):
    args = (stacks((4, 512, 512), (4, 512, 512)),)
    assert ("two-in-flight" in ids(judge(streamed, args, hardware))) == exists("two-in-flight")
    cured = judge(streamed, args, hardware, compiler_options={"xla_gpu_experimental_parallel_async_compute_limit": 16})
    assert "two-in-flight" not in ids(cured)


def test_copies_of_very_different_sizes_have_one_flat_cost(hardware):
    assert "flat-copy-cost" in ids(judge(streamed, (stacks((4, 2048, 1024), (4, 8, 1024)),), hardware))
    assert "flat-copy-cost" not in ids(judge(streamed, (stacks((4, 256, 1024), (4, 256, 1024)),), hardware))


def test_pipelined_host_offloading_is_named_where_it_is_chosen(hardware):
    fn, args = notebook("activation"), notebook_args("activation", 8)
    options = {"xla_gpu_enable_pipelined_host_offloading": True}
    assert "pipelined-host-offload" in ids(judge(fn, args, hardware, donate_argnums=(), compiler_options=options))
    assert "pipelined-host-offload" not in ids(judge(fn, args, hardware, donate_argnums=()))


def test_more_than_the_pool_holds_names_the_pool_and_the_size_to_set(hardware):
    verdict = judge(streamed, (stacks((64, 16384, 32768)),), hardware)
    (pool,) = (hazard for hazard in verdict.hazards if hazard.id == "host-pool-64gb")
    assert verdict.host.total_bytes == 128 * 2**30
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=141" in pool.message


def test_the_setting_remat3_is_named(hardware):
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no jax_remat3")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        assert "remat3" in ids(judge(lambda x: x * 2, (jnp.ones(4),), hardware))
    finally:
        jax.config.update("jax_remat3", before)


def test_the_facts_of_a_state_that_is_updated_in_place_on_the_host(hardware):
    limit = {"xla_gpu_experimental_parallel_async_compute_limit": 16}
    verdict = judge(fsdp_step, fsdp_args(8), hardware, compiler_options=limit)
    facts = {fact.name: fact for fact in verdict.facts}
    beside = facts.pop("host copies in loops run beside work")
    assert len(facts) == 4
    assert all(fact.held for fact in facts.values())
    copies = [copy for copy in verdict.host_copies if copy.loop]
    assert {copy.direction for copy in copies} == {TO_DEVICE, TO_HOST}
    assert beside.held == all(copy.asynchronous and copy.work_between for copy in copies)


def test_facts_that_do_not_hold_say_what_was_found(hardware):
    worked = judge(lambda a: a * 2, (array(8, 1024, 1024, kind="pinned_host"),), hardware)
    assert "mul" in {fact.name: fact.found for fact in worked.facts if not fact.held}["no computation on the host"]
    assert "not held: no computation on the host" in str(worked)
