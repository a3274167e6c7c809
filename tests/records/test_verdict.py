"""The verdict record: totals, JSON there and back, and what it prints."""

import gzip
import json

import pytest

from forebay.errors import InputError
from forebay.records.verdict import Hazard, HostCopy, Memory, Verdict

pytestmark = pytest.mark.oldest


def verdict(**changes):
    fields = {
        "fits": True,
        "reason": "HBM is within the budget",
        "hbm": Memory(argument_bytes=100, output_bytes=60, alias_bytes=50, temp_bytes=30, code_bytes=7),
        "host": Memory(argument_bytes=2**30),
        "hbm_budget_bytes": 2**30,
        "host_budget_bytes": 2**40,
        "host_copies": (HostCopy(name="c", direction="to_host", bytes=4, asynchronous=True, loop="body", trip_count=None),),
        "hazards": (Hazard(id="two-in-flight", message="Only two.", action="Set it."),),
        "honoured": ("optimizer:mu",),
        "messages": ("said",),
        "attention": {"__cudnn$fmhaSoftmax": 1},
        "versions": {"jaxlib": "0.12.0"},
        "hlo_gzip": gzip.compress(b"HloModule m"),
    }
    return Verdict(**fields | changes)


def test_the_total_is_argument_and_output_less_alias_and_temp_without_code():
    assert verdict().hbm.total_bytes == 140


def test_json_there_and_back_loses_only_the_hlo():
    there = json.loads(json.dumps(verdict().to_json()))
    assert there["hbm"]["total_bytes"] == 140
    back = Verdict.from_json(there)
    assert back == verdict()
    assert verdict().hlo == "HloModule m"
    with pytest.raises(InputError, match="holds no HLO"):
        _ = back.hlo


def test_a_verdict_without_sizes_goes_there_and_back():
    killed = verdict(fits=None, reason="killed", hbm=None, host=None)
    assert Verdict.from_json(json.loads(json.dumps(killed.to_json()))) == killed
    assert not killed.compiled


@pytest.mark.parametrize("damage", [lambda data: data.pop("reason"), lambda data: data.update(colour="red")])
def test_a_foreign_file_is_an_input_error(damage):
    data = verdict().to_json()
    damage(data)
    with pytest.raises(InputError, match="not a verdict"):
        Verdict.from_json(data)


def test_it_prints_the_word_first_and_then_both_memories_and_the_hazards():
    lines = str(verdict()).splitlines()
    assert lines[0] == "fits (compiled): HBM is within the budget"
    assert lines[1].strip().startswith("HBM  140 B of 1.00 GiB per device (argument 100 B")
    assert lines[3].strip() == "hazard two-in-flight: Only two. -> Set it."
    assert str(verdict(fits=False)).startswith("does not fit (compiled)")
    assert str(verdict(fits=False, hbm=None, host=None)).startswith("does not compile:")
    assert str(verdict(fits=None, hbm=None, host=None)).startswith("unknown:")
