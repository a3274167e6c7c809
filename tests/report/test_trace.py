"""The trace of a plan's step, from the compile cache by fingerprint."""

import gzip
import json
from pathlib import Path

import pytest

from forebay.compiler import cache
from forebay.compiler.outcome import COMPILED, Outcome
from forebay.errors import InputError, PlanError
from forebay.hardware import Hardware
from forebay.report.trace import write_trace

pytestmark = pytest.mark.oldest

HLO = Path(__file__).parents[1] / "timeline" / "fixtures" / "stream_gpu_0.12.0.1.hlo.gz"
KEY = "5" * 40


def record(**changes):
    base = {
        "workload": {"model": "tiny"},
        "hardware": Hardware.named("h100-sxm:8").to_json(),
        "verdict": {"hbm": {"total_bytes": 1}, "fingerprint": KEY},
    }
    return base | changes


@pytest.fixture
def kept():
    memory = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes"), 0)
    cache.write(KEY, Outcome(status=COMPILED, sizes={"hbm": memory, "host": memory}, hlo_gzip=HLO.read_bytes()))
    yield
    (cache.folder() / (KEY + cache._SUFFIX)).unlink()


def test_a_step_in_the_cache_becomes_a_trace(kept, tmp_path):
    data = json.loads(gzip.decompress(write_trace(record(), tmp_path / "step.perfetto.json.gz").read_bytes()))
    assert data["traceEvents"][0]["args"]["name"] == "tiny on h100-sxm:8 (forecast)"
    loops = [e["name"] for e in data["traceEvents"] if e.get("cat") == "loop"]
    assert all("more iterations like the last" in name for name in loops)


def test_what_the_cache_no_longer_holds_says_what_to_run(tmp_path):
    with pytest.raises(PlanError, match="no longer holds this plan's step"):
        write_trace(record(), tmp_path / "t.json")


@pytest.mark.parametrize("missing", [{"verdict": None}, {"hardware": None}, {"verdict": {"hbm": None, "fingerprint": KEY}}])
def test_a_plan_without_a_compiled_step_has_no_trace(missing, tmp_path):
    with pytest.raises(PlanError, match="no compiled step"):
        write_trace(record(**missing), tmp_path / "t.json")


def test_a_file_that_cannot_be_written_is_named(kept, tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(record(), tmp_path / "missing" / "t.json")
