import collections
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.timeline.kinds import classify
from forebay.timeline.parse import HloSyntaxError, parse_hlo

pytestmark = pytest.mark.oldest


def works(text):
    program = classify(parse_hlo(text))
    return [w for name in program.computations for w in program.computations[name]]


def kinds(text):
    return collections.Counter((w.kind, w.asynchronous) for w in works(text) if w.kind != "free")


def test_streamed_state_is_host_copies_both_ways(compiled, version):
    found = [w for w in works(compiled("stream", "gpu", version)) if w.kind == "host_copy"]
    assert all(w.asynchronous for w in found)
    layer = 1024 * 1024 // 8 * 4
    assert sorted((w.traffic.host_read, w.traffic.host_written) for w in found) == [(0, layer), (layer, 0)]
    assert [w.trip_count for w in works(compiled("stream", "gpu", version)) if w.kind == "loop"] == [4]


def test_attention_forward_and_backward(compiled, version):
    found = kinds(compiled("attention", "gpu", version))
    assert found["attention_forward", False] == 1
    assert found["attention_backward", False] == 1


def test_unknown_calls_are_counted_with_their_bytes(compiled, version):
    unknown = [w for w in works(compiled("control", "gpu", version)) if w.kind == "unknown"]
    assert [w.why_unknown for w in unknown] == ["custom call 'cusolver_potrf_ffi'"]
    assert unknown[0].traffic.hbm_bytes >= 2 * 256 * 256 * 4


def test_triton_fusions_are_matmuls(compiled, version):
    assert kinds(compiled("fsdp", "gpu", version))["matmul", False] == 7


def test_tpu_copies_into_vector_memory_move_hbm_once(module):
    text = module(
        "%a = f32[8,128]{1,0} parameter(0)\n%s = (f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%a)\n"
        "ROOT %d = f32[8,128]{1,0:S(1)} copy-done(%s)"
    )
    start = next(w for w in works(text) if w.opcode == "copy-start")
    assert (start.kind, start.traffic.hbm_read, start.traffic.hbm_written) == ("device_copy", 4096, 0)


@pytest.mark.parametrize("wrapped", ["kCustom", "kLoop"])
@pytest.mark.parametrize("annotation", ['"dynamic_slice_config":{"byte_offset":"0","byte_stride":"256"}', '"operation_queue_id":"0"'])
def test_host_slices_of_both_compilers(module, wrapped, annotation):
    callee = f"""
        %wrapped (p0: f32[8,64], p1: s32[]) -> f32[1,64] {{
          %p0 = f32[8,64]{{1,0:S(5)}} parameter(0)
          %p1 = s32[] parameter(1)
          ROOT %s = f32[1,64]{{1,0}} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={{1,64}}, backend_config={{{annotation}}}
        }}"""
    text = module(
        "%a = f32[8,64]{1,0:S(5)} parameter(0)\n%i = s32[] parameter(1)\n"
        f"%s = ((f32[8,64]{{1,0:S(5)}}, s32[]), f32[1,64]{{1,0}}, u32[]) fusion-start(%a, %i), kind={wrapped}, calls=%wrapped\n"
        "ROOT %d = f32[1,64]{1,0} fusion-done(%s)",
        callee,
    )
    start = next(w for w in works(text) if w.opcode == "fusion-start")
    assert (start.kind, start.asynchronous, start.traffic.host_read) == ("host_copy", True, 256)
    assert start.by_kernel == ("dynamic_slice_config" not in annotation), "without its offsets the slice is a kernel over the link"


def test_is_sync_starts_do_not_overlap(module):
    line = (
        "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups={}, dimensions={0}, "
        'backend_config={"collective_backend_config": {"is_sync": SYNC}}'
    )
    for sync in ("true", "false"):
        text = module("%a = f32[8]{0} parameter(0)\n" + line.replace("SYNC", sync) + "\nROOT %d = f32[64]{0} all-gather-done(%s)")
        start = next(w for w in works(text) if w.kind == "collective")
        assert start.asynchronous == (sync == "false")
        assert start.collective.full_bytes == 8 * 4 * 8


