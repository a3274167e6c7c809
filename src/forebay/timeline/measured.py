"""The constants of one machine: its family's, and in their place what ``forebay probe`` measured on it.

Device memory: the family's efficiency is that of a step's fusions, which reach ``of_triad`` of what a triad reaches; a measured triad gives
the rest. Matmuls: the rate at the largest side over the peak is the limit of its dtype, and the curve with the most sides is the shape of
all. Host DRAM: a measured rate is what the memory reaches, so no efficiency comes off it. The host link has none: its measured rates stand
in the machine's own figures. Slow-downs beside copies and collectives stay the family's.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from forebay.hardware import Hardware, Quantity
from forebay.timeline.constants import Constants, MatmulRate, constants_of

FEWEST_SIDES = 4
"""A curve of fewer says too little about small matmuls to replace the family's."""


def constants_on(hardware: Hardware) -> Constants:
    """The constants for ``hardware``.

    Raises:
        InputError: no family and no vendor claims its chip.
    """
    chip = hardware.chip
    constants = constants_of(chip.name, chip.vendor)
    triad, dram = chip.sustained.hbm_bytes_per_second, chip.host.dram_bytes_per_second
    if triad is not None and chip.hbm_bytes_per_second is not None:
        reached = float(triad) / float(chip.hbm_bytes_per_second)
        constants = replace(constants, memory_efficiency=constants.memory_of_triad * reached)
    if dram is not None and dram.kind == "measured":
        constants = replace(constants, host_dram_efficiency=1.0)
    peaks = {dtype: float(peak) for dtype, peak in chip.peak_flops.items()}
    curves = {dtype: curve for dtype, curve in chip.sustained.matmul_flops.items() if dtype in peaks and curve}
    return replace(constants, matmul=_matmul(constants.matmul, curves, peaks)) if curves else constants


def _matmul(family: MatmulRate, curves: Mapping[str, Mapping[int, Quantity]], peaks: Mapping[str, float]) -> MatmulRate:
    widest = max(curves.values(), key=len)
    rate = family
    if len(widest) >= FEWEST_SIDES:
        sides = sorted(widest)
        # A larger matmul that came out slower than a smaller one (tiles that do not fit, a chip that throttles) counts as fast as that.
        rising = list(itertools.accumulate((float(widest[side]) for side in sides), max))
        rate = replace(family, sides=tuple(sides), shape=tuple(value / rising[-1] for value in rising))
    limits = {}
    for dtype, curve in curves.items():
        largest = max(curve)
        at_largest = replace(rate, limit={dtype: 1.0}).efficiency(dtype, largest)
        limits[dtype] = float(curve[largest]) / peaks[dtype] / at_largest
    return replace(rate, limit=family.limit | limits)
