"""Asked against honoured, on findings written by hand."""

import dataclasses

import pytest

from forebay.compiler.hlo import Findings
from forebay.compiler.honour import compare
from forebay.records.entries import Entry
from forebay.records.verdict import HostCopy

pytestmark = pytest.mark.oldest


def entry(name, size, placement="host", layers=None):
    return Entry(name=name, role=name.partition(":")[0], bytes_per_device=size, placement=placement, layers=layers)


def findings(parameters=(), copies=()):
    made = [HostCopy(name=f"c{i}", direction=way, bytes=size, asynchronous=True, loop="body", trip_count=trips)
            for i, (way, size, trips) in enumerate(copies)]  # fmt: skip
    return Findings(
        host_copies=tuple(made), host_compute=(), misplaced_slices=(), remat_instructions=0, attention={}, parameters=tuple(parameters)
    )


def test_arguments_without_a_plan():
    arguments = (("args[0]", "pinned_host"), ("args[1]", "pinned_host"), ("args[2]", "device"))
    assert compare(arguments, findings([(8, True), (8, False), (8, False)]), ()) == (("args[0]",), ("args[1]",))
    assert compare(arguments, findings([(8, True)]), ()) == ((), ())


def test_a_state_entry_needs_a_parameter_of_its_size_on_the_host_for_itself():
    entries = (entry("optimizer:mu", 8), entry("optimizer:nu", 8), entry("parameter:w", 8, "hbm"))
    assert compare((), findings([(8, True), (8, True), (8, False)]), entries) == (("optimizer:mu", "optimizer:nu"), ())
    assert compare((), findings([(8, True), (8, False), (8, False)]), entries) == (("optimizer:mu",), ("optimizer:nu",))


def test_parts_of_one_stack_are_one_buffer():
    entries = (entry("parameter:w", 6, layers=(0, 3)), entry("parameter:w", 2, layers=(3, 4)))
    assert compare((), findings([(8, True)]), entries) == (("parameter:w",), ())


def test_an_activation_needs_a_copy_of_its_bytes_over_the_turns():
    entries = (entry("activation:x", 80), entry("activation:y", 40), entry("activation:z", 40, "recompute"))
    found = findings(copies=[("to_host", 8, 10), ("to_device", 4, 10)])
    assert compare((), found, entries) == (("activation:x",), ("activation:y",))
    peeled = findings(copies=[("to_host", 8, 9), ("to_host", 4, None)])
    assert compare((), peeled, entries) == (("activation:x", "activation:y"), ())


def test_an_activation_outside_of_loops_needs_one_copy_of_all_its_bytes_for_itself():
    entries = (entry("activation:x", 80), entry("activation:y", 80), entry("activation:z", 40))
    copies = [HostCopy(name=f"c{size}", direction="to_host", bytes=size, asynchronous=True, loop=None, trip_count=1, work_between=None)
              for size in (80, 20, 20)]  # fmt: skip
    found = dataclasses.replace(findings(), host_copies=tuple(copies))
    assert compare((), found, entries) == (("activation:x",), ("activation:y", "activation:z"))


def test_the_copy_that_writes_the_state_back_does_not_stand_for_an_activation():
    entries = (entry("optimizer:mu", 80), entry("activation:x", 80))
    one = findings([(80, True)], [("to_host", 8, 10)])
    assert compare((), one, entries) == (("optimizer:mu",), ("activation:x",))
    two = findings([(80, True)], [("to_host", 8, 10), ("to_host", 8, 10)])
    assert compare((), two, entries) == (("optimizer:mu", "activation:x"), ())


def test_a_gradient_is_neither():
    assert compare((), findings(), (entry("gradient:w", 8),)) == ((), ())


def test_a_double_buffered_loop_writes_two_layers_a_turn():
    entries = (entry("activation:x", 80), entry("activation:y", 80))
    assert compare((), findings(copies=[("to_host", 8, 5)] * 4), entries) == (("activation:x", "activation:y"), ())
    assert compare((), findings(copies=[("to_host", 8, 4)] * 3), entries) == (("activation:x",), ("activation:y",))