def test_an_async_start_takes_the_kind_of_what_it_wraps(module):
    callee = """
        %inner (p0: f32[64]) -> f32[8] {
          %p0 = f32[64]{0} parameter(0)
          ROOT %r = f32[8]{0} reduce-scatter(%p0), replica_groups=[1,8]<=[8], dimensions={0}
        }"""
    text = module(
        "%a = f32[64]{0} parameter(0)\n%s = ((f32[64]{0}), f32[8]{0}, s32[]) async-start(%a), calls=%inner\n"
        "%u = ((f32[64]{0}), f32[8]{0}, s32[]) async-update(%s)\nROOT %d = f32[8]{0} async-done(%u)",
        callee,
    )
    found = works(text)
    start = next(w for w in found if w.kind == "collective")
    assert (start.asynchronous, start.collective.operation, start.collective.full_bytes) == (True, "reduce-scatter", 256)
    assert next(w.awaits for w in found if w.kind == "done") == "s"


def test_a_stated_cost_is_taken(module):
    config = '{"custom_call_config":{"cost_estimate":{"flops":"5000"}}}'
    line = f'ROOT %k = f32[8]{{0}} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={config}'
    found = works(module("%a = f32[8]{0} parameter(0)\n" + line))[-1]
    assert (found.kind, found.flops) == ("kernel", 5000)


def test_an_unknown_opcode_is_a_counted_unknown(module):
    found = works(module("%a = f32[8]{0} parameter(0)\nROOT %k = f32[8]{0} frobnicate(%a)"))[-1]
    assert (found.kind, found.why_unknown, found.traffic.hbm_bytes) == ("unknown", "opcode 'frobnicate'", 64)


def test_texts_without_a_schedule_or_with_a_cycle_are_refused(module):
    text = module("ROOT %a = f32[8]{0} parameter(0)")
    with pytest.raises(HloSyntaxError, match="no schedule"):
        classify(parse_hlo(text.replace("is_scheduled=true, ", "")))
    cycle = module(
        "%a = f32[] parameter(0)\nROOT %c = f32[] call(%a), to_apply=%f",
        "%f (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %c = f32[] call(%p), to_apply=%f\n}",
    )
    with pytest.raises(HloSyntaxError, match="calls itself"):
        classify(parse_hlo(cycle))


def test_a_tpu_all_reduce_that_keeps_a_slice_is_a_reduce_scatter(module):
    callee = """
        %fused (p0: f32[64]) -> f32[8] {
          %p0 = f32[64]{0} parameter(0)
          %r = f32[64]{0} all-reduce(%p0), replica_groups=[1,8]<=[8]
          %i = s32[] constant(0)
          ROOT %s = f32[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}
        }"""
    found = works(module("%a = f32[64]{0} parameter(0)\nROOT %f = f32[8]{0} fusion(%a), kind=kCustom, calls=%fused", callee))[-1]
    assert (found.kind, found.collective.operation, found.collective.full_bytes) == ("collective", "reduce-scatter", 256)


def test_a_fusion_that_multiplies_while_it_communicates_keeps_both(module):
    callee = """
        %fused (p0: f32[8,8], p1: f32[64,64]) -> f32[64,64] {
          %p0 = f32[8,8]{1,0} parameter(0)
          %p1 = f32[64,64]{1,0} parameter(1)
          %g = f32[64,8]{1,0} all-gather(%p0), replica_groups=[1,8]<=[8], dimensions={0}
          ROOT %d = f32[64,8]{1,0} dot(%p1, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        }"""
    body = "%a = f32[8,8]{1,0} parameter(0)\n%b = f32[64,64]{1,0} parameter(1)\nROOT %f = f32[64,8]{1,0} fusion(%a, %b), calls=%fused"
    found = works(module(body, callee))[-1]
    assert (found.kind, found.flops, found.collective.operation) == ("matmul", 2 * 64 * 64 * 8, "all-gather")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_texts_are_refused_by_name_or_still_mean_something(compiled, data):
    lines = compiled(data.draw(st.sampled_from(["whole", "stream"])), "gpu", "0.12.0.1").splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    cut = data.draw(st.integers(0, len(lines[at])))
    lines[at] = (
        lines[at][:cut] + data.draw(st.sampled_from(["", "(", "}", ", x=", "%y", "S(5)"])) + lines[at][cut + data.draw(st.integers(0, 3)) :]
    )
    with contextlib.suppress(HloSyntaxError):
        classify(parse_hlo("\n".join(lines)))
