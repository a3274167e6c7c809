import time

import pytest

from forebay.timeline.parse import HloSyntaxError, parse_hlo, parse_instruction
from forebay.timeline.shapes import arrays

pytestmark = pytest.mark.oldest

NAMES = [(name, "gpu") for name in ("fsdp", "offload", "stream", "whole", "attention", "control")]
NAMES += [(name, "tpu") for name in ("fsdp", "offload", "stream", "whole", "control")]


@pytest.mark.parametrize(("name", "platform"), NAMES)
def test_compiled_modules_parse(compiled, version, name, platform):
    text = compiled(name, platform, version)
    found = parse_hlo(text)
    assert found.scheduled
    assert found.devices == (8 if platform == "gpu" else 4)
    lines = sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    assert sum(len(c.instructions) for c in found.computations.values()) == lines
    for computation in found.computations.values():
        for instruction in computation.instructions:
            assert all(o in computation.by_name for o in instruction.operands)
            assert all(c in found.computations for c in instruction.callees)


def test_an_instruction():
    line = (
        "ROOT %cc.4 = (bf16[512,1536]{1,0}, s8[4194304]{0}) custom-call(%b.1, f32[2]{0} %c.2, /*index=2*/%d), "
        'custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/a, b={c\\"}" id=3}, '
        'backend_config={"gemm_backend_config":{"beta":1},"known_trip_count":{"n":"39"}}, control-predecessors={%x}'
    )
    found = parse_instruction(line, 7)
    assert (found.name, found.opcode, found.is_root, found.line) == ("cc.4", "custom-call", True, 7)
    assert found.operands == ("b.1", "c.2", "d")
    assert [a.dtype for a in arrays(found.shape)] == ["bf16", "s8"]
    assert found.target == "__cublas$lt$matmul"
    assert found.op_name.startswith("jit(f)/a, b={c")
    assert found.backend_config["gemm_backend_config"] == {"beta": 1}
    assert found.trip_count == 39


def test_callees_and_replica_groups_with_device_ids():
    found = parse_instruction("%w = (s32[]) while(%t), condition=%c.1, body=%b.1")
    assert found.callees == ("b.1", "c.1")
    found = parse_instruction(
        "%a = f32[8] all-gather(%p), replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}, dimensions={0}"
    )
    assert found.attributes["replica_groups"] == "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}"
    assert found.attributes["dimensions"] == "{0}"
    assert parse_instruction("%c = f32[] conditional(%p, %a, %b), branch_computations={%x, %y}").callees == ("x", "y")


@pytest.mark.parametrize(
    "line",
    [
        "%a f32[2] add(%b)",
        "%a = f32[2] add(%b",
        "%a = f32[2] add(%b) what",
        "%a = f32[2] add(%b), flag",
        "%a = f32[2] add(b c|d)",
        "%a = f32[2]",
    ],
)
def test_bad_lines_name_themselves(line):
    with pytest.raises(HloSyntaxError, match="HLO line 3"):
        parse_instruction(line, 3)


def test_bad_modules(module):
    with pytest.raises(HloSyntaxError, match="no 'HloModule' line"):
        parse_hlo("module @jit_f { func.func }")
    with pytest.raises(HloSyntaxError, match="no ENTRY"):
        parse_hlo("HloModule m\n\n%f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n")
    good = module("ROOT %x = f32[] parameter(0)")
    with pytest.raises(HloSyntaxError, match="not closed"):
        parse_hlo(good.rstrip().rstrip("}"))
    with pytest.raises(HloSyntaxError, match="defines a name twice"):
        parse_hlo(module("%x = f32[] parameter(0)\nROOT %x = f32[] parameter(1)"))


def test_aliases():
    header = "HloModule m, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, must-alias) }"
    text = header + "\n\nENTRY %e (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"
    assert parse_hlo(text).aliases == {0: 2, 1: 0}


def test_a_large_module_takes_no_time(module):
    body = "\n".join(
        ["%x0 = f32[64,64]{1,0} parameter(0)"]
        + [f'%x{i} = f32[64,64]{{1,0}} add(%x{i - 1}, %x{i - 1}), metadata={{op_name="jit(f)/add" id={i}}}' for i in range(1, 20_000)]
    )
    began = time.perf_counter()
    found = parse_hlo(module(body))
    assert len(found.computations["main"].instructions) == 20_000
    assert time.perf_counter() - began < 10  # 0.4 s when idle
