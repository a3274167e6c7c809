"""The line scanner on small HLO, written as XLA writes it: every kind of host copy, host compute, and wrong byte lines."""

import pytest

from forebay.compiler.hlo import read_hlo
from forebay.compiler.lines import array_bytes, split_type
from forebay.records.verdict import HostCopy

pytestmark = pytest.mark.oldest


LAYOUT = "entry_computation_layout={(f32[4]{0:S(5)}, f32[4]{0})->f32[4]{0}}"


def entry(*lines, before=""):
    body = "\n".join("  " + line for line in lines)
    return f"HloModule m, is_scheduled=true, {LAYOUT}\n\n{before}ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def copies(*lines, before=""):
    return read_hlo(entry(*lines, before=before)).host_copies


SLICE = """%slice (a: f32[8,4], b: s32[]) -> f32[1,4] {
  %a = f32[8,4]{1,0:S(5)} parameter(0)
  %b = s32[] parameter(1)
  %c = s32[] constant(0)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%a, %b, %c), dynamic_slice_sizes={1,4}, backend_config={"dynamic_slice_config":{LINE}}
}

"""
UPDATE = """%update (a: f32[8,4], u: f32[1,4], b: s32[]) -> f32[8,4] {
  %a = f32[8,4]{1,0:S(5)} parameter(0)
  %u = f32[1,4]{1,0} parameter(1)
  %b = s32[] parameter(2)
  %c = s32[] constant(0)
  ROOT %d = f32[8,4]{1,0:S(5)} dynamic-update-slice(%a, %u, %b, %c)
}

"""


def test_copy_start_both_ways_and_a_sync_one():
    found = copies(
        "%p = f32[4]{0:S(5)} parameter(0)",
        "%in = (f32[4]{0}, f32[4]{0:S(5)}, u32[]) copy-start(%p)",
        "%q = f32[4]{0} copy-done(%in)",
        '%out = (f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%q), backend_config={"is_sync":true}',
        "%r = f32[4]{0:S(5)} copy-done(%out)",
        "%s = f32[4]{0} copy(%q)",
    )
    assert found == (
        HostCopy(name="in", direction="to_device", bytes=16, asynchronous=True, work_between=0),
        HostCopy(name="out", direction="to_host", bytes=16, asynchronous=False, work_between=0),
    )


def test_work_between_a_start_and_its_end_is_counted():
    found = copies(
        "%p = f32[4]{0:S(5)} parameter(0)",
        "%x = f32[4]{0} parameter(1)",
        "%in = (f32[4]{0}, f32[4]{0:S(5)}, u32[]) copy-start(%p)",
        "%a = f32[4]{0} add(%x, %x)",
        "%t = (f32[4]{0}) tuple(%a)",
        "%b = f32[4]{0} multiply(%a, %x)",
        "%q = f32[4]{0} copy-done(%in)",
        "%c = f32[4]{0} add(%q, %b)",
    )
    assert [copy.work_between for copy in found] == [2]


def test_a_plain_copy_with_host_memory_on_both_sides():
    (found,) = copies("%p = f32[4]{0:S(5)} parameter(0)", "%c = f32[4]{0:S(5)} copy(%p)")
    assert (found.direction, found.asynchronous) == ("host_to_host", False)


def test_slices_by_fusion_start_and_by_plain_fusion_move_only_the_slice():
    found = copies(
        "%p = f32[8,4]{1,0:S(5)} parameter(0)",
        "%i = s32[] constant(3)",
        "%s = ((f32[8,4]{1,0:S(5)}, s32[]), f32[1,4]{1,0}, u32[]) fusion-start(%p, %i), kind=kCustom, calls=%slice",
        "%d = f32[1,4]{1,0} fusion-done(%s)",
        "%k = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%slice",
        "%u = f32[8,4]{1,0:S(5)} fusion(%p, %d, %i), kind=kLoop, calls=%update",
        before=SLICE + UPDATE,
    )
    assert [(copy.name, copy.direction, copy.bytes, copy.asynchronous) for copy in found] == [
        ("s", "to_device", 16, True),
        ("k", "to_device", 16, False),
        ("u", "to_host", 16, False),
    ]


def test_the_tpu_forms():
    found = copies(
        "%p = f32[8,4]{1,0:T(8,128)S(5)} parameter(0)",
        "%i = s32[]{:T(128)} constant(3)",
        "%s = ((f32[8,4]{1,0:T(8,128)S(5)}, s32[]{:T(128)}), f32[1,4]{1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%p, %i)",
        "%d = f32[1,4]{1,0:T(8,128)} dynamic-slice-done(%s)",
        "%u = ((f32[8,4]{1,0:T(8,128)S(5)}, f32[1,4]{1,0:T(8,128)}, s32[]{:T(128)}), f32[8,4]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) "
        "dynamic-update-slice-start(%p, %d, %i)",
    )
    assert [(copy.direction, copy.bytes) for copy in found] == [("to_device", 16), ("to_host", 16)]


