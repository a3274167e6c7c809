"""The mixed-integer program against every choice of random small problems."""

import ctypes
import math

import pytest
from brute import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.search.problem import HBM, HOST, RECOMPUTE, Choice, Correction, Group, Link, Problem, Value, estimate, rebuilt
from forebay.search.program import Limits, most_frugal, solve, unheard

MIB = 2**20
sizes = st.integers(0, 40).map(lambda n: float(n * MIB))
seconds = st.integers(0, 50).map(lambda n: n / 1000)


@st.composite
def values(draw):
    made = []
    for v in range(draw(st.integers(1, 5))):
        inputs = draw(st.sets(st.integers(0, v - 1), max_size=2)) if v else set()
        loop = made[min(inputs)].loop if inputs else draw(st.integers(0, 1))
        inputs = {u for u in inputs if made[u].loop == loop}
        stack = draw(sizes)
        places = draw(st.sampled_from([(), (HBM, HOST, RECOMPUTE), (HBM, HOST), (HBM, RECOMPUTE)]))
        made.append(
            Value(
                name=f"activation:{v}",
                loop=loop,
                inputs=tuple(sorted(inputs)),
                needed=draw(st.booleans()),
                places=places,
                stack_bytes=stack,
                slice_bytes=stack / 4,
                rebuild_seconds=draw(seconds),
                keep_seconds=draw(seconds) / 50,
                after_seconds=draw(seconds),
                ahead_seconds=draw(seconds),
            )
        )
    return tuple(made)


@st.composite
def groups(draw):
    def one():
        size = draw(sizes)
        return Group(
            params=("parameter:w",),
            state=("optimizer:w",),
            param_moves=draw(st.booleans()),
            parts=draw(st.integers(0, 3)),
            loop=draw(st.sampled_from([None, 0, 1])),
            param_bytes=size,
            gradient_bytes=draw(sizes),
            state_bytes=draw(sizes),
            travel_bytes=size,
            copy_bytes=draw(st.sampled_from([0.0, size / 2])),
            slice_bytes=size / 8,
            fused=draw(st.booleans()),
            fuse_seconds=draw(seconds),
            passes=draw(st.integers(1, 2)),
        )

    return tuple(one() for _ in range(draw(st.integers(1, 2))))


@st.composite
def problems(draw):
    link = Link(to_device=4e9, to_host=3e9, both=6e9, slow_down=1e-12)
    return Problem(
        values=draw(values()),
        groups=draw(groups()),
        compute_seconds=tuple(draw(seconds) for _ in range(5)),
        link=draw(st.sampled_from([link, link, None])),
        hbm_fixed_bytes=draw(sizes),
        hbm_budget_bytes=0.0,
        host_budget_bytes=0.0,
        form=draw(st.sampled_from([(), (("fuse_update", "always"),), (("microbatches", 2),)])),
    )


corrections = st.builds(
    Correction,
    constant_seconds=seconds,
    rebuild=st.sampled_from([1.0, 0.5, 2.0]),
    exposed=st.sampled_from([1.0, 1.3]),
    beside_values=st.sampled_from([1.0, 3.0]),
    beside_groups=st.sampled_from([1.0, 9.0]),
    workspace_bytes=sizes,
)


@settings(max_examples=120, deadline=None)
@given(problems(), corrections, st.integers(20, 200), st.integers(0, 120))
def test_the_optimum_is_the_cheapest_of_all_choices(problem, correction, hbm, host):
    limits = Limits(hbm_bytes=float(hbm * MIB), host_bytes=float(host * MIB))
    best, found = cheapest(problem, correction, limits), solve(problem, correction, limits)
    assert (best is None) == (found is None)
    if found is not None:
        price = estimate(problem, found, correction)
        assert price.hbm_bytes <= limits.hbm_bytes + 1
        assert price.host_bytes <= limits.host_bytes + 1
        assert price.seconds == pytest.approx(best[0], rel=2e-4, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(), corrections)
