"""Forecasts for the terminal: a picture of the lanes over one step, where the time goes, and the exposed copies by buffer."""

from collections.abc import Iterable, Mapping

from forebay.records.forecast import Forecast
from forebay.units import GIB, show_bytes, show_seconds

_ORDER = ("compute", "to_device", "to_host", "device", "collective", "side", "disk")
_SHADES = " .:-=+*#%@"


def lane_picture(forecast: Forecast) -> str:
    """One row a lane, columns of equal time over the step; a darker character is a busier column. Empty without a picture."""
    if not forecast.picture:
        return ""
    width = max(len(columns) for columns in forecast.picture.values())
    lines = [f"{'':11}0 s{f'{show_seconds(forecast.step_seconds)} (forecast)':>{width - 2}}"]
    for lane in _ORDER:
        if lane in forecast.picture:
            marks = "".join(_SHADES[round(share * (len(_SHADES) - 1))] for share in forecast.picture[lane])
            lines.append(f"{lane:>10} |{marks}|")
    return "\n".join(lines)


def step_table(forecast: Forecast) -> str:
    """The step's seconds, its band, and the causes that add up to it, the largest first."""
    low, middle, high = forecast.low_seconds, forecast.step_seconds, forecast.high_seconds
    lines = [f"step {show_seconds(middle)} (forecast, {show_seconds(low)} to {show_seconds(high)}) on {forecast.hardware}"]
    for cause, seconds in sorted(forecast.path.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * middle:
            lines.append(f"  {cause:24} {show_seconds(seconds):>10} {100 * seconds / middle:5.1f} %")
    if forecast.tokens_per_second is not None:
        mfu = f", MFU {100 * forecast.mfu:.1f} % (attention counted causally)" if forecast.mfu else ""
        lines.append(f"  {forecast.tokens_per_second:,.0f} tokens/s{mfu}")
    for loop in forecast.loops:
        if loop.link_use:
            full = ", ".join(f"{way} {100 * share:.0f} %" for way, share in loop.link_use.items())
            head = f"  {loop.name} ({loop.iterations} iterations, {show_seconds(loop.seconds)})"
            lines.append(f"{head}: host link full {full}; bound by {loop.bound}")
    if forecast.unknown_share > 0 or forecast.unknowns:
        names = ", ".join(what for what, _, _ in forecast.unknowns)
        lines.append(f"  costed by bytes only: {100 * forecast.unknown_share:.2f} % of the step ({names})")
    return "\n".join(lines)


def exposed_table(entries: Iterable[Mapping], count: int = 12) -> str:
    """Exposed time of a plan's entries in host memory, with ms/GiB, the most exposed first; empty where none has any."""
    timed = sorted((e for e in entries if e.get("exposed_ms") is not None), key=lambda e: -e["exposed_ms"])
    if not timed:
        return ""
    lines = [f"{'exposed (forecast)':>18} {'on the host':>11} {'ms/GiB':>7}  entry"]
    for e in timed[:count]:
        exposed, per_gib = show_seconds(e["exposed_ms"] / 1e3), e.get("ms_per_gib") or 0.0
        lines.append(f"{exposed:>18} {show_bytes(e['bytes_per_device']):>11} {per_gib:7.2f}  {e['name']}")
    if len(timed) > count:
        rest, held = sum(e["exposed_ms"] for e in timed[count:]), sum(e["bytes_per_device"] for e in timed[count:])
        lines.append(
            f"{show_seconds(rest / 1e3):>18} {show_bytes(held):>11} {rest / (held / GIB) if held else 0.0:7.2f}  {len(timed) - count} more"
        )
    return "\n".join(lines)


def copy_table(forecast: Forecast, count: int = 20) -> str:
    """Exposed time by host buffer with ms/GiB, the most exposed first."""
    if not forecast.copies:
        return "no host copies in this program"
    lines = [f"{'exposed':>10} {'busy':>10} {'moved':>10} {'ms/GiB':>7}  direction  buffer"]
    for copy in forecast.copies[:count]:
        lines.append(
            f"{show_seconds(copy.exposed_seconds):>10} {show_seconds(copy.busy_seconds):>10} {show_bytes(copy.moved_bytes):>10} "
            f"{copy.exposed_ms_per_gib:7.2f}  {copy.direction:9}  {copy.buffer}"
        )
    if len(forecast.copies) > count:
        lines.append(f"  and {len(forecast.copies) - count} more")
    return "\n".join(lines)
