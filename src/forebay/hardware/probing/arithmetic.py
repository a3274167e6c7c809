"""What the device itself reaches: a triad in its memory, and square matmuls by dtype and side.

    HBM        a = b + s * a      many times in one program; two arrays read and one written are counted
    matmul     x = x @ w          a chain of square products in one program; 2 side^3 operations each

Chains are long enough (30 ms where the catalog knows the peak) that the host's dispatch does not count. Matrices hold random numbers,
scaled so that the chain neither grows nor vanishes: a chip draws less power, and runs faster, on zeros. The value is the median. The
side is the cube root of MNK of a square product, which is how the forecast asks for the rate.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from forebay.hardware.probing.timing import FEWEST, Clock, rates, repeated
from forebay.hardware.reading import Reading
from forebay.units import GIB, MIB

SIDES = (16384, 8192, 4096, 2048, 1024, 512, 256, 64)
CPU_SIDES = (512, 1024, 2048)
CHAIN_SECONDS, LONGEST_CHAIN = 0.03, 2000
SHARE_OF_FREE = 8
TRIAD_BYTES = GIB
TRIADS = 10
PRECISION = {"fp32": "highest", "tf32": "default"}


def hbm(device: Any, free_bytes: int) -> Reading:
    """The triad's rate in the device's memory, on arrays of 1 GiB or of an eighth of what is free."""
    import jax

    count = max(MIB, min(TRIAD_BYTES, free_bytes // SHARE_OF_FREE)) // 4
    a, b = (jax.device_put(jax.numpy.full((count,), value, jax.numpy.float32), device) for value in (0.0, 1.0))
    program = jax.jit(lambda a, b: jax.lax.fori_loop(0, TRIADS, lambda _, a: b + 0.5 * a, a))
    counted = 3 * 4 * count
    found = rates(TRIADS * counted, repeated(lambda: program(a, b).block_until_ready()))
    return Reading(group="hbm", kind="triad", size=counted, rates=found)


def matmuls(device: Any, clock: Clock, free_bytes: int, peaks: Mapping[str, float]) -> tuple[list[Reading], list[str]]:
    """Rates of square products, and what there was no time or memory for.

    ``peaks`` are the chip's dense peaks by dtype; without any (a CPU), single products of bf16 and fp32 are timed.
    """
    readings, absent = [], []
    dtypes = [dtype for dtype in ("bf16", "fp16", "tf32", "fp32") if dtype in peaks] if peaks else ["fp32", "bf16"]
    for dtype in dtypes:
        last = None
        # bf16 from the largest side down: the sides that a forecast rests on come first. Without a peak from the smallest up, to know in
        # time that the next is too long.
        for side in (SIDES if dtype == "bf16" else SIDES[1:5:2]) if peaks else CPU_SIDES:
            bytes_used = 4 * side * side * (4 if dtype in ("fp32", "tf32") else 2)
            next_seconds = 2.0 * side**3 / last * (FEWEST + 1) if last else 0.0
            if bytes_used > free_bytes // 2 or not clock.allows(next_seconds):
                absent.append(f"matmul {dtype} {side}: {'too little memory is free' if bytes_used > free_bytes // 2 else 'out of time'}")
                continue
            readings.append(matmul(device, dtype, side, peaks.get(dtype)))
            last = readings[-1].value
    return readings, absent


def matmul(device: Any, dtype: str, side: int, peak: float | None) -> Reading:
    """The rate of a chain of ``side``-square products; without a ``peak`` the chain is one product."""
    import jax

    flops = 2.0 * side**3
    count = max(1, min(LONGEST_CHAIN, int(CHAIN_SECONDS * peak / flops))) if peak else 1
    kind = {"bf16": jax.numpy.bfloat16, "fp16": jax.numpy.float16}.get(dtype, jax.numpy.float32)
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.device_put(jax.random.normal(key, (side, side), kind), device) for key in keys)
    w = w * jax.numpy.asarray(side**-0.5, kind)
    multiply = partial(jax.numpy.matmul, precision=PRECISION.get(dtype, "default"))
    program = jax.jit(lambda x, w: jax.lax.fori_loop(0, count, lambda _, x: multiply(x, w), x))
    seconds = repeated(lambda: program(x, w).block_until_ready())
    return Reading(group="matmul", kind=dtype, size=side, rates=rates(count * flops, seconds))
