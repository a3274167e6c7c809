"""What the compiled program says: memory in use, ignored placements, and overlap in HLO of the real XLA:GPU."""

import dataclasses

import optax
import pytest
from words import batch, loss, shapes

import forebay as fb
from forebay.records import Memory
from forebay.trust import compiled
from forebay.units import MIB

GIB = 1024 * MIB


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("used", "outcome", "text"),
    [
        (None, "skipped", "does not count"),
        (((GIB, 2 * GIB, 3 * GIB),), "passed", "state 1.00 GiB, step 2.00 GiB of HBM per device (measured), 2.00 GiB compiled"),
        (((GIB, 3 * GIB, 3 * GIB),), "failed", "the state takes 2.00 GiB of HBM per device (measured), 1.00 GiB planned"),
        (((0, GIB, 3 * GIB), (0, GIB, 2 * GIB)), "failed", "the step takes 3.00 GiB of HBM per device (measured), 2.00 GiB compiled"),
    ],
)
def test_memory_in_use_is_held_against_plan_and_compiler(used, outcome, text):
    found = compiled.memory(used, GIB, 2 * GIB)
    assert found.outcome == outcome
    assert text in found.detail


@pytest.fixture(scope="module")
def judged():
    """A plan with everything on the host, judged for one H100."""
    hardware, optimizer = fb.Hardware.named("h100-sxm:1"), optax.adamw(1e-2)
    work = fb.trace(loss, optimizer, shapes(layers=6, width=256), batch())
    rules = {"parameter:layers*": "host", "optimizer:*layers*": "host"}
    plan = fb.Plan.by_hand(work, rules, hardware=hardware)
    step = fb.train_step(loss, optimizer, plan)
    verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan)
    return dataclasses.replace(plan, verdict=verdict)


@pytest.mark.compiler
def test_a_program_of_xla_gpu_overlaps_and_its_placements_are_honoured(judged):
    found = compiled.overlap(judged.verdict.hlo)
    assert found.outcome == "passed", found
    assert "host copies in loops have work beside them (compiled)" in found.detail
    assert compiled.ignored(judged, None).outcome == "passed"


BODY = """HloModule m, is_scheduled=true, entry_computation_layout={{(f32[8,4]{{1,0:S(5)}})->f32[4]{{0}}}}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]{{1,0:S(5)}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[8,4]{{1,0:S(5)}} get-tuple-element(%p), index=1
{lines}
  ROOT %out = (s32[], f32[8,4]{{1,0:S(5)}}) tuple(%i, %stack)
}}

%cond (q: (s32[], f32[8,4])) -> pred[] {{
  %q = (s32[], f32[8,4]{{1,0:S(5)}}) parameter(0)
  ROOT %always = pred[] constant(true)
}}

ENTRY %main (a: f32[8,4]) -> f32[4] {{
  %a = f32[8,4]{{1,0:S(5)}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{{1,0:S(5)}}) tuple(%zero, %a)
  %w = (s32[], f32[8,4]{{1,0:S(5)}}) while(%start), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"8"}}}}
  ROOT %end = f32[4]{{0}} constant({{0,0,0,0}})
}}
"""
WORK = "  %work = f32[8,4]{1,0} negate(%other)"


def _copy(name, *between):
    start = f"  %{name}-start = (f32[8,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}, u32[]) copy-start(%stack)"
    return [start, *between, f"  %{name}-done = f32[8,4]{{1,0}} copy-done(%{name}-start)"]


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("lines", "outcome", "text"),
    [
        (_copy("one", WORK), "passed", "1 of 1 host copies in loops have work beside them"),
        ([*_copy("one", WORK), *_copy("two")], "passed", "1 of 2 host copies in loops have work beside them (compiled); not two-start"),
        ([*_copy("one"), WORK], "failed", "one-start (to_device, 128 B) is waited for at once"),
        ([WORK], "skipped", "no host copies in loops"),
    ],
)
def test_a_copy_overlaps_where_work_stands_between_its_start_and_its_done(lines, outcome, text):
    found = compiled.overlap(BODY.format(lines="\n".join(lines)))
    assert found.outcome == outcome, found
    assert text in found.detail


@pytest.mark.oldest
def test_ignored_placements_come_from_the_plans_own_verdict():
    plan = fb.Plan.by_hand(fb.trace(loss, optax.adam(1e-2), shapes(), batch()), {"optimizer": "host"})
    assert compiled.ignored(plan, None).outcome == "skipped"
    assert "carries no verdict" in compiled.ignored(plan, None).detail
    resident = fb.Plan.by_hand(fb.trace(loss, optax.adam(1e-2), shapes(), batch()), {})
    assert compiled.ignored(resident, None).detail == "the plan asks for nothing on the host"
    memory = Memory()
    verdict = fb.Verdict(
        fits=True, reason="", hbm=memory, host=memory, hbm_budget_bytes=1, host_budget_bytes=1, ignored=("optimizer:0/mu/embed",)
    )
    found = compiled.ignored(dataclasses.replace(plan, verdict=verdict), None)
    assert found.outcome == "failed"
    assert "optimizer:0/mu/embed was asked onto the host" in found.detail