def loop(index, line, trips=8, compute=""):
    body = f"""%body (c: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %c.1 = (s32[], f32[8,4]{{1,0:S(5)}}) parameter(0)
  %i = s32[] get-tuple-element(%c.1), index=0
  %host = f32[8,4]{{1,0:S(5)}} get-tuple-element(%c.1), index=1
  %one = s32[] constant(1)
  %seven = s32[] constant(7)
  %j = s32[] {index}
  %start = ((f32[8,4]{{1,0:S(5)}}, s32[]), f32[1,4]{{1,0}}, u32[]) fusion-start(%host, %j), kind=kCustom, calls=%slice
  %done = f32[1,4]{{1,0}} fusion-done(%start)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8,4]{{1,0:S(5)}}) tuple(%next, %host)
}}

"""
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}},"known_induction_variable":{{"tuple_index":"0"}}}}'
    return entry(
        "%z = (s32[], f32[8,4]{1,0:S(5)}) tuple()",
        f"%w = (s32[], f32[8,4]{{1,0:S(5)}}) while(%z), condition=%cond, body=%body, {config}",
        before=SLICE.replace("LINE", line) + body,
    )


FROM_THE_START = '"loop_index":"0","byte_offset":"0","byte_stride":"16"'


def test_a_copy_in_a_loop_has_its_body_and_its_trips():
    (copy,) = read_hlo(loop("copy(%i)", FROM_THE_START)).host_copies
    assert (copy.loop, copy.trip_count) == ("body", 8)


@pytest.mark.parametrize(
    ("index", "line", "wrong"),
    [
        ("copy(%i)", FROM_THE_START, False),
        ("subtract(%seven, %i)", FROM_THE_START, True),
        ("subtract(%seven, %i)", '"loop_index":"0","byte_offset":"112","byte_stride":"-16"', False),
        ("subtract(%seven, %i)", '"byte_offset":"0","byte_stride":"0","linear":{"byte_offset":"112","byte_stride":"-16"}', False),
        ("add(%i, %one)", FROM_THE_START, True),
        ("minimum(%i, %seven)", FROM_THE_START, False),
        ("minimum(%i, %one)", FROM_THE_START, True),
        ("add(%i, %i)", FROM_THE_START, True),
        ("custom-call(%i)", FROM_THE_START, True),
    ],
)
def test_a_byte_line_that_the_index_does_not_follow_is_found(index, line, wrong):
    assert read_hlo(loop(index, line)).misplaced_slices == (("start",) if wrong else ())


def test_work_on_host_memory_is_told_from_moving_it():
    work = """%work (a: f32[4]) -> f32[4] {
  %a = f32[4]{0:S(5)} parameter(0)
  ROOT %m = f32[4]{0:S(5)} multiply(%a, %a)
}

"""
    found = read_hlo(
        entry(
            "%p = f32[4]{0:S(5)} parameter(0)",
            '%a = f32[4]{0:S(5)} custom-call(), custom_call_target="AllocateBuffer"',
            "%f = f32[4]{0:S(5)} fusion(%p), kind=kLoop, calls=%work",
            '%h = f32[4]{0} custom-call(%p), custom_call_target="HostExecute"',
            before=work,
        )
    )
    assert found.host_compute == ("f", "h")
    assert found.host_copies == ()


def test_rematerialised_and_attention_instructions_are_counted():
    found = read_hlo(
        entry(
            "%p = f32[4]{0} parameter(0)",
            "%dot.1.remat = f32[4]{0} add(%p, %p)",
            "%dot.1.remat2.1 = f32[4]{0} add(%p, %p)",
            "%broadcast.rematerialized = f32[4]{0} add(%p, %p)",
            '%x = f32[4]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"',
            '%y = f32[4]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward"',
            '%z = f32[4]{0} custom-call(%p), custom_call_target="__cublas$gemm"',
        )
    )
    assert found.remat_instructions == 2
    assert found.attention == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}


def test_parameters_in_host_memory_are_read_from_the_layout():
    assert read_hlo(entry("%p = f32[4]{0:S(5)} parameter(0)")).parameters == ((16, True), (16, False))


def test_types():
    assert array_bytes("bf16", "2,3") == 12
    assert array_bytes("pred", "") == 1
    assert array_bytes("s4", "3") == 2
    assert array_bytes("token", "") == 0
    assert array_bytes("f8e4m3fn", "16") == 16
    assert split_type("((f32[2]{0}, s32[]), f32[1]{0:T(8,128)S(5)}, u32[])") == ["(f32[2]{0}, s32[])", "f32[1]{0:T(8,128)S(5)}", "u32[]"]


def test_work_on_the_host_is_told_with_its_operation_and_its_line():
    head = """HloModule m, is_scheduled=true, entry_computation_layout={(f32[4]{0:S(5)})->f32[4]{0:S(5)}}

FileNames
1 "/home/user/library.py"
2 "/home/user/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=41 end_line=41 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


"""
    line = '%m = f32[4]{0:S(5)} multiply(%p, %p), metadata={op_name="jit(step)/while/body/mul" stack_frame_id=2}'
    text = entry("%p = f32[4]{0:S(5)} parameter(0)", line)
    assert read_hlo(head + text[text.index("ENTRY") :]).host_compute == ("m (mul at model.py:41)",)
