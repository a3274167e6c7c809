"""Each row of the table of hazards has a test of its own, and is silent outside its versions and platforms."""

import pytest

from forebay.compiler.detect import _TESTS, Evidence, hazards
from forebay.compiler.hlo import Findings
from forebay.records.hazards import HAZARDS, in_range, version_key
from forebay.records.verdict import HostCopy, Memory

pytestmark = pytest.mark.oldest


def copy(name="c", direction="to_device", size=1024, loop="body"):
    return HostCopy(name=name, direction=direction, bytes=size, asynchronous=True, loop=loop, trip_count=4)


def evidence(options=None, settings=None, host=0, **findings):
    empty = {"host_copies": (), "host_compute": (), "misplaced_slices": (), "remat_instructions": 0, "attention": {}, "parameters": ()}
    return Evidence(findings=Findings(**empty | findings), host=Memory(argument_bytes=host), options=options or {}, settings=settings or {})


def ids(found, jaxlib="0.10.2", platform="cuda"):
    return [hazard.id for hazard in hazards(found, jaxlib, platform)]


MET = {
    "reversed-host-slice": evidence(misplaced_slices=("s",)),
    "two-in-flight": evidence(host_copies=tuple(copy(str(i)) for i in range(3))),
    "pipelined-host-offload": evidence({"xla_gpu_enable_pipelined_host_offloading": True}, host_copies=(copy(),)),
    "host-counted-as-hbm": evidence(host=2**30, remat_instructions=63),
    "host-pool-64gb": evidence(host=65 * 10**9),
    "implicit-host-compute": evidence(host_compute=("f",)),
    "host-to-host-copy": evidence(host_copies=(copy(direction="host_to_host"),)),
    "flat-copy-cost": evidence(host_copies=(copy(size=2**30), copy(size=1024))),
    "remat3": evidence(settings={"jax_remat3": True}),
}


def test_every_row_has_a_test():
    assert {row.id for row in HAZARDS} == set(_TESTS) == set(MET)


@pytest.mark.parametrize("row", HAZARDS, ids=lambda row: row.id)
def test_a_row_is_met_by_its_program_alone(row):
    assert ids(MET[row.id]) == [row.id]
    assert ids(evidence()) == []


@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("two-in-flight", {"xla_gpu_experimental_parallel_async_compute_limit": 16}),
        ("host-counted-as-hbm", {"xla_gpu_enable_host_memory_offloading": "true"}),
        ("host-counted-as-hbm", {"xla_disable_hlo_passes": "dynamic-slice-annotator,rematerialization"}),
    ],
)
def test_the_option_that_cures_a_hazard_silences_it(id, options):
    met = MET[id]
    assert ids(Evidence(findings=met.findings, host=met.host, options=options, settings={})) == []


def test_versions_and_platforms_bound_a_row():
    wrong = MET["reversed-host-slice"]
    assert ids(wrong, "0.11.0") == ["reversed-host-slice"]
    assert ids(wrong, "0.10.1") == ids(wrong, "0.11.1") == ids(wrong, "0.12.0.1") == ids(wrong, "0.10.2", "tpu") == []
    assert version_key("0.12.0.dev20260101") == (0, 12, 0)
    assert all(in_range(row, "0.10.2", row.platforms[0]) for row in HAZARDS)


def test_the_pool_is_named_with_the_size_to_set():
    (hazard,) = hazards(MET["host-pool-64gb"], "0.12.0", "cuda")
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=67 or more" in hazard.message
