import pytest

from forebay.timeline.parse import parse_hlo
from forebay.timeline.traffic import fusion_traffic, plain_traffic

pytestmark = pytest.mark.oldest

SLICE = """
    %fused (p0: f32[8,1024], p1: s32[]) -> f32[1,1024] {
      %p0 = f32[8,1024]{1,0} parameter(0)
      %p1 = s32[] parameter(1)
      %zero = s32[] constant(0)
      %s = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,1024}
      ROOT %n = f32[1,1024]{1,0} negate(%s)
    }"""
UPDATE = """
    %fused (p0: f32[8,1024], p1: f32[1024], p2: s32[]) -> f32[8,1024] {
      %p0 = f32[8,1024]{1,0} parameter(0)
      %p1 = f32[1024]{0} parameter(1)
      %p2 = s32[] parameter(2)
      %zero = s32[] constant(0)
      %r = f32[1,1024]{1,0} bitcast(%p1)
      ROOT %u = f32[8,1024]{1,0} dynamic-update-slice(%p0, %r, %p2, %zero)
    }"""
REDUCE = """
    %add (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %c = f32[] add(%a, %b)
    }

    %fused (p0: bf16[64,32], p1: f32[32]) -> f32[64] {
      %p0 = bf16[64,32]{1,0} parameter(0)
      %p1 = f32[32]{0} parameter(1)
      %w = f32[64,32]{1,0} convert(%p0)
      %b = f32[64,32]{1,0} broadcast(%p1), dimensions={1}
      %m = f32[64,32]{1,0} multiply(%w, %b)
      %z = f32[] constant(0)
      ROOT %r = f32[64]{0} reduce(%m, %z), dimensions={1}, to_apply=%add
    }"""


def fused(text):
    found = parse_hlo(text)
    entry = found.computations["main"]
    fusion = next(i for i in entry.instructions if i.opcode == "fusion")
    return fusion_traffic(fusion, entry, found.computations["fused"], fusion.shape)


def test_a_fusion_around_a_slice_moves_the_slice_not_the_stack(module):
    traffic = fused(
        module(
            "%a = f32[8,1024]{1,0} parameter(0)\n%i = s32[] parameter(1)\nROOT %f = f32[1,1024]{1,0} fusion(%a, %i), calls=%fused", SLICE
        )
    )
    assert (traffic.hbm_read, traffic.hbm_written) == (4096 + 0, 4096)


def test_the_same_slice_of_a_host_stack_reads_the_host(module):
    body = "%a = f32[8,1024]{1,0:S(5)} parameter(0)\n%i = s32[] parameter(1)\nROOT %f = f32[1,1024]{1,0} fusion(%a, %i), calls=%fused"
    traffic = fused(module(body, SLICE))
    assert (traffic.host_read, traffic.hbm_written, traffic.hbm_read) == (4096, 4096, 0)


def test_an_update_in_place_writes_the_update_only(module):
    body = "%a = f32[8,1024]{1,0} parameter(0)\n%b = f32[1024]{0} parameter(1)\n%i = s32[] parameter(2)\n"
    body += "ROOT %f = f32[8,1024]{1,0} fusion(%a, %b, %i), calls=%fused"
    traffic = fused(module(body, UPDATE))
    assert (traffic.hbm_read, traffic.hbm_written) == (4096, 4096)
    on_host = body.replace("f32[8,1024]{1,0} ", "f32[8,1024]{1,0:S(5)} ")
    traffic = fused(module(on_host, UPDATE))
    assert (traffic.hbm_read, traffic.host_written, traffic.hbm_written) == (4096, 4096, 0)


def test_reductions_read_their_input_and_broadcasts_their_small_operand(module):
    body = "%a = bf16[64,32]{1,0} parameter(0)\n%b = f32[32]{0} parameter(1)\nROOT %f = f32[64]{0} fusion(%a, %b), calls=%fused"
    traffic = fused(module(body, REDUCE))
    assert traffic.hbm_read == 64 * 32 * 2 + 32 * 4
    assert traffic.hbm_written == 64 * 4


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("%r = f32[8,1024]{1,0} copy(%a)", 32768, 32768),
        ("%r = f32[1,1024]{1,0} slice(%a), slice={[0:1], [0:1024]}", 4096, 4096),
        ("%r = f32[8,1024]{1,0} broadcast(%c), dimensions={}", 4, 32768),
        ("%r = f32[8,1024]{1,0} dynamic-update-slice(%a, %b, %i, %i)", 4096, 4096),
        ("%r = f32[8,1024]{1,0:S(1)} copy(%a)", 32768, 0),
    ],
)
def test_plain_instructions(module, line, read, written):
    head = "%a = f32[8,1024]{1,0} parameter(0)\n%b = f32[1,1024]{1,0} parameter(1)\n%c = f32[] constant(0)\n%i = s32[] constant(0)\n"
    entry = parse_hlo(module(head + "ROOT " + line)).computations["main"]
    traffic = plain_traffic(entry.root, entry)
    assert (traffic.hbm_read, traffic.hbm_written) == (read, written)
