"""What happens when several lanes run at once: shares of the host link, of host DRAM, and the slow-down of compute.

A transfer's size is kept in seconds-alone; ``transfer_rate`` says how many of those pass per second of real time. The two
directions of the host link share ``both_rate``; every device of a host shares its DRAM. Compute slows beside collectives (they take
SMs and HBM) and beside copies."""

from collections.abc import Container

from forebay.timeline.costs import Costs


class Rates:
    """Speeds of the lanes as a function of which transfer lanes are busy."""

    def __init__(self, costs: Costs, uses_host: bool):
        constants = costs.constants
        self._collective = 1 + constants.beside_collective
        self._device = 1 + constants.beside_device_copy
        self._alone, self._both, self._host_slow = {}, 1.0, {}
        self.binding = {"to_device": "link", "to_host": "link", "both": "link"}
        if uses_host:
            self._set_host(costs)

    def _set_host(self, costs: Costs) -> None:
        dram, constants = costs.dram_share(), costs.constants
        per_share = constants.beside_host_per_hbm_share / costs.hbm_peak
        rates = {lane: costs.link_rate(lane) for lane in ("to_device", "to_host")}
        for lane, rate in rates.items():
            self._alone[lane] = min(1.0, dram / rate)
            self._host_slow[lane] = 1 + per_share * min(rate, dram)
            self.binding[lane] = "link" if rate <= dram else "host DRAM"
        together = sum(rates.values())
        self._both = min(1.0, costs.both_rate() / together, dram / together)
        self._host_slow["both"] = 1 + per_share * self._both * together
        self.binding["both"] = "host DRAM" if dram < costs.both_rate() else "link"

    def transfer_rate(self, lane: str, busy: Container[str]) -> float:
        """Seconds-alone that pass per second on ``lane`` while the lanes ``busy`` (this one included) run."""
        if lane not in ("to_device", "to_host"):
            return 1.0
        return self._both if "to_device" in busy and "to_host" in busy else self._alone[lane]

    def slow_down(self, busy: Container[str]) -> float:
        """How much longer compute takes beside the lanes ``busy``; the causes multiply."""
        factor = self._collective if "collective" in busy else 1.0
        to_device, to_host = "to_device" in busy, "to_host" in busy
        if to_device or to_host:
            factor *= self._host_slow["both" if to_device and to_host else "to_device" if to_device else "to_host"]
        return factor * self._device if "device" in busy else factor
