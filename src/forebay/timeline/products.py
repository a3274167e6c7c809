"""Floating point operations of matrix products, convolutions and attention, read from the instruction that does them.

A product of an ``m x k`` by a ``k x n`` matrix is ``2 m n k`` operations. ``__cublas$lt$matmul`` keeps K in its
``gemm_backend_config``; its s8 result is a workspace and not an output. cuDNN attention keeps the score shape ``[batch, heads,
queries, keys]`` as strings; a causal mask halves the work (``(1 + 1/keys) / 2`` exactly), a sliding window limits it. Backward
attention does five products where forward does two."""

import math
import re

from forebay.timeline.parse import Computation, Instruction
from forebay.timeline.shapes import Array, HloSyntaxError, arrays
from forebay.timeline.work import Product

_WINDOW = re.compile(r"(size|stride|pad|lhs_dilate|rhs_dilate|rhs_reversal)=([\w\-]+)")


def _indices(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.strip("{}").split(",") if i.strip())


def _extent(array: Array, axes: tuple[int, ...]) -> int:
    return math.prod(array.dimensions[a] for a in axes)


def _arithmetic(dtype: str, precision: str) -> str:
    """f32 operands are multiplied as TF32 unless the program asks for the highest precision."""
    return "tf32" if dtype == "f32" and "highest" not in precision.lower() else dtype


def contraction(lhs: Array, rhs: Array, contracted: tuple[int, ...], batch: tuple[int, ...], precision: str = "") -> Product:
    """The product of two arrays over ``contracted`` dimensions of ``lhs``, for each index of its ``batch`` dimensions."""
    k, count = _extent(lhs, contracted), _extent(lhs, batch)
    m, n = lhs.elements / max(1, k * count), rhs.elements / max(1, k * count)
    return Product(flops=2.0 * m * n * k * count, dtype=_arithmetic(lhs.dtype, precision), m=m, n=n, k=k, batch=count)


def dot_product(instruction: Instruction, inside: Computation) -> Product:
    """A ``dot``, on TPU or inside a GPU fusion."""
    lhs, rhs = (arrays(inside.by_name[o].shape)[0] for o in instruction.operands[:2])
    get = instruction.attributes.get
    contracted, batch = _indices(get("lhs_contracting_dims", "{}")), _indices(get("lhs_batch_dims", "{}"))
    return contraction(lhs, rhs, contracted, batch, get("operand_precision", ""))


def cublas_product(instruction: Instruction, inside: Computation) -> Product:
    """A cuBLAS or cuBLASLt custom call, f8 included."""
    config = instruction.backend_config.get("gemm_backend_config")
    if not config:
        raise HloSyntaxError(f"{instruction.name}: {instruction.target} without a gemm_backend_config; its K is not known")
    lhs, rhs = (arrays(inside.by_name[o].shape)[0] for o in instruction.operands[:2])
    numbers = config["dot_dimension_numbers"]
    contracted, batch = (tuple(map(int, numbers[f"lhs_{part}_dimensions"])) for part in ("contracting", "batch"))
    return contraction(lhs, rhs, contracted, batch, str(config.get("precision_config", {}).get("operand_precision", "")))


def attention_product(instruction: Instruction, inside: Computation) -> Product:
    """A ``__cudnn$fmha...`` custom call; flops count the masked half of causal attention as not done."""
    config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
    shape = config.get("intermediate_tensor_shape", {}).get("dimensions")
    if not shape or len(shape) != 4:
        raise HloSyntaxError(f"{instruction.name}: {instruction.target} without intermediate_tensor_shape; its sizes are not known")
    batch, heads, queries, keys = (int(d) for d in shape)
    query, value = (arrays(inside.by_name[instruction.operands[i]].shape)[0] for i in (0, 2))
    key = arrays(inside.by_name[instruction.operands[1]].shape)[0]
    width = query.elements / (batch * heads * queries)
    value_width = width * value.elements / key.elements
    per_score = 3 * width + 2 * value_width if "Backward" in instruction.target else width + value_width
    scores = batch * heads * _visible(config, queries, keys)
    return Product(flops=2.0 * scores * per_score, dtype=query.dtype, m=queries, n=keys, k=width, batch=batch * heads)


