"""The tables of whole models at a tiny size: placements order as they must, and counts come from the traced step."""

import dataclasses
import importlib

import pytest

from forebay.training.models import presets


@pytest.fixture
def tiny():
    """A decoder just large enough for its leaves to be streamed."""
    return dataclasses.replace(presets.preset("llama-3.1-8b"), name="tiny", vocab=2048, model=512, mlp=1024, heads=4, kv_heads=4, layers=4)


@pytest.mark.compiler
def test_the_table_of_peers_orders_its_placements(tiny):
    peers = importlib.import_module("peers")
    case = dataclasses.replace(peers.CASES[0], machine="h100-sxm:2", per_chip=1)
    rows, versions = peers.measure(case, config=tiny, seq=512)
    hbm = {r.form: r.hbm_bytes for r in rows}
    assert hbm[peers.OPTIMIZER] < hbm[peers.PLAIN]
    assert hbm[peers.BOTH] < hbm[peers.OPTIMIZER]
    assert all(r.host_to_host_in_loops == 0 for r in rows)
    assert versions["jaxlib"]


@pytest.mark.compiler
def test_the_table_of_capacity_counts_host_bytes_for_each_parameter(tiny):
    capacity = importlib.import_module("capacity")
    case = capacity.Case(model="tiny", machine="h100-sxm:1", host_ram="1TiB", sequences=1, seq=512, goal_gib=1)
    row, _ = capacity.measure(case, config=tiny)
    assert row.within
    assert row.facts["tokens_per_step"] == 512
    assert 12 <= row.facts["host_bytes_per_parameter"] <= 16
