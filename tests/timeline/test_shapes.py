import pytest

from forebay.timeline.shapes import Array, HloSyntaxError, Tuple, arrays, element_bits, parse_shape

pytestmark = pytest.mark.oldest


def test_arrays_with_layout_tiles_and_memory_space():
    assert parse_shape("f32[8,128]{1,0:T(8,128)S(5)}") == Array("f32", (8, 128), (1, 0), 5)
    assert parse_shape("bf16[4,256]{1,0:T(8,128)(2,1)S(1)}").space == 1
    assert parse_shape("u32[]{:S(2)}") == Array("u32", (), (), 2)
    assert parse_shape("f32[8,128]{1,0:T(8,128)S(5)}").on_host


@pytest.mark.parametrize(
    ("text", "size"),
    [("f32[2,3]", 24), ("bf16[]", 2), ("pred[7]", 7), ("s4[3]", 2), ("f8e4m3fn[10]", 10), ("c64[2]", 16), ("token[]", 0), ("f32[<=4]", 16)],
)
def test_bytes(text, size):
    assert parse_shape(text).bytes == size


def test_tuples_nest_without_recursion():
    shape = parse_shape("((f32[2]{0}, s32[]), /*index=1*/(bf16[4]), ())")
    assert isinstance(shape, Tuple)
    assert [a.dtype for a in arrays(shape)] == ["f32", "s32", "bf16"]
    deep = "(" * 5000 + "f32[2]" + ")" * 5000
    assert arrays(parse_shape(deep))[0].bytes == 8


@pytest.mark.parametrize("text", ["f32[2]{0:Z(3)}", "g32[2]", "f32", "(f32[2] f32[2])", "f32[2] trailing", "", "(f32[2]"])
def test_unknown_syntax_is_an_error(text):
    with pytest.raises(HloSyntaxError):
        parse_shape(text)


def test_an_unknown_type_says_so():
    with pytest.raises(HloSyntaxError, match="unknown HLO element type 'q7'"):
        element_bits("q7")
