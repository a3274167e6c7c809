"""The replay on programs written as data: exact answers, and properties that hold for any program."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UnsupportedError
from forebay.hardware import Hardware
from forebay.timeline.constants import constants_of
from forebay.timeline.costs import Costs
from forebay.timeline.groups import Groups
from forebay.timeline.rates import Rates
from forebay.timeline.replay import MAX_DEPTH, Replay
from forebay.timeline.work import Collective, Product, Program, Traffic, Work

pytestmark = pytest.mark.oldest

H100 = Hardware.named("h100-sxm:1")
PLAIN = dataclasses.replace(
    constants_of("h100-sxm", "nvidia"), gap_seconds=0.0, kernel_ramp_seconds=0.0, beside_collective=0.0, beside_host_per_hbm_share=0.0,
    beside_device_copy=0.0, host_latency_seconds=0.0,
)  # fmt: skip
LINK = 51e9


def replay(computations, hardware=H100, constants=PLAIN, **more):
    if not isinstance(computations, dict):
        computations = {"main": tuple(computations)}
    costs = Costs(hardware, constants)
    return Replay(Program(entry="main", devices=1, computations=computations), costs, Rates(costs, True), **more).run()


NUMBERS = itertools.count()


def compute(seconds, name=None):
    return Work(
        name=name or f"k{next(NUMBERS)}",
        kind="memory",
        opcode="fusion",
        traffic=Traffic(hbm_read=seconds * 3.35232e12 * PLAIN.memory_efficiency),
    )


def copy_in(seconds, name="c", asynchronous=True):
    traffic = Traffic(host_read=seconds * LINK, hbm_written=seconds * LINK)
    return Work(name=name, kind="host_copy", opcode="copy-start", traffic=traffic, asynchronous=asynchronous)


def copy_out(seconds, name="o"):
    return Work(
        name=name,
        kind="host_copy",
        opcode="copy-start",
        traffic=Traffic(hbm_read=seconds * 52e9, host_written=seconds * 52e9),
        asynchronous=True,
    )


def done(name):
    return Work(name=f"{name}.done", kind="done", opcode="copy-done", awaits=name)


def loop(count, body="body", name="w"):
    return Work(name=name, kind="loop", opcode="while", callees=(body, "condition"), trip_count=count)


def exposed(result):
    return sum(v for k, v in result.sums.items() if k[-1] == "exposed")


def test_a_copy_overlaps_what_stands_between_its_start_and_its_done():
    result = replay([copy_in(3), compute(2), done("c"), compute(1)])
    assert result.now == pytest.approx(4)
    assert exposed(result) == pytest.approx(1)
    assert replay([copy_in(2), compute(3), done("c")]).now == pytest.approx(3)


def test_a_copy_with_nothing_to_hide_behind_is_wholly_exposed():
    for works in ([copy_in(3), done("c"), compute(1)], [copy_in(3, asynchronous=False), compute(1)]):
        result = replay(works)
        assert (result.now, exposed(result)) == (pytest.approx(4), pytest.approx(3))


def test_one_lane_is_first_in_first_out():
    result = replay([copy_in(2, "a"), copy_in(2, "b"), compute(1), done("b"), done("a")])
    assert result.now == pytest.approx(4)
    assert result.sums["host_copy", "b", "exposed"] == pytest.approx(3)


def test_a_copy_is_set_up_while_its_lane_is_busy():
    slow_to_begin = dataclasses.replace(PLAIN, host_latency_seconds=0.5)
    begun_together = [copy_in(2, "a"), copy_in(2, "b"), done("a"), done("b")]
    in_turns = [copy_in(2, "a"), done("a"), copy_in(2, "b"), done("b")]
    assert replay(begun_together, constants=slow_to_begin).now == pytest.approx(4.5)
    assert replay(in_turns, constants=slow_to_begin).now == pytest.approx(5)
    short = [copy_in(0.25, "a"), copy_in(0.25, "b"), done("b")]
    assert replay(short, constants=slow_to_begin).now == pytest.approx(1), "both are set up at the same time"


def test_both_directions_run_together_and_share_what_the_machine_gives():
    apart = replay([copy_in(2), done("c"), copy_out(2), done("o")])
    together = replay([copy_in(2), copy_out(2), done("c"), done("o")])
    assert apart.now == pytest.approx(4)
    assert together.now == pytest.approx(2)
    crowd = Hardware.named("h100-sxm:8")  # eight devices, one host DRAM
    assert replay([copy_in(2), copy_out(2), done("c"), done("o")], crowd).now > 3


def test_a_copy_by_kernel_takes_its_share_of_the_link_but_not_of_what_dram_leaves():
    read, write = copy_in(2), copy_out(2)
    by_kernel = [dataclasses.replace(work, by_kernel=True) for work in (read, write)]
    share = PLAIN.host_kernel_efficiency
    assert replay([by_kernel[0], done("c")]).now == pytest.approx(2 / share)
    crowd = Hardware.named("h100-sxm:8")  # host DRAM leaves each direction less than a kernel can take
    engine, kernel = (replay([*works, done("c"), done("o")], crowd).now for works in ((read, write), by_kernel))
    assert kernel == pytest.approx(engine)


def test_compute_slows_only_while_the_transfer_runs():
    constants = dataclasses.replace(PLAIN, beside_device_copy=0.5)
    beside = Work(
        name="d",
        kind="device_copy",
        opcode="fusion-start",
        traffic=Traffic(hbm_read=3.35232e12 * PLAIN.memory_efficiency),
        asynchronous=True,
    )
    result = replay([beside, compute(4), done("d")], constants=constants)
    assert result.now == pytest.approx(1 + (4 - 1 / 1.5))  # in the copy's one second the kernel does 1/1.5 of a second's work
    assert result.sums["path", "contention"] == pytest.approx(1 - 1 / 1.5)


def test_loops_multiply_their_steady_state_and_nest():
    body = (copy_in(1), compute(2), done("c"))
    result = replay({"main": (loop(100),), "body": body})
    assert result.now == pytest.approx(200)
    assert result.sums["host_copy", "c", "count"] == 100
    assert result.loops[0].iterations == 100
    nested = replay({"main": (loop(10),), "body": (loop(50, "inner", "v"), compute(1)), "inner": body})
    assert nested.now == pytest.approx(10 * (50 * 2 + 1))


def test_a_transfer_that_spans_a_loop_is_followed_through_it():
    result = replay({"main": (copy_in(50.5), loop(100), done("c")), "body": (compute(1),)})
    assert result.now == pytest.approx(100)
    long = replay({"main": (copy_in(150.0), loop(100), done("c")), "body": (compute(1),)})
    assert long.now == pytest.approx(150)


def test_unknown_trip_counts_are_counted_and_can_be_given():
    program = {"main": (loop(None),), "body": (compute(1),)}
    assert replay(program).now == pytest.approx(1)
    assert any(k[0] == "unknown count" and "trip count of w" in k[1] for k in replay(program).sums)
    assert replay(program, trips={"w": 30}).now == pytest.approx(30)


def test_conditionals_take_the_longest_branch_and_say_so():
    choose = Work(name="c", kind="conditional", opcode="conditional", callees=("short", "long"))
    result = replay({"main": (choose,), "short": (compute(1),), "long": (compute(3),)})
    assert result.now == pytest.approx(3)
    assert "longest branch" in next(iter(result.notes))


def test_depth_is_limited():
    def call(to):
        return Work(name="c", kind="call", opcode="call", callees=(to,))

    chain = {"main": (call("f0"),)} | {f"f{i}": (call(f"f{i + 1}"),) for i in range(MAX_DEPTH + 2)} | {f"f{MAX_DEPTH + 2}": (compute(1),)}
    with pytest.raises(UnsupportedError, match="nested more than"):
        replay(chain)


def test_events_tell_the_same_story():
    result = replay({"main": (loop(100),), "body": (copy_in(1), compute(2), done("c"))}, tracing=True)
    assert max(e.end_seconds for e in result.events) == pytest.approx(result.now)
    skipped = [e for e in result.events if e.kind == "loop"]
    assert {e.lane: round(e.share, 6) for e in skipped} == {"compute": 1.0, "to_device": 0.5}
    assert replay([compute(1)]).events == []


@st.composite
def programs(draw):
    """Any order of kernels, copies in and out, collectives and their dones; sometimes in a loop."""
    works, open_ = [], []
    for number in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(["compute", "matmul", "in", "out", "collective", "done"]))
        size = draw(st.floats(0.001, 5.0))
        if what == "compute":
            works.append(compute(size, f"k{number}"))
        elif what == "matmul":
            works.append(
                Work(
                    name=f"m{number}", kind="matmul", opcode="dot", product=Product(flops=size * 1e12, dtype="bf16", m=4096, n=4096, k=4096)
                )
            )
        elif what == "in":
            works.append(copy_in(size, f"c{number}"))
        elif what == "out":
            works.append(copy_out(size, f"c{number}"))
        elif what == "collective":
            group = Collective(operation="all-gather", full_bytes=size * 1e10, groups=Groups((tuple(range(8)),)))
            works.append(Work(name=f"c{number}", kind="collective", opcode="all-gather-start", collective=group, asynchronous=True))
        elif open_:
            works.append(done(open_.pop(draw(st.integers(0, len(open_) - 1)))))
        if what in ("in", "out", "collective"):
            open_.append(f"c{number}")
    works += [done(name) for name in open_]
    if draw(st.booleans()):
        return {"main": (loop(draw(st.integers(1, 40))),), "body": tuple(works)}
    return {"main": tuple(works)}


def faster(hardware, *, link=1.0, hbm=1.0, wire=1.0):
    def grow(q, by):
        return dataclasses.replace(q, value=float(q) * by)

    chip = hardware.chip
    new = dataclasses.replace(
        chip,
        hbm_bytes_per_second=grow(chip.hbm_bytes_per_second, hbm),
        link=dataclasses.replace(
            chip.link,
            to_device_bytes_per_second=grow(chip.link.to_device_bytes_per_second, link),
            to_host_bytes_per_second=grow(chip.link.to_host_bytes_per_second, link),
            both_bytes_per_second=grow(chip.link.both_bytes_per_second, link),
        ),
        interconnect=dataclasses.replace(chip.interconnect, bytes_per_second=grow(chip.interconnect.bytes_per_second, wire)),
    )
    return dataclasses.replace(hardware, chip=new)


EIGHT = Hardware.named("h100-sxm:8")
REAL = constants_of("h100-sxm", "nvidia")


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from(["link", "hbm", "wire"]), st.floats(1.0, 4.0))
def test_more_bandwidth_is_never_slower(program, what, by):
    now, then = (replay(program, machine, REAL).now for machine in (EIGHT, faster(EIGHT, **{what: by})))
    assert then <= now * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_the_path_adds_up_and_lanes_fit_in_the_step(program):
    result = replay(program, EIGHT, REAL)
    path = sum(v for k, v in result.sums.items() if k[0] == "path")
    assert path == pytest.approx(result.now, rel=1e-6)
    assert all(v <= result.now * (1 + 1e-6) for k, v in result.sums.items() if k[0] == "lane")
    waits = sum(v for k, v in result.sums.items() if k[0] == "path" and k[1].startswith("wait"))
    assert exposed(result) == pytest.approx(waits, rel=1e-6, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(2, 30))
def test_twice_the_layers_is_twice_the_time(program, layers):
    body = program.get("body", program["main"])
    once, twice = (replay({"main": (loop(n),), "body": body}, EIGHT, REAL).now for n in (layers, 2 * layers))
    assert twice == pytest.approx(2 * once, rel=1e-6)
