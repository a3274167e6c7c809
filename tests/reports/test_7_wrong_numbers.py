"""Reports of theme 7, "the numbers are wrong": a version known to be wrong gets the safe option, or the program is refused."""

import jax
import pytest

from forebay.compiler.detect import Evidence, avoided, hazards, refused
from forebay.compiler.hlo import Findings
from forebay.plan.options import compiler_options
from forebay.records import Memory

pytestmark = pytest.mark.oldest
SAFE = {"xla_disable_hlo_passes": "dynamic-slice-annotator"}


def test_xla_46231_plans_set_the_safe_option_where_gradients_would_be_wrong_and_say_so():
    for jaxlib in ("0.10.2", "0.11.0"):
        options, reasons = compiler_options("cuda", hosted=True, devices=1, jaxlib=jaxlib)
        assert options.items() >= SAFE.items()
        assert any("reversed-host-slice on jaxlib" in reason for reason in reasons)
        [said] = avoided(options, jaxlib, "cuda")
        assert said.startswith("compiled with xla_disable_hlo_passes=dynamic-slice-annotator, which keeps the hazard reversed-host-slice")
    assert "xla_disable_hlo_passes" not in compiler_options("cuda", hosted=True, devices=1, jaxlib="0.12.0.1")[0]
    assert avoided({}, "0.10.2", "cuda") == avoided(SAFE, "0.12.0.1", "cuda") == ()


def test_xla_46231_without_the_option_the_program_is_refused_with_the_option_to_set():
    findings = Findings(host_copies=(), host_compute=(), misplaced_slices=("slice",), remat_instructions=0, attention={}, parameters=())
    evidence = Evidence(findings=findings, host=Memory(), options={}, settings={})
    said = refused(hazards(evidence, "0.11.0", "cuda"))
    assert said.startswith("refused: reversed-host-slice, its results would be wrong. Compile with xla_disable_hlo_passes=")
    assert refused(hazards(evidence, "0.11.1", "cuda")) == ""


def test_transformers_28391_moving_tensors_is_no_licence_to_change_their_precision():
    options, _ = compiler_options("cuda", hosted=True, devices=1, jaxlib=jax.__version__)
    assert not any("precision" in name or "fast_math" in name for name in options)
