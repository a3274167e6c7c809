import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.timeline.parse import parse_hlo
from forebay.timeline.products import _valid, attention_product, convolution_product, cublas_product, cudnn_convolution_product, dot_product
from forebay.timeline.shapes import HloSyntaxError

pytestmark = pytest.mark.oldest


def root(text):
    entry = parse_hlo(text).computations["main"]
    return entry.root, entry


def test_dot(module):
    found = dot_product(
        *root(module(
            "%a = bf16[3,8,16]{2,1,0} parameter(0)\n%b = bf16[3,16,5]{2,1,0} parameter(1)\n"
            "ROOT %d = bf16[3,8,5]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}"
        ))
    )  # fmt: skip
    assert (found.m, found.n, found.k, found.batch, found.flops) == (8, 5, 16, 3, 2 * 3 * 8 * 5 * 16)


@pytest.mark.parametrize(("precision", "dtype"), [("DEFAULT", "tf32"), ("HIGHEST", "f32")])
def test_cublas(module, precision, dtype):
    config = {
        "gemm_backend_config": {
            "dot_dimension_numbers": {"lhs_contracting_dimensions": ["0"], "lhs_batch_dimensions": []},
            "precision_config": {"operand_precision": [precision, precision]},
        }
    }
    text = module(
        "%a = f32[16,8]{1,0} parameter(0)\n%b = f32[16,5]{1,0} parameter(1)\n"
        'ROOT %d = (f32[8,5]{1,0}, s8[999]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config='
        + json.dumps(config)
    )
    found = cublas_product(*root(text))
    assert (found.m, found.n, found.k, found.flops, found.dtype) == (8, 5, 16, 2 * 8 * 5 * 16, dtype)


def test_a_cublas_call_without_its_config_is_an_error(module):
    text = module('%a = f32[16,8]{1,0} parameter(0)\nROOT %d = f32[8,8]{1,0} custom-call(%a, %a), custom_call_target="__cublas$gemm"')
    with pytest.raises(HloSyntaxError, match="its K is not known"):
        cublas_product(*root(text))


def attention(module, target="__cudnn$fmhaSoftmax", mask="CAUSAL", window=0, heads=4, kv=2):
    shape = {"dimensions": ["2", str(heads), "64", "64"]}
    inner = {"intermediate_tensor_shape": shape, "mask_type": mask, "sliding_window_length": window}
    config = {"cudnn_fmha_backend_config": inner}
    return module(
        f"%q = bf16[2,64,{heads},16]{{3,2,1,0}} parameter(0)\n%k = bf16[2,64,{kv},16]{{3,2,1,0}} parameter(1)\n"
        f'ROOT %d = (bf16[2,{heads},64,16]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="{target}", backend_config='
        + json.dumps(config)
    )


def test_attention_counts_the_visible_scores(module):
    whole, pairs = 2 * 4 * 64 * 64, 2 * 4 * 64 * 65 // 2
    assert attention_product(*root(attention(module, mask="NO_MASK"))).flops == 4 * whole * 16
    assert attention_product(*root(attention(module))).flops == 4 * pairs * 16
    assert attention_product(*root(attention(module, "__cudnn$fmhaSoftmaxBackward"))).flops == 10 * pairs * 16


def test_a_window_limits_the_scores(module):
    visible = sum(min(i + 1, 8) for i in range(64))
    assert attention_product(*root(attention(module, window=8))).flops == 4 * 2 * 4 * visible * 16


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 9), size=st.integers(1, 4), stride=st.integers(1, 3), low=st.integers(0, 3), high=st.integers(0, 3),
    base=st.integers(1, 3), spread=st.integers(1, 2),
)  # fmt: skip
def test_valid_positions_are_those_of_a_loop(width, size, stride, low, high, base, spread):
    outputs = (((width - 1) * base + 1 + low + high) - ((size - 1) * spread + 1)) // stride + 1
    if outputs < 1:
        return
    inside = [(o * stride + t * spread - low) for o in range(outputs) for t in range(size)]
    expected = sum(0 <= p <= (width - 1) * base and p % base == 0 for p in inside)
    window = {"stride": str(stride), "pad": f"{low}_{high}", "lhs_dilate": str(base), "rhs_dilate": str(spread)}
    assert _valid(width, size, outputs, window, 0) == expected


def test_a_tpu_dot_is_a_convolution_without_window(module):
    text = module(
        "%a = bf16[64,32]{1,0} parameter(0)\n%b = bf16[32,16]{1,0} parameter(1)\n"
        "ROOT %c = bf16[64,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    )
    found = convolution_product(*root(text))
    assert (found.flops, found.m, found.n, found.k) == (2 * 64 * 32 * 16, 64, 16, 32)


def test_convolutions(module):
    text = module(
        "%a = bf16[2,8,8,4]{3,2,1,0} parameter(0)\n%b = bf16[3,3,4,16]{3,2,1,0} parameter(1)\n"
        "ROOT %c = bf16[2,6,6,16]{3,2,1,0} convolution(%a, %b), window={size=3x3}, dim_labels=b01f_01io->b01f"
    )
    assert convolution_product(*root(text)).flops == 2 * np.prod([2, 6, 6, 16, 3, 3, 4])
    call = text.replace("convolution(%a, %b)", "custom-call(%a, %b)").replace(
        "dim_labels", 'custom_call_target="__cudnn$convForward", dim_labels'
    )
    assert cudnn_convolution_product(*root(call)).flops == 2 * np.prod([2, 6, 6, 16, 3, 3, 4])