def test_the_most_frugal_choice_needs_the_least_hbm(problem, correction):
    limits = Limits(hbm_bytes=math.inf, host_bytes=math.inf)
    found = most_frugal(problem, correction, limits)
    least = estimate(problem, found, correction).hbm_bytes
    assert solve(problem, correction, Limits(hbm_bytes=least + 16, host_bytes=math.inf)) is not None
    if least > MIB:
        assert solve(problem, correction, Limits(hbm_bytes=least - MIB / 2, host_bytes=math.inf)) is None


def test_a_chain_that_two_values_share_is_rebuilt_once():
    shared = Value(name="", loop=0, inputs=(), needed=False, places=(), stack_bytes=0.0, slice_bytes=0.0, rebuild_seconds=5.0)
    ends = [
        Value(
            name=f"activation:{v}",
            loop=0,
            inputs=(0,),
            needed=True,
            places=(HBM, RECOMPUTE),
            stack_bytes=MIB,
            slice_bytes=0.0,
            rebuild_seconds=1.0,
        )
        for v in range(2)
    ]
    problem = Problem(
        values=(shared, *ends),
        groups=(),
        compute_seconds=(0.0, 0.0, 0.0),
        link=None,
        hbm_fixed_bytes=0.0,
        hbm_budget_bytes=0.0,
        host_budget_bytes=0.0,
    )
    assert rebuilt(problem, ("", HBM, HBM)) == frozenset()
    assert rebuilt(problem, ("", HBM, RECOMPUTE)) == {0, 2}
    assert rebuilt(problem, ("", RECOMPUTE, RECOMPUTE)) == {0, 1, 2}
    one = solve(problem, Correction(), Limits(hbm_bytes=MIB, host_bytes=0.0))
    # room for one of two: keeping it saves its own second only, since the other still needs the chain
    assert estimate(problem, one, Correction()).seconds == pytest.approx(6.0)


def _hosted_alone(**more):
    """Exposed seconds of a value on the host (1 s of copies each way; 2 s forward, 4 s back) by the place of what is made from it."""
    common = {"loop": 0, "needed": True, "slice_bytes": 0.0}
    value = Value(
        name="activation:v", inputs=(), places=(HBM, HOST), stack_bytes=4e9, rebuild_seconds=0.0, **common,
        **({"after_seconds": 2.0, "ahead_seconds": 4.0} | more),
    )  # fmt: skip
    made = Value(name="activation:w", inputs=(0,), places=(HBM, RECOMPUTE), stack_bytes=1.0, rebuild_seconds=0.25, **common)
    problem = Problem(
        values=(value, made), groups=(), compute_seconds=(2.0, 4.0, 0.0), link=Link(to_device=4e9, to_host=4e9, both=8e9),
        hbm_fixed_bytes=0.0, hbm_budget_bytes=0.0, host_budget_bytes=0.0,
    )  # fmt: skip
    places = {place: Choice(places=(HOST, place), state_parts=(), params_on_host=()) for place in (HBM, RECOMPUTE)}
    return {place: estimate(problem, choice, Correction()).exposed_seconds for place, choice in places.items()}


def test_a_copy_hides_only_beside_the_work_of_its_own_iteration():
    assert _hosted_alone()[HBM] == 0.0
    assert _hosted_alone(after_seconds=0.25)[HBM] == pytest.approx(0.75)  # made late: most of the write has nothing beside it
    assert _hosted_alone(ahead_seconds=0.5)[HBM] == pytest.approx(0.5)  # read early in the backward pass
    assert _hosted_alone()[RECOMPUTE] == pytest.approx(1.0)  # read at once, for something is rebuilt from it
    assert _hosted_alone(ahead_seconds=0.5)[RECOMPUTE] == pytest.approx(1.0)


def test_the_solver_is_not_heard_on_standard_output(capfd):
    say = ctypes.CDLL(None).puts
    with unheard():
        say(b"a remark of the solver")
    print("a plan", flush=True)
    assert capfd.readouterr().out == "a plan\n"