def _visible(config: dict, queries: int, keys: int) -> float:
    """Scores per head that the mask leaves."""
    mask = str(config.get("mask_type", "NO_MASK"))
    window = int(config.get("sliding_window_length", 0) or 0)
    if "CAUSAL" not in mask:
        return float(queries) * keys
    if 0 < window < keys:
        return min(queries, window) * (window + 1) / 2 + max(0, queries - window) * float(window)
    return queries * (keys - (queries - 1) / 2) if queries <= keys else keys * (keys + 1) / 2


def convolution_product(instruction: Instruction, inside: Computation) -> Product:
    """A ``convolution``; on TPU every dot is one. Positions that fall in padding or between dilated elements are not counted."""
    lhs, rhs = (arrays(inside.by_name[o].shape)[0] for o in instruction.operands[:2])
    result = arrays(instruction.shape)[0]
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    if labels is None:
        raise HloSyntaxError(f"{instruction.name}: unknown dim_labels {instruction.attributes['dim_labels']!r}")
    lhs_labels, rhs_labels, out_labels = labels.groups()
    window = dict(_WINDOW.findall(instruction.attributes.get("window", "")))
    spatial = sorted(c for c in rhs_labels if c.isdigit())
    positions, taps = 1.0, 1.0
    for index, label in enumerate(spatial):
        size = rhs.dimensions[rhs_labels.index(label)]
        taps *= size
        positions *= _valid(lhs.dimensions[lhs_labels.index(label)], size, result.dimensions[out_labels.index(label)], window, index)
    k = rhs.dimensions[rhs_labels.index("i")]
    n = result.dimensions[out_labels.index("f")]
    rows = result.dimensions[out_labels.index("b")]
    spots = math.prod(result.dimensions[out_labels.index(c)] for c in spatial)
    flops = 2.0 * rows * n * k * positions
    used = positions / spots if spots else taps  # taps that hold data, on average: the batch of a dot folded into a window has one
    dtype = _arithmetic(lhs.dtype, instruction.attributes.get("operand_precision", ""))
    return Product(flops=flops, dtype=dtype, m=rows * spots, n=n, k=max(1.0, k * used))


def _valid(width: int, size: int, outputs: int, window: dict[str, str], index: int) -> float:
    """Pairs (output, tap) of one spatial dimension that meet an input element."""

    def pick(key: str) -> int:
        return int(window[key].split("x")[index]) if key in window else 1

    stride, base, spread = pick("stride"), pick("lhs_dilate"), pick("rhs_dilate")
    low = int(window["pad"].split("x")[index].split("_")[0]) if "pad" in window else 0
    reach = (width - 1) * base  # the last dilated position that holds an element
    period = base // math.gcd(stride, base)
    count = 0
    for tap in range(size):
        offset = tap * spread - low
        first, last = max(0, -(offset // stride)), min(outputs - 1, (reach - offset) // stride)
        hit = next((o for o in range(first, first + period) if (o * stride + offset) % base == 0), None)
        if hit is not None and hit <= last:
            count += (last - hit) // period + 1
    return float(count)


def cudnn_convolution_product(instruction: Instruction, inside: Computation) -> Product:
    """A ``__cudnn$conv...`` custom call, any direction: each output of the forward convolution meets the whole kernel."""
    lhs, rhs = (arrays(inside.by_name[o].shape)[0] for o in instruction.operands[:2])
    result = arrays(instruction.shape)[0]
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    if labels is None:
        raise HloSyntaxError(f"{instruction.name}: {instruction.target} without dim_labels")
    forward, kernel = result, rhs
    if "BackwardInput" in instruction.target:
        forward = lhs
    elif "BackwardFilter" in instruction.target:
        forward, kernel = rhs, result
    features = kernel.dimensions[labels.group(2).index("o")]
    k = kernel.elements / features
    return Product(flops=2.0 * forward.elements * k, dtype=_arithmetic(lhs.dtype, ""), m=forward.elements / features, n=features, k=k)
