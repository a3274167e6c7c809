"""The user's XLA_FLAGS against a plan: contradictions by name with both values, and the flags that nothing is known of left alone."""

import subprocess
import sys

import pytest

from forebay.hardware.xla_flags import contradictions, read_flags

pytestmark = pytest.mark.oldest
PLAN = {"xla_gpu_experimental_parallel_async_compute_limit": 16, "xla_gpu_enable_host_memory_offloading": True}


def test_flags_are_read_as_xla_reads_them():
    text = "--a=1 --b='x y' --c --a=2 plain"
    assert read_flags(text) == {"a": "2", "b": "x y", "c": "true"}
    assert read_flags("--a='1") == {"a": "'1"}


def test_each_contradiction_is_named_with_both_values_and_the_winner():
    text = "--xla_gpu_experimental_parallel_async_compute_limit=4 --xla_gpu_enable_host_memory_offloading=false"
    first, second = contradictions(PLAN, text)
    assert first == (
        "XLA_FLAGS has xla_gpu_experimental_parallel_async_compute_limit=4 and the plan 16: the plan's wins, it travels with the program"
    )
    assert "xla_gpu_enable_host_memory_offloading=false and the plan true" in second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--xla_gpu_experimental_parallel_async_compute_limit=16 --xla_gpu_enable_host_memory_offloading=1",
        "--xla_gpu_memory_limit_slop_factor=95",
        "--xla_dump_to=/tmp/x --xla_gpu_some_new_flag=3",
        "--xla_disable_hlo_passes=algsimp",
    ],
)
def test_what_agrees_or_is_unknown_is_left_alone(text):
    assert contradictions(PLAN, text) == ()


def test_a_flag_the_plan_was_judged_without_wins_and_says_what_it_does():
    (said,) = contradictions({}, "--xla_gpu_enable_analytical_sol_latency_estimator=false")
    assert "the plan was judged with true: yours wins" in said
    assert "the scheduler that hides copies behind compute is off" in said


def test_a_disabled_offload_pass_is_named():
    (said,) = contradictions({}, "--xla_disable_hlo_passes=algsimp,host-offloader")
    assert "turns off the pass host-offloader, which the plan relies on, and yours wins" in said


def test_a_list_of_passes_in_the_plan_goes_over_the_whole_list_of_the_user():
    (said,) = contradictions({"xla_disable_hlo_passes": "dynamic-slice-annotator"}, "--xla_disable_hlo_passes=host-offloader")
    assert "xla_disable_hlo_passes=host-offloader and the plan dynamic-slice-annotator: the plan's wins" in said


WINS = """
import os, glob, sys
os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=algsimp --xla_gpu_memory_limit_slop_factor=50"
import jax, jax.numpy as jnp
options = {"xla_dump_to": sys.argv[1], "xla_disable_hlo_passes": "dce", "xla_gpu_memory_limit_slop_factor": 77}
jax.jit(lambda x: x + 1, compiler_options=options).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
print(*(open(file).read() for file in glob.glob(sys.argv[1] + "/*debug_options*")))
"""


def test_xla_itself_lets_the_option_win(tmp_path):
    done = subprocess.run([sys.executable, "-c", WINS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True)
    assert 'xla_disable_hlo_passes: "dce"' in done.stdout
    assert "xla_gpu_memory_limit_slop_factor: 77" in done.stdout
    assert "algsimp" not in done.stdout
