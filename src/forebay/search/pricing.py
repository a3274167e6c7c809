"""Seconds of work that has not been compiled: the constants of the forecast, applied to the equations of the traced program.

What the compiler makes of them is learned later (``Correction``); here only the proportions matter. A machine whose link rate nobody
published has no link, and nothing is moved to its host.
"""

from forebay.errors import InputError
from forebay.hardware import Hardware
from forebay.search.problem import Link
from forebay.timeline.constants import constants_of
from forebay.timeline.costs import Costs
from forebay.timeline.rates import Rates

HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16"}  # what else there is multiplies as float32


class Prices:
    """Prices for one machine.

    Raises:
        InputError: the machine has no figures for compute: a CPU, or a chip without a published rate.
    """

    def __init__(self, hardware: Hardware):
        self.costs = Costs(hardware, constants_of(hardware.chip.name, hardware.chip.vendor))
        self.link = _link(self.costs)

    def seconds(self, node, share: float, dtype: str) -> float:
        """One value made once, of global size, when a device does ``share`` of it in ``dtype``."""
        moved = node.moved_bytes * share / self.costs.hbm_rate
        if node.kind not in ("matmul", "attention"):
            return moved
        known = self.costs.peak(HLO_DTYPES.get(dtype, "f32"))
        if known is None:
            return moved
        name, peak = known
        constants = self.costs.constants
        if node.kind == "attention":
            return max(moved, node.flops * share / (peak * constants.attention_forward))
        side = max(1.0, node.flops * share / 2) ** (1 / 3)
        return max(moved, node.flops * share / (peak * constants.matmul.efficiency(name, side)))

    def keeping(self, stack_bytes: float) -> float:
        """Seconds to write a kept value and to read it back."""
        return 2 * stack_bytes / self.costs.hbm_rate

    def update(self, held_bytes: float) -> float:
        """Seconds of an update that reads and writes ``held_bytes`` of parameters and state in HBM."""
        return 2 * held_bytes / self.costs.hbm_rate


def _link(costs: Costs) -> Link | None:
    try:
        device, host = costs.link_rate("to_device"), costs.link_rate("to_host")
    except InputError:
        return None
    dram = costs.dram_share()
    rates = Rates(costs, uses_host=True)
    slower = rates.slow_down({"to_device"}) - 1
    return Link(
        to_device=min(device, dram), to_host=min(host, dram), both=min(costs.both_rate(), dram), slow_down=slower / min(device, dram)
    )  # fmt: skip
